"""Dashboards, panels and the queries that panels share.

Keeps true
- A fleet is shown as its mean and its worst member: the mean of a hundred engines hides one engine that is stalled.
- A query uses only metrics of the table, and selects no run: the reader selects it with the variable `$job`.
"""

from dataclasses import dataclass, field

RATE = "$__rate_interval"
"""The window of a rate, as Grafana chooses it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture."""

    title: str
    sentence: str
    """What it tells, and what is worth a look."""
    unit: str
    """Unit, by Grafana's name."""
    queries: dict[str, str]
    """Queries, by legend."""
    needs: str = ""
    """What a run must have besides a router, environment workers, executors and a trainer, to show anything."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    name: str
    """Name of the file; the dashboard's id is `rose-` and this name."""
    title: str
    panels: list[Panel] = field(default_factory=list)


LENDER = "a lending server"
CONTROL = f"{LENDER} and a control app"
SCRAPED = f"{LENDER} with users, which is scraped too"


def mean_and_worst(query: str, *, worst: str = "max") -> dict[str, str]:
    """The mean of a fleet and its worst."""
    return {"mean": f"avg({query})", "worst": f"{worst}({query})"}


def quantiles(histogram: str) -> dict[str, str]:
    """Median and the slowest in a hundred, of all processes."""
    buckets = f"sum by (le) (rate({histogram}_bucket[{RATE}]))"
    return {"p50": f"histogram_quantile(0.5, {buckets})", "p99": f"histogram_quantile(0.99, {buckets})"}


def each_mean(histogram: str) -> str:
    """The mean of what a histogram observed, of each process in which there was anything."""
    return f"rate({histogram}_sum[{RATE}]) / (rate({histogram}_count[{RATE}]) > 0)"


def rate_by(label: str, counter: str) -> dict[str, str]:
    """How fast a counter grows, by a label."""
    return {f"{{{{{label}}}}}": f"sum by ({label}) (rate({counter}[{RATE}]))"}
