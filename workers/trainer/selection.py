"""Selection: which samples of complete groups are trained on, and the outcome of each trajectory.

A sample is left out if no step can compute it, if its loss is undefined, or if it is too old.

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

import numpy as np
from numpy.typing import NDArray

from rose.schemas.arrays import logprob_error, unpack_logprobs, unpack_tokens
from rose.schemas.errors import RecordError, message_of
from rose.schemas.prompts import sampling_error
from rose.schemas.samples import TRUNCATED, Ending, Outcome, Sample, SampleOutcome
from rose.workers.trainer.groups import CompleteGroup

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
EQUAL = SampleDecision(Outcome.FILTERED, "all rewards of its group are equal")
ALONE = SampleDecision(Outcome.FILTERED, "alone in its group")
SURPLUS = SampleDecision(Outcome.SURPLUS, "ended early: enough others of its group had ended")


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

    @property
    def computable(self) -> tuple[Sample, ...]:
        """The samples that a step could compute: those to train on, and those whose group gives no signal."""
        ends = zip(self.samples, self.decisions, strict=True)
        return tuple(sample for sample, decision in ends if decision in (TRAINED, EQUAL, ALONE))


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
        filtered = EQUAL if len(kept) >= LEAST_TO_COMPARE else ALONE
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


def outcomes_of(
    groups: Iterable[SelectedGroup], *, step: int, policy_version: int, oldest_fresh: int = 0, now: float
) -> list[SampleOutcome]:
    """The outcome records of these groups. `now`: Unix seconds.

    `oldest_fresh`: a trajectory with an older token is ended early; 0: none is.
    """
    return [
        SampleOutcome(
            trajectory_id=sample.trajectory_id,
            group_id=group.group_id,
            outcome=decision.outcome,
            step=step,
            policy_version=policy_version,
            reason=decision.reason,
            oldest_fresh=oldest_fresh,
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
    if sample.ended is Ending.SURPLUS:
        return SURPLUS
    too_old = f"sampled under version {sample.oldest_version}, the trainer is at {version}"
    if sample.ended is Ending.STALE:
        return SampleDecision(Outcome.STALE, f"{too_old}; ended early")
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
        return SampleDecision(Outcome.STALE, too_old)
    if rules.leave_out_truncated and sample.ended in TRUNCATED:
        return SampleDecision(
            Outcome.FILTERED, f"it was cut off ({sample.ended.value}), and truncated samples are left out"
        )
    return TRAINED


def staleness(sample: Sample, version: int, abandoned: Sequence[tuple[int, int]] = ()) -> int:
    """Number of versions by which the policy is ahead of the sample's oldest token; 0 if no token was sampled."""
    return steps_between(sample.oldest_version, version, abandoned) if sample.spans else 0


def steps_between(since: int, version: int, abandoned: Sequence[tuple[int, int]]) -> int:
    """Number of training steps between two versions of the run.

    Abandoned versions are not counted, nor the version after each abandoned range, which is the same policy as the
    version before the range.
    """
    return max(0, version - since - sum(last - first + 2 for first, last in abandoned if since < first))


def oldest_fresh_version(version: int, abandoned: Sequence[tuple[int, int]], *, max_staleness: int) -> int:
    """The oldest version of which a sample may still be trained on at `version`: the inverse of `steps_between`."""
    oldest = version - max_staleness
    for first, last in sorted(abandoned, reverse=True):
        if oldest <= last + 1:  # the policy of version last + 1, which is that of first - 1, is still fresh
            oldest -= last - first + 2
    return max(0, oldest)


def still_relevant(
    abandoned: Sequence[tuple[int, int]], version: int, *, max_staleness: int
) -> tuple[tuple[int, int], ...]:
    """The abandoned ranges that can still affect a sample; a sample from before any other range is stale anyway."""
    return tuple(one for one in abandoned if steps_between(one[1] + 1, version, abandoned) <= max_staleness)


def sample_error(sample: Sample, *, vocabulary: int, context_tokens: int) -> str | None:
    """Why a sample cannot be trained on whatever its age: an infrastructure failure. None if it can be.

    `vocabulary`: token ids are below it. `context_tokens`: most tokens of a sample that the model takes.
    """
    if sample.failure:
        return sample.failure
    if sample.reward is None:
        return "it has no reward"
    try:
        tokens, logprobs = np.asarray(unpack_tokens(sample.tokens)), unpack_logprobs(sample.logprobs)
    except RecordError as error:
        return str(error)
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
    if not len(tokens) == len(mask) == len(logprobs):
        return f"{len(tokens)} tokens, a mask of {len(mask)} and {len(logprobs)} logprobs do not fit"
    if len(tokens) > context_tokens:
        return f"its {len(tokens)} tokens are more than the {context_tokens} that the model takes"
    if tokens.max(initial=0) >= vocabulary:
        return f"token {tokens.max()} is outside of the vocabulary of {vocabulary}"
    if mask.max(initial=0) > 1:
        return "the loss mask holds more than 0 and 1"
    return logprob_error(logprobs[mask == 1]) or _turns_error(sample, mask)


def _turns_error(sample: Sample, mask: NDArray[np.uint8]) -> str | None:
    if mask[:1].any():
        return "its first token is a sampled one, and nothing says of what"
    covered = np.zeros_like(mask)
    for turn in sample.turns:
        if not turn.start <= turn.end <= len(mask) or covered[turn.start : turn.end].any():
            return f"turn {turn.turn} lies outside of its tokens or on another turn"
        covered[turn.start : turn.end] = 1
    if not (covered == mask).all():
        return "its turns are not the tokens that were sampled"
    known = np.zeros_like(mask)
    for span in sample.spans:
        known[span.start : span.end] = 1
    unknown = np.flatnonzero(mask > known)
    return f"nothing says under which version token {unknown[0]} was sampled" if len(unknown) else None


def untrainable_request(sample: Sample) -> str | None:
    """Why a sample without a failure cannot be trained on because of its request. None if it can be."""
    if not any(sample.loss_mask):
        return "no token of it was sampled"
    return next((reason for turn in sample.turns if (reason := sampling_error(turn.sampling))), None)
