"""Percentiles that are measured values: the nearest rank, without interpolation."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that `percent` of the values do not exceed; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
