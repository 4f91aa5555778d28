"""One training step on a batch of groups: the function that the bus trainer and the plain reference both call.

Keeps true
- The step is a function of model, optimizer and groups: no clock, no randomness, no I/O. The model computes in
  evaluation mode (`policy`), so on policy a token's ratio is 1.
- Samples of a group without advantage, or without a sampled token, are not computed: their gradient is exactly zero,
  and they dilute no mean.
- How sequences are packed into passes changes nothing but time and memory.
- A minibatch whose gradient is not finite changes nothing and is in no mean; the metrics count it and name its groups.
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
    """One trajectory; the lists are of equal length."""

    tokens: Sequence[int]
    loss_mask: Sequence[int]
    """1 where the policy sampled the token."""
    behaviour_logprobs: Sequence[float]
    """As the engine recorded them; ignored where the mask is 0."""
    temperatures: Sequence[float]
    """At which each token was drawn; above 0, and without meaning where the mask is 0."""
    reward: float

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """A sample of the bus that `selection.select_samples` found fit to learn from."""
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
    """How a step learns."""

    bounds: LossBounds
    scale_by_deviation: bool
    """Divide advantages by the group's standard deviation, so that groups count alike."""
    minibatches: int
    """Optimizer updates in a step, each on its share of the groups."""
    gradient_norm: float
    """A larger gradient is scaled down to this norm."""
    microbatch_tokens: int
    """Padded tokens of one pass through the model; bounds memory, changes nothing else."""


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """What a step did; means are over the tokens trained on."""

    reward: float
    """Mean over all samples given, those without advantage too."""
    groups: int
    groups_with_signal: int
    """Groups whose rewards differ."""
    tokens: int = 0
    """Sampled tokens trained on."""
    loss: float = 0.0
    gradient_norm: float = 0.0
    """Largest of the minibatches, before it was scaled down."""
    importance_mean: float = 0.0
    """Mean ratio of the policy to the one that sampled, before truncation; on policy it is 1."""
    kl_behaviour: float = 0.0
    """Estimated KL divergence of the sampling policy from the trained one, nats a token."""
    clipped_share: float = 0.0
    """Share of tokens that the clip kept from pulling further."""
    skipped_minibatches: int = 0
    """Minibatches whose gradient was not finite."""
    skipped_groups: tuple[int, ...] = ()
    """Of those, by their places among the groups given: nothing was learned from them."""


@dataclass(frozen=True, slots=True)
class _Row:
    sample: TrainingSample
    advantage: float


@dataclass(slots=True)
class _Sums:
    """Over sampled tokens."""

    tokens: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    divergence: float = 0.0
    clipped: float = 0.0

    def add(self, other: Self) -> None:
        self.tokens += other.tokens
        self.loss += other.loss
        self.ratio += other.ratio
        self.divergence += other.divergence
        self.clipped += other.clipped


def make_optimizer(model: Any, *, learning_rate: float) -> torch.optim.AdamW:
    """AdamW without weight decay and with a short memory, as a run of a few dozen steps wants it."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[TrainingSample]],
    *,
    settings: StepSettings,
) -> StepMetrics:
    """Update the model in place from whole groups; say what happened."""
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
    """Compute a group's gradient and throw it away: raises what a step on it would raise, and changes no weight."""
    _gradients(model, [_Row(sample, 1.0) for sample in group if any(sample.loss_mask)], settings)
    model.zero_grad(set_to_none=True)


def dry_run_policy(model: Any, groups: Sequence[Sequence[TrainingSample]], *, settings: StepSettings) -> bool:
    """Whether a policy of finite weights computes numbers, tried on the longest samples of these groups: as many as one
    pass takes, since what overflows does so everywhere.
    """
    samples = [sample for group in groups for sample in group if any(sample.loss_mask)]
    longest = next(microbatches([len(sample.tokens) for sample in samples], tokens=settings.microbatch_tokens), [])
    return not (longest and produces_nonfinite(model, *_inputs([samples[index] for index in longest])))


def _inputs(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    """Tokens and temperatures of one pass."""
    tokens = pad_rows([sample.tokens for sample in samples], dtype=torch.long)
    return tokens, pad_rows([sample.temperatures for sample in samples], dtype=torch.float32, filling=1.0)


def _gradients(model: Any, rows: Sequence[_Row], settings: StepSettings) -> _Sums:
    """Add to the parameters' gradients that of the rows' loss, a mean over their sampled tokens."""
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
    log_ratio = (logprobs - behaviour)[mask.bool()].double()  # whose ratio is at most that of LEAST_LOGPROB
    ratio = log_ratio.exp()
    sums.ratio += float(ratio.sum())
    # The estimator r - 1 - log r of the divergence is never negative and varies little.
    sums.divergence += float((ratio - 1 - log_ratio).sum())
    sums.clipped += float(beyond_clip(ratio, advantages.expand_as(mask)[mask.bool()], bounds).sum())
