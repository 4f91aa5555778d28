"""The occupancy guard: how much longer guests may make serving hold its requests than it would alone.

By Little's law serving holds arrival rate x stay requests: whatever stretches their stay grows the batch by as much,
until slots fill and the next burst queues, while every single token is still in time. So the stay is what is guarded.

Keeps true
- Alone is learned while guests lend, from serving's own steps, in which no guest computes. A step of it costs a fixed
  part, the same for any batch, and a part for each token in it. Guests may add, for every held request, at most
  `dial / (1 - dial)` of the fixed part. So over any stretch of time: requests x seconds of guest steps are at most that
  share of the requests x fixed seconds of serving's steps, and one longest guest step of each request held at first.
- The part for each token earns nothing: it is work that must be done at any batch, and near saturation to add to it
  would grow the batch without end. Earned so, stays, and with them what serving holds, reach on average at most
  `1 / (1 - dial)` of alone, at any load below saturation: held = rate x steps x (fixed / (1 - dial) + token x held).
- A guest's step that took more than `HALTED` longest ones was halted, as by a debugger or a machine that froze: what is
  beyond that was nobody's doing, and is not paid for.
- dial 0 earns nothing: guests run only while serving holds no request. dial 1 has no guard.

Units: seconds, and requests x seconds for what is earned. Pure, and without time.

Example (dial 0.5, longest 20 ms): 10 serving steps of 2 ms, 1.5 ms of them fixed -> guests may take 15 ms.
"""

import math

HALTED = 50.0
"""Times the longest guest step: a second, as steps are."""


class Occupancy:
    """What guests have earned by serving's own steps and not yet spent."""

    def __init__(self, *, dial: float, longest_seconds: float) -> None:
        self._share = dial / (1.0 - dial) if dial < 1.0 else math.inf
        self._longest_seconds = longest_seconds
        self._earned = 0.0

    def served(self, held: int, fixed_seconds: float) -> None:
        """Serving made a step while it held `held` requests; `fixed_seconds` of it were its fixed cost."""
        if self._share < math.inf:
            earned = self._earned + self._share * held * fixed_seconds
            self._earned = min(earned, held * self._longest_seconds)

    def spend(self, held: int, seconds: float) -> None:
        """A guest computed for `seconds` while serving held `held` requests."""
        if self._share < math.inf:
            self._earned -= held * min(seconds, HALTED * self._longest_seconds)

    def seconds(self, held: int) -> float:
        """What a guest may take now that serving holds `held` requests, above 0."""
        return self._earned / held if self._share < math.inf else math.inf
