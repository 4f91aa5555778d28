"""Pace: how fast an executor is, learned from what its heartbeats measure.

Keeps true
- What is learned is one of few steps, STEPS to an octave. So executors of one hardware are alike, and are looked for as
  one, though no two of them measure the same.
- It is never further than one step from the newest reading; and a reading no further than that changes nothing.

Example, in tokens a second
    1000 is read     -> 1024 is learned
    950, 1080, 1100  -> 1024 still: 861 to 1218 are within a step
    500              -> 512
"""

import math
from dataclasses import dataclass
from functools import cache

STEPS = 4
"""To an octave: a step is 19 %, the worst that a cost can be wrong by. What a turn will sample is known far worse."""


@dataclass(frozen=True, slots=True)
class Pace:
    """One step."""

    seconds: float
    """Of a token."""
    least: float
    """Tokens a second, of the readings that change nothing."""
    most: float


def learned(rate: float, before: Pace | None) -> Pace:
    """What is believed after a reading of `rate` tokens a second, and after what was believed `before`."""
    if before is not None and before.least <= rate <= before.most:
        return before
    return _step(round(STEPS * math.log2(rate)))


@cache
def _step(number: int) -> Pace:
    """The steps between the bounds of what a heartbeat may say are some two hundred."""
    below, rate, above = (2.0 ** ((number + away) / STEPS) for away in (-1, 0, 1))
    return Pace(1.0 / rate, below, above)
