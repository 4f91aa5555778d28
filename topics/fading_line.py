"""A line that is fitted online by least squares over an exponentially fading past.

Keeps true
- The line is `base + slope * x`. Both terms are at least `least`, so every rate derived from them is finite.
- A point makes the slope forget only as much as the point tells about the slope. Points of similar `x` differ by noise:
  the slope of points that differ more is kept until the next such points.

Pure. Example: the points (10, 3) and (110, 13) -> base 2, slope 0.1.
"""

FADING = 0.98
"""Factor by which each point fades the weight of the points before: about the last 50 points count."""

SLOPE_FADING = 0.998
"""The fading of the slope by points that tell nothing about the slope: half of the weight is left after 350 points."""


class FadingLine:
    """An online fit of `y` against `x`, both at least 0."""

    __slots__ = ("_covered", "_weight", "base", "least", "mean_x", "mean_y", "slope", "spread")

    def __init__(self, base: float, slope: float, least: float) -> None:
        """`base`, `slope`: the line before any point. `least`: lower bound of both terms."""
        self.base = base
        self.slope = slope
        self.least = least
        self.mean_x = self.mean_y = 0.0
        """Fading means."""
        self.spread = 0.0
        """Sum, over distances from the means at the time, of x squared. Each point fades this sum and `_covered` in
        proportion to what the point adds to it."""
        self._covered = 0.0
        """Sum of the same distances, x times y."""
        self._weight = 0.0
        """Effective number of recent points."""

    def add(self, x: float, y: float) -> None:
        """Take a point."""
        before = FADING * self._weight
        weight = self._weight = before + 1.0
        more_x, more_y = x - self.mean_x, y - self.mean_y
        self.mean_x += more_x / weight
        self.mean_y += more_y / weight
        information = before / weight * more_x * more_x
        share = information * weight / self.spread if self.spread else 1.0
        fading = min(max(FADING, 1.0 - (1.0 - FADING) * share), SLOPE_FADING)
        self.spread = fading * self.spread + information
        self._covered = fading * self._covered + before / weight * more_x * more_y
        if self.spread > 1e-6 * self.mean_x * self.mean_x:  # points of one x alone say nothing about the slope
            slope = min(self._covered / self.spread, self.mean_y / self.mean_x)  # the base is not below 0
            self.slope = max(slope, self.least)
        self.base = max(self.mean_y - self.slope * self.mean_x, self.least)

    def at(self, x: float) -> float:
        """The fitted `y` at `x`."""
        return self.base + self.slope * x
