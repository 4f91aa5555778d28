"""The idle stretches of a server: the time that the server could lend.

Keeps true: every moment since the start is idle or busy, and each idle stretch that has ended is counted once.
Pure; `now` is seconds on any one clock.

Example: on_busy(0), on_idle(2), on_busy(5), read at 10 -> 10 s observed, 3 s idle, one stretch of 3 s
"""

from bisect import bisect_left

STRETCH_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram of idle stretches, in seconds. A further bucket counts longer stretches."""


class IdleStretches:
    """Idle time of one server, which is idle at the start."""

    def __init__(self, now: float) -> None:
        self.stretches = [0] * (len(STRETCH_BOUNDS) + 1)
        """Number of ended idle stretches, by bucket of STRETCH_BOUNDS."""
        self.stretch_seconds = 0.0
        """Sum of the ended idle stretches, in seconds."""
        self._began = now
        self._idle_since: float | None = now

    def on_busy(self, now: float) -> None:
        """Record that serving has work from `now` on."""
        if self._idle_since is not None:
            seconds = now - self._idle_since
            self.stretches[bisect_left(STRETCH_BOUNDS, seconds)] += 1
            self.stretch_seconds += seconds
            self._idle_since = None

    def on_idle(self, now: float) -> None:
        """Record that serving has no work from `now` on."""
        if self._idle_since is None:
            self._idle_since = now

    def seconds(self, now: float) -> float:
        """Seconds since the start of the observation."""
        return now - self._began

    def idle_seconds(self, now: float) -> float:
        """Idle seconds since the start, the current stretch included."""
        return self.stretch_seconds + (now - self._idle_since if self._idle_since is not None else 0.0)
