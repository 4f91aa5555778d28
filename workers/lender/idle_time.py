"""What of a server's time could be lent: its idle stretches.

Keeps true: every moment since the beginning is idle or busy, and each idle stretch that has ended is counted once.
Pure; `now` is seconds on any one clock of the caller's.

Example: busy(0), idle(2), busy(5), told at 10 -> 10 s observed, 3 s idle, one stretch of 3 s
"""

from bisect import bisect_left

STRETCH_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Seconds: stretches are counted by the first of these that they do not exceed; longer ones behind the last."""


class IdleTime:
    """Of one server, idle in the beginning."""

    def __init__(self, now: float) -> None:
        self.stretches = [0] * (len(STRETCH_BOUNDS) + 1)
        """Ended ones, by length."""
        self.stretch_seconds = 0.0
        """All of those together."""
        self._began = now
        self._idle_since: float | None = now

    def on_busy(self, now: float) -> None:
        """Serving has something to do."""
        if self._idle_since is not None:
            seconds = now - self._idle_since
            self.stretches[bisect_left(STRETCH_BOUNDS, seconds)] += 1
            self.stretch_seconds += seconds
            self._idle_since = None

    def on_idle(self, now: float) -> None:
        """Serving has nothing to do."""
        if self._idle_since is None:
            self._idle_since = now

    def seconds(self, now: float) -> float:
        """Observed so far."""
        return now - self._began

    def idle_seconds(self, now: float) -> float:
        """Idle so far, this stretch included."""
        return self.stretch_seconds + (now - self._idle_since if self._idle_since is not None else 0.0)
