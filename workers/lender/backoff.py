"""How long to wait before what failed is tried again.

Keeps true: `FIRST_WAIT_SECONDS` after the first failure, twice as long after each, never over `LONGEST_WAIT_SECONDS`;
`WELL_SECONDS` without one forget them. Pure; seconds on any clock of the caller's.
"""

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0

RESET_SECONDS = 60.0
"""Whoever went for so long since the last wait has no failure on its record."""


class Backoff:
    """Of one thing that may fail."""

    def __init__(self) -> None:
        self.until = 0.0
        """Not to be tried again before."""
        self._failures = 0

    def failed(self, now: float) -> float:
        """It failed; returns how long it waits now."""
        if now - self.until >= RESET_SECONDS:
            self._failures = 0
        wait = min(FIRST_WAIT_SECONDS * 2.0 ** min(self._failures, 30), LONGEST_WAIT_SECONDS)
        self._failures += 1
        self.until = now + wait
        return wait
