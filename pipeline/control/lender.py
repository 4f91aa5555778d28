"""One serving worker as the control app knows it: what it was told, since when, and how it took that.

Keeps true: when it was woken, was there and was of use last is of the newest decision alone; how often it was woken in
vain outlives that.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schemas.capacity import CapacityGrant
from schemas.cells import ExecutorLine

GRACE_SECONDS = 2.0
"""By which a lease may end later with its lender: a grant is on its way for some time."""


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
    useless_since: float | None = None
    failures: int = 0
    """Times on end that it was woken and did not come."""
    held_until: float = 0.0
    busy: float = 0.0
    """Requests of its own users, in the mean."""

    @property
    def parks_at(self) -> tuple[bool, float]:
        """Its place among those that may be parked: who runs nothing first, then whose users ask most."""
        return self.line.held_turns > 0, -self.busy

    def decide(self, lends: bool, reason: str, now: float) -> None:
        """Change it."""
        self.lends, self.reason, self.since = lends, reason, now
        self.asked_at = now if lends and not self.line.open else None
        self.built_at = self.useless_since = self.renewed_at = None
