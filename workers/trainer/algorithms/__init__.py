"""Algorithms: their interface, what a step requires of their results, and how a name leads to one.

Keeps true
- An algorithm is a pair of pure functions: no clock, no randomness, no I/O, no change of the arguments. A step is
  repeated after a restart and must then give the same policy.
- A result that a step cannot use raises AlgorithmError before the result has changed a weight.
- A wrong name or class raises UnknownAlgorithm or AlgorithmError before the trainer reads or fences anything.

Example (a user's module, set as `trainer.algorithm = "my_module:PlainReinforce"`)
    class PlainReinforce:
        def __init__(self, config: TrainerConfig) -> None: ...

        def advantages(self, group: Sequence[TrainingSample]) -> list[float]:
            mean = sum(sample.reward for sample in group) / len(group)
            return [sample.reward - mean for sample in group]

        def loss(self, batch: TokenBatch) -> TokenLoss:
            return TokenLoss(-(batch.advantages * batch.logprobs)[batch.loss_mask].sum())
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.errors import RoseError, UsageError, describe_error
from rose.schemas.samples import TRUNCATED, Sample
from rose.workers.import_path import Registry, binding_error, class_error
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.menu import PRESETS


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
    oldest_version: int = -1
    """The oldest policy version that sampled one of the tokens; -1 if that is not known."""
    workers: Sequence[str] = ()
    """The worker that ended the turn of each token; empty if that is not known."""
    truncated: bool = False
    """Whether the trajectory was cut off, so that the reward is that of a part of the task."""

    @property
    def sampled_by(self) -> list[str]:
        """The worker of each sampled token, in order; empty names if the workers are not known."""
        workers = self.workers or [""] * len(self.tokens)
        return [worker for worker, sampled in zip(workers, self.loss_mask, strict=True) if sampled]

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Convert a Sample record that `selection.select_samples` marked as trained."""
        assert sample.reward is not None
        tokens = unpack_tokens(sample.tokens)
        temperatures, workers = [1.0] * len(tokens), [""] * len(tokens)
        for turn in sample.turns:
            workers[turn.start : turn.end] = [turn.worker] * (turn.end - turn.start)
            temperatures[turn.start : turn.end] = [turn.sampling.temperature] * (turn.end - turn.start)
        return cls(
            tokens=tokens,
            loss_mask=list(sample.loss_mask),
            behaviour_logprobs=unpack_logprobs(sample.logprobs).tolist(),
            temperatures=temperatures,
            reward=sample.reward,
            oldest_version=sample.oldest_version,
            workers=workers,
            truncated=sample.ended in TRUNCATED,
        )


class AlgorithmError(UsageError):
    """An algorithm returned a value that a step cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The tokens of some trajectories, one row each, padded on the right."""

    logprobs: Tensor
    """Logprob of each token in `loss_mask` under the current policy, at the temperature of its turn; 0 elsewhere.
    Shape (rows, tokens), float32; carries the gradient."""
    behaviour_logprobs: Tensor
    """Logprob that the engine recorded when it sampled the token, possibly under an older policy. Shape (rows, tokens),
    float32. Any value, also NaN, where `loss_mask` is False."""
    advantages: Tensor
    """Advantage of each row's trajectory. Shape (rows, 1), float32."""
    loss_mask: Tensor
    """True where the policy sampled the token, False for observations and padding. Shape (rows, tokens), bool."""
    proximal_logprobs: Tensor | None = None
    """Logprob of each token in `loss_mask` under the policy at the step's start; 0 elsewhere. Shape (rows, tokens),
    float32. None unless the algorithm needs them (`StepAlgorithm`)."""
    reference_logprobs: Tensor | None = None
    """The same under the reference policy. None unless the algorithm needs them."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of a TokenBatch."""

    summed: Tensor
    """Sum of the losses of the tokens in `loss_mask`; a scalar with a gradient. The step divides the sum by the number
    of sampled tokens of the whole minibatch, so the loss is a mean over tokens, however they are packed into passes.
    A `StepAlgorithm` may choose another denominator."""
    clipped: Tensor | None = None
    """True where a sampled token has no gradient because of a bound of the algorithm. Shape (rows, tokens), bool; for
    the metric `clipped_share` only. None if the algorithm has no such bound."""
    rejected: Tensor | None = None
    """True where a sampled token is left out because of its ratio of trainer to engine; also True in `clipped`. Shape
    (rows, tokens), bool; for the metric `rejected_share` only. None if the algorithm leaves no token out so."""


class Algorithm(Protocol):
    """Advantages and loss. The class is called with the TrainerConfig."""

    def advantages(self, group: Sequence[TrainingSample]) -> Sequence[float]:
        """Return the advantage of each sample of one group, in their order; finite.

        A group whose advantages are all 0 has no gradient and is not computed. The trainer gives at least two samples
        with different rewards: `selection.select_samples` filters other groups.
        """

    def loss(self, batch: TokenBatch) -> TokenLoss:
        """Return the summed loss of the tokens in `batch.loss_mask`, which the step minimises."""


@runtime_checkable
class StepAlgorithm(Algorithm, Protocol):
    """An algorithm that needs more than groups and a mean over tokens.

    Derive a class from this one, and replace what differs.
    """

    needs_proximal: bool = False
    """Whether `loss` reads `TokenBatch.proximal_logprobs`, which cost a forward pass if the step has minibatches."""
    needs_reference: bool = False
    """Whether `loss` reads `TokenBatch.reference_logprobs`, which cost a forward pass and a second model."""

    def step_advantages(self, groups: Sequence[Sequence[TrainingSample]]) -> Sequence[Sequence[float]]:
        """Return the advantages of all groups of a step, in their order; `advantages` has those of a single group."""
        return [self.advantages(group) for group in groups]

    def denominator(self, *, tokens: int, sequences: int) -> float:
        """Return what the step divides the summed losses of a minibatch by; above 0 and finite.

        `tokens`, `sequences`: the sampled tokens and the trajectories of the whole minibatch, both above 0.
        """
        return tokens


def step_advantages(algorithm: Algorithm, groups: Sequence[Sequence[TrainingSample]]) -> list[list[float]]:
    """Return the algorithm's advantages of all groups of a step, checked as `checked_advantages` does."""
    if not isinstance(algorithm, StepAlgorithm):
        return [checked_advantages(algorithm, group) for group in groups]
    found = algorithm.step_advantages(groups)
    if len(found) != len(groups):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.step_advantages must return advantages for each of the {len(groups)} groups "
            f"of a step, and returned {len(found)}"
        )
    return [_numbers(algorithm, "step_advantages", one, group) for one, group in zip(found, groups, strict=True)]


def denominator(algorithm: Algorithm, *, tokens: int, sequences: int) -> float:
    """Return what the summed losses of a minibatch are divided by. Raises AlgorithmError if it is not above 0."""
    if not isinstance(algorithm, StepAlgorithm):
        return tokens
    found = algorithm.denominator(tokens=tokens, sequences=sequences)
    if not 0 < found < math.inf:
        raise AlgorithmError(
            f"{type(algorithm).__name__}.denominator must return a finite number above 0, and returned {found}"
        )
    return found


def checked_advantages(algorithm: Algorithm, group: Sequence[TrainingSample]) -> list[float]:
    """Return the algorithm's advantages of a group. Raises AlgorithmError if they are not one finite number each."""
    return _numbers(algorithm, "advantages", algorithm.advantages(group), group)


def _numbers(algorithm: Algorithm, method: str, found: Sequence[float], group: Sequence[TrainingSample]) -> list[float]:
    try:
        numbers = [float(number) for number in found]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != len(group) or not all(map(math.isfinite, numbers)):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.{method} must return one finite number for each of the {len(group)} samples "
            f"of a group, and returned {str(found)[:100]}"
        )
    return numbers


def checked_loss(algorithm: Algorithm, batch: TokenBatch) -> TokenLoss:
    """Return the algorithm's loss of a batch.

    Raises AlgorithmError if the loss has another type or shape than TokenLoss says.
    """
    found = algorithm.loss(batch)
    name = f"{type(algorithm).__name__}.loss must return a TokenLoss"
    if not isinstance(found, TokenLoss):
        raise AlgorithmError(f"{name}, and returned a {type(found).__name__}")
    if not isinstance(found.summed, Tensor) or found.summed.shape != () or not found.summed.requires_grad:
        raise AlgorithmError(f"{name} whose `summed` is a scalar tensor computed from `batch.logprobs`")
    for field, marked in (("clipped", found.clipped), ("rejected", found.rejected)):
        if marked is not None and marked.shape != batch.loss_mask.shape:
            raise AlgorithmError(f"{name} whose `{field}` has the shape of `batch.loss_mask`")
    return found


BUILT_IN = dict.fromkeys(PRESETS, "rose.workers.trainer.algorithms.combined:Combined")
"""Name to `module:class`."""

METHODS = ("advantages", "loss")


class UnknownAlgorithm(UsageError):
    """A name that leads to no algorithm."""


ALGORITHMS = Registry(kind="algorithm", built_in=BUILT_IN, error=UnknownAlgorithm)


def make_algorithm(config: TrainerConfig) -> Algorithm:
    """Make the algorithm that `config.algorithm` names and try it on one group of two short samples.

    Raises UnknownAlgorithm, or AlgorithmError for results that a step cannot use.
    """
    name = config.algorithm
    factory = ALGORITHMS.load(name, _factory_error)
    try:
        algorithm: Algorithm = factory(config)
        if wrong := _method_error(algorithm):
            raise UnknownAlgorithm(f"algorithm {name!r}: {type(algorithm).__name__} {wrong}")
        _try(algorithm)
        if config.stream_gradients:
            _require_advantages_of_groups(algorithm)
    except RoseError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise UnknownAlgorithm(f"algorithm {name!r} does not compute: {describe_error(error)}") from error
    return algorithm


def _factory_error(factory: object) -> str | None:
    """Return why the trainer cannot call `factory` to make an algorithm; None if it can."""
    unbound = "cannot be made with the trainer's settings as its one argument ({error})"
    return class_error(factory, methods=METHODS, arguments=1, unbound=unbound)


def _method_error(algorithm: object) -> str | None:
    """Return why the object is no algorithm; None if it has the methods of one."""
    for name in METHODS:
        method = getattr(algorithm, name, None)
        if not callable(method):
            return f"lacks {name}"
        if error := binding_error(method, 1):
            return f"has a method {name} that does not take one argument ({error})"
    return None


def _try(algorithm: Algorithm) -> None:
    samples = [
        TrainingSample(
            tokens=[0, 0, 0],
            loss_mask=mask,  # the rows have unlike numbers of tokens, so that a mean shows
            behaviour_logprobs=[0.0, -1.0, -1.0],
            temperatures=[1.0] * 3,
            reward=reward,
        )
        for mask, reward in (([0, 1, 1], 0.0), ([0, 0, 1], 1.0))
    ]
    advantages = step_advantages(algorithm, [samples])[0]
    denominator(algorithm, tokens=3, sequences=2)
    logprobs = torch.full((2, 3), -1.0)
    batch = TokenBatch(
        logprobs=logprobs.clone().requires_grad_(),
        behaviour_logprobs=logprobs,
        advantages=torch.tensor(advantages)[:, None],
        loss_mask=torch.tensor([sample.loss_mask for sample in samples], dtype=torch.bool),
        proximal_logprobs=logprobs,
        reference_logprobs=logprobs,
    )
    (slopes,) = torch.autograd.grad(checked_loss(algorithm, batch).summed, batch.logprobs, allow_unused=True)
    own = torch.zeros(1) if slopes is None else slopes[batch.loss_mask]
    if any(advantages) and not (own.any() and own.isfinite().all()):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.loss has no finite gradient for sampled tokens with advantages of "
            f"{' and '.join(map(str, advantages))}, so nothing would be learned: compute `summed` from `batch.logprobs`"
        )
    unlike = dataclasses.replace(batch, advantages=torch.tensor([[1.0], [2.0]]))  # losses that do not cancel
    whole = float(checked_loss(algorithm, unlike).summed.detach())
    rows = [float(checked_loss(algorithm, _row(unlike, place)).summed.detach()) for place in range(2)]
    if not math.isclose(whole, sum(rows), rel_tol=1e-3, abs_tol=1e-3 * max(map(abs, rows))):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.loss gives {whole:g} for two trajectories, and {rows[0]:g} and {rows[1]:g} "
            "for each alone, so what is learned would depend on microbatches: make `summed` a sum over tokens, no mean"
        )


def _require_advantages_of_groups(algorithm: Algorithm) -> None:
    """Try whether the advantages of a group depend on the other groups of the step. Raises UnknownAlgorithm."""
    groups = [
        [
            TrainingSample(
                tokens=[0] * (2 + number),
                loss_mask=[0] + [1] * (1 + number),
                behaviour_logprobs=[-1.0] * (2 + number),
                temperatures=[1.0] * (2 + number),
                reward=reward,
            )
            for reward in rewards
        ]
        for number, rewards in enumerate(([0.0, 1.0], [0.0, 1.0, 3.0]))
    ]
    alone = [step_advantages(algorithm, [group])[0] for group in groups]
    if step_advantages(algorithm, groups) != alone:
        raise UnknownAlgorithm(
            f"{type(algorithm).__name__}.step_advantages compares all samples of a step, so no gradient can be "
            "computed before the step's last group: set trainer.stream_gradients to false"
        )


def _row(batch: TokenBatch, place: int) -> TokenBatch:
    """Return a batch of one row of this batch."""
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return TokenBatch(**{name: tensor[place : place + 1] for name, tensor in tensors.items() if tensor is not None})
