"""The life of a guest: when it is built, when it lends, and what becomes of it after a fault.

Keeps true
- A guest lends only while it is wanted (a grant says so and nothing says stop), and parks once it is not.
- One build at a time, never two guests; a build that is no longer wanted is finished and then parked.
- A fault drops the guest, whatever it was doing, and the next build waits (`backoff`); nothing shortens that.
- Nothing stalls: wanted, and with builds that end well, it lends within the longest wait.

    PARKED --wanted--> WAKING --built--> LENDING --not wanted--> PARKING --freed--> PARKED
       ^                  \\------------------|-----------------------/
       |                                   fault
       \\---------------- waited ---------- DROPPED ---- waited, wanted --> WAKING

Pure; seconds on any clock of the caller's. The caller does what `follow` returns and tells how it ended.
"""

from enum import Enum

from workers.lender.backoff import Backoff


class State(Enum):
    """Where a guest is in its life."""

    PARKED = "parked"
    """Weights in host memory at most, no KV."""
    WAKING = "waking"
    """Being built."""
    LENDING = "lending"
    PARKING = "parking"
    """Its turns go back, then its memory."""
    DROPPED = "dropped"
    """Let go of after a fault; it waits."""


class Act(Enum):
    """What the caller does now."""

    NOTHING = "nothing"
    BUILD = "build"
    """Begin to build; `built` or `fault` follows."""
    PARK = "park"
    """Begin to hand its turns back, then free its memory; `freed` or `fault` follows."""


class Life:
    """One guest's."""

    def __init__(self) -> None:
        self.state = State.PARKED
        self._backoff = Backoff()

    def follow(self, wanted: bool, now: float) -> Act:
        """What the state of things asks for."""
        if self.state is State.DROPPED and now >= self._backoff.until:
            self.state = State.PARKED
        if self.state is State.PARKED and wanted:
            self.state = State.WAKING
            return Act.BUILD
        if self.state is State.LENDING and not wanted:
            self.state = State.PARKING
            return Act.PARK
        return Act.NOTHING

    def due(self, wanted: bool, now: float) -> bool:
        """Whether there is something to do for its life alone."""
        match self.state:
            case State.WAKING | State.PARKING:
                return True
            case State.LENDING:
                return not wanted
            case State.PARKED:
                return wanted
            case State.DROPPED:
                return wanted and now >= self._backoff.until

    def built(self) -> None:
        """The build has ended well."""
        assert self.state is State.WAKING
        self.state = State.LENDING

    def freed(self) -> None:
        """What PARK asked for is done."""
        assert self.state is State.PARKING
        self.state = State.PARKED

    def fault(self, now: float) -> float:
        """The guest, or its build, failed: let go of it. Returns the seconds until it may be built again."""
        self.state = State.DROPPED
        return self._backoff.failed(now)
