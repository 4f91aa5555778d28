"""GRPO and RLOO: advantages from the rewards of a group, and a policy gradient with truncated importance weights.

Keeps true
- A group whose rewards are equal, except for rounding errors, has no advantage. Neither has a group of one sample.
- Tokens outside of the loss mask contribute nothing, whatever their values.
- A token is weighted by the probability ratio of the current policy to the policy that sampled the token, which may be
  some versions older and runs in another engine. The weight is truncated (truncated importance sampling, as TRL's
  `vllm_importance_sampling_cap`). The token has no gradient once the ratio has left the clip range in the direction of
  the advantage (PPO, with the wider upper bound of DAPO, arXiv 2503.14476).
- The loss is a sum over tokens, not over trajectories, so a long trajectory has more weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rose.workers.trainer.algorithms import TokenBatch, TokenLoss, TrainingSample
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.selection import rewards_differ

DEVIATION_EPSILON = 1e-4
"""Added to a group's standard deviation, so that tiny differences between rewards do not give full advantages."""


class Grpo:
    """Advantages from the mean and the standard deviation of a group (DeepSeekMath, arXiv 2402.03300)."""

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


class Rloo:
    """REINFORCE with a leave-one-out baseline: advantages from the mean reward of the other samples of a group.

    The baseline is that of Kool, van Hoof and Welling, "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (ICLR 2019
    workshop); Ahmadian et al., "Back to Basics" (arXiv 2402.14740), use it for language models. It does not depend on
    the reward of the sample itself, so it does not bias the gradient. Both compute on policy and without bounds; here
    samples may be some versions old. `trainer.clip_low = 0` and a large `trainer.clip_high` leave the importance
    weights alone.
    """

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


def clipped_loss(batch: TokenBatch, config: TrainerConfig) -> TokenLoss:
    """Return the loss whose gradient is that of `-ratio * advantage`, summed over the sampled tokens.

    The configuration's `clip_low`, `clip_high` and `importance_cap` bound the ratio.
    """
    log_ratio = torch.where(batch.loss_mask, batch.logprobs - batch.behaviour_logprobs, 0.0)
    ratio = log_ratio.detach().exp()
    clipped = batch.loss_mask & _beyond_clip(ratio, batch.advantages, config)
    weight = ratio.clamp(max=config.importance_cap)
    pull = weight * torch.exp(log_ratio - log_ratio.detach()) * batch.advantages
    return TokenLoss(-torch.where(batch.loss_mask & ~clipped, pull, 0.0).sum(), clipped)


def _beyond_clip(ratio: Tensor, advantages: Tensor, config: TrainerConfig) -> Tensor:
    """True where the ratio has left the clip range in the direction of the advantage."""
    return ((advantages > 0) & (ratio > config.clip_high)) | ((advantages < 0) & (ratio < config.clip_low))
