"""Group assembly: samples in, complete groups out.

Keeps true
- A group is handed out whole, once, in the order in which groups became complete; its members in order of index.
- A second sample of a trajectory changes nothing, whenever it comes.
- The same samples in the same order give the same groups.
- `resume_at` names the place from which a new assembly that is told what was settled has all that this one has.

Pure: no clock, no I/O, no randomness.

Example (groups of 2)
    offer a:0, b:0, b:1        -> b is complete, a waits for a:1
    take 1                     -> b; resume_at is the place of a:0 until a is settled too
    offer b:0 again            -> DUPLICATE
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from schemas.samples import Sample

REMEMBERED_GROUPS = 65_536
"""Settled groups whose late duplicates are still recognised; older ones are forgotten, so that memory is bounded. More
where more were settled since the oldest sample that is held: a restart reads them again."""


class Taken(Enum):
    """What `offer` did with a sample."""

    HELD = "held"
    DUPLICATE = "duplicate"
    """Its trajectory is held or settled already: dropped."""
    STRANGER = "stranger"
    """It is no trajectory of the group that it names, which nobody asked for."""


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """All trajectories of one prompt."""

    group_id: str
    samples: tuple[Sample, ...]
    """In order of index."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where reading must begin so that nothing without an outcome is missed."""

    offsets: dict[int, int]
    """Of each partition of the samples."""
    outcomes_from: int
    """The outcomes of what lies at or after `offsets` and is settled lie at or after this offset."""


@dataclass(frozen=True, slots=True)
class _Held:
    sample: Sample
    partition: int
    offset: int
    outcomes_from: int


class GroupAssembly:
    """Holds samples until their groups are settled."""

    def __init__(self, *, settled: Iterable[str] = ()) -> None:
        """`settled`: groups whose samples are to be dropped, oldest first."""
        self._settled = dict.fromkeys(settled)
        self._remembered = max(REMEMBERED_GROUPS, len(self._settled))
        self._members: dict[str, dict[int, _Held]] = {}
        self._complete: dict[str, None] = {}
        self._trajectories: set[str] = set()

    @property
    def held_samples(self) -> int:
        """How many samples have no outcome yet."""
        return len(self._trajectories)

    @property
    def settled(self) -> list[str]:
        """Settled groups that are remembered, oldest first."""
        return list(self._settled)

    @property
    def complete_groups(self) -> int:
        """How many groups can be taken."""
        return len(self._complete)

    def is_settled(self, group_id: str) -> bool:
        return group_id in self._settled

    def members(self, group_id: str) -> list[str]:
        """The trajectories of a group that are held."""
        return [held.sample.trajectory_id for held in self._members.get(group_id, {}).values()]

    def offer(self, sample: Sample, *, partition: int, offset: int, outcomes_from: int) -> Taken:
        """Take a sample in. Were it settled already, its outcome would lie at or after `outcomes_from`."""
        if sample.group_id in self._settled or sample.trajectory_id in self._trajectories:
            return Taken.DUPLICATE
        members = self._members.get(sample.group_id)
        size = next(iter(members.values())).sample.group_size if members else sample.group_size
        index = _index(sample)
        if index is None or index >= size:
            return Taken.STRANGER
        members = self._members.setdefault(sample.group_id, {})
        members[index] = _Held(sample, partition, offset, outcomes_from)
        self._trajectories.add(sample.trajectory_id)
        if len(members) == size:
            self._complete[sample.group_id] = None
        return Taken.HELD

    def take(self, count: int) -> tuple[CompleteGroup, ...]:
        """The next `count` complete groups, or as many as there are. They are held until they are settled."""
        group_ids = list(self._complete)[:count]
        for group_id in group_ids:
            del self._complete[group_id]
        return tuple(
            CompleteGroup(group_id, tuple(held.sample for _, held in sorted(self._members[group_id].items())))
            for group_id in group_ids
        )

    def settle(self, group_id: str) -> None:
        """Let a group go: its trajectories have their outcomes. It need not have been taken, nor be complete."""
        self._complete.pop(group_id, None)
        for held in self._members.pop(group_id, {}).values():
            self._trajectories.discard(held.sample.trajectory_id)
        self._settled[group_id] = None
        if len(self._settled) > self._remembered:
            del self._settled[next(iter(self._settled))]

    def resume_at(self, next_offsets: Mapping[int, int], *, outcomes_end: int) -> ResumePoint:
        """From where to read again, given where reading stands: before everything held."""
        offsets, outcomes_from = dict(next_offsets), outcomes_end
        for members in self._members.values():
            for held in members.values():
                offsets[held.partition] = min(offsets[held.partition], held.offset)
                outcomes_from = min(outcomes_from, held.outcomes_from)
        return ResumePoint(offsets, outcomes_from)


def _index(sample: Sample) -> int | None:
    group, _, digits = sample.trajectory_id.rpartition(":")
    if group != sample.group_id or not (digits.isascii() and digits.isdigit()) or str(int(digits)) != digits:
        return None
    return int(digits)
