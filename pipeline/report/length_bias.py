"""Lengths of what was trained on against what was asked for, where trajectories were ended early as surplus. Pure.

The length that a surplus trajectory would have had is unknown: it is at least the length at which it was ended. The
distribution of what was asked for is therefore the product-limit estimate (Kaplan and Meier, 1958), and its mean is the
area under the estimated survival function.

Each group has an estimate of its own. The estimate assumes that those that were ended at a length would have gone on
like the others that are as long. Within a group that holds; between groups the others are of harder tasks. Mostly a
group's longest trajectory was ended, so the mean is a lower bound.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from rose.pipeline.report.history import RunHistory


class LengthBias(msgspec.Struct, frozen=True, kw_only=True):
    """Mean lengths in sampled tokens."""

    surplus: int
    """Number of trajectories that were ended early as surplus."""
    finished_mean: float
    """Mean of the trajectories that ended with a reward: those that can be trained on."""
    asked_mean: float
    """Estimated mean of all trajectories, had none been ended early."""
    asked_at_least: bool
    """Whether `asked_mean` is a lower bound: the longest trajectory of some group was ended early."""

    @property
    def bias(self) -> float:
        """Relative difference of the finished trajectories from all; negative if they are shorter."""
        return self.finished_mean / self.asked_mean - 1.0 if self.asked_mean else 0.0


def length_bias(history: RunHistory) -> LengthBias | None:
    """Return the lengths of a run; None if no trajectory was surplus, or none ended with a reward."""
    finished: defaultdict[str, list[int]] = defaultdict(list)
    surplus: defaultdict[str, list[int]] = defaultdict(list)
    for each in history.trajectories:
        if each.reward is not None:
            finished[each.group_id].append(each.sampled_tokens)
        elif each.surplus:
            surplus[each.group_id].append(each.sampled_tokens)
    if not finished or not surplus:
        return None
    sizes = [len(ended) + len(surplus[group]) for group, ended in finished.items()]
    estimates = [estimated_mean(ended, surplus[group]) for group, ended in finished.items()]
    ended_tokens = [tokens for ended in finished.values() for tokens in ended]
    return LengthBias(
        surplus=sum(map(len, surplus.values())),
        finished_mean=sum(ended_tokens) / len(ended_tokens),
        asked_mean=sum(size * mean for size, (mean, _) in zip(sizes, estimates, strict=True)) / sum(sizes),
        asked_at_least=any(at_least for _, at_least in estimates),
    )


def estimated_mean(ended: Sequence[int], cut: Sequence[int]) -> tuple[float, bool]:
    """Return the product-limit estimate of the mean length in a group, and whether it is a lower bound.

    `ended`: lengths of trajectories that ended. `cut`: lengths at which others were ended early. A trajectory that was
    cut at the length at which another one ended counts as longer.
    """
    mean, survival, at, left = 0.0, 1.0, 0, len(ended) + len(cut)
    for length, was_cut in sorted([(each, False) for each in ended] + [(each, True) for each in cut]):
        mean += survival * (length - at)
        at = length
        if not was_cut:
            survival *= 1.0 - 1.0 / left
        left -= 1
    return mean, survival > 0.0


def length_sentence(bias: LengthBias) -> str:
    """Return the lengths in one sentence."""
    least = "at least " if bias.asked_at_least else ""
    return (
        f"{bias.surplus:,} trajectories were ended early: those that ended with a reward have "
        f"{bias.finished_mean:,.0f} sampled tokens on average, all together would have had "
        f"{least}{bias.asked_mean:,.0f} ({bias.bias:+.0%})."
    )
