"""Clock skew: whether an executor's clock is wrong, told from when it says it sent its heartbeats.

Keeps true
- Nothing is decided by it: a wrong clock is told, and spoils nothing but the times in its results.
- What is compared is the least difference over WINDOW_SECONDS, so that a heartbeat that was late on its way says
  nothing of the clock.
- Who is silent for long is forgotten: there is no clock any more that could be mended.

Example: heartbeats that were heard 7.2, 7.1 and 9 s after their `sent_at` -> 7.1 s behind, told once a minute.
"""

from dataclasses import dataclass

SKEW_SECONDS = 5.0
"""Two clocks further apart than this are told of. Synchronised ones are within milliseconds."""

WINDOW_SECONDS = 10.0
"""The least difference of so many seconds counts."""

TELL_SECONDS = 60.0
"""Between two warnings of one worker."""

SILENT_SECONDS = 60.0
"""Who has not been heard for so long is forgotten."""


@dataclass(slots=True)
class _Window:
    began: float
    least: float
    heard_at: float
    told_at: float = float("-inf")


class Skews:
    """By worker: how far its clock is behind the listener's, in seconds; negative if it is ahead."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Of the newest whole window."""
        self._windows: dict[str, _Window] = {}
        self._sweeps_at = 0.0

    def heard(self, worker: str, sent_at: float, now: float) -> float | None:
        """Take a heartbeat's time in; the skew if it is to be told now. `now` is unix seconds."""
        if now >= self._sweeps_at:
            self._sweep(now)
        window = self._windows.get(worker)
        if window is None:
            window = self._windows[worker] = _Window(now, now - sent_at, now)
        window.heard_at = now
        if now - window.began < WINDOW_SECONDS:
            window.least = min(window.least, now - sent_at)
            return None
        skew = self.seconds[worker] = window.least
        window.began, window.least = now, now - sent_at
        if abs(skew) <= SKEW_SECONDS or now - window.told_at < TELL_SECONDS:
            return None
        window.told_at = now
        return skew

    def _sweep(self, now: float) -> None:
        self._sweeps_at = now + WINDOW_SECONDS
        silent = [worker for worker, window in self._windows.items() if now - window.heard_at > SILENT_SECONDS]
        for worker in silent:
            del self._windows[worker]
            self.seconds.pop(worker, None)
