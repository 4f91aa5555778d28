"""Health of a process: whether its loop makes progress (alive), and whether it does its work now (ready).

Keeps true
- Only a hung loop makes a process not alive. A broker that is away, a missing policy version or a cell that another
  router owns is no reason to restart a process.
- A loop reports its activity and how long the report is valid. After that time without a report the loop counts as
  hung.
- A process whose loop restarts again and again is not ready, whatever it reports in between.
- A process that waits for its turn is ready: spare routers wait for a cell, and a rolling update may go on.

Example:
    reports "serves" at 0, valid for 120 s    -> alive and ready until 120
    reports "recovers", not ready, at 50      -> alive and not ready until 170
    no report until 171                       -> neither alive nor ready
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Lock
from typing import NamedTuple

HUNG_SECONDS = 120.0
"""Default validity of a report: twice the time of the longest call to the broker. Loops report many times a second."""

RESTART_LIMIT, RESTART_WINDOW_SECONDS = 4, 120.0
"""A process with RESTART_LIMIT restarts of its loop in this window is not ready. A move of partition leaders causes one
or two restarts."""

START_SECONDS = 1800.0
"""Validity of the first report, and of a report while an engine loads: a large model loads and compiles for minutes."""


class LoopReport(NamedTuple):
    """The newest report of a loop."""

    activity: str
    ready: bool
    at: float
    """Monotonic seconds."""
    lasts_seconds: float
    """How long the report is valid."""


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """Health of a process, for probes and people."""

    alive: bool
    ready: bool
    sentence: str


def status_of(report: LoopReport, now: float) -> HealthStatus:
    """The health that follows from a report at `now`, monotonic seconds. Pure."""
    silent = now - report.at
    if silent > report.lasts_seconds:
        return HealthStatus(
            False, False, f"its loop hangs: no word for {silent:.0f} s, the last was: {report.activity}"
        )
    return HealthStatus(True, report.ready, report.activity)


class Health:
    """Stores the newest report of the loop, and its restarts. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._report = LoopReport("starting", False, clock(), START_SECONDS)
        self._writing = Lock()
        self._changed = Condition(self._writing)
        self._restarts: deque[float] = deque(maxlen=RESTART_LIMIT)
        """Times of the newest restarts."""
        self._times, self._reason, self._woken = 0, "", False

    def report_restart(self, reason: str) -> None:
        """Report that the loop has discarded its state and restarts. `reason`: the error that caused it."""
        with self._writing:
            self._report = LoopReport(f"restarts: {reason}", False, self._clock(), HUNG_SECONDS)
            self._restarts.append(self._clock())
            self._times, self._reason = self._times + 1, reason
            self._changed.notify_all()

    def await_restart(self, times: int) -> tuple[int, str]:
        """Wait for more than `times` restarts, or for `wake_waiters`; return their number and the last reason."""
        with self._writing:
            self._changed.wait_for(lambda: self._times > times or self._woken)
            return self._times, self._reason

    def wake_waiters(self) -> None:
        """End all waits in `await_restart`, also later ones."""
        with self._writing:
            self._woken = True
            self._changed.notify_all()

    def report(self, activity: str, *, ready: bool = True, lasts_seconds: float = HUNG_SECONDS) -> None:
        """Report progress of the loop and its activity. The report is valid for `lasts_seconds`."""
        with self._writing:
            self._report = LoopReport(activity, ready, self._clock(), lasts_seconds)

    def report_progress(self) -> None:
        """Report progress of the loop without a change of its activity."""
        with self._writing:
            activity, ready, _, lasts_seconds = self._report
            self._report = LoopReport(activity, ready, self._clock(), lasts_seconds)

    @property
    def status(self) -> HealthStatus:
        """Return the present health: the last report, and whether the process restarts again and again."""
        now, restarts = self._clock(), list(self._restarts)
        status = status_of(self._report, now)
        if len(restarts) < RESTART_LIMIT or now - restarts[0] > RESTART_WINDOW_SECONDS:
            return status
        sentence = f"{status.sentence} (it has restarted {self._times} times, last because of: {self._reason})"
        return HealthStatus(status.alive, False, sentence)


HEALTH = Health()
"""Health of this process."""
