"""A figure of a benchmark, and the bound that it is held against."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One figure and the bound it is held against."""

    name: str
    value: float
    unit: str
    bound: float
    direction: str
    """`min`: at least the bound; `max`: at most."""
    against: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.direction == "min" else self.value <= self.bound

    def __str__(self) -> str:
        relation = "at least" if self.direction == "min" else "at most"
        verdict = "met" if self.met else "MISSED"
        details = ", ".join(f"{name} {value}" for name, value in self.details.items())
        return f"{self.name:10} {self.value:12,.2f} {self.unit} ({relation} {self.bound:,g}: {verdict}); {details}"


@dataclass
class Section:
    """A part of a benchmark: its table, a row for each thing measured, and its checks."""

    name: str
    rows: list[dict[str, float | str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
