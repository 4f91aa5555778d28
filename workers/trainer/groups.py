"""Group assembly: samples in, complete groups out.

Keeps true
- A group is handed out whole, once, in the order in which groups became complete; its members in order of index.
- A second sample of a trajectory changes nothing while its group is held or remembered.
- The same samples in the same order give the same groups.
- Whatever place was committed last: every sample before it has an outcome on the log, and the outcomes of every settled
  group with a sample at or after it, as those that the last settlement named, lie at or after its `outcomes_from`.
  So a new assembly that begins there, told those outcomes, loses nothing and settles nothing twice.

Pure: no clock, no I/O, no randomness.

Example (groups of 2)
    offer a:0, b:0, b:1        -> b is complete, a waits for a:1
    take 1, settle b           -> b; to read again from a:0
    offer b:0 again            -> DUPLICATE
    settle a, b not committed  -> to read again from b:0: what b is to be settled with may never come on the log
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from rose.schemas.samples import Sample

REMEMBERED_GROUPS = 65_536
"""Settled groups whose late duplicates are still recognised; older ones are forgotten, so that memory is bounded. None
is forgotten while samples are unread that were there at the start."""


class SampleStatus(Enum):
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
class _Where:
    partition: int
    offset: int
    outcomes_from: int
    """Were the sample settled, its outcome would lie at or after this offset."""


@dataclass(frozen=True, slots=True)
class _Held:
    sample: Sample
    where: _Where


class GroupAssembly:
    """Holds samples until their groups are settled."""

    def __init__(self, begin: ResumePoint, ends: Mapping[int, int], *, settled: Iterable[str] = ()) -> None:
        """`begin`: the place that was committed. `ends`: where each partition ends; what lies before may be settled.

        `settled`: the groups of the outcomes at or after the place, oldest first; their samples are to be dropped.
        """
        self._next = dict(begin.offsets)
        self._known_from = begin.outcomes_from
        self._ends = dict(ends)
        self._settled = dict.fromkeys(settled)
        self._members: dict[str, dict[int, _Held]] = {}
        self._complete: dict[str, None] = {}
        self._trajectories: set[str] = set()
        self._leaving: dict[str, list[_Where]] = {}
        """Where the samples lie of groups that are settled, though not on the log yet."""

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

    def on_read(self, partition: int, offset: int) -> None:
        """The record at this place has been read, whatever it was, or there is none up to it."""
        self._next[partition] = max(self._next[partition], offset + 1)

    def is_from_before(self, partition: int, offset: int) -> bool:
        """Whether what lies there was there at the start, and may be settled already."""
        return offset < self._ends[partition]

    def on_sample(self, sample: Sample, *, partition: int, offset: int, outcomes_end: int) -> SampleStatus:
        """Take a sample in. `outcomes_end`: an end of the outcomes that was seen by now."""
        self.on_read(partition, offset)
        where = _Where(partition, offset, self._known_from if self.is_from_before(partition, offset) else outcomes_end)
        if sample.group_id in self._leaving:
            self._leaving[sample.group_id].append(where)
        if sample.group_id in self._settled or sample.trajectory_id in self._trajectories:
            return SampleStatus.DUPLICATE
        members = self._members.get(sample.group_id)
        size = next(iter(members.values())).sample.group_size if members else sample.group_size
        index = _index(sample)
        if index is None or index >= size:
            return SampleStatus.STRANGER
        members = self._members.setdefault(sample.group_id, {})
        members[index] = _Held(sample, where)
        self._trajectories.add(sample.trajectory_id)
        if len(members) == size:
            self._complete[sample.group_id] = None
        return SampleStatus.HELD

    def take(self, count: int) -> tuple[CompleteGroup, ...]:
        """The next `count` complete groups, or as many as there are. They are held until they are settled."""
        group_ids = list(self._complete)[:count]
        for group_id in group_ids:
            del self._complete[group_id]
        return tuple(
            CompleteGroup(group_id, tuple(held.sample for _, held in sorted(self._members[group_id].items())))
            for group_id in group_ids
        )

    def settle(self, group_ids: Collection[str], *, outcomes_end: int) -> ResumePoint:
        """Let groups go, and return the place to commit with their outcomes; those settled already are passed over.

        They need not have been taken, nor be complete. Until they are `committed` other places count on nothing of
        them, so such places may be committed in any order, or never.
        """
        fresh = {name for name in group_ids if name not in self._settled}
        for name in fresh:
            self._complete.pop(name, None)
            members = self._members.pop(name, {}).values()
            self._trajectories.difference_update(held.sample.trajectory_id for held in members)
            self._leaving[name] = [held.where for held in members]
            self._settled[name] = None
        old_left = any(self._next[partition] < end for partition, end in self._ends.items())
        while len(self._settled) > REMEMBERED_GROUPS and not old_left:
            del self._settled[next(iter(self._settled))]
        asks_again = not fresh or len(fresh) < len(set(group_ids))  # as may the next start, which must know the answer
        return self._resume_point(fresh, self._known_from if old_left or asks_again else outcomes_end)

    def on_committed(self, group_ids: Iterable[str]) -> None:
        """The outcomes of these groups are on the log, with their place."""
        for name in group_ids:
            self._leaving.pop(name, None)

    def _resume_point(self, settling: Collection[str], outcomes_from: int) -> ResumePoint:
        """Before everything that has no outcome on the log, but for what these groups hold."""
        offsets = dict(self._next)
        held = (one.where for members in self._members.values() for one in members.values())
        leaving = (where for name, wheres in self._leaving.items() if name not in settling for where in wheres)
        for where in chain(held, leaving):
            offsets[where.partition] = min(offsets[where.partition], where.offset)
            outcomes_from = min(outcomes_from, where.outcomes_from)
        return ResumePoint(offsets, outcomes_from)


def _index(sample: Sample) -> int | None:
    group, _, digits = sample.trajectory_id.rpartition(":")
    if group != sample.group_id or not (digits.isascii() and digits.isdigit()) or str(int(digits)) != digits:
        return None
    return int(digits)
