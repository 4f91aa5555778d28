"""Steps of an engine that are planned at once: equal batches, whose times grow with their contexts.

Keeps true: the time of the first `n` steps is a sum in closed form, so planning does not depend on the number of steps.

Pure.
"""

import math
from typing import NamedTuple

ROUNDING = 1e-9
"""Seconds: a step whose end is this near has ended."""


class Plan(NamedTuple):
    """Equal steps that are planned: step `k` of `n` decodes `decoding` requests."""

    began: float
    steps: int
    first_seconds: float
    """Time of the first step."""
    growth_seconds: float
    """Seconds by which each step is longer than the step before."""
    decoding: int
    tokens: int
    """Tokens that one of the steps computes."""

    def seconds(self, steps: int) -> float:
        """Return the time of the first `steps` steps."""
        return steps * self.first_seconds + self.growth_seconds * steps * (steps - 1) / 2

    def whole_steps(self, seconds: float) -> int:
        """Return how many steps have ended `seconds` after the beginning."""
        first, growth = self.first_seconds, self.growth_seconds
        if not self.steps:
            return 0
        if growth <= 0.0:
            steps = int((seconds + ROUNDING) / first)
        else:
            half = first / growth - 0.5
            steps = int(math.sqrt(half * half + 2.0 * (seconds + ROUNDING) / growth) - half)
        while steps > 0 and self.seconds(steps) > seconds + ROUNDING:
            steps -= 1
        while steps < self.steps and self.seconds(steps + 1) <= seconds + ROUNDING:
            steps += 1
        return min(steps, self.steps)


NO_PLAN = Plan(0.0, 0, 0.0, 0.0, 0, 0)
