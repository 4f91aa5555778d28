"""Rate buckets: an executor's measured rates and its number of turns, rounded so that similar executors compare equal.

Keeps true
- A rate is rounded to one of BUCKETS_PER_OCTAVE buckets per octave. So executors of the same hardware share a bucket,
  and a candidate group, although their measurements differ.
- The bucket is at most one step from the newest reading. A reading within one step does not change the bucket.

Example, in tokens a second
    a reading of 1000  -> the bucket of 1024
    950, 1080, 1100    -> still 1024: readings from 861 to 1218 are within a step
    500                -> 512
"""

import math
from dataclasses import dataclass
from functools import cache

from rose.schemas.heartbeats import SlackHeartbeat

BUCKETS_PER_OCTAVE = 4
"""Rate buckets per octave. One step is 19 %, the largest error of a cost; the number of tokens that a turn will
generate is known far less exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class RateBucket:
    """A rounded rate. Equal rates share one object, so buckets are compared by identity."""

    token_seconds: float
    """Seconds of a token (or step) at this rate."""
    min_rate: float
    """Least reading, in tokens a second, that keeps this bucket."""
    max_rate: float
    """Greatest reading, in tokens a second, that keeps this bucket."""


def rate_bucket(rate: float, previous: RateBucket | None) -> RateBucket:
    """The bucket after a reading of `rate` (tokens or steps a second), which must be positive.

    `previous`: the bucket before the reading; None at the first reading.
    """
    if previous is not None and previous.min_rate <= rate <= previous.max_rate:
        return previous
    return _bucket(round(BUCKETS_PER_OCTAVE * math.log2(rate)))


@cache
def _bucket(number: int) -> RateBucket:
    """The bucket of this number. The rates that a heartbeat may report have some two hundred buckets."""
    below, rate, above = (2.0 ** ((number + away) / BUCKETS_PER_OCTAVE) for away in (-1, 0, 1))
    return RateBucket(1.0 / rate, below, above)


def engine_step_rate(heartbeat: SlackHeartbeat) -> float:
    """Steps a second that the executor's engine would take if its steps had no tokens.

    The decode rate in a heartbeat was measured with `rollout.running` turns, each with one token in every step. A step
    is taken to last at least as long as one token, so the result is positive for any measurement.
    """
    hardware = heartbeat.hardware
    token_seconds = 1.0 / hardware.prefill_tokens_per_second
    seconds = 1.0 / hardware.decode_tokens_per_second - max(1, heartbeat.rollout.running) * token_seconds
    return 1.0 / max(seconds, token_seconds)


TURN_BUCKETS_PER_OCTAVE = 2
"""Turn buckets per octave: for example, executors with 10 to 13 turns share a bucket."""


@cache
def turn_bucket(turns: int) -> float:
    """The number of turns that an executor holds, rounded to a turn bucket; 0 for no turns."""
    return 2.0 ** (round(TURN_BUCKETS_PER_OCTAVE * math.log2(turns)) / TURN_BUCKETS_PER_OCTAVE) if turns > 0 else 0.0
