"""Figures of a training step, computed from the outcomes of its trajectories and their samples.

Keeps true
- Equal records give equal figures, whenever they are computed: a step that is written again replaces itself.
- A figure that no sample has is left out; it is not 0.
- An infrastructure failure is in no mean of rewards.

Pure: no clock, no I/O.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rose.schemas.samples import TRUNCATED, Outcome, Sample, SampleOutcome


class SampleFacts(NamedTuple):
    """Facts of a sample from which figures are computed."""

    reward: float | None
    success: bool | None
    oldest_version: int
    """-1 if no token was sampled."""
    sampled_tokens: int
    turns: int
    truncated: bool

    @classmethod
    def of(cls, sample: Sample) -> "SampleFacts":
        """Return the facts of a sample."""
        return cls(
            reward=sample.reward,
            success=sample.success,
            oldest_version=sample.oldest_version,
            sampled_tokens=sum(span.end - span.start for span in sample.spans),
            turns=len(sample.turns),
            truncated=sample.ended in TRUNCATED,
        )


class Settled(NamedTuple):
    """An outcome with the facts of its sample."""

    outcome: SampleOutcome
    facts: SampleFacts | None
    """None if the log has no sample of the trajectory."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """The figures of one step."""

    step: int
    at: float
    """Unix seconds at which the trainer settled the step."""
    values: dict[str, float]


def point_of(step: int, settled: Sequence[Settled]) -> StepPoint:
    """Return the figures of a step that settled these trajectories, at least one."""
    counts = Counter(each.outcome.outcome for each in settled)
    known = [(each.outcome, each.facts) for each in settled if each.facts is not None]
    rewarded = [facts for outcome, facts in known if outcome.outcome is not Outcome.INFRA_FAILED]
    trained = [(outcome, facts) for outcome, facts in known if outcome.outcome is Outcome.TRAINED]
    ages = [
        max(0, outcome.policy_version - facts.oldest_version) if facts.sampled_tokens else 0
        for outcome, facts in trained
    ]
    groups = {each.outcome.group_id for each in settled}
    learned = {each.outcome.group_id for each in settled if each.outcome.outcome is Outcome.TRAINED}
    means: dict[str, Sequence[float]] = {
        "reward_mean": [facts.reward for facts in rewarded if facts.reward is not None],
        "success_rate": [facts.success for facts in rewarded if facts.success is not None],
        "staleness_mean": ages,
        "truncated_share": [facts.truncated for _, facts in known],
        "turns_mean": [facts.turns for _, facts in known],
        "sampled_tokens_mean": [facts.sampled_tokens for _, facts in known],
    }
    values = {name: sum(some) / len(some) for name, some in means.items() if some}
    if ages:
        values["staleness_max"] = max(ages)
    values |= {
        "tokens": sum(facts.sampled_tokens for _, facts in trained),
        "groups": len(groups),
        "groups_filtered": len(groups - learned),
        "policy_version": max(each.outcome.policy_version for each in settled),
        "without_sample": len(settled) - len(known),
        **{f"outcomes/{outcome.value}": counts[outcome] for outcome in Outcome},
    }
    at = max(each.outcome.recorded_at for each in settled)
    return StepPoint(step, at, {name: float(value) for name, value in sorted(values.items())})
