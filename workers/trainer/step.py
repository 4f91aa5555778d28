"""One training step on a batch of groups. The bus trainer and the plain reference call the same function.

Keeps true
- The step is a function of model, optimizer and groups: no clock, no randomness, no I/O. The model computes in
  evaluation mode (`policy`), so the ratio of an on-policy token is 1.
- Samples of a group without advantages, or without sampled tokens, are not computed: their gradient is zero, and they
  are not part of any mean.
- How sequences are put into passes (`passes`), and which gradients were computed before the groups were whole
  (`early_gradients`), changes only time and memory, but for the rounding of sums.
- No weight changes if an engine computes another policy: the logprobs of tokens that each worker sampled with the
  policy's own weights are compared before the first update, also in steps and groups without a signal.
- A minibatch whose gradient is not finite changes no weight and is in no mean. The metrics count it and name its
  groups.
- Logprobs under the policy at the step's start are computed before the first update, and only for an algorithm that
  reads them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from rose.workers.trainer.algorithms import Algorithm, TrainingSample
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.early_gradients import EarlyGradients
from rose.workers.trainer.engine_check import check_engines
from rose.workers.trainer.logprobs import produces_nonfinite
from rose.workers.trainer.passes import Passes, Row, Sums, batches_of, inputs_of, needs_proximal, rows_of
from rose.workers.trainer.ranks import ALONE, Ranks


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
    samples_with_signal: int = 0
    """Number of samples with an advantage that is not 0, without those of skipped minibatches."""
    mismatch_kl: float | None = None
    """Estimated KL divergence of the engines' policy from the trainer's, in nats per token, over tokens that the
    policy's own weights sampled; None if there are none, or engines were not checked."""
    clipped_share_positive: float | None = None
    """Like `clipped_share`, of the tokens with an advantage above 0; None without such tokens."""
    clipped_share_negative: float | None = None
    """Like `clipped_share`, of the tokens with an advantage below 0; None without such tokens."""
    rejected_share: float = 0.0
    """Share of tokens that are left out because of their ratio of trainer to engine."""
    kl_reference: float | None = None
    """Estimated KL divergence of the current policy from the reference, in nats per token; None without a
    reference."""
    used_early: bool = False
    """Whether the gradients that were computed early are part of the step."""
    streamed_tokens: int = 0
    """Number of sampled tokens whose gradient was computed before the step's last group was complete."""

    def set_means(self, learned: Sums, *, has_reference: bool) -> None:
        """Set the figures that are means over the sums of all applied minibatches."""
        self.tokens, tokens = learned.tokens, max(learned.tokens, 1)
        self.loss, self.importance_mean = learned.loss / (learned.denominator or 1.0), learned.ratio / tokens
        self.kl_behaviour, self.clipped_share = learned.divergence / tokens, learned.clipped / tokens
        self.rejected_share = learned.rejected / tokens
        if has_reference:
            self.kl_reference = learned.reference_divergence / tokens
        if learned.positive:
            self.clipped_share_positive = learned.clipped_positive / learned.positive
        if learned.negative:
            self.clipped_share_negative = learned.clipped_negative / learned.negative


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[TrainingSample]],
    *,
    algorithm: Algorithm,
    config: TrainerConfig,
    version: int | None = None,
    compared: Sequence[TrainingSample] | None = None,
    since: int | None = None,
    reference: Any | None = None,
    ranks: Ranks = ALONE,
    early: EarlyGradients | None = None,
) -> StepMetrics:
    """Update the model in place with one step on whole groups.

    Each inner sequence of `groups` is one complete group; every rank gives all groups. `version` is the model's
    version; None: engines are not checked. `compared`: the samples by which engines are checked, also of groups
    without advantages; None: the samples of `groups`. `since`: see `check_engines`. `reference`: the reference policy,
    for an algorithm that reads its logprobs. `early`: the gradients of these very groups, as far as they are computed;
    they are not used if the algorithm gives other advantages to the whole step.

    Raises AlgorithmError, or EngineMismatch (`check_engines`); with several ranks FailedOnARank for the first, and
    UsageError if their advantages differ.
    """
    with ranks.agreed():
        of_groups = rows_of(groups, algorithm)
    advantages = [[row.advantage for row in rows or ()] for rows in of_groups]
    ranks.require_alike(msgspec.msgpack.encode(advantages), "the algorithm's advantages")
    live = [(place, rows) for place, rows in enumerate(of_groups) if rows is not None]
    samples = [sample for group in groups for sample in group]
    metrics = StepMetrics(
        reward=sum(sample.reward for sample in samples) / max(len(samples), 1),
        groups=len(groups),
        groups_with_signal=len(live),
        learning_rate=optimizer.param_groups[0]["lr"],
    )
    model.eval()
    if version is not None:
        metrics.mismatch_kl = check_engines(
            model, samples if compared is None else compared, config, version, since=since, ranks=ranks
        )
    metrics.used_early = early is not None and early.advantages == advantages
    learned = Sums()
    minibatches = [live[first :: config.minibatches] for first in range(min(config.minibatches, len(live)))]
    passes = Passes(model, algorithm, config, ranks, reference)
    whole = [[row for _, rows in minibatch for row in rows] for minibatch in minibatches]
    for minibatch, sums in zip(
        minibatches, _gradients(passes, whole, early if metrics.used_early else None), strict=True
    ):
        norm = _clipped_norm(model, config.gradient_norm)
        if math.isfinite(norm):
            optimizer.step()
            metrics.gradient_norm = max(metrics.gradient_norm, norm)
            learned.add(sums)
        else:
            metrics.skipped_minibatches += 1
            metrics.skipped_groups += tuple(place for place, _ in minibatch)
    applied = (advantages[place] for place in range(len(groups)) if place not in metrics.skipped_groups)
    metrics.samples_with_signal = sum(map(bool, chain.from_iterable(applied)))
    metrics.set_means(learned, has_reference=reference is not None)
    return metrics


def _gradients(passes: Passes, minibatches: Sequence[Sequence[Row]], early: EarlyGradients | None) -> Iterator[Sums]:
    """Compute the gradient of one minibatch after the other, to be applied before the next; yields the sums of each."""
    # The first minibatch computes with the weights of the step's start.
    starts = [passes.logprobs(rows) if needs_proximal(passes.algorithm) else None for rows in minibatches[1:]]
    for rows, start in zip(minibatches, [None, *starts], strict=False):
        if early is not None and rows is minibatches[0]:
            yield early.finish()
        else:
            passes.model.zero_grad(set_to_none=True)
            yield passes.gradients(rows, start, divisor=passes.divisor(rows))


def _clipped_norm(model: Any, most: float) -> float:
    """Scale the gradients down to the norm `most`; returns their norm before, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def dry_run_group(
    model: Any,
    group: Sequence[TrainingSample],
    *,
    algorithm: Algorithm,
    config: TrainerConfig,
    reference: Any | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Compute the gradient of a group and discard it.

    Raises what a step on the group would raise; changes no weight. `reference`: see `train_step`.
    """
    with ranks.agreed():
        rows = rows_of([group], algorithm)[0] or []
    passes = Passes(model, algorithm, config, ranks, reference)
    passes.gradients(rows, divisor=passes.divisor(rows))
    model.zero_grad(set_to_none=True)


def dry_run_policy(
    model: Any, groups: Sequence[Sequence[TrainingSample]], *, config: TrainerConfig, ranks: Ranks = ALONE
) -> bool:
    """Return whether the policy computes finite logprobs.

    Tries one pass with the longest samples of these groups, since an overflow affects every sample.
    """
    samples = [sample for group in groups for sample in group if any(sample.loss_mask)]
    longest = next(batches_of(model, samples, config), [])
    part = [samples[index] for index in longest]
    return ranks.all_true(not (part and produces_nonfinite(model, **inputs_of(model, part, ranks.device))))
