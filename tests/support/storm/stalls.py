"""Stalls: how long nothing moved although it could have. Pure.

Keeps true
- Time counts while work is left, and one worker of each kind is well: running, started, not frozen. Every cell must
  have such an executor; if a control app moves executors between cells, one in all is enough.
- Time does not count within a session timeout after a worker died or was frozen: the log may still think it lives.
- A stall is what counts of the time between two applied turns.

Example (session timeout 10 s)
    turns applied at 0 and 40, work from 0 to 40; the one router frozen from 5 to 15
    -> 40 s passed; 5 to 15 it was frozen, and for its session: 30 s are a stall
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TypeAlias

from tests.support.storm.plan import Role

Interval: TypeAlias = tuple[float, float]

SESSION_SECONDS: Mapping[Role, float] = {
    Role.ENVIRONMENT: 10.0,
    Role.EXECUTOR: 2.0,
    Role.LENDER: 2.0,
    Role.ROUTER: 6.0,
    Role.TRAINER: 0.0,
    Role.CONTROL: 0.0,
    Role.NODE: 6.0,
}
"""Silence in seconds after which other processes know that a worker is gone."""


class Change(Enum):
    STARTED = "started"
    """The process was started."""
    READY = "ready"
    """The process is ready."""
    FROZEN = "frozen"
    THAWED = "thawed"
    ENDED = "ended"
    """The process was killed, stopped, or ended by itself."""


@dataclass(frozen=True, slots=True)
class RoleEvent:
    """A change of one process, with its time in unix seconds."""

    at: float
    change: Change
    role: Role
    process: int
    """Number of one start of one worker."""
    cell: int = 0
    """Cell of an executor that stays in a cell; all other processes have one cell."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A time between two applied turns while work was left."""

    begin: float
    end: float
    seconds: float
    """The part of the time that counts."""


def stalls(applied: Sequence[float], work: Iterable[Interval], excused: Iterable[Interval]) -> list[Stall]:
    """Return the counted part of each time between two applied turns, longest first."""
    found = []
    excuses = union(excused)
    for begin, end in union(work):
        moments = [begin, *sorted(at for at in applied if begin < at < end), end]
        found += [Stall(a, b, length([(a, b)]) - overlap((a, b), excuses)) for a, b in pairwise(moments)]
    return sorted(found, key=lambda stall: -stall.seconds)


def excuses(happenings: Sequence[RoleEvent], *, until: float) -> list[Interval]:
    """Return the times that do not count."""
    found: list[Interval] = []
    for role in (Role.ENVIRONMENT, Role.EXECUTOR, Role.ROUTER, Role.TRAINER):
        of_role = [each for each in happenings if each.role is role]
        for cell in {each.cell for each in of_role}:
            found += nobody_well([each for each in of_role if each.cell == cell], until=until)
    return union([*found, *sessions(happenings)])


def nobody_well(happenings: Sequence[RoleEvent], *, until: float) -> list[Interval]:
    """Return the times in which no process of the group is healthy."""
    well: set[int] = set()
    ready: set[int] = set()
    found: list[Interval] = []
    since: float | None = 0.0
    for each in sorted(happenings, key=lambda happening: happening.at):
        if each.change is Change.READY:
            ready.add(each.process)
            well.add(each.process)
        elif each.change is Change.THAWED and each.process in ready:
            well.add(each.process)
        elif each.change in (Change.FROZEN, Change.ENDED):
            well.discard(each.process)
        if well and since is not None:
            found.append((since, each.at))
            since = None
        elif not well and since is None:
            since = each.at
    if since is not None:
        found.append((since, max(since, until)))
    return found


def sessions(happenings: Sequence[RoleEvent]) -> list[Interval]:
    """Return the times after a death or within a freeze in which other processes cannot know of it."""
    found = []
    for each in happenings:
        session = SESSION_SECONDS[each.role]
        if each.change is Change.ENDED:
            found.append((each.at, each.at + session))
        elif each.change is Change.FROZEN:
            later = [
                other.at
                for other in happenings
                if other.process == each.process and other.change is Change.THAWED and other.at >= each.at
            ]
            found.append((each.at, min([each.at + session, *later])))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times without overlaps, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def overlap(interval: Interval, others: Sequence[Interval]) -> float:
    """Return how much of the interval lies in the others, which do not overlap."""
    return sum(max(0.0, min(interval[1], end) - max(interval[0], begin)) for begin, end in others)
