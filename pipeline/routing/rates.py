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

from rose.schemas.heartbeats import SlackHeartbeat

BUCKETS_PER_OCTAVE = 4
"""To an octave: a step is 19 %, the worst that a cost can be wrong by. What a turn will sample is known far worse."""


@dataclass(frozen=True, slots=True, eq=False)
class RateBucket:
    """One step. There is one of each: what is as fast has the same."""

    token_seconds: float
    """Of a token."""
    min_rate: float
    """Tokens a second, of the readings that change nothing."""
    max_rate: float


def rate_bucket(rate: float, previous: RateBucket | None) -> RateBucket:
    """What is believed after a reading of `rate` tokens a second, and after what was believed `previous`."""
    if previous is not None and previous.min_rate <= rate <= previous.max_rate:
        return previous
    return _bucket(round(BUCKETS_PER_OCTAVE * math.log2(rate)))


@cache
def _bucket(number: int) -> RateBucket:
    """The steps between the bounds of what a heartbeat may say are some two hundred."""
    below, rate, above = (2.0 ** ((number + away) / BUCKETS_PER_OCTAVE) for away in (-1, 0, 1))
    return RateBucket(1.0 / rate, below, above)


def engine_step_rate(heartbeat: SlackHeartbeat) -> float:
    """Steps a second that its engine would take if they computed nothing.

    What a heartbeat says of decoding was measured while so many ran, each with a token in every step. A step takes no
    less than one token: so it stays positive whatever was measured.
    """
    hardware = heartbeat.hardware
    token_seconds = 1.0 / hardware.prefill_tokens_per_second
    seconds = 1.0 / hardware.decode_tokens_per_second - max(1, heartbeat.rollout.running) * token_seconds
    return 1.0 / max(seconds, token_seconds)


TURN_BUCKETS_PER_OCTAVE = 2
"""To an octave: executors with 11 to 13 turns are equally crowded."""


@cache
def turn_bucket(turns: int) -> float:
    """Turns that an executor holds, as far as costs tell them apart."""
    return 2.0 ** (round(TURN_BUCKETS_PER_OCTAVE * math.log2(turns)) / TURN_BUCKETS_PER_OCTAVE) if turns > 0 else 0.0
