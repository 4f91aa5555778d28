"""Assembles samples into complete groups. Pure: no clock, no I/O, no randomness.

Keeps true
- A group is handed out complete and once, in the order in which groups became complete; its members are in order of
  index.
- A second sample of a trajectory changes nothing while its group is held or remembered.
- The same samples in the same order give the same groups.
- For every committed resume point: each sample before it has an outcome on the log. The outcomes of every settled group
  that has a sample at or after it, or that the last settlement named, lie at or after its `outcomes_from`. A new
  assembly that begins there with those outcomes loses nothing and settles nothing twice.

Example (groups of 2)
    on_sample a:0, b:0, b:1         -> b is complete, a waits for a:1
    take(1), settle b               -> b; resume point at a:0
    on_sample b:0 again             -> DUPLICATE
    settle a before on_committed(b) -> resume point at b:0: the outcomes of b may never be committed
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from rose.schemas.samples import Sample

REMEMBERED_GROUPS = 65_536
"""Number of settled groups that are remembered to recognise late duplicates; the oldest are forgotten to bound memory.
None is forgotten before all samples have been read that were on the log at the start."""


class SampleStatus(Enum):
    """Result of `GroupAssembly.on_sample` for a sample."""

    HELD = "held"
    DUPLICATE = "duplicate"
    """The trajectory is held or settled already; the sample is dropped."""
    STRANGER = "stranger"
    """The trajectory does not belong to the group that the sample names."""


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """The samples of all trajectories of one prompt."""

    group_id: str
    samples: tuple[Sample, ...]
    """The samples in order of index."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where the next stream must begin to read so that it misses no sample without an outcome."""

    offsets: dict[int, int]
    """The offset for each partition of the samples topic."""
    outcomes_from: int
    """The outcomes of settled samples at or after `offsets` lie at or after this offset of the outcomes topic."""


@dataclass(frozen=True, slots=True)
class _Where:
    partition: int
    offset: int
    outcomes_from: int
    """The outcome of the sample, if it has one, lies at or after this offset of the outcomes topic."""


@dataclass(frozen=True, slots=True)
class _Held:
    sample: Sample
    where: _Where


class GroupAssembly:
    """Holds samples until their groups are settled."""

    def __init__(self, begin: ResumePoint, ends: Mapping[int, int], *, settled: Iterable[str] = ()) -> None:
        """`begin`: the committed resume point.

        `ends`: the end offset of each partition at the start; samples before it may be settled.

        `settled`: the groups of the outcomes at or after the resume point, oldest first; their samples are dropped.
        """
        self._next = dict(begin.offsets)
        self._known_from = begin.outcomes_from
        self._ends = dict(ends)
        self._settled = dict.fromkeys(settled)
        self._members: dict[str, dict[int, _Held]] = {}
        self._complete: dict[str, None] = {}
        self._trajectories: set[str] = set()
        self._leaving: dict[str, list[_Where]] = {}
        """Positions of the samples of groups that are settled but not committed."""

    @property
    def held_samples(self) -> int:
        """Number of samples without an outcome."""
        return len(self._trajectories)

    @property
    def settled(self) -> list[str]:
        """Settled groups that are still remembered, oldest first."""
        return list(self._settled)

    @property
    def complete_groups(self) -> int:
        """Number of complete groups that can be taken."""
        return len(self._complete)

    def is_settled(self, group_id: str) -> bool:
        """Whether the group is settled and still remembered."""
        return group_id in self._settled

    def members(self, group_id: str) -> list[str]:
        """The trajectories of a group of which a sample is held."""
        return [held.sample.trajectory_id for held in self._members.get(group_id, {}).values()]

    def on_read(self, partition: int, offset: int) -> None:
        """The stream has read up to and including this offset, whether or not a sample lies there."""
        self._next[partition] = max(self._next[partition], offset + 1)

    def is_from_before(self, partition: int, offset: int) -> bool:
        """Whether the offset was on the log at the start, so that its sample may be settled already."""
        return offset < self._ends[partition]

    def on_sample(self, sample: Sample, *, partition: int, offset: int, outcomes_end: int) -> SampleStatus:
        """Add a sample. `outcomes_end`: an end offset of the outcomes topic that was seen before."""
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
        """The next `count` complete groups, or all if there are fewer. They stay held until they are settled."""
        groups = self.peek(count)
        for group in groups:
            del self._complete[group.group_id]
        return groups

    def peek(self, count: int, *, after: int = 0) -> tuple[CompleteGroup, ...]:
        """The groups that `take(count)` would return now, without the first `after` ones."""
        group_ids = list(self._complete)[after:count]
        return tuple(
            CompleteGroup(group_id, tuple(held.sample for _, held in sorted(self._members[group_id].items())))
            for group_id in group_ids
        )

    def settle(self, group_ids: Collection[str], *, outcomes_end: int) -> ResumePoint:
        """Mark groups as settled and return the resume point to commit with their outcomes.

        Groups that were settled before are skipped.

        The groups need not be complete or taken. Until `on_committed`, other resume points treat the groups as not
        settled; so the resume points may be committed in any order or not at all.
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
        # Groups that are settled again here may be settled again after a restart, which must find their outcomes.
        asks_again = not fresh or len(fresh) < len(set(group_ids))
        return self._resume_point(fresh, self._known_from if old_left or asks_again else outcomes_end)

    def on_committed(self, group_ids: Iterable[str]) -> None:
        """The outcomes of these groups are committed, with their resume point."""
        for name in group_ids:
            self._leaving.pop(name, None)

    def _resume_point(self, settling: Collection[str], outcomes_from: int) -> ResumePoint:
        """Return the position before every sample without a committed outcome.

        The samples of the groups in `settling` do not count.
        """
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
