"""Token-level GRPO: what a group of rewards says about each sampled token.

Keeps true
- A group whose rewards are all equal, but for what sums of floats leave, has no advantage, and so no gradient.
- Where the loss mask is 0 nothing counts, whatever the numbers there are.
- A token weighs by the ratio of the policy to the one that sampled it, which may be versions older and ran in another
  engine. That weight is truncated (truncated importance sampling, as TRL's `vllm_importance_sampling_cap`), and the
  token stops pulling once the ratio has left the clip range in the direction of its advantage (PPO, with the wider
  upper bound of DAPO, arXiv 2503.14476).
- Long trajectories weigh by their tokens: the mean is over the batch's sampled tokens, not over trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.workers.trainer.selection import rewards_differ

DEVIATION_EPSILON = 1e-4
"""Added to a group's standard deviation, so that a hair's breadth between rewards is no lesson of full weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBounds:
    """How far one update may follow a sample."""

    clip_low: float
    """Lowest ratio at which a token of negative advantage is still pulled down."""
    clip_high: float
    """Highest ratio at which a token of positive advantage is still pushed up."""
    importance_cap: float
    """Largest weight of a token; without it a token of negative advantage could weigh without bound."""


def group_advantages(rewards: Sequence[float], *, scale_by_deviation: bool) -> list[float]:
    """Reward minus the group's mean, over the group's standard deviation if asked (Dr. GRPO, 2503.20783, does without).

    All zeros for a group of equal rewards.
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
    """True where the policy has already followed a token as far as the clip range lets it."""
    return ((advantages > 0) & (ratio > bounds.clip_high)) | ((advantages < 0) & (ratio < bounds.clip_low))


def grpo_loss(
    logprobs: Tensor, *, behaviour_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, bounds: LossBounds
) -> Tensor:
    """The summed loss of the masked tokens; divide by the whole batch's count of them. All float, shape (rows, tokens).

    `logprobs` is the policy's and carries the gradient, `behaviour_logprobs` what the engine recorded; `advantages`
    broadcasts against them. Inside the bounds the gradient is that of `-ratio * advantage`.
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - behaviour_logprobs, 0.0)
    ratio = log_ratio.detach().exp()
    spent = beyond_clip(ratio, advantages, bounds)
    weight = ratio.clamp(max=bounds.importance_cap)
    pull = weight * torch.exp(log_ratio - log_ratio.detach()) * advantages
    return -torch.where(mask & ~spent, pull, 0.0).sum()
