"""Selection: which samples of complete groups are trained on, and the outcome of each trajectory.

Another rule belongs into `_decide` if it looks at one sample, into `select_samples` if it compares the samples of a
group, and into `select_groups` if it compares groups, for example to train on the best of more groups than a step needs
(oversampling).

Keeps true
- Every trajectory of a group gets exactly one outcome.
- A group is trained on only if at least two trainable members have different rewards.
- A sample that the step cannot compute, or whose loss is undefined, is settled with a reason before the step.
- An infrastructure failure is never a reward of 0.

Pure: no clock, no I/O, no randomness.

Example (max_staleness 1, at version 3)
    b:0 of version 3, b:1 of version 1   -> b:1 STALE; b:0 FILTERED, as no other reward is left to compare with
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isclose

from rose.schemas.errors import message_of
from rose.schemas.samples import TRUNCATED, Outcome, Sample, SampleOutcome
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.sample_errors import sample_error, untrainable_request
from rose.workers.trainer.staleness import staleness

LEAST_TO_COMPARE = 2
"""A reward is informative only if the group has another one."""

EQUAL_REWARDS = 1e-6
"""Rewards whose relative difference is at most this are equal: the difference may be a rounding error of sums."""

SUM_LEAVES = 1e-12
"""Rewards whose absolute difference is at most this are equal: the rounding error of sums that should be 0, with terms
up to a thousand, is smaller."""

REASON_CHARACTERS = 300
"""Longest exception message in an outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRules:
    """Conditions on the samples that are trained on."""

    max_staleness: int
    """In versions. A sample is stale if one of its tokens was sampled by a policy that is older than this. Abandoned
    versions are not counted."""
    vocabulary: int
    """Size of the vocabulary: token ids are below it."""
    context_tokens: int
    """Most tokens of a sample that the model takes."""
    leave_out_truncated: bool = False
    """Whether truncated samples (`rose.schemas.samples.TRUNCATED`) are filtered."""


@dataclass(frozen=True, slots=True)
class SampleDecision:
    """Outcome of one trajectory, with the reason."""

    outcome: Outcome
    reason: str = ""


TRAINED = SampleDecision(Outcome.TRAINED)


@dataclass(frozen=True, slots=True)
class SelectedGroup:
    """A group with the outcome of each member."""

    group_id: str
    samples: tuple[Sample, ...]
    """All members of the group, in order of index."""
    decisions: tuple[SampleDecision, ...]
    """Decisions on `samples`, in the same order."""

    @property
    def trained(self) -> tuple[Sample, ...]:
        """The samples to train on: none, or at least two with different rewards."""
        ends = zip(self.samples, self.decisions, strict=True)
        return tuple(sample for sample, decision in ends if decision.outcome is Outcome.TRAINED)


def select_groups(
    groups: Iterable[CompleteGroup],
    version: int,
    *,
    rules: SelectionRules,
    abandoned: Sequence[tuple[int, int]] = (),
) -> list[SelectedGroup]:
    """Choose the outcomes of all groups of a step; the parameters are those of `select_samples`."""
    return [select_samples(group, version, rules=rules, abandoned=abandoned) for group in groups]


def select_samples(
    group: CompleteGroup, version: int, *, rules: SelectionRules, abandoned: Sequence[tuple[int, int]] = ()
) -> SelectedGroup:
    """Choose the outcome of each member of a complete group under policy `version`.

    `abandoned`: first and last version of each range that the run has gone back behind.
    """
    decisions = [_decide(sample, version, rules=rules, abandoned=abandoned) for sample in group.samples]
    kept = [sample for sample, decision in zip(group.samples, decisions, strict=True) if decision is TRAINED]
    if not rewards_differ([sample.reward for sample in kept if sample.reward is not None]):
        alike = "all rewards of its group are equal" if len(kept) >= LEAST_TO_COMPARE else "alone in its group"
        filtered = SampleDecision(Outcome.FILTERED, alike)
        decisions = [filtered if decision is TRAINED else decision for decision in decisions]
    return SelectedGroup(group.group_id, group.samples, tuple(decisions))


def mark_failed(group: SelectedGroup, error: Exception) -> SelectedGroup:
    """The group with its trained members marked as failed, because training on the group raised `error`."""
    message = " ".join(message_of(error).split())[:REASON_CHARACTERS]
    return _not_trained(group, f"to train on its group raised {type(error).__name__}: {message}")


def mark_skipped(group: SelectedGroup) -> SelectedGroup:
    """The group with its trained members marked as failed, because the gradient of its minibatch was not finite."""
    return _not_trained(group, "the gradient of its minibatch is not finite, and was not applied")


def _not_trained(group: SelectedGroup, reason: str) -> SelectedGroup:
    decision = SampleDecision(Outcome.INFRA_FAILED, reason)
    decisions = tuple(decision if one.outcome is Outcome.TRAINED else one for one in group.decisions)
    return SelectedGroup(group.group_id, group.samples, decisions)


def outcomes_of(groups: Iterable[SelectedGroup], *, step: int, policy_version: int, now: float) -> list[SampleOutcome]:
    """The outcome records of these groups. `now`: Unix seconds."""
    return [
        SampleOutcome(
            trajectory_id=sample.trajectory_id,
            group_id=group.group_id,
            outcome=decision.outcome,
            step=step,
            policy_version=policy_version,
            reason=decision.reason,
            recorded_at=now,
        )
        for group in groups
        for sample, decision in zip(group.samples, group.decisions, strict=True)
    ]


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether at least two rewards differ by more than the tolerance, which filter and advantages share."""
    if len(rewards) < LEAST_TO_COMPARE:
        return False
    return not isclose(min(rewards), max(rewards), rel_tol=EQUAL_REWARDS, abs_tol=SUM_LEAVES)


def _decide(
    sample: Sample, version: int, *, rules: SelectionRules, abandoned: Sequence[tuple[int, int]]
) -> SampleDecision:
    failure = sample_error(sample, vocabulary=rules.vocabulary, context_tokens=rules.context_tokens)
    if failure:
        return SampleDecision(Outcome.INFRA_FAILED, failure)
    if unfit := untrainable_request(sample):
        return SampleDecision(Outcome.FILTERED, unfit)
    for first, last in abandoned:
        lost = [span.version for span in sample.spans if first <= span.version <= last]
        if lost:
            reason = f"sampled under version {lost[0]}; the run has gone back behind version {first}"
            return SampleDecision(Outcome.SUPERSEDED, reason)
    if staleness(sample, version, abandoned) > rules.max_staleness:
        return SampleDecision(
            Outcome.STALE, f"sampled under version {sample.oldest_version}, the trainer is at {version}"
        )
    if rules.leave_out_truncated and sample.ended in TRUNCATED:
        return SampleDecision(
            Outcome.FILTERED, f"it was cut off ({sample.ended.value}), and truncated samples are left out"
        )
    return TRAINED
