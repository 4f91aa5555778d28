"""The interface of an algorithm, and what a step requires of its results.

Keeps true
- An algorithm is a pair of pure functions: no clock, no randomness, no I/O, no change of the arguments. A step is
  repeated after a restart and must then give the same policy.
- A result that a step cannot use is an AlgorithmError, before any weight has changed by it.

Example (a user's module, set as `trainer.algorithm = "my_module:PlainReinforce"`)
    class PlainReinforce:
        def __init__(self, config: TrainerConfig) -> None: ...

        def advantages(self, group: Sequence[TrainingSample]) -> list[float]:
            mean = sum(sample.reward for sample in group) / len(group)
            return [sample.reward - mean for sample in group]

        def loss(self, batch: TokenBatch) -> TokenLoss:
            return TokenLoss(-(batch.advantages * batch.logprobs)[batch.loss_mask].sum())
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rose.schemas.errors import UsageError
from rose.workers.trainer.training_sample import TrainingSample


class AlgorithmError(UsageError):
    """An algorithm returned what a step cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The tokens of some trajectories, one row each, padded on the right."""

    logprobs: Tensor
    """Logprob of each token under the current policy, at the temperature of its turn. Shape (rows, tokens), float32;
    carries the gradient."""
    behaviour_logprobs: Tensor
    """Logprob that the engine recorded when it sampled the token, possibly under an older policy. Shape (rows, tokens),
    float32. Any value, also NaN, where `loss_mask` is False."""
    advantages: Tensor
    """Advantage of each row's trajectory. Shape (rows, 1), float32."""
    loss_mask: Tensor
    """True where the policy sampled the token, False for observations and padding. Shape (rows, tokens), bool."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of a TokenBatch."""

    summed: Tensor
    """Sum of the losses of the tokens in `loss_mask`; a scalar with a gradient. The step divides the sum by the number
    of sampled tokens of the whole minibatch, so the loss is a mean over tokens, however they are packed into passes."""
    clipped: Tensor | None = None
    """True where a sampled token has no gradient because of a bound of the algorithm. Shape (rows, tokens), bool; for
    the metric `clipped_share` only. None if the algorithm has no such bound."""


class Algorithm(Protocol):
    """Advantages and loss. The class is called with the TrainerConfig."""

    def advantages(self, group: Sequence[TrainingSample]) -> Sequence[float]:
        """Return the advantage of each sample of one group, in their order; finite.

        A group whose advantages are all 0 has no gradient and is not computed. The trainer gives at least two samples
        with different rewards: `selection.select_samples` filters other groups.
        """

    def loss(self, batch: TokenBatch) -> TokenLoss:
        """Return the summed loss of the tokens in `batch.loss_mask`, which the step minimises."""


def checked_advantages(algorithm: Algorithm, group: Sequence[TrainingSample]) -> list[float]:
    """Return the algorithm's advantages of a group. Raises AlgorithmError if they are not one finite number each."""
    found = algorithm.advantages(group)
    try:
        numbers = [float(number) for number in found]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != len(group) or not all(map(math.isfinite, numbers)):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.advantages must return one finite number for each of the {len(group)} samples "
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
    if found.clipped is not None and found.clipped.shape != batch.loss_mask.shape:
        raise AlgorithmError(f"{name} whose `clipped` has the shape of `batch.loss_mask`")
    return found
