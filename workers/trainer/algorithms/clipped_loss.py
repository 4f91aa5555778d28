"""The token-level loss of GRPO and RLOO: a policy gradient with truncated importance weights and a clip range.

Keeps true
- Tokens outside of the loss mask contribute nothing, whatever their values.
- A token is weighted by the probability ratio of the current policy to the policy that sampled the token, which may be
  some versions older and runs in another engine. The weight is truncated (truncated importance sampling, as TRL's
  `vllm_importance_sampling_cap`). The token has no gradient once the ratio has left the clip range in the direction of
  the advantage (PPO, with the wider upper bound of DAPO, arXiv 2503.14476).
- The loss is a sum over tokens, not over trajectories, so a long trajectory has more weight.
"""

import torch
from torch import Tensor

from rose.workers.trainer.algorithms.base import TokenBatch, TokenLoss
from rose.workers.trainer.config import TrainerConfig


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
