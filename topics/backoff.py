"""The wait before an operation is tried again: it doubles with each failure in a row, up to a longest wait.

Pure: times are seconds on any clock. Light: the watchdog of a lending server imports this module.
"""

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0

RESET_SECONDS = 60.0
"""A failure that comes so long after the end of the last wait counts as the first one."""


class Backoff:
    """The back-off of one operation."""

    def __init__(
        self,
        first_seconds: float = FIRST_SECONDS,
        longest_seconds: float = LONGEST_SECONDS,
        *,
        reset_seconds: float = RESET_SECONDS,
    ) -> None:
        """`reset_seconds`: a failure that comes so long after the end of the last wait counts as the first one."""
        self.until = 0.0
        """Earliest time of the next try."""
        self.failures = 0
        """Failures in a row."""
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._reset_seconds = reset_seconds

    def failed(self, now: float) -> float:
        """Record a failure. Return the seconds to wait."""
        if now - self.until >= self._reset_seconds:
            self.failures = 0
        wait = min(self._first_seconds * 2.0 ** min(self.failures, 30), self._longest_seconds)
        self.failures += 1
        self.until = now + wait
        return wait

    def reset(self) -> None:
        """Allow a try at once, which counts as the first one: the cause of the failures may be gone."""
        self.failures, self.until = 0, 0.0

    def succeeded(self) -> None:
        """Record a success: the next failure counts as the first one."""
        self.failures = 0
