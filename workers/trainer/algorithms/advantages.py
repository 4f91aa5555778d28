"""Advantages: what each sample's reward becomes, compared with its group or with all samples of a step.

Keeps true
- Advantages depend on rewards and numbers of sampled tokens only, and are computed in float64.
- Rewards of a group that are equal, except for rounding errors, give no advantages, unless the advantage compares with
  all samples of the step.
- A deviation is that of the rewards at hand (divided by their number), plus DEVIATION_EPSILON.

Example (one success in four)
    group_advantages([0, 0, 0, 1], scale_by_deviation=False)  -> -0.25, -0.25, -0.25, 0.75
    leave_one_out_advantages([0, 0, 0, 1])                    -> -0.33, -0.33, -0.33, 1
    likelihood_advantages([0, 0, 0, 1])                       -> -1, -1, -1, 3
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from math import comb, fsum, sqrt

from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.selection import rewards_differ

DEVIATION_EPSILON = 1e-4
"""Added to a standard deviation, so that tiny differences between rewards do not give full advantages."""

Rewards = Sequence[float]

GroupAdvantages = Callable[[Rewards], list[float]]
"""Advantages of the samples of one group from their rewards."""


@dataclass(frozen=True, slots=True)
class RewardedGroup:
    """Rewards and sizes of a group, which an advantage over a whole step needs."""

    rewards: Rewards
    tokens: Sequence[int]
    """Number of sampled tokens of each sample."""


StepAdvantages = Callable[[Sequence[RewardedGroup]], list[list[float]]]
"""Advantages of the samples of all groups of a step."""


def group_advantages(rewards: Rewards, *, scale_by_deviation: bool) -> list[float]:
    """Return each reward minus the group's mean.

    `scale_by_deviation`: whether to divide by the group's standard deviation. GRPO does (DeepSeekMath, arXiv
    2402.03300), Dr. GRPO (arXiv 2503.20783) does not. Returns zeros for a group of equal
    rewards.
    """
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale_by_deviation:
        return centred
    deviation = (sum(c * c for c in centred) / len(centred)) ** 0.5
    return [c / (deviation + DEVIATION_EPSILON) for c in centred]


def leave_one_out_advantages(rewards: Rewards) -> list[float]:
    """Return each reward minus the mean of the other rewards of the group; not divided by a deviation.

    The baseline is that of Kool, van Hoof and Welling, "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (ICLR 2019
    workshop); Ahmadian et al., "Back to Basics" (arXiv 2402.14740), use it for language models as RLOO. It does not
    depend on the reward of the sample itself, so it does not bias the gradient. Returns zeros for a group of equal
    rewards or of one.
    """
    if not rewards_differ(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def likelihood_advantages(rewards: Rewards) -> list[float]:
    """Return each reward minus the group's mean, divided by the mean (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 the expected gradient is that of a truncated series of the logarithm of the success
    probability, so rarely solved tasks have more weight than under GRPO. Returns zeros for a group of equal rewards,
    and for one whose mean is 0 or negative, as a likelihood is not.
    """
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    if mean <= 0 or not rewards_differ(rewards):
        return [0.0] * len(rewards)
    return [(reward - mean) / mean for reward in rewards]


def pass_at_k_advantages(rewards: Rewards, *, k: int) -> list[float]:
    """Return the advantages of pass@k training (arXiv 2508.10751).

    Every k samples of the group form a subset, whose reward is its best one. A subset's advantage is its reward minus
    the mean over all subsets, over their standard deviation plus DEVIATION_EPSILON; a sample's advantage is the mean
    over the subsets that have it. The paper's closed form for rewards of 0 and 1 is the same; here other rewards are
    sorted, so no subset is formed. Returns zeros for a group of `k` samples or fewer, and for a group whose subsets
    have equal rewards.
    """
    size = len(rewards)
    if size <= k or not rewards_differ(rewards):
        return [0.0] * size
    order = sorted(range(size), key=lambda place: rewards[place])
    ascending = [rewards[place] for place in order]
    # The n-th smallest reward is the best one of the subsets that have it and k - 1 of the n smaller ones.
    best = [comb(n, k - 1) / comb(size, k) for n in range(size)]
    mean = fsum(share * reward for share, reward in zip(best, ascending, strict=True))
    squares = fsum(share * (reward - mean) ** 2 for share, reward in zip(best, ascending, strict=True))
    if not rewards_differ(ascending[k - 1 :]):
        return [0.0] * size
    # Among the subsets with the n-th smallest, that one is the best in those whose others are all smaller. A larger
    # one, the m-th, is the best in those with k - 2 others of the m - 1 that are left below it.
    with_it = comb(size - 1, k - 1)
    above = [comb(m - 1, k - 2) / with_it * ascending[m] if m and k > 1 else 0.0 for m in range(size)]
    sums = [*accumulate(reversed(above), initial=0.0)][::-1]
    advantages = [0.0] * size
    for n, place in enumerate(order):
        expected = comb(n, k - 1) / with_it * ascending[n] + sums[n + 1]
        advantages[place] = (expected - mean) / (sqrt(squares) + DEVIATION_EPSILON)
    return advantages


def batch_normalised_advantages(groups: Sequence[RewardedGroup]) -> list[list[float]]:
    """Return each reward minus its group's mean, over the standard deviation of all rewards of the step.

    Lite PPO ("Part I: Tricks or Traps?", arXiv 2508.08221). A group whose rewards hardly differ does not get the
    weight of the others, as it does with a deviation of its own.
    """
    deviation = _deviation(list(chain.from_iterable(group.rewards for group in groups)))
    centred = [group_advantages(group.rewards, scale_by_deviation=False) for group in groups]
    return [[one / (deviation + DEVIATION_EPSILON) for one in group] for group in centred]


def reinforce_plus_plus_advantages(groups: Sequence[RewardedGroup], *, baseline: bool) -> list[list[float]]:
    """Return rewards normalised by mean and deviation over all sampled tokens of the step.

    REINFORCE++ (arXiv 2501.03262): every token has its sample's reward, so a sample counts in mean and deviation as
    often as it has tokens. `baseline`: whether to subtract the group's mean first, which is the paper's
    REINFORCE++-baseline. Groups of equal rewards are not trained on, so they are in no mean.
    """
    values = [
        group_advantages(group.rewards, scale_by_deviation=False) if baseline else list(group.rewards)
        for group in groups
    ]
    flat = list(chain.from_iterable(values))
    tokens = list(chain.from_iterable(group.tokens for group in groups))
    if not rewards_differ(flat) or not sum(tokens):
        return [[0.0] * len(group) for group in values]
    mean = fsum(value * count for value, count in zip(flat, tokens, strict=True)) / sum(tokens)
    squares = fsum((value - mean) ** 2 * count for value, count in zip(flat, tokens, strict=True)) / sum(tokens)
    return [[(value - mean) / (sqrt(squares) + DEVIATION_EPSILON) for value in group] for group in values]


def _deviation(values: Rewards) -> float:
    """Return the standard deviation of values, divided by their number; 0 for none."""
    mean = fsum(values) / max(len(values), 1)
    return sqrt(fsum((value - mean) ** 2 for value in values) / max(len(values), 1))


def group_advantage(name: str, config: TrainerConfig) -> GroupAdvantages | None:
    """Return the advantage within a group that has this name in the menu; None if it compares over the step."""
    found: Mapping[str, GroupAdvantages] = {
        "grpo": partial(group_advantages, scale_by_deviation=config.scale_by_deviation),
        "mean": partial(group_advantages, scale_by_deviation=False),
        "rloo": leave_one_out_advantages,
        "maxrl": likelihood_advantages,
        "pass_at_k": partial(pass_at_k_advantages, k=config.pass_at_k),
    }
    return found.get(name)


STEP_ADVANTAGES: Mapping[str, StepAdvantages] = {
    "batch": batch_normalised_advantages,
    "reinforce_plus_plus": partial(reinforce_plus_plus_advantages, baseline=False),
    "reinforce_plus_plus_baseline": partial(reinforce_plus_plus_advantages, baseline=True),
}
"""The advantages over all samples of a step, by their name in the menu."""
