"""What windows of requests amount to: percentiles over requests, medians over windows, and what can be told apart.

Keeps true
- A percentile is a value that was measured (nearest rank), never one between two.
- A failed request has no latency and misses every budget: it is in the attainment and in no percentile.
- A ratio is resolved only where its margin over 1 is larger than that of alone over alone again.

Pure: times are seconds on whatever clock the caller keeps.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rose.workers.loadgen.requests import StreamedCompletion


@dataclass(frozen=True, slots=True)
class Latency:
    """What one answered request waited."""

    ttft: float
    """Seconds from the moment at which it was due to its first token."""
    tpot: float | None
    """Mean seconds between its tokens; None where there was only one."""


def latency(due: float, moments: Sequence[float], counts: Sequence[int]) -> Latency:
    """Of a request whose tokens came `counts` at a time at these moments; at least one came."""
    after_first = sum(counts) - 1
    return Latency(moments[0] - due, (moments[-1] - moments[0]) / after_first if after_first else None)


def engine_seconds(answer: StreamedCompletion) -> float:
    """Seconds from the scheduler's queue to the last token."""
    return answer.queue_seconds + answer.prefill_seconds + answer.decode_seconds


def outside_seconds(answer: StreamedCompletion) -> float:
    """Seconds of the time to the first token that are neither queue nor prefill.

    These are HTTP, and the time until the scheduler has the request.
    """
    return answer.moments[0] - answer.sent - answer.queue_seconds - answer.prefill_seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of them do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def attainment(values: Sequence[float], budget: float, *, failed: int) -> float:
    """Share of the requests within a budget; 1 of none."""
    asked = len(values) + failed
    return sum(value <= budget for value in values) / asked if asked else 1.0


def covered(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Share of the time from start to end that lies in at least one interval."""
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
    """Median and range; of what was not measured in a window (NaN), as if that window had not been."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Summary(math.nan, math.nan, math.nan, 0)
    return Summary(statistics.median(known), min(known), max(known), len(known))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of an arm over that of serving alone."""

    value: float
    resolution: float
    """How far alone again is from alone, as a share; NaN where it was not measured."""

    @property
    def resolved(self) -> bool:
        return abs(self.value - 1) > self.resolution


def ratio(arm: float, alone: float, again: float) -> Ratio:
    """NaN where alone is 0 or was not measured."""
    if not alone:
        return Ratio(math.nan, math.nan)
    return Ratio(arm / alone, abs(again / alone - 1))


def harvest(guest: float, guest_alone: float, busy: float) -> float:
    """Guest tokens a second, as a share of what a guest alone makes in the time that serving leaves idle."""
    left = guest_alone * (1 - busy)
    return guest / left if left > 0 else math.nan
