"""The token-level loss of GRPO and RLOO: a policy gradient with truncated importance weights and a clip range.

Keeps true
- Tokens outside of the loss mask contribute nothing, whatever their values.
- A token is weighted by the probability ratio of the current policy to the policy that sampled the token, which may be
  some versions older and runs in another engine. The weight is truncated (truncated importance sampling, as TRL's
  `vllm_importance_sampling_cap`). The token has no gradient once the ratio has left the clip range in the direction of
  the advantage (PPO, with the wider upper bound of DAPO, arXiv 2503.14476).
- The loss is a sum over tokens, not over trajectories, so a long trajectory has more weight.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rose.workers.trainer.algorithms.base import TokenBatch, TokenLoss
from rose.workers.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBounds:
    """Bounds on the ratio of the current policy to the sampling policy."""

    clip_low: float
    """Lowest ratio at which a token with negative advantage still has a gradient."""
    clip_high: float
    """Highest ratio at which a token with positive advantage still has a gradient."""
    importance_cap: float
    """Largest weight of a token. Without a cap, the weight of a token with negative advantage is unbounded."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """The bounds that the configuration sets."""
        return cls(clip_low=config.clip_low, clip_high=config.clip_high, importance_cap=config.importance_cap)


def clipped_loss(batch: TokenBatch, bounds: LossBounds) -> TokenLoss:
    """Within the bounds, the gradient is that of `-ratio * advantage`, summed over the sampled tokens."""
    log_ratio = torch.where(batch.loss_mask, batch.logprobs - batch.behaviour_logprobs, 0.0)
    ratio = log_ratio.detach().exp()
    clipped = batch.loss_mask & _beyond_clip(ratio, batch.advantages, bounds)
    weight = ratio.clamp(max=bounds.importance_cap)
    pull = weight * torch.exp(log_ratio - log_ratio.detach()) * batch.advantages
    return TokenLoss(-torch.where(batch.loss_mask & ~clipped, pull, 0.0).sum(), clipped)


def _beyond_clip(ratio: Tensor, advantages: Tensor, bounds: LossBounds) -> Tensor:
    """True where the ratio has left the clip range in the direction of the advantage."""
    return ((advantages > 0) & (ratio > bounds.clip_high)) | ((advantages < 0) & (ratio < bounds.clip_low))
