"""One lender as the control app knows it: its newest line, the decision about it, and since when what holds.

Keeps true
- What was measured under a decision ends with the decision.
- A condition holds without a break only while summaries arrive: a gap in the summaries begins it anew.

Pure: `now` is the time of the elasticity core.
"""

import math
from dataclasses import dataclass, field

from rose.schemas.cells import ExecutorLine
from rose.topics.backoff import Backoff

HOLD_SECONDS = 60.0
"""How long a lender stays parked after its first failure. Each further failure doubles the time."""

LONGEST_HOLD_SECONDS = 32 * HOLD_SECONDS

USER_REQUESTS_WEIGHT = 0.1
"""Weight of the newest summary in a worker's mean number of user requests."""


@dataclass(slots=True)
class Lender:
    """One serving worker that follows grants."""

    line: ExecutorLine
    """Its line in the newest summary."""
    cell: int
    heard_at: float
    """Time of the newest summary that names it."""
    lends: bool | None = None
    """Whether it shall lend; None while that is not decided."""
    reason: str = ""
    """Reason of the decision. Updated at each tick while the worker lends."""
    since: float = 0.0
    """Time of the decision."""
    renewed_at: float | None = None
    """When a grant to lend was last written; None if there was none since the decision."""
    woken_at: float | None = None
    """When it was woken; None once it is open."""
    guest_built_at: float | None = None
    """When its guest was first seen after the wake."""
    closed_since: float | None = None
    """Since when a worker that shall lend is closed and holds no turns in every summary."""
    idle_since: float | None = None
    """Since when a worker that lends is not needed."""
    gains_since: float | None = None
    """Since when a worker that does not lend would add `min_gain`."""
    backoff: Backoff = field(
        default_factory=lambda: Backoff(HOLD_SECONDS, LONGEST_HOLD_SECONDS, reset_seconds=math.inf)
    )
    """Failures to lend. It is not woken before the wait ends. A wake after which the worker opens counts as success."""
    user_requests: float = 0.0
    """Running mean of the requests of its own users, running and waiting."""

    @property
    def park_priority(self) -> tuple[bool, float]:
        """Sort key for parking: lenders without turns first, then lenders with the most user requests."""
        return self.line.held_turns > 0, -self.user_requests

    @property
    def absent_since(self) -> float | None:
        """Since when it shall lend and does not, because it did not open or has closed; None if it lends.

        A closed lender that runs turns counts as lending: it may be full.
        """
        return self.closed_since if self.woken_at is None else self.woken_at

    def on_line(self, line: ExecutorLine, cell: int, now: float, *, after_gap: bool) -> None:
        """Update from a line of a summary. `after_gap`: whether summaries were missing since the previous line."""
        self.line, self.cell, self.heard_at = line, cell, now
        self.user_requests += USER_REQUESTS_WEIGHT * (line.serving_running + line.serving_waiting - self.user_requests)
        if after_gap:
            self.gains_since = None
        if not self.lends or line.open or line.held_turns:
            self.closed_since = None
        elif self.closed_since is None or after_gap:
            self.closed_since = now

    def gains_for(self, gain: float, min_gain: float, now: float) -> float:
        """Seconds for which it would have added `min_gain` of an executor's work without a break, now `gain`.

        Less than 0 if it would not add as much now.
        """
        if gain < min_gain:
            self.gains_since = None
            return -1.0
        self.gains_since = now if self.gains_since is None else self.gains_since
        return now - self.gains_since

    def decide(self, lends: bool, reason: str, now: float) -> None:
        """Set whether the worker shall lend, and reset what was measured under the previous decision."""
        self.lends, self.reason, self.since = lends, reason, now
        self.woken_at = now if lends and not self.line.open else None
        self.guest_built_at = self.closed_since = self.idle_since = self.gains_since = self.renewed_at = None
