"""The time at which each stage of a run last moved in each home, and the starts of the roles. Pure.

Keeps true
- `now` is seconds on the reader's own clock. Records that arrive after the start of reading are timed by it only.
- Older records are timed by two timestamps of the broker: their own, and that of a record that arrived since.
- Time in which the reader did not read counts in no duration.
- Memory is bounded by the number of homes and roles, not of records.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from rose.pipeline.monitor.diagnosis import RECENT_START_SECONDS
from rose.pipeline.monitor.facts import RoleFacts
from rose.schemas.heartbeats import RoleBegun

REMEMBERED_STARTS = 64
"""Number of starts that are remembered of one role."""


class Stage(Enum):
    """A stage of the work of a run."""

    OPENED = "opened"
    """Groups were opened, refused or settled."""
    APPLIED = "applied"
    """Turn results were applied to trajectories."""
    SETTLED = "settled"
    """Samples got outcomes."""
    SAMPLED = "sampled"
    """Trajectories finished; the trainer waits for their samples."""


@dataclass(slots=True)
class BrokerClock:
    """Converts timestamps of the broker to ages on this machine's clock."""

    _ahead: float | None = None
    """This machine's clock minus the broker's, from the newest record that arrived after the start of reading."""
    _newest: float = -math.inf
    """The newest timestamp that arrived after the start of reading."""
    _away: float = 0.0
    """Sum of the reader's absences, in seconds."""
    _left: float = -math.inf
    """The newest timestamp that was known when the last absence began."""

    def compare(self, now: float, stamp: float) -> None:
        """Learn how far the local clock is ahead of the broker's. Both times are Unix seconds."""
        self._ahead, self._newest = now - stamp, max(self._newest, stamp)

    def add_absence(self, seconds: float) -> None:
        """Count time in which the broker was away."""
        if seconds > 0:
            self._away, self._left = self._away + seconds, self._newest

    def seconds_since(self, now: float, stamp: float) -> float | None:
        """Return the age of a timestamp without later absences; None if the clocks were not compared yet."""
        if self._ahead is None:
            return None
        away = self._away if stamp <= self._left else 0.0
        return max(0.0, now - self._ahead - stamp - away)


@dataclass(slots=True)
class RoleStart:
    """The record of a role start."""

    event: RoleBegun
    at: float | None
    """When the record arrived; None if it was on the log before the start of reading."""
    stamp: float | None


@dataclass(slots=True)
class RoleStarts:
    """The recent starts of roles. Roles of one name in different places are counted separately."""

    clock: BrokerClock
    _starts: dict[str, deque[RoleStart]] = field(default_factory=dict)
    """The newest starts by role."""

    def on_role_begun(self, event: RoleBegun, at: float | None, stamp: float | None) -> None:
        """Add the start of a role. `at`: when it was read; `stamp`: when the broker stored it, Unix seconds."""
        self._starts.setdefault(event.role, deque(maxlen=REMEMBERED_STARTS)).append(RoleStart(event, at, stamp))

    def add_absence(self, seconds: float) -> None:
        """Count time in which the broker was away."""
        for beginnings in self._starts.values():
            for each in beginnings:
                each.at = None if each.at is None else each.at + seconds

    def recent(self, now: float) -> list[RoleFacts]:
        """Return the roles that have started recently, for each name by the place with most starts."""
        found = []
        for role, beginnings in sorted(self._starts.items()):
            late = [each.event for each in beginnings if self._seconds(each, now) <= RECENT_START_SECONDS]
            times: Counter[str] = Counter()
            for event in late:
                times[event.place] += event.times
            if times:
                [(place, most)] = times.most_common(1)
                reason = [event.reason for event in late if event.place == place][-1]
                found.append(RoleFacts(role=role, times=most, reason=reason))
        return found

    def first_within(self, seconds: float, now: float) -> float:
        """Return the age of the oldest start within `seconds`; `seconds` if there is none."""
        ages = (self._seconds(each, now) for beginnings in self._starts.values() for each in beginnings)
        return max((since for since in ages if since <= seconds), default=seconds)

    def _seconds(self, start: RoleStart, now: float) -> float:
        if start.at is not None:
            return now - start.at
        since = None if start.stamp is None else self.clock.seconds_since(now, start.stamp)
        return math.inf if since is None else since


@dataclass(slots=True)
class StageClock:
    """When each stage last moved in each home."""

    began: float
    """Start of reading, moved forward by each absence of the reader since."""
    clock: BrokerClock
    role_starts: RoleStarts
    _at: dict[tuple[Stage, int], float] = field(default_factory=dict)
    """When the stage last moved after the start of reading."""
    _stamps: dict[tuple[Stage, int], float] = field(default_factory=dict)
    """The broker's timestamp of the newest record from before the start of reading."""

    def on_progress(self, stage: Stage, home: int, now: float, stamp: float | None, *, fresh: bool) -> None:
        """Fold a record of this stage. `fresh`: the record arrived after the start of reading."""
        place = stage, home
        if fresh:
            self._at[place] = now
        elif stamp is not None:
            self._stamps[place] = max(stamp, self._stamps.get(place, stamp))

    def add_absence(self, seconds: float) -> None:
        """Count time in which the broker was away: no stage gets older in it."""
        self.began += seconds
        self._at = {place: at + seconds for place, at in self._at.items()}
        self.clock.add_absence(seconds)
        self.role_starts.add_absence(seconds)

    def last_seen(self, *stages: Stage) -> float:
        """Return when any of the stages was last seen to move; -1 if never."""
        return max((at for (stage, _), at in self._at.items() if stage in stages), default=-1.0)

    def has_moved(self, stage: Stage) -> bool:
        """Return whether the stage has moved, before or after the start of reading."""
        return any(stage is other for places in (self._at, self._stamps) for other, _ in places)

    def seconds_still(self, now: float, *stages: Stage, homes: Collection[int] | None = None) -> float:
        """Return the seconds since any of the stages moved in any of the homes; None means all homes."""
        at = max(_of(self._at, stages, homes), default=-math.inf)
        if at >= self.began:
            return now - at
        before = self.seconds_still_before(now, *stages, homes=homes)
        return now - self.began if before is None else before

    def seconds_still_before(self, now: float, *stages: Stage, homes: Collection[int] | None = None) -> float | None:
        """Return `seconds_still` from the records before the start of reading only; None if there are none."""
        stamp = max(_of(self._stamps, stages, homes), default=None)
        return None if stamp is None else self.since_stamp(now, stamp)

    def since_stamp(self, now: float, stamp: float) -> float:
        """Return the seconds since the timestamp, or since the first role start after it."""
        since = self.clock.seconds_since(now, stamp)
        return now - self.began if since is None else self.role_starts.first_within(since, now)


def _of(places: dict[tuple[Stage, int], float], stages: Iterable[Stage], homes: Collection[int] | None) -> list[float]:
    return [when for (stage, home), when in places.items() if stage in stages and (homes is None or home in homes)]


@dataclass(slots=True)
class ConditionTimer:
    """Since when a condition holds of a place without a break, from observations at intervals."""

    _since: dict[Hashable, float] = field(default_factory=dict)
    _first: float | None = None
    """When the first observation was made: conditions that held then may have held for long."""

    def set_active(self, places: Iterable[Hashable], now: float) -> None:
        """Observe the condition: it holds now of these places only."""
        self._first = now if self._first is None else self._first
        self._since = {place: self._since.get(place, now) for place in places}

    def add_absence(self, seconds: float) -> None:
        """Count time in which the broker was away: no condition gets older in it."""
        self._since = {place: since + seconds for place, since in self._since.items()}
        self._first = None if self._first is None else self._first + seconds

    def is_active(self, place: Hashable) -> bool:
        """Whether the condition holds at this place."""
        return place in self._since

    def seen_seconds(self, place: Hashable, now: float) -> float:
        """Return for how long the condition was observed to hold."""
        return max(0.0, now - self._since.get(place, now))

    def most_seconds(self, place: Hashable, now: float) -> float:
        """Return for how long the condition may have held; infinite if it held at the first observation."""
        since = self._since.get(place, now)
        return math.inf if since == self._first else max(0.0, now - since)
