"""Exponential back-off: the wait before a failed operation is tried again.

Keeps true: the wait is `FIRST_WAIT_SECONDS` after the first failure, doubles with each further failure, and is never
longer than `LONGEST_WAIT_SECONDS`. `RESET_SECONDS` without a failure reset it. Pure; times are seconds on any clock.
"""

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0

RESET_SECONDS = 60.0
"""A failure that comes so long after the end of the last wait counts as the first one."""


class Backoff:
    """The back-off of one operation."""

    def __init__(self) -> None:
        self.until = 0.0
        """Earliest time of the next try."""
        self._failures = 0

    def failed(self, now: float) -> float:
        """Record a failure. Return the seconds to wait."""
        if now - self.until >= RESET_SECONDS:
            self._failures = 0
        wait = min(FIRST_WAIT_SECONDS * 2.0 ** min(self._failures, 30), LONGEST_WAIT_SECONDS)
        self._failures += 1
        self.until = now + wait
        return wait
