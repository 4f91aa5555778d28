"""Token-level GRPO: advantages from the rewards of a group, and the loss of each sampled token.

Keeps true
- A group whose rewards are equal, except for rounding errors, has no advantage and no gradient.
- Tokens with a loss mask of 0 contribute nothing, whatever their values.
- A token is weighted by the probability ratio of the current policy to the policy that sampled the token, which may be
  some versions older and runs in another engine. The weight is truncated (truncated importance sampling, as TRL's
  `vllm_importance_sampling_cap`). The token has no gradient once the ratio has left the clip range in the direction of
  the advantage (PPO, with the wider upper bound of DAPO, arXiv 2503.14476).
- The loss is a mean over the sampled tokens of the batch, not over trajectories, so a long trajectory has more weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.workers.trainer.selection import rewards_differ

DEVIATION_EPSILON = 1e-4
"""Added to a group's standard deviation, so that tiny differences between rewards do not give full advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBounds:
    """Bounds on the ratio of the current policy to the sampling policy."""

    clip_low: float
    """Lowest ratio at which a token with negative advantage still has a gradient."""
    clip_high: float
    """Highest ratio at which a token with positive advantage still has a gradient."""
    importance_cap: float
    """Largest weight of a token. Without a cap, the weight of a token with negative advantage is unbounded."""


def group_advantages(rewards: Sequence[float], *, scale_by_deviation: bool) -> list[float]:
    """Return each reward minus the group's mean.

    `scale_by_deviation`: whether to divide by the group's standard deviation; Dr. GRPO (arXiv 2503.20783) does not.

    Returns zeros for a group of equal rewards.
    """
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale_by_deviation:
        return centred
    deviation = (sum(c * c for c in centred) / len(centred)) ** 0.5
    return [c / (deviation + DEVIATION_EPSILON) for c in centred]


def beyond_clip(ratio: Tensor, advantages: Tensor, bounds: LossBounds) -> Tensor:
    """Return where a token has no gradient because of the clip range.

    True where the ratio has left the clip range in the direction of the advantage.
    """
    return ((advantages > 0) & (ratio > bounds.clip_high)) | ((advantages < 0) & (ratio < bounds.clip_low))


def grpo_loss(
    logprobs: Tensor, *, behaviour_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, bounds: LossBounds
) -> Tensor:
    """The loss summed over the masked tokens; the caller divides by the number of masked tokens in the batch.

    `logprobs` are the current policy's and carry the gradient; `behaviour_logprobs` are those that the engine recorded.
    Both and `loss_mask` have shape (rows, tokens); `advantages` broadcasts to it. Within the bounds the gradient is
    that of `-ratio * advantage`.
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - behaviour_logprobs, 0.0)
    ratio = log_ratio.detach().exp()
    spent = beyond_clip(ratio, advantages, bounds)
    weight = ratio.clamp(max=bounds.importance_cap)
    pull = weight * torch.exp(log_ratio - log_ratio.detach()) * advantages
    return -torch.where(mask & ~spent, pull, 0.0).sum()
