"""The event queue of a simulation: one virtual clock, and callbacks in order of time.

Keeps true
- Time never goes back. Events of the same time run in the order in which they were scheduled, so a simulation is a
  function of its scenario.
- Nothing else in a simulation has a clock or draws from a random generator that no seed determines.
"""

import heapq
import math
from collections.abc import Callable

from rose.schemas.errors import RoseError

Callback = Callable[[], None]


class Stalled(RoseError):
    """A simulation has work left and no event that could continue the work."""


class EventQueue:
    """Callbacks by time. Times are in seconds of the simulation, from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        """Number of callbacks that have run."""
        self._due: list[tuple[float, int, Callback]] = []
        self._scheduled = 0

    def at(self, seconds: float, act: Callback) -> None:
        """Run `act` at this time, or now if the time has passed. An infinite time schedules nothing."""
        if seconds == math.inf:
            return
        self._scheduled += 1
        heapq.heappush(self._due, (max(seconds, self.now), self._scheduled, act))

    def after(self, seconds: float, act: Callback) -> None:
        """Run `act` this many seconds from now."""
        self.at(self.now + seconds, act)

    def repeat(self, every_seconds: float, act: Callback, *, first: float = 0.0) -> None:
        """Run `act` again and again: `first` seconds from now, and then every `every_seconds`."""

        def run() -> None:
            act()
            self.after(every_seconds, run)

        self.after(first, run)

    def run_until(self, done: Callable[[], bool], *, latest: float) -> None:
        """Run events until `done` returns true. Raises Stalled if that is not so at the time `latest`."""
        while not done():
            if not self._due or self._due[0][0] > latest:
                raise Stalled(f"the scenario makes no progress: it has not ended after {latest:g} simulated seconds")
            self.now, _, act = heapq.heappop(self._due)
            self.handled += 1
            act()
