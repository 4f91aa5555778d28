"""One serving worker as the control app knows it: what it was told, since when, and how it took that.

Keeps true: when it was woken, was there, closed and was of use last is of the newest decision alone; how often it was
given up outlives that.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schemas.capacity import CapacityGrant
from schemas.cells import ExecutorLine

GRACE_SECONDS = 2.0
"""By which a lease may end later with its lender: a grant is on its way for some time."""

HOLD_SECONDS = 60.0
"""One that was given up is left parked for so long, and twice as long each further time."""

MOST_FAILURES = 6
"""Of them the hold grows no more."""

BUSY_WEIGHT = 0.1
"""Of the newest summary in how much a worker's own users ask of it."""


class Told(NamedTuple):
    """A leased grant on the log."""

    grant: CapacityGrant
    at: float
    """When it was written here, or read."""

    def runs_out(self) -> float:
        """When its lender surely counts it no more."""
        return self.at + self.grant.lease_seconds + GRACE_SECONDS


@dataclass(slots=True)
class Lender:
    """One serving worker that follows grants."""

    line: ExecutorLine
    """The newest."""
    cell: int
    heard_at: float
    lends: bool | None = None
    """Whether it is to; None before that was decided."""
    reason: str = ""
    """Of one that lends, by the newest summary of its cell; of any other, when that was decided."""
    since: float = 0.0
    """When that was decided."""
    renewed_at: float | None = None
    """When a grant to lend was written last; None before, and once it is parked."""
    asked_at: float | None = None
    """When it was woken, until it is open."""
    built_at: float | None = None
    """When its guest was there after that, its weights not yet."""
    closed_since: float | None = None
    """Of one that is to lend: since when it has been closed and has held nothing, as each summary said."""
    useless_since: float | None = None
    failures: int = 0
    """Times on end that it was given up; none any more once it was woken and came."""
    held_until: float = 0.0
    busy: float = 0.0
    """Requests of its own users, in the mean."""

    @property
    def parks_at(self) -> tuple[bool, float]:
        """Its place among those that may be parked: who runs nothing first, then whose users ask most."""
        return self.line.held_turns > 0, -self.busy

    @property
    def missed_since(self) -> float | None:
        """Since when it is to lend and does not: it did not come, or it closed. One that runs turns may be full."""
        return self.closed_since if self.asked_at is None else self.asked_at

    def heard(self, line: ExecutorLine, cell: int, now: float, *, anew: bool) -> None:
        """Its newest line. `anew`: of the time since the one before nobody knows."""
        self.line, self.cell, self.heard_at = line, cell, now
        self.busy += BUSY_WEIGHT * (line.serving_running + line.serving_waiting - self.busy)
        if not self.lends or line.open or line.held_turns:
            self.closed_since = None
        elif self.closed_since is None or anew:
            self.closed_since = now

    def given_up(self, now: float) -> None:
        """It is left parked for a while, longer each time."""
        self.failures = min(self.failures + 1, MOST_FAILURES)
        self.held_until = now + HOLD_SECONDS * 2 ** (self.failures - 1)

    def decide(self, lends: bool, reason: str, now: float) -> None:
        """Change it."""
        self.lends, self.reason, self.since = lends, reason, now
        self.asked_at = now if lends and not self.line.open else None
        self.built_at = self.closed_since = self.useless_since = self.renewed_at = None
