"""Pace: how fast an executor is, learned from what its heartbeats measure, and how crowded.

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

from schemas.slack import SlackHeartbeat

STEPS = 4
"""To an octave: a step is 19 %, the worst that a cost can be wrong by. What a turn will sample is known far worse."""


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """One step. There is one of each: what is as fast has the same."""

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


def step_rate(beat: SlackHeartbeat) -> float:
    """Steps a second that its engine would take if they computed nothing.

    What a heartbeat says of decoding was measured while so many ran, each with a token in every step. A step takes no
    less than one token: so it stays positive whatever was measured.
    """
    hardware = beat.hardware
    token_seconds = 1.0 / hardware.prefill_tokens_per_second
    seconds = 1.0 / hardware.decode_tokens_per_second - max(1, beat.rollout.running) * token_seconds
    return 1.0 / max(seconds, token_seconds)


CROWD_STEPS = 2
"""To an octave: executors with 11 to 13 turns are equally crowded."""


@cache
def crowd_of(turns: int) -> float:
    """Turns that an executor holds, as far as costs tell them apart."""
    return 2.0 ** (round(CROWD_STEPS * math.log2(turns)) / CROWD_STEPS) if turns > 0 else 0.0
