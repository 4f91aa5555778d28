"""One training step on a batch of groups. The bus trainer and the plain reference call the same function.

Keeps true
- The step is a function of model, optimizer and groups: no clock, no randomness, no I/O. The model computes in
  evaluation mode (`policy`), so the ratio of an on-policy token is 1.
- Samples of a group without advantages, or without sampled tokens, are not computed: their gradient is zero, and they
  are not part of any mean.
- How sequences are packed into passes changes only time and memory.
- A minibatch whose gradient is not finite changes no weight and is in no mean. The metrics count it and name its
  groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.samples import Sample
from rose.topics.health import HEALTH
from rose.workers.trainer.loss import LossBounds, beyond_clip, group_advantages, grpo_loss
from rose.workers.trainer.policy import microbatches, pad_rows, produces_nonfinite, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trajectory. All lists have one entry per token."""

    tokens: Sequence[int]
    loss_mask: Sequence[int]
    """1 where the policy sampled the token."""
    behaviour_logprobs: Sequence[float]
    """Logprobs that the engine recorded; ignored where the mask is 0."""
    temperatures: Sequence[float]
    """Sampling temperature of each token, above 0; ignored where the mask is 0."""
    reward: float

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Convert a Sample record that `selection.select_samples` marked as trained."""
        assert sample.reward is not None
        tokens = unpack_tokens(sample.tokens)
        temperatures = [1.0] * len(tokens)
        for turn in sample.turns:
            temperatures[turn.start : turn.end] = [turn.sampling.temperature] * (turn.end - turn.start)
        return cls(
            tokens=tokens,
            loss_mask=list(sample.loss_mask),
            behaviour_logprobs=unpack_logprobs(sample.logprobs).tolist(),
            temperatures=temperatures,
            reward=sample.reward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of a step."""

    bounds: LossBounds
    scale_by_deviation: bool
    """Whether advantages are divided by the group's standard deviation, so that groups have equal weight."""
    minibatches: int
    """Optimizer updates in a step, each on its share of the groups."""
    gradient_norm: float
    """Largest gradient norm; a larger gradient is scaled down to it."""
    microbatch_tokens: int
    """Most padded tokens in one pass through the model. Bounds memory only."""


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
    """Share of tokens that have no gradient because of the clip range."""
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

    def add(self, other: Self) -> None:
        """Add the sums of another minibatch."""
        self.tokens += other.tokens
        self.loss += other.loss
        self.ratio += other.ratio
        self.divergence += other.divergence
        self.clipped += other.clipped


def make_optimizer(model: Any, *, learning_rate: float) -> torch.optim.AdamW:
    """AdamW without weight decay and with a beta2 of 0.95, which adapts fast enough for a run of a few dozen steps."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[TrainingSample]],
    *,
    settings: StepSettings,
) -> StepMetrics:
    """Update the model in place with one step on whole groups.

    Each inner sequence of `groups` is one complete group.
    """
    live: list[tuple[int, list[_Row]]] = []
    for place, group in enumerate(groups):
        rewards = [sample.reward for sample in group]
        advantages = group_advantages(rewards, scale_by_deviation=settings.scale_by_deviation)
        if any(advantages):
            rows = zip(group, advantages, strict=True)
            live.append((place, [_Row(sample, advantage) for sample, advantage in rows if any(sample.loss_mask)]))
    samples = [sample for group in groups for sample in group]
    metrics = StepMetrics(
        reward=sum(sample.reward for sample in samples) / max(len(samples), 1),
        groups=len(groups),
        groups_with_signal=len(live),
    )
    model.eval()
    learned = _Sums()
    for first in range(min(settings.minibatches, len(live))):
        minibatch = live[first :: settings.minibatches]
        optimizer.zero_grad(set_to_none=True)
        sums = _gradients(model, [row for _, rows in minibatch for row in rows], settings)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm))
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


def dry_run_group(model: Any, group: Sequence[TrainingSample], *, settings: StepSettings) -> None:
    """Compute the gradient of a group and discard it.

    Raises what a step on the group would raise; changes no weight.
    """
    _gradients(model, [_Row(sample, 1.0) for sample in group if any(sample.loss_mask)], settings)
    model.zero_grad(set_to_none=True)


def dry_run_policy(model: Any, groups: Sequence[Sequence[TrainingSample]], *, settings: StepSettings) -> bool:
    """Whether the policy computes finite logprobs.

    Tries one pass with the longest samples of these groups, since an overflow affects every sample.
    """
    samples = [sample for group in groups for sample in group if any(sample.loss_mask)]
    longest = next(microbatches([len(sample.tokens) for sample in samples], tokens=settings.microbatch_tokens), [])
    return not (longest and produces_nonfinite(model, *_inputs([samples[index] for index in longest])))


def _inputs(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    """Tokens and temperatures of one pass, each of shape (rows, tokens)."""
    tokens = pad_rows([sample.tokens for sample in samples], dtype=torch.long)
    return tokens, pad_rows([sample.temperatures for sample in samples], dtype=torch.float32, filling=1.0)


def _gradients(model: Any, rows: Sequence[_Row], settings: StepSettings) -> _Sums:
    """Add the gradient of the rows' loss, a mean over their sampled tokens, to the parameters' gradients."""
    sums = _Sums(tokens=sum(sum(row.sample.loss_mask) for row in rows))
    for indices in microbatches([len(row.sample.tokens) for row in rows], tokens=settings.microbatch_tokens):
        part = [rows[index] for index in indices]
        mask = pad_rows([row.sample.loss_mask for row in part], dtype=torch.float32)
        behaviour = pad_rows([row.sample.behaviour_logprobs for row in part], dtype=torch.float32)
        advantages = torch.tensor([[row.advantage] for row in part])
        logprobs = token_logprobs(model, *_inputs([row.sample for row in part]))
        summed = grpo_loss(
            logprobs, behaviour_logprobs=behaviour, advantages=advantages, loss_mask=mask, bounds=settings.bounds
        )
        (summed / max(sums.tokens, 1)).backward()  # type: ignore[no-untyped-call]
        HEALTH.report_progress()
        sums.loss += float(summed.detach())
        _observe(sums, logprobs.detach(), behaviour, advantages, mask=mask, bounds=settings.bounds)
    return sums


def _observe(
    sums: _Sums, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, mask: Tensor, bounds: LossBounds
) -> None:
    log_ratio = (logprobs - behaviour)[mask.bool()].double()  # the ratio is at most that of MIN_LOGPROB
    ratio = log_ratio.exp()
    sums.ratio += float(ratio.sum())
    # The estimator r - 1 - log r of the KL divergence is never negative and has low variance.
    sums.divergence += float((ratio - 1 - log_ratio).sum())
    sums.clipped += float(beyond_clip(ratio, advantages.expand_as(mask)[mask.bool()], bounds).sum())
