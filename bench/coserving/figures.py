"""Figures of request windows: percentiles over requests, medians over windows, and the resolution of ratios.

Keeps true
- A failed request has no latency and misses every budget: the attainment counts it, percentiles do not.
- A ratio is resolved only if its distance from 1 is larger than the distance of `again` from `alone`.

Pure: times are seconds on any one clock of the caller.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rose.workers.loadgen.requests import StreamedCompletion


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of one answered request."""

    ttft: float
    """Seconds from the time at which the request was due to its first token."""
    tpot: float | None
    """Mean seconds between its tokens; None for a single token."""


def latency(due: float, moments: Sequence[float], counts: Sequence[int]) -> Latency:
    """Return the latency of a request whose tokens arrived at these times, `counts` tokens each; at least one token
    arrived.
    """
    after_first = sum(counts) - 1
    return Latency(moments[0] - due, (moments[-1] - moments[0]) / after_first if after_first else None)


def engine_seconds(answer: StreamedCompletion) -> float:
    """Return the seconds from the scheduler's queue to the last token."""
    return answer.queue_seconds + answer.prefill_seconds + answer.decode_seconds


def outside_seconds(answer: StreamedCompletion) -> float:
    """Return the part of the time to first token that is neither queue nor prefill, in seconds.

    This part is HTTP, and the time until the scheduler has the request.
    """
    return answer.moments[0] - answer.sent - answer.queue_seconds - answer.prefill_seconds


def attainment(values: Sequence[float], budget: float, *, failed: int) -> float:
    """Return the share of the requests within a budget; 1 without requests."""
    requests = len(values) + failed
    return sum(value <= budget for value in values) / requests if requests else 1.0


def covered(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the share of the time from start to end that lies in at least one interval."""
    total, reached = 0.0, start
    for low, high in sorted(intervals):
        low, high = max(low, reached), min(high, end)
        if high > low:
            total += high - low
            reached = high
    return total / (end - start)


@dataclass(frozen=True, slots=True)
class Summary:
    """A figure over the windows of an arm."""

    median: float
    low: float
    high: float
    windows: int


def summary(values: Sequence[float]) -> Summary:
    """Return median and range; windows in which the figure was not measured (NaN) are left out."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Summary(math.nan, math.nan, math.nan, 0)
    return Summary(statistics.median(known), min(known), max(known), len(known))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of an arm relative to serving alone."""

    value: float
    resolution: float
    """Distance of the arm `again` from `alone`, as a share; NaN if it was not measured."""

    @property
    def resolved(self) -> bool:
        return abs(self.value - 1) > self.resolution


def ratio(arm: float, alone: float, again: float) -> Ratio:
    """Return the ratio; NaN if `alone` is 0 or was not measured."""
    if not alone:
        return Ratio(math.nan, math.nan)
    return Ratio(arm / alone, abs(again / alone - 1))


def harvest(guest: float, guest_alone: float, busy: float) -> float:
    """Return guest tokens a second, as a share of a lone guest's throughput in the time that serving leaves idle."""
    left = guest_alone * (1 - busy)
    return guest / left if left > 0 else math.nan
