"""The life of a guest: when it is built, when it lends, and what becomes of it after a fault.

Keeps true
- A guest lends only while a grant says so and nothing says stop, and starts to park at the event that ends either.
- One build at a time, never two guests; a build that is no longer wanted is finished and then parked.
- A fault drops the guest, whatever it was doing, and the next build waits: `FIRST_WAIT_SECONDS` at first, twice as
  long after each fault, never over `LONGEST_WAIT_SECONDS`; no grant shortens it. `WELL_SECONDS` of lending forget them.
- Nothing stalls: with a grant, without a stop and with builds that end well, it lends within the longest wait.

    PARKED --wanted--> WAKING --built--> LENDING --not wanted--> PARKING --freed--> PARKED
       ^                  \\------------------|-----------------------/
       |                                   fault
       \\---------------- waited ---------- DROPPED ---- waited, wanted --> WAKING

Units: seconds on any clock of the caller's. Pure. The caller does what `on` returns and tells how it ended.
"""

from enum import Enum

FIRST_WAIT_SECONDS = 1.0
"""From the first fault to the next build."""

LONGEST_WAIT_SECONDS = 300.0
"""A guest that fails each time is tried as often as this."""

WELL_SECONDS = 300.0
"""Whoever lent for so long without a fault has none on its record."""


class State(Enum):
    PARKED = "parked"
    """Weights in host memory at most, no KV."""
    WAKING = "waking"
    """Being built, off the serving thread."""
    LENDING = "lending"
    PARKING = "parking"
    """Its turns go back, then its memory."""
    DROPPED = "dropped"
    """Let go of after a fault; it waits."""


class Event(Enum):
    GRANTED = "granted"
    WITHDRAWN = "withdrawn"
    STOPPED = "stopped"
    """By a record, or by the file that stops lending here."""
    CLEARED = "cleared"
    """No stop any more."""
    BUILT = "built"
    FREED = "freed"
    """What PARK asked for is done."""
    FAULT = "fault"
    """An exception of the guest, of its build, or while it was parked."""
    TICK = "tick"
    """Time has passed."""


class Act(Enum):
    """What the caller does now."""

    NOTHING = "nothing"
    BUILD = "build"
    """Start to build on another thread; BUILT or FAULT follows."""
    PARK = "park"
    """Hand its turns back and free its KV; FREED or FAULT follows."""
    DROP = "drop"
    """Hand its turns back and let go of all of it, at once."""


class Life:
    """One guest's."""

    def __init__(self) -> None:
        self.state = State.PARKED
        self.faults = 0
        """In a row: without `WELL_SECONDS` of lending between them."""
        self.waits_until = 0.0
        """While DROPPED, no build before this."""
        self._granted = self._stopped = False
        self._lends_since = 0.0

    @property
    def wanted(self) -> bool:
        """Whether it should lend."""
        return self._granted and not self._stopped

    def on(self, event: Event, now: float) -> Act:
        """Take an event in. One that the state does not wait for, as BUILT while PARKED, changes nothing."""
        if event in (Event.GRANTED, Event.WITHDRAWN):
            self._granted = event is Event.GRANTED
        elif event in (Event.STOPPED, Event.CLEARED):
            self._stopped = event is Event.STOPPED
        elif event is Event.FAULT and self.state is not State.DROPPED:
            return self._dropped(now)
        elif event is Event.BUILT and self.state is State.WAKING:
            self.state, self._lends_since = State.LENDING, now
        elif event is Event.FREED and self.state is State.PARKING:
            self.state = State.PARKED
        return self._follow(now)

    def _follow(self, now: float) -> Act:
        """What the state of things asks for."""
        if self.state is State.DROPPED and now >= self.waits_until:
            self.state = State.PARKED
        if self.state is State.PARKED and self.wanted:
            self.state = State.WAKING
            return Act.BUILD
        if self.state is State.LENDING and not self.wanted:
            self.state = State.PARKING
            return Act.PARK
        return Act.NOTHING

    def _dropped(self, now: float) -> Act:
        if self.state is State.LENDING and now - self._lends_since >= WELL_SECONDS:
            self.faults = 0
        doubled = FIRST_WAIT_SECONDS * 2.0 ** min(self.faults, 30)
        self.waits_until = now + min(doubled, LONGEST_WAIT_SECONDS)
        self.faults += 1
        self.state = State.DROPPED
        return Act.DROP
