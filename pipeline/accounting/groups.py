"""Groups: samples in, steps of complete groups out, and one outcome for every trajectory of them.

Keeps true
- A group is taken whole, once, in the order in which groups became complete; its members in the order of their index.
- Every trajectory of a taken group is settled exactly once; a second sample of it changes nothing, whenever it comes.
- The same samples in the same order give the same decisions, also when they were held over a restart in between.

Pure: no clock, no I/O, no randomness.

Example (groups of 2, one group a step, max_staleness 1)
    offer a:0, b:0, b:1        -> b is complete, a waits for a:1
    take at version 3          -> step over b; a member sampled under version 1 settles as STALE
    offer b:0 again            -> DUPLICATE
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

import numpy as np

from schemas.arrays import count, unpack_logprobs, unpack_tokens
from schemas.errors import RecordError
from schemas.samples import Outcome, Sample

REMEMBERED_GROUPS = 65_536
"""Settled groups whose late duplicates are still recognised; older ones are forgotten, so that memory is bounded."""

LEAST_TO_COMPARE = 2
"""A reward says something only beside another one of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """What makes a step, and which samples may be learned from."""

    groups_per_step: int
    max_staleness: int
    """In versions: a sample is stale if any of its tokens was drawn under a policy older than this."""
    vocabulary: int
    """Token ids lie below it; a sample with others cannot be learned from."""
    total_groups: int = 0
    """The run ends with this many settled groups; 0 is never. The last step takes what is left."""


class Taken(Enum):
    """What `offer` did with a sample."""

    HELD = "held"
    DUPLICATE = "duplicate"
    """Its trajectory is held or settled already: dropped."""
    STRANGER = "stranger"
    """It is no trajectory of the group that it names, which nobody asked for: dropped."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of one trajectory."""

    trajectory_id: str
    group_id: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AssembledGroup:
    """One group of a step."""

    group_id: str
    samples: tuple[Sample, ...]
    """All of its members, in order of index."""
    trained: tuple[Sample, ...]
    """Those to learn from: none, or at least two whose rewards differ."""
    settled: tuple[Settled, ...]
    """One for each of `samples`, in the same order."""


class GroupAssembly:
    """Holds samples until their groups are complete."""

    def __init__(self, rules: GroupRules, *, settled: Iterable[str] = (), settled_groups: int = 0) -> None:
        """`settled`: groups whose samples are to be dropped; `settled_groups`: how many count towards the total."""
        self.rules = rules
        self.settled_groups = settled_groups
        self._settled = dict.fromkeys(settled)
        self._held: dict[str, Sample] = {}
        self._members: dict[str, dict[int, Sample]] = {}
        self._complete: dict[str, None] = {}

    @property
    def held(self) -> list[Sample]:
        """Samples without an outcome, in the order of their offering: offered again, they restore the state."""
        return list(self._held.values())

    @property
    def settled(self) -> list[str]:
        """Settled groups that are remembered, oldest first."""
        return list(self._settled)

    @property
    def step_size(self) -> int:
        """How many groups the next step takes; 0 when the run has ended."""
        if not self.rules.total_groups:
            return self.rules.groups_per_step
        return max(0, min(self.rules.groups_per_step, self.rules.total_groups - self.settled_groups))

    @property
    def held_samples(self) -> int:
        """How many samples wait for their group or for a step."""
        return len(self._held)

    def offer(self, sample: Sample) -> Taken:
        """Take a sample in."""
        if sample.group_id in self._settled or sample.trajectory_id in self._held:
            return Taken.DUPLICATE
        members = self._members.get(sample.group_id)
        size = next(iter(members.values())).group_size if members else sample.group_size
        index = _index(sample)
        if index is None or index >= size:
            return Taken.STRANGER
        members = self._members.setdefault(sample.group_id, {})
        members[index] = self._held[sample.trajectory_id] = sample
        if len(members) == size:
            self._complete[sample.group_id] = None
        return Taken.HELD

    def take(self, version: int, group_ids: Sequence[str] | None = None) -> tuple[AssembledGroup, ...] | None:
        """The next step's groups, settled as of policy `version`; None while there are too few.

        With `group_ids` it takes exactly these, in this order: a step that was taken before is made again.
        """
        if group_ids is None:
            if not self.step_size or len(self._complete) < self.step_size:
                return None
            group_ids = list(self._complete)[: self.step_size]
        elif any(group_id not in self._complete for group_id in group_ids):
            return None
        return tuple(self._settle(group_id, version) for group_id in group_ids)

    def _settle(self, group_id: str, version: int) -> AssembledGroup:
        del self._complete[group_id]
        samples = tuple(sample for _, sample in sorted(self._members.pop(group_id).items()))
        for sample in samples:
            del self._held[sample.trajectory_id]
        self._settled[group_id] = None
        if len(self._settled) > REMEMBERED_GROUPS:
            del self._settled[next(iter(self._settled))]
        self.settled_groups += 1
        return settle_group(group_id, samples, version, rules=self.rules)


@dataclass(slots=True)
class _Verdicts:
    kept: list[Sample] = field(default_factory=list)
    ends: dict[str, tuple[Outcome, str]] = field(default_factory=dict)


def settle_group(group_id: str, samples: Sequence[Sample], version: int, *, rules: GroupRules) -> AssembledGroup:
    """Decide what each member of a complete group is good for under policy `version`."""
    verdicts = _Verdicts()
    for sample in samples:
        flaw = sample_flaw(sample, vocabulary=rules.vocabulary)
        if flaw:
            verdicts.ends[sample.trajectory_id] = (Outcome.INFRA_FAILED, flaw)
        elif staleness(sample, version) > rules.max_staleness:
            reason = f"sampled under version {sample.oldest_version}, the trainer is at {version}"
            verdicts.ends[sample.trajectory_id] = (Outcome.STALE, reason)
        else:
            verdicts.kept.append(sample)
    trained: tuple[Sample, ...] = tuple(verdicts.kept)
    if len({sample.reward for sample in trained}) < LEAST_TO_COMPARE:
        reason = "all rewards of its group are equal" if len(trained) > 1 else "alone in its group"
        verdicts.ends.update((sample.trajectory_id, (Outcome.FILTERED, reason)) for sample in trained)
        trained = ()
    default = (Outcome.TRAINED, "")
    settled = tuple(
        Settled(sample.trajectory_id, group_id, *verdicts.ends.get(sample.trajectory_id, default)) for sample in samples
    )
    return AssembledGroup(group_id, tuple(samples), trained, settled)


def staleness(sample: Sample, version: int) -> int:
    """How many versions the policy has moved on since the oldest of its tokens; 0 if it sampled none."""
    return max(0, version - sample.oldest_version) if sample.spans else 0


def sample_flaw(sample: Sample, *, vocabulary: int) -> str:
    """Why a sample cannot be learned from whatever its age: the infrastructure failed it. Empty if it can."""
    if sample.failure:
        return sample.failure
    if sample.reward is None or not isfinite(sample.reward):
        return "it has no reward"
    try:
        tokens, logprobs = unpack_tokens(sample.tokens), unpack_logprobs(sample.logprobs)
    except RecordError as error:
        return str(error)
    if not len(tokens) == len(sample.loss_mask) == count(sample.logprobs):
        return f"{len(tokens)} tokens, a mask of {len(sample.loss_mask)} and {len(logprobs)} logprobs do not fit"
    if max(tokens, default=0) >= vocabulary:
        return f"token {max(tokens)} is outside of the vocabulary of {vocabulary}"
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
    if not np.isfinite(logprobs[mask == 1]).all():
        return "a logprob is no finite number"
    if mask.max(initial=0) > 1:
        return "the loss mask holds more than 0 and 1"
    return ""


def _index(sample: Sample) -> int | None:
    group, _, digits = sample.trajectory_id.rpartition(":")
    if group != sample.group_id or not (digits.isascii() and digits.isdigit()) or str(int(digits)) != digits:
        return None
    return int(digits)
