"""A histogram of latencies with buckets of equal relative width.

Keeps true: a percentile is off by at most half of `WIDTH`, relative to its value, however many values were added.
"""

import math
from collections import defaultdict

WIDTH = 0.01
"""Relative width of a bucket."""

LEAST_SECONDS = 1e-6
"""Shorter latencies count as this."""

_SCALE = 1.0 / math.log1p(WIDTH)


class LatencyHistogram:
    """Weighted latencies, in seconds."""

    def __init__(self) -> None:
        self.count = 0.0
        """Sum of the weights."""
        self.total_seconds = 0.0
        self._buckets: defaultdict[int, float] = defaultdict(float)

    def add(self, seconds: float, weight: float = 1.0) -> None:
        """Add a latency that occurred `weight` times."""
        self.count += weight
        self.total_seconds += weight * seconds
        self._buckets[int(math.log(max(seconds, LEAST_SECONDS)) * _SCALE // 1)] += weight

    def merge(self, other: "LatencyHistogram") -> None:
        """Add all latencies of another histogram."""
        self.count += other.count
        self.total_seconds += other.total_seconds
        for bucket, weight in other._buckets.items():
            self._buckets[bucket] += weight

    def mean(self) -> float:
        """Return the mean in seconds; 0 without latencies."""
        return self.total_seconds / self.count if self.count else 0.0

    def percentile(self, share: float) -> float:
        """Return the latency that `share` (0 to 1) of all latencies do not exceed, in seconds; 0 without latencies."""
        left = share * self.count * (1.0 - 1e-12)  # so that a rounding error does not reach into the next bucket
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return math.exp((bucket + 0.5) / _SCALE)
        return 0.0
