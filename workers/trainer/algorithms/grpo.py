"""Token-level GRPO (DeepSeekMath, arXiv 2402.03300).

Keeps true: a group whose rewards are equal, except for rounding errors, has no advantage.
"""

from collections.abc import Sequence

from rose.workers.trainer.algorithms.base import TokenBatch, TokenLoss
from rose.workers.trainer.algorithms.clipped_loss import clipped_loss
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.selection import rewards_differ
from rose.workers.trainer.training_sample import TrainingSample

DEVIATION_EPSILON = 1e-4
"""Added to a group's standard deviation, so that tiny differences between rewards do not give full advantages."""


class Grpo:
    """Advantages from the mean and the standard deviation of a group."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config

    def advantages(self, group: Sequence[TrainingSample]) -> list[float]:
        """Return `group_advantages` of the rewards."""
        rewards = [sample.reward for sample in group]
        return group_advantages(rewards, scale_by_deviation=self._config.scale_by_deviation)

    def loss(self, batch: TokenBatch) -> TokenLoss:
        """Return the clipped loss."""
        return clipped_loss(batch, self._config)


def group_advantages(rewards: Sequence[float], *, scale_by_deviation: bool) -> list[float]:
    """Return each reward minus the group's mean.

    `scale_by_deviation`: whether to divide by the group's standard deviation; Dr. GRPO (arXiv 2503.20783) does not.
    Computed in float64. Returns zeros for a group of equal rewards.
    """
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale_by_deviation:
        return centred
    deviation = (sum(c * c for c in centred) / len(centred)) ** 0.5
    return [c / (deviation + DEVIATION_EPSILON) for c in centred]
