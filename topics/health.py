"""How a process is: whether its loop turns over, and whether it does now what it is there for.

Keeps true
- Alive is said of the loop alone: a broker that is away, a version that does not come and a seat that another has are
  no reason to start a process again.
- A loop says when it turned over, how it is, and how long it may be silent. Silent for longer it hangs, whatever it
  said.
- A process that begins anew again and again is not ready, whatever it says between.
- Who only waits for its turn is ready: routers share the cells and any more wait, and a rollout may go on.

Example
    says "serves" at 0, for 120 s     -> alive and ready until 120
    says "recovers", not ready, at 50 -> alive and not ready until 170
    silence until 171                 -> neither
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Lock
from typing import NamedTuple

HUNG_SECONDS = 120.0
"""Silence of a loop that turns over many times a second: twice what its longest call to the broker may take."""

RESTART_LIMIT, RESTART_WINDOW_SECONDS = 4, 120.0
"""A process that began anew so often within so long does not do its work. Leaders that move are met once or twice."""

START_SECONDS = 1800.0
"""Before its first word, and of a word while its engine loads: a large one loads and compiles for minutes."""


class LoopReport(NamedTuple):
    """A loop's newest."""

    activity: str
    ready: bool
    at: float
    """Monotonic seconds."""
    lasts_seconds: float


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """How a process is, for whoever asks."""

    alive: bool
    ready: bool
    sentence: str


def status_of(report: LoopReport, now: float) -> HealthStatus:
    """What the word means by now. Pure."""
    silent = now - report.at
    if silent > report.lasts_seconds:
        return HealthStatus(
            False, False, f"its loop hangs: no word for {silent:.0f} s, the last was: {report.activity}"
        )
    return HealthStatus(True, report.ready, report.activity)


class Health:
    """Keeps the newest word: the loop's, or that it waits properly; and when it began anew. Any thread reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._report = LoopReport("starting", False, clock(), START_SECONDS)
        self._writing = Lock()
        self._changed = Condition(self._writing)
        self._restarts: deque[float] = deque(maxlen=RESTART_LIMIT)
        """When it last began anew."""
        self._times, self._reason, self._woken = 0, "", False

    def report_restart(self, reason: str) -> None:
        """What the loop was at is given up, and begins anew as soon as it can."""
        with self._writing:
            self._report = LoopReport(f"begins anew: {reason}", False, self._clock(), HUNG_SECONDS)
            self._restarts.append(self._clock())
            self._times, self._reason = self._times + 1, reason
            self._changed.notify_all()

    def await_restart(self, times: int) -> tuple[int, str]:
        """Wait until it has begun anew more often than so many times, or for `wake_waiters`: how often, and why at
        last.
        """
        with self._writing:
            self._changed.wait_for(lambda: self._times > times or self._woken)
            return self._times, self._reason

    def wake_waiters(self) -> None:
        """Let go who waits."""
        with self._writing:
            self._woken = True
            self._changed.notify_all()

    def report(self, activity: str, *, ready: bool = True, lasts_seconds: float = HUNG_SECONDS) -> None:
        """The loop turned over, and this is how it is."""
        with self._writing:
            self._report = LoopReport(activity, ready, self._clock(), lasts_seconds)

    def report_progress(self) -> None:
        """The loop turned over, and is as it was."""
        with self._writing:
            activity, ready, _, lasts_seconds = self._report
            self._report = LoopReport(activity, ready, self._clock(), lasts_seconds)

    @property
    def status(self) -> HealthStatus:
        now, restarts = self._clock(), list(self._restarts)
        status = status_of(self._report, now)
        if len(restarts) < RESTART_LIMIT or now - restarts[0] > RESTART_WINDOW_SECONDS:
            return status
        sentence = f"{status.sentence} (it has begun anew {self._times} times, at last: {self._reason})"
        return HealthStatus(status.alive, False, sentence)


HEALTH = Health()
"""This process's."""
