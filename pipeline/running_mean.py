"""A running mean of measurements, whose first measurement replaces an assumed value. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class RunningMean:
    """The plain mean of the first 1 / `weight` measurements; from then on, the newest measurement has this weight."""

    value: float
    """The assumed value before the first measurement."""
    weight: float
    count: int = 0
    """Number of measurements."""

    def add(self, measured: float) -> None:
        """Add a measurement."""
        self.count = count = self.count + 1
        weight = self.weight
        self.value += (weight if count * weight > 1.0 else 1.0 / count) * (measured - self.value)
