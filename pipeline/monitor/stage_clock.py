"""When the stages of a run last moved, home by home, and when its roles began. Pure.

Keeps true
- `now` is seconds on the reader's own clock. What came while looking is told by it alone.
- What lay on the log before is told by two stamps of the broker: its own, and that of a record that came while looking.
- Time in which nobody looked counts in no duration.
- What is kept is bounded by the homes and the roles, not by the records.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from rose.pipeline.monitor.diagnosis import RECENT_START_SECONDS
from rose.pipeline.monitor.facts import RoleFacts
from rose.schemas.role_starts import RoleBegun

REMEMBERED_STARTS = 64
"""Of one role, that are remembered."""


class Stage(Enum):
    """What moves in a run."""

    OPENED = "opened"
    """Groups of prompts."""
    APPLIED = "applied"
    """Turns."""
    SETTLED = "settled"
    """Outcomes of samples."""
    SAMPLED = "sampled"
    """Finished trajectories, which are what the trainer waits for."""


@dataclass(slots=True)
class BrokerClock:
    """The broker's stamps as times on our clock."""

    _ahead: float | None = None
    """Our clock less the broker's, as of the newest record that came while looking."""
    _newest: float = -math.inf
    """The newest stamp that came while looking."""
    _away: float = 0.0
    """How long nobody looked, all absences together."""
    _left: float = -math.inf
    """The newest stamp that was known when the last absence began."""

    def compare(self, now: float, stamp: float) -> None:
        self._ahead, self._newest = now - stamp, max(self._newest, stamp)

    def add_absence(self, seconds: float) -> None:
        if seconds > 0:
            self._away, self._left = self._away + seconds, self._newest

    def seconds_since(self, now: float, stamp: float) -> float | None:
        """Since that stamp, less the absences since; None where the clocks were not compared yet."""
        if self._ahead is None:
            return None
        away = self._away if stamp <= self._left else 0.0
        return max(0.0, now - self._ahead - stamp - away)


@dataclass(slots=True)
class RoleStart:
    """What a role has told of one beginning, or of several."""

    event: RoleBegun
    at: float | None
    """When it came; None where it lay there before the looking began."""
    stamp: float | None


@dataclass(slots=True)
class RoleStarts:
    """Who has begun of late. Namesakes that run in different places are counted apart."""

    clock: BrokerClock
    _begun: dict[str, deque[RoleStart]] = field(default_factory=dict)
    """By role, its newest beginnings."""

    def on_role_begun(self, event: RoleBegun, at: float | None, stamp: float | None) -> None:
        self._begun.setdefault(event.role, deque(maxlen=REMEMBERED_STARTS)).append(RoleStart(event, at, stamp))

    def add_absence(self, seconds: float) -> None:
        for beginnings in self._begun.values():
            for each in beginnings:
                each.at = None if each.at is None else each.at + seconds

    def recent(self, now: float) -> list[RoleFacts]:
        """The roles that have begun of late, and how often one of each name did that did so most often."""
        found = []
        for role, beginnings in sorted(self._begun.items()):
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
        """Since the first process that began within so long; so long if none did."""
        begun = (self._seconds(each, now) for beginnings in self._begun.values() for each in beginnings)
        return max((since for since in begun if since <= seconds), default=seconds)

    def _seconds(self, begun: RoleStart, now: float) -> float:
        if begun.at is not None:
            return now - begun.at
        since = None if begun.stamp is None else self.clock.seconds_since(now, begun.stamp)
        return math.inf if since is None else since


@dataclass(slots=True)
class StageClock:
    """When each stage last moved in each home."""

    began: float
    """When the looking began; later by each absence since."""
    clock: BrokerClock
    role_starts: RoleStarts
    _at: dict[tuple[Stage, int], float] = field(default_factory=dict)
    """While looking."""
    _stamps: dict[tuple[Stage, int], float] = field(default_factory=dict)
    """The broker's stamp of the newest record from before."""

    def on_progress(self, stage: Stage, home: int, now: float, stamp: float | None, *, fresh: bool) -> None:
        """A record of this stage: it came while looking, or lay there before."""
        place = stage, home
        if fresh:
            self._at[place] = now
        elif stamp is not None:
            self._stamps[place] = max(stamp, self._stamps.get(place, stamp))

    def add_absence(self, seconds: float) -> None:
        self.began += seconds
        self._at = {place: at + seconds for place, at in self._at.items()}
        self.clock.add_absence(seconds)
        self.role_starts.add_absence(seconds)

    def last_seen(self, *stages: Stage) -> float:
        """When any of these was last seen to move; before the beginning if never."""
        return max((at for (stage, _), at in self._at.items() if stage in stages), default=-1.0)

    def has_moved(self, stage: Stage) -> bool:
        """Whether it has moved, while looking or before."""
        return any(stage is other for places in (self._at, self._stamps) for other, _ in places)

    def seconds_still(self, now: float, *stages: Stage, homes: Collection[int] | None = None) -> float:
        """Since any of these stages moved, in one of these homes."""
        at = max(_of(self._at, stages, homes), default=-math.inf)
        if at >= self.began:
            return now - at
        before = self.seconds_still_before(now, *stages, homes=homes)
        return now - self.began if before is None else before

    def seconds_still_before(self, now: float, *stages: Stage, homes: Collection[int] | None = None) -> float | None:
        """The same of what moved before the looking began; None of what did not."""
        stamp = max(_of(self._stamps, stages, homes), default=None)
        return None if stamp is None else self.since_stamp(now, stamp)

    def since_stamp(self, now: float, stamp: float) -> float:
        """Since that stamp, or since the first process that began later."""
        since = self.clock.seconds_since(now, stamp)
        return now - self.began if since is None else self.role_starts.first_within(since, now)


def _of(places: dict[tuple[Stage, int], float], stages: Iterable[Stage], homes: Collection[int] | None) -> list[float]:
    return [when for (stage, home), when in places.items() if stage in stages and (homes is None or home in homes)]


@dataclass(slots=True)
class ConditionTimer:
    """Since when something holds of a place without a break, as it is seen now and then."""

    _since: dict[Hashable, float] = field(default_factory=dict)
    _first: float | None = None
    """When it was looked at for the first time: what held then may have for long."""

    def set_active(self, places: Iterable[Hashable], now: float) -> None:
        """It holds now of these, and of no others."""
        self._first = now if self._first is None else self._first
        self._since = {place: self._since.get(place, now) for place in places}

    def add_absence(self, seconds: float) -> None:
        self._since = {place: since + seconds for place, since in self._since.items()}
        self._first = None if self._first is None else self._first + seconds

    def is_active(self, place: Hashable) -> bool:
        return place in self._since

    def seen_seconds(self, place: Hashable, now: float) -> float:
        """For how long it was seen to hold."""
        return max(0.0, now - self._since.get(place, now))

    def most_seconds(self, place: Hashable, now: float) -> float:
        """For how long it may have held."""
        since = self._since.get(place, now)
        return math.inf if since == self._first else max(0.0, now - since)
