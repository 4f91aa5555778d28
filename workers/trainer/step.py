"""One training step on a batch of groups. The bus trainer and the plain reference call the same function.

Keeps true
- The step is a function of model, optimizer and groups: no clock, no randomness, no I/O. The model computes in
  evaluation mode (`policy`), so the ratio of an on-policy token is 1.
- Samples of a group without advantages, or without sampled tokens, are not computed: their gradient is zero, and they
  are not part of any mean.
- How sequences are packed into passes changes only time and memory.
- No weight changes if the engines compute another policy: their logprobs of tokens that they sampled with the policy's
  own version are compared before the first update.
- A minibatch whose gradient is not finite changes no weight and is in no mean. The metrics count it and name its
  groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rose.schemas.errors import UsageError
from rose.topics.health import HEALTH
from rose.workers.trainer.algorithms.base import Algorithm, TokenBatch, checked_advantages, checked_loss
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.policy import microbatches, pad_rows, produces_nonfinite, token_logprobs
from rose.workers.trainer.training_sample import TrainingSample

LEAST_COMPARED_TOKENS = 16
"""Fewer on-policy tokens say too little about the engines."""


class EngineMismatch(UsageError):
    """The engines compute another policy than the trainer."""


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """Metrics of a step; means are over the tokens that were trained on."""

    reward: float
    """Mean reward of all samples, with or without advantage."""
    groups: int
    groups_with_signal: int
    """Number of groups whose rewards differ."""
    tokens: int = 0
    """Number of sampled tokens that were trained on."""
    loss: float = 0.0
    gradient_norm: float = 0.0
    """Largest gradient norm of the minibatches, before clipping."""
    importance_mean: float = 0.0
    """Mean ratio of the current policy to the sampling policy, before truncation; 1 on policy."""
    kl_behaviour: float = 0.0
    """Estimated KL divergence of the sampling policy from the current policy, in nats per token."""
    clipped_share: float = 0.0
    """Share of tokens that have no gradient because of a bound of the algorithm."""
    learning_rate: float = 0.0
    skipped_minibatches: int = 0
    """Number of minibatches whose gradient was not finite."""
    skipped_groups: tuple[int, ...] = ()
    """Indices, among the groups given, of the groups in skipped minibatches."""


@dataclass(frozen=True, slots=True)
class _Row:
    sample: TrainingSample
    advantage: float


@dataclass(slots=True)
class _Sums:
    """Sums over sampled tokens."""

    tokens: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    divergence: float = 0.0
    clipped: float = 0.0
    on_policy: int = 0
    """Number of tokens of samples that the policy's own version sampled."""
    on_policy_difference: float = 0.0
    """Over these tokens, the absolute difference of the trainer's and the engines' logprobs, in nats."""

    def add(self, other: Self) -> None:
        """Add the sums of another minibatch."""
        self.tokens += other.tokens
        self.loss += other.loss
        self.ratio += other.ratio
        self.divergence += other.divergence
        self.clipped += other.clipped


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[TrainingSample]],
    *,
    algorithm: Algorithm,
    config: TrainerConfig,
    version: int | None = None,
) -> StepMetrics:
    """Update the model in place with one step on whole groups.

    Each inner sequence of `groups` is one complete group. `version` is the model's version; None: samples are not
    compared with the model.

    Raises AlgorithmError, or EngineMismatch if on-policy tokens differ by more than `max_logprob_difference`.
    """
    of_groups = [_rows(group, algorithm) for group in groups]
    live = [(place, rows) for place, rows in enumerate(of_groups) if rows is not None]
    samples = [sample for group in groups for sample in group]
    metrics = StepMetrics(
        reward=sum(sample.reward for sample in samples) / max(len(samples), 1),
        groups=len(groups),
        groups_with_signal=len(live),
        learning_rate=optimizer.param_groups[0]["lr"],
    )
    model.eval()
    learned = _Sums()
    for first in range(min(config.minibatches, len(live))):
        minibatch = live[first :: config.minibatches]
        optimizer.zero_grad(set_to_none=True)
        sums = _gradients(model, [row for _, rows in minibatch for row in rows], algorithm, config, version)
        if first == 0:
            _check_engines(sums, config, version)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_norm))
        if math.isfinite(norm):
            optimizer.step()
            metrics.gradient_norm = max(metrics.gradient_norm, norm)
            learned.add(sums)
        else:
            metrics.skipped_minibatches += 1
            metrics.skipped_groups += tuple(place for place, _ in minibatch)
    metrics.tokens, tokens = learned.tokens, max(learned.tokens, 1)
    metrics.loss, metrics.importance_mean = learned.loss / tokens, learned.ratio / tokens
    metrics.kl_behaviour, metrics.clipped_share = learned.divergence / tokens, learned.clipped / tokens
    return metrics


def dry_run_group(model: Any, group: Sequence[TrainingSample], *, algorithm: Algorithm, config: TrainerConfig) -> None:
    """Compute the gradient of a group and discard it.

    Raises what a step on the group would raise; changes no weight.
    """
    _gradients(model, _rows(group, algorithm) or [], algorithm, config)
    model.zero_grad(set_to_none=True)


def dry_run_policy(model: Any, groups: Sequence[Sequence[TrainingSample]], *, config: TrainerConfig) -> bool:
    """Return whether the policy computes finite logprobs.

    Tries one pass with the longest samples of these groups, since an overflow affects every sample.
    """
    samples = [sample for group in groups for sample in group if any(sample.loss_mask)]
    longest = next(microbatches([len(sample.tokens) for sample in samples], tokens=config.microbatch_tokens), [])
    return not (longest and produces_nonfinite(model, *_inputs([samples[index] for index in longest])))


def _inputs(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    """Tokens and temperatures of one pass, each of shape (rows, tokens)."""
    tokens = pad_rows([sample.tokens for sample in samples], dtype=torch.long)
    return tokens, pad_rows([sample.temperatures for sample in samples], dtype=torch.float32, filling=1.0)


def _rows(group: Sequence[TrainingSample], algorithm: Algorithm) -> list[_Row] | None:
    """The samples of a group with sampled tokens, and their advantages; None for a group without advantages."""
    advantages = checked_advantages(algorithm, group)
    if not any(advantages):
        return None
    rows = zip(group, advantages, strict=True)
    return [_Row(sample, advantage) for sample, advantage in rows if any(sample.loss_mask)]


def _check_engines(sums: _Sums, config: TrainerConfig, version: int | None) -> None:
    """Compare the logprobs of tokens that the model's own version sampled, before the model has changed."""
    difference = sums.on_policy_difference / max(sums.on_policy, 1)
    if sums.on_policy >= LEAST_COMPARED_TOKENS and difference > config.max_logprob_difference:
        raise EngineMismatch(
            f"the engines compute another policy than the trainer: their logprobs of {sums.on_policy} tokens that "
            f"version {version} sampled differ by {difference:.2g} nats on average, and "
            f"trainer.max_logprob_difference is {config.max_logprob_difference:g}; nothing was learned from these "
            "samples: take a model folder that vLLM and transformers compute alike, or raise the setting if the "
            "engines compute in low precision"
        )


def _gradients(
    model: Any, rows: Sequence[_Row], algorithm: Algorithm, config: TrainerConfig, version: int | None = None
) -> _Sums:
    """Add the gradient of the rows' loss, a mean over their sampled tokens, to the parameters' gradients."""
    sums = _Sums(tokens=sum(sum(row.sample.loss_mask) for row in rows))
    for indices in microbatches([len(row.sample.tokens) for row in rows], tokens=config.microbatch_tokens):
        part = [rows[index] for index in indices]
        batch = TokenBatch(
            logprobs=token_logprobs(model, *_inputs([row.sample for row in part])),
            behaviour_logprobs=pad_rows([row.sample.behaviour_logprobs for row in part], dtype=torch.float32),
            advantages=torch.tensor([[row.advantage] for row in part]),
            loss_mask=pad_rows([row.sample.loss_mask for row in part], dtype=torch.bool),
        )
        loss = checked_loss(algorithm, batch)
        (loss.summed / max(sums.tokens, 1)).backward()  # type: ignore[no-untyped-call]
        HEALTH.report_progress()
        sums.loss += float(loss.summed.detach())
        _observe(sums, batch, loss.clipped)
        own = torch.tensor([[row.sample.oldest_version == version] for row in part]) & batch.loss_mask
        difference = (batch.logprobs.detach() - batch.behaviour_logprobs)[own].abs()
        difference = difference[difference.isfinite()]  # a minibatch with other values is skipped
        sums.on_policy += len(difference)
        sums.on_policy_difference += float(difference.sum())
    return sums


def _observe(sums: _Sums, batch: TokenBatch, clipped: Tensor | None) -> None:
    log_ratio = (batch.logprobs.detach() - batch.behaviour_logprobs)[batch.loss_mask].double()
    ratio = log_ratio.exp()  # at most that of MIN_LOGPROB
    sums.ratio += float(ratio.sum())
    # The estimator r - 1 - log r of the KL divergence is never negative and has low variance.
    sums.divergence += float((ratio - 1 - log_ratio).sum())
    if clipped is not None:
        sums.clipped += float(clipped[batch.loss_mask].sum())
