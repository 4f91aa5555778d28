"""Passes: rows of samples put through the policy, with the gradient of their loss and the sums for a step's figures.

Keeps true
- How sequences are put into passes, packed or padded, and passes spread over ranks, changes only time and memory, but
  for the rounding of sums.
- Every rank makes as many passes as the others, because a pass is a collective call: a rank without sequences left
  computes two tokens, whose gradient is zero.
- Gradients and sums of disjoint rows add up to those of all the rows, if the divisor is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from rose.topics.health import HEALTH
from rose.workers.trainer.algorithms import (
    Algorithm,
    StepAlgorithm,
    TokenBatch,
    TokenLoss,
    TrainingSample,
    checked_loss,
    denominator,
    step_advantages,
)
from rose.workers.trainer.algorithms.losses import reference_divergence
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.logprobs import pad_rows, padded_batches, token_logprobs
from rose.workers.trainer.packing import is_packed, packed_batches
from rose.workers.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Row:
    """A sample with its advantage."""

    sample: TrainingSample
    advantage: float


@dataclass(slots=True)
class Sums:
    """Sums over sampled tokens, of all ranks."""

    tokens: int = 0
    denominator: float = 0.0
    """Sum of the numbers by which the algorithm divides the losses."""
    loss: float = 0.0
    ratio: float = 0.0
    divergence: float = 0.0
    clipped: float = 0.0
    positive: float = 0.0
    """Number of tokens with an advantage above 0."""
    negative: float = 0.0
    """Number of tokens with an advantage below 0."""
    clipped_positive: float = 0.0
    clipped_negative: float = 0.0
    rejected: float = 0.0
    reference_divergence: float = 0.0

    def add(self, other: Self) -> None:
        """Add the sums of other rows."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def add_ranks(self, ranks: Ranks) -> None:
        """Add the sums of the other ranks; `tokens` and `denominator` are not touched."""
        names = [field.name for field in fields(self) if field.name not in ("tokens", "denominator")]
        for name, value in zip(names, ranks.sum([getattr(self, name) for name in names]), strict=True):
            setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a minibatch of rows on this rank."""

    model: Any
    algorithm: Algorithm
    config: TrainerConfig
    ranks: Ranks
    reference: Any | None

    def logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the logprobs under the present weights of each pass that `gradients` makes of these rows."""
        found = []
        for indices in passes_of(self.model, [row.sample for row in rows], self.config, self.ranks):
            part = [rows[index].sample for index in indices]
            with torch.no_grad():
                found.append(pass_logprobs(self.model, part, mask_of(part), self.ranks.device))
            HEALTH.report_progress()
        return found

    def divisor(self, rows: Sequence[Row]) -> float:
        """Return the algorithm's divisor of the summed losses of a minibatch of these rows. Raises as `gradients`."""
        with self.ranks.agreed():
            found = denominator(self.algorithm, tokens=max(tokens_of(rows), 1), sequences=max(len(rows), 1))
        return found

    def gradients(self, rows: Sequence[Row], proximal: Sequence[Tensor] | None = None, *, divisor: float) -> Sums:
        """Add the gradient of the rows' summed loss, over `divisor`, to the parameters' gradients.

        `proximal`: the logprobs at the step's start, from `logprobs`; None: the present weights are those of the start.

        Raises what the algorithm raises; with several ranks FailedOnARank, after all ranks have made all passes.
        """
        sums, ranks = Sums(), self.ranks
        fault: Exception | None = None
        samples = [row.sample for row in rows]
        for place, indices in enumerate(passes_of(self.model, samples, self.config, ranks)):
            part = [rows[index] for index in indices]
            mask = mask_of([row.sample for row in part])
            logprobs = pass_logprobs(self.model, [row.sample for row in part], mask, ranks.device)
            gradient, start = torch.zeros_like(logprobs), None if proximal is None else proximal[place]
            others = self._others(part, logprobs.detach() if start is None else start, mask)
            if part and fault is None:
                batch = _batch(part, logprobs.detach().requires_grad_(), mask.to(ranks.device), others)
                try:
                    loss = checked_loss(self.algorithm, batch)
                    gradient = _loss_gradient(loss, batch, divisor)
                    _observe(sums, batch, loss)
                except Exception as error:  # of a user's algorithm
                    if not ranks.grouped:
                        raise
                    fault = error
            # FSDP2 divides the sum of the ranks' gradients by their number.
            logprobs.backward(gradient * ranks.size)  # type: ignore[no-untyped-call]
            HEALTH.report_progress()
        ranks.raise_agreed(fault)
        sums.tokens, sums.denominator = tokens_of(rows), divisor if rows else 0.0
        sums.add_ranks(ranks)
        return sums

    def _others(self, part: Sequence[Row], start: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the logprobs under other policies that the algorithm reads, by their names in TokenBatch."""
        found = {}
        if needs_proximal(self.algorithm):
            found["proximal_logprobs"] = start
        if self.reference is not None:
            with torch.no_grad():
                samples = [row.sample for row in part]
                found["reference_logprobs"] = pass_logprobs(self.reference, samples, mask, self.ranks.device)
        return found


def rows_of(groups: Sequence[Sequence[TrainingSample]], algorithm: Algorithm) -> list[list[Row] | None]:
    """Return the samples of each group with sampled tokens, and their advantages; None for one without advantages."""
    return [
        [Row(sample, one) for sample, one in zip(group, advantages, strict=True) if any(sample.loss_mask)]
        if any(advantages)
        else None
        for group, advantages in zip(groups, step_advantages(algorithm, groups), strict=True)
    ]


def tokens_of(rows: Sequence[Row]) -> int:
    """Number of sampled tokens of the rows."""
    return sum(sum(row.sample.loss_mask) for row in rows)


def needs_proximal(algorithm: Algorithm) -> bool:
    """Whether the algorithm's loss reads the logprobs under the policy at the step's start."""
    return isinstance(algorithm, StepAlgorithm) and algorithm.needs_proximal


def batches_of(model: Any, samples: Sequence[TrainingSample], config: TrainerConfig) -> Iterator[list[int]]:
    """The indices of the samples of each pass."""
    batches = packed_batches if is_packed(model) else padded_batches
    return batches([len(sample.tokens) for sample in samples], tokens=config.microbatch_tokens)


def inputs_of(model: Any, samples: Sequence[TrainingSample], device: torch.device) -> dict[str, Any]:
    """Arguments of `token_logprobs` for one pass: tokens and temperatures of shape (rows, tokens), and lengths."""
    tokens = pad_rows([sample.tokens for sample in samples], dtype=torch.long)
    temperatures = pad_rows([sample.temperatures for sample in samples], dtype=torch.float32, filling=1.0)
    lengths = [len(sample.tokens) for sample in samples] if is_packed(model) else None
    return {"tokens": tokens.to(device), "temperatures": temperatures.to(device), "lengths": lengths}


def passes_of(
    model: Any, samples: Sequence[TrainingSample], config: TrainerConfig, ranks: Ranks
) -> Iterator[list[int]]:
    """The indices of the samples of each pass of this rank: as many passes on all ranks, some of them empty."""
    batches = list(batches_of(model, samples, config))
    for first in range(0, len(batches), ranks.size):
        mine = first + ranks.rank
        yield batches[mine] if mine < len(batches) else []


def pass_logprobs(model: Any, samples: Sequence[TrainingSample], mask: Tensor, device: torch.device) -> Tensor:
    """Logprobs of the tokens in `mask`, of shape (rows, tokens); two zeros for a pass without samples."""
    if not samples:
        return token_logprobs(model, torch.zeros((1, 2), dtype=torch.long, device=device)) * 0.0
    return token_logprobs(model, **inputs_of(model, samples, device), wanted=mask.to(device))


def mask_of(samples: Sequence[TrainingSample]) -> Tensor:
    """Return the loss mask of a pass, of shape (rows, tokens); that of two other tokens for a pass without samples."""
    return pad_rows([sample.loss_mask for sample in samples] or [[0, 0]], dtype=torch.bool)


def _loss_gradient(loss: TokenLoss, batch: TokenBatch, divisor: float) -> Tensor:
    """Return the gradient of the summed loss over `divisor` with respect to the batch's logprobs."""
    (gradient,) = torch.autograd.grad(loss.summed / divisor, batch.logprobs, allow_unused=True)
    return torch.zeros_like(batch.logprobs) if gradient is None else gradient


def _batch(part: Sequence[Row], logprobs: Tensor, mask: Tensor, others: dict[str, Tensor]) -> TokenBatch:
    behaviour = pad_rows([row.sample.behaviour_logprobs for row in part], dtype=torch.float32)
    return TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=behaviour.to(mask.device),
        advantages=torch.tensor([[row.advantage] for row in part]).to(mask.device),
        loss_mask=mask,
        **others,
    )


def _observe(sums: Sums, batch: TokenBatch, loss: TokenLoss) -> None:
    sums.loss += float(loss.summed.detach())
    log_ratio = (batch.logprobs.detach() - batch.behaviour_logprobs)[batch.loss_mask].double()
    ratio = log_ratio.exp()  # at most that of MIN_LOGPROB
    sums.ratio += float(ratio.sum())
    # The estimator r - 1 - log r of the KL divergence is never negative and has low variance.
    sums.divergence += float((ratio - 1 - log_ratio).sum())
    positive = batch.loss_mask & (batch.advantages > 0)
    negative = batch.loss_mask & (batch.advantages < 0)
    sums.positive += float(positive.sum())
    sums.negative += float(negative.sum())
    if loss.clipped is not None:
        sums.clipped += float(loss.clipped[batch.loss_mask].sum())
        sums.clipped_positive += float(loss.clipped[positive].sum())
        sums.clipped_negative += float(loss.clipped[negative].sum())
    if loss.rejected is not None:
        sums.rejected += float(loss.rejected[batch.loss_mask].sum())
    if batch.reference_logprobs is not None:
        sums.reference_divergence += float(reference_divergence(batch).detach().double().sum())
