"""REINFORCE with a leave-one-out baseline (RLOO).

The baseline is that of Kool, van Hoof and Welling, "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (ICLR 2019
workshop); Ahmadian et al., "Back to Basics" (arXiv 2402.14740), use it for language models. Both compute on policy and
without bounds; here the samples may be some versions old, so the loss is the clipped loss with its importance weights.
`trainer.clip_low = 0` and a large `trainer.clip_high` leave the importance weights alone.

Keeps true
- The baseline of a sample does not depend on the reward of that sample, so it does not bias the gradient.
- A group whose rewards are equal, except for rounding errors, has no advantage. Neither has a group of one sample,
  which has no other rewards.
"""

from collections.abc import Sequence

from rose.workers.trainer.algorithms.base import TokenBatch, TokenLoss
from rose.workers.trainer.algorithms.clipped_loss import clipped_loss
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.selection import rewards_differ
from rose.workers.trainer.training_sample import TrainingSample


class Rloo:
    """Advantages from the mean reward of the other samples of a group."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config

    def advantages(self, group: Sequence[TrainingSample]) -> list[float]:
        """Return `leave_one_out_advantages` of the rewards."""
        return leave_one_out_advantages([sample.reward for sample in group])

    def loss(self, batch: TokenBatch) -> TokenLoss:
        """Return the clipped loss."""
        return clipped_loss(batch, self._config)


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean of the other rewards of the group; not divided by a deviation.

    Computed in float64. Returns zeros for a group of equal rewards or of one.
    """
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
