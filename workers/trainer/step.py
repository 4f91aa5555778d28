"""One training step on a batch of groups. The bus trainer and the plain reference call the same function.

Keeps true
- The step is a function of model, optimizer and groups: no clock, no randomness, no I/O. The model computes in
  evaluation mode (`policy`), so the ratio of an on-policy token is 1.
- Samples of a group without advantages, or without sampled tokens, are not computed: their gradient is zero, and they
  are not part of any mean.
- How sequences are put into passes, packed or padded, and passes spread over ranks, changes only time and memory, but
  for the rounding of sums.
- Every rank makes as many passes as the others, because a pass is a collective call: a rank without sequences left
  computes two tokens, whose gradient is zero.
- No weight changes if an engine computes another policy: the logprobs of tokens that each worker sampled with the
  policy's own weights are compared before the first update, also in steps and groups without a signal.
- A minibatch whose gradient is not finite changes no weight and is in no mean. The metrics count it and name its
  groups.
- Logprobs under the policy at the step's start are computed before the first update, and only for an algorithm that
  reads them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Self

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rose.schemas.errors import UsageError
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
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.logprobs import pad_rows, padded_batches, produces_nonfinite, token_logprobs
from rose.workers.trainer.packing import is_packed, packed_batches
from rose.workers.trainer.ranks import ALONE, Ranks

LEAST_COMPARED_TOKENS, LEAST_OF_WORKER, MOST_OF_WORKER = 16, 64, 256
"""Least on-policy tokens to judge all engines together, least to judge one engine, and enough to judge one engine."""


class EngineMismatch(UsageError):
    """An engine computes another policy than the trainer."""


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
    denominator: float = 0.0
    """Sum of the numbers by which the algorithm divides the losses."""
    loss: float = 0.0
    ratio: float = 0.0
    divergence: float = 0.0
    clipped: float = 0.0

    def add(self, other: Self) -> None:
        """Add the sums of another minibatch."""
        self.tokens += other.tokens
        self.denominator += other.denominator
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
    compared: Sequence[TrainingSample] | None = None,
    since: int | None = None,
    reference: Any | None = None,
    ranks: Ranks = ALONE,
) -> StepMetrics:
    """Update the model in place with one step on whole groups.

    Each inner sequence of `groups` is one complete group; every rank gives all groups. `version` is the model's
    version; None: engines are not checked. `compared`: the samples by which engines are checked, also of groups
    without advantages; None: the samples of `groups`. `since`: see `check_engines`. `reference`: the reference policy,
    for an algorithm that reads its logprobs.

    Raises AlgorithmError, or EngineMismatch (`check_engines`); with several ranks FailedOnARank for the first, and
    UsageError if their advantages differ.
    """
    with ranks.agreed():
        of_groups = _rows(groups, algorithm)
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
        check_engines(model, samples if compared is None else compared, config, version, since=since, ranks=ranks)
    learned = _Sums()
    minibatches = [live[first :: config.minibatches] for first in range(min(config.minibatches, len(live)))]
    rows_of = [[row for _, rows in minibatch for row in rows] for minibatch in minibatches]
    passes = _Passes(model, algorithm, config, ranks, reference)
    # The first minibatch computes with the weights of the step's start.
    proximal = [None, *(passes.logprobs(rows) if _needs_proximal(algorithm) else None for rows in rows_of[1:])]
    for minibatch, rows, start in zip(minibatches, rows_of, proximal, strict=False):
        optimizer.zero_grad(set_to_none=True)
        sums = passes.gradients(rows, start)
        norm = _clipped_norm(model, config.gradient_norm)
        if math.isfinite(norm):
            optimizer.step()
            metrics.gradient_norm = max(metrics.gradient_norm, norm)
            learned.add(sums)
        else:
            metrics.skipped_minibatches += 1
            metrics.skipped_groups += tuple(place for place, _ in minibatch)
    metrics.tokens, tokens = learned.tokens, max(learned.tokens, 1)
    metrics.loss, metrics.importance_mean = learned.loss / (learned.denominator or 1.0), learned.ratio / tokens
    metrics.kl_behaviour, metrics.clipped_share = learned.divergence / tokens, learned.clipped / tokens
    return metrics


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
        rows = _rows([group], algorithm)[0] or []
    _Passes(model, algorithm, config, ranks, reference).gradients(rows, None)
    model.zero_grad(set_to_none=True)


def dry_run_policy(
    model: Any, groups: Sequence[Sequence[TrainingSample]], *, config: TrainerConfig, ranks: Ranks = ALONE
) -> bool:
    """Return whether the policy computes finite logprobs.

    Tries one pass with the longest samples of these groups, since an overflow affects every sample.
    """
    samples = [sample for group in groups for sample in group if any(sample.loss_mask)]
    longest = next(_batches(model, samples, config), [])
    part = [samples[index] for index in longest]
    return ranks.all_true(not (part and produces_nonfinite(model, **_inputs(model, part, ranks.device))))


def _batches(model: Any, samples: Sequence[TrainingSample], config: TrainerConfig) -> Iterator[list[int]]:
    """The indices of the samples of each pass."""
    batches = packed_batches if is_packed(model) else padded_batches
    return batches([len(sample.tokens) for sample in samples], tokens=config.microbatch_tokens)


def _inputs(model: Any, samples: Sequence[TrainingSample], device: torch.device) -> dict[str, Any]:
    """Arguments of `token_logprobs` for one pass: tokens and temperatures of shape (rows, tokens), and lengths."""
    tokens = pad_rows([sample.tokens for sample in samples], dtype=torch.long)
    temperatures = pad_rows([sample.temperatures for sample in samples], dtype=torch.float32, filling=1.0)
    lengths = [len(sample.tokens) for sample in samples] if is_packed(model) else None
    return {"tokens": tokens.to(device), "temperatures": temperatures.to(device), "lengths": lengths}


def _rows(groups: Sequence[Sequence[TrainingSample]], algorithm: Algorithm) -> list[list[_Row] | None]:
    """Return the samples of each group with sampled tokens, and their advantages; None for one without advantages."""
    return [
        [_Row(sample, one) for sample, one in zip(group, advantages, strict=True) if any(sample.loss_mask)]
        if any(advantages)
        else None
        for group, advantages in zip(groups, step_advantages(algorithm, groups), strict=True)
    ]


def _needs_proximal(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, StepAlgorithm) and algorithm.needs_proximal


def check_engines(
    model: Any,
    samples: Sequence[TrainingSample],
    config: TrainerConfig,
    version: int,
    *,
    since: int | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Compare the model's logprobs with those that each worker's engine recorded. `version`: the model's version.

    `since`: the first version with the weights of `version`, as steps without a gradient change none; None: `version`.
    Workers with fewer than LEAST_OF_WORKER tokens are judged only together with the others.

    Raises EngineMismatch if the mean absolute difference of a worker, or of all, is more than `max_logprob_difference`.
    """
    chosen = [samples[place] for place in places_to_compare(samples, version if since is None else since)]
    found = {name: values for name, values in _differences(model, chosen, config, ranks).items() if values}
    everything = [value for values in found.values() for value in values]
    judged = {name: fmean(values) for name, values in found.items() if len(values) >= LEAST_OF_WORKER}
    most = config.max_logprob_difference
    whole = fmean(everything) if len(everything) >= LEAST_COMPARED_TOKENS else 0.0
    worst = max(judged, key=lambda name: judged[name], default="")
    if judged and judged[worst] > most and any(fmean(found[name]) <= most for name in found if name != worst):
        subject, difference, tokens = f"the engine of worker {worst} computes", judged[worst], len(found[worst])
        fix = "begin again in another --namespace without that worker"
    elif max(whole, judged.get(worst, 0.0)) > most:
        subject, difference, tokens = "the engines compute", whole, len(everything)
        fix = (
            "look whether executors have the trainer's config.json, and leave executor.vllm empty; if the folder is "
            "the cause, take one that vLLM and transformers compute alike"
        )
    else:
        return
    raise EngineMismatch(
        f"{subject} another policy than the trainer: the logprobs of {tokens} tokens that version {version} sampled "
        f"differ by {difference:.2g} nats on average, and trainer.max_logprob_difference is {most:g}; nothing was "
        f"learned from these samples: {fix}. Raise the setting only for engines that compute in low precision"
    )


def places_to_compare(samples: Sequence[TrainingSample], since: int) -> list[int]:
    """Return the places of the samples by which engines are checked.

    No version before `since` has sampled a token of them. They have about MOST_OF_WORKER tokens of each worker, from
    its longest samples: a difference far into a context does not show in short samples. A second choice among the
    chosen samples is the same.
    """
    chosen: list[int] = []
    enough: Counter[str] = Counter()
    for place in sorted(range(len(samples)), key=lambda place: -len(samples[place].tokens)):
        sample = samples[place]
        own = Counter(sample.sampled_by) if sample.oldest_version >= since else Counter[str]()
        if any(enough[name] < MOST_OF_WORKER for name in own):
            chosen.append(place)
            enough += own
    return chosen


def _differences(
    model: Any, chosen: Sequence[TrainingSample], config: TrainerConfig, ranks: Ranks
) -> dict[str, list[float]]:
    """Return the finite absolute differences of the logprobs of sampled tokens, in nats, by worker."""
    found: dict[str, list[float]] = {}
    for indices in _passes(model, chosen, config, ranks):
        part = [chosen[index] for index in indices]
        mask = _mask(part)
        with torch.no_grad():
            logprobs = _pass_logprobs(model, part, mask, ranks.device).cpu()
        behaviour = pad_rows([sample.behaviour_logprobs for sample in part] or [[0, 0]], dtype=torch.float32)
        values = (logprobs - behaviour)[mask].abs().tolist()
        for name, value in zip(chain.from_iterable(sample.sampled_by for sample in part), values, strict=True):
            found.setdefault(name, []).extend([value] * math.isfinite(value))
        HEALTH.report_progress()
    together: dict[str, list[float]] = {}
    for data in ranks.gather(msgspec.msgpack.encode(found)):
        for name, values in msgspec.msgpack.decode(data, type=dict[str, list[float]]).items():
            together.setdefault(name, []).extend(values)
    return together


def _passes(model: Any, samples: Sequence[TrainingSample], config: TrainerConfig, ranks: Ranks) -> Iterator[list[int]]:
    """The indices of the samples of each pass of this rank: as many passes on all ranks, some of them empty."""
    batches = list(_batches(model, samples, config))
    for first in range(0, len(batches), ranks.size):
        mine = first + ranks.rank
        yield batches[mine] if mine < len(batches) else []


def _pass_logprobs(model: Any, samples: Sequence[TrainingSample], mask: Tensor, device: torch.device) -> Tensor:
    """Logprobs of the tokens in `mask`, of shape (rows, tokens); two zeros for a pass without samples."""
    if not samples:
        return token_logprobs(model, torch.zeros((1, 2), dtype=torch.long, device=device)) * 0.0
    return token_logprobs(model, **_inputs(model, samples, device), wanted=mask.to(device))


@dataclass(frozen=True, slots=True)
class _Passes:
    """The passes of a minibatch of rows on this rank."""

    model: Any
    algorithm: Algorithm
    config: TrainerConfig
    ranks: Ranks
    reference: Any | None

    def logprobs(self, rows: Sequence[_Row]) -> list[Tensor]:
        """Return the logprobs under the present weights of each pass that `gradients` makes of these rows."""
        found = []
        for indices in _passes(self.model, [row.sample for row in rows], self.config, self.ranks):
            part = [rows[index].sample for index in indices]
            with torch.no_grad():
                found.append(_pass_logprobs(self.model, part, _mask(part), self.ranks.device))
            HEALTH.report_progress()
        return found

    def gradients(self, rows: Sequence[_Row], proximal: Sequence[Tensor] | None) -> _Sums:
        """Add the gradient of the rows' loss, divided by the algorithm's denominator, to the parameters' gradients.

        `proximal`: the logprobs at the step's start, from `logprobs`; None: the present weights are those of the start.

        Raises what the algorithm raises; with several ranks FailedOnARank, after all ranks have made all passes.
        """
        sums, ranks = _Sums(), self.ranks
        tokens = sum(sum(row.sample.loss_mask) for row in rows)
        with ranks.agreed():
            divisor = denominator(self.algorithm, tokens=max(tokens, 1), sequences=max(len(rows), 1))
        fault: Exception | None = None
        samples = [row.sample for row in rows]
        for place, indices in enumerate(_passes(self.model, samples, self.config, ranks)):
            part = [rows[index] for index in indices]
            mask = _mask([row.sample for row in part])
            logprobs = _pass_logprobs(self.model, [row.sample for row in part], mask, ranks.device)
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
        sums.tokens, sums.denominator = tokens, divisor if rows else 0.0
        sums.loss, sums.ratio, sums.divergence, sums.clipped = ranks.sum(
            [sums.loss, sums.ratio, sums.divergence, sums.clipped]
        )
        return sums

    def _others(self, part: Sequence[_Row], start: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the logprobs under other policies that the algorithm reads, by their names in TokenBatch."""
        found = {}
        if _needs_proximal(self.algorithm):
            found["proximal_logprobs"] = start
        if self.reference is not None:
            with torch.no_grad():
                samples = [row.sample for row in part]
                found["reference_logprobs"] = _pass_logprobs(self.reference, samples, mask, self.ranks.device)
        return found


def _mask(samples: Sequence[TrainingSample]) -> Tensor:
    """Return the loss mask of a pass, of shape (rows, tokens); that of two other tokens for a pass without samples."""
    return pad_rows([sample.loss_mask for sample in samples] or [[0, 0]], dtype=torch.bool)


def _loss_gradient(loss: TokenLoss, batch: TokenBatch, divisor: float) -> Tensor:
    """Return the gradient of the summed loss over `divisor` with respect to the batch's logprobs."""
    (gradient,) = torch.autograd.grad(loss.summed / divisor, batch.logprobs, allow_unused=True)
    return torch.zeros_like(batch.logprobs) if gradient is None else gradient


def _batch(part: Sequence[_Row], logprobs: Tensor, mask: Tensor, others: dict[str, Tensor]) -> TokenBatch:
    behaviour = pad_rows([row.sample.behaviour_logprobs for row in part], dtype=torch.float32)
    return TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=behaviour.to(mask.device),
        advantages=torch.tensor([[row.advantage] for row in part]).to(mask.device),
        loss_mask=mask,
        **others,
    )


def _observe(sums: _Sums, batch: TokenBatch, loss: TokenLoss) -> None:
    sums.loss += float(loss.summed.detach())
    log_ratio = (batch.logprobs.detach() - batch.behaviour_logprobs)[batch.loss_mask].double()
    ratio = log_ratio.exp()  # at most that of MIN_LOGPROB
    sums.ratio += float(ratio.sum())
    # The estimator r - 1 - log r of the KL divergence is never negative and has low variance.
    sums.divergence += float((ratio - 1 - log_ratio).sum())
    if loss.clipped is not None:
        sums.clipped += float(loss.clipped[batch.loss_mask].sum())
