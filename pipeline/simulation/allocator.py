"""An allocator of whole engines, the elasticity of other systems: it moves serving engines to the rollouts and back.

Keeps true
- It keeps as many engines in service as the users needed at most within the time in which it gets an engine back, and
  one more. An engine that is needed is taken back at once. Both favour this allocator: in truth a moved engine must
  load its serving weights before it serves again.
- The capacity of an engine is the largest number of concurrent requests that any engine had with users of its own,
  filled to `UTILISED`.

Pure.
"""

import math
from collections import deque

UTILISED = 0.7
"""Utilisation up to which engines are filled with users, a usual target of autoscalers."""

LOOK_SECONDS = 1.0
"""Time between two decisions."""


class Allocator:
    """Decides how many engines serve users."""

    def __init__(self, engines: int, *, capacity: float, delay_seconds: float) -> None:
        """`capacity`: concurrent requests that an engine may serve."""
        self._engines = engines
        self._capacity = max(1.0, UTILISED * capacity)
        self._delay_seconds = delay_seconds
        self._seen: deque[tuple[float, int]] = deque()
        """Numbers of requests that no later one exceeds, oldest and largest first."""

    def engines_to_serve(self, requests: int, now: float) -> int:
        """Return how many engines must serve, given the users' present requests."""
        while self._seen and self._seen[-1][1] <= requests:
            self._seen.pop()
        self._seen.append((now, requests))
        while self._seen[0][0] < now - self._delay_seconds:
            self._seen.popleft()
        return min(self._engines, math.ceil(self._seen[0][1] / self._capacity) + 1)
