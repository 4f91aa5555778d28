"""Dashboards and panels, the queries that panels share, and their form in Grafana's files.

Keeps true: a query uses only metrics of the table, and each metric is restricted to the jobs of the variable `$job`.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

RATE = "$__rate_interval"
"""The window of a rate, as Grafana chooses it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    sentence: str
    """Meaning of the panel, and values that deserve attention."""
    unit: str
    """Unit, by Grafana's name."""
    queries: dict[str, str]
    """Queries, by legend."""
    needs: str = ""
    """Processes that the panel needs besides a router, environment workers, executors and a trainer."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: panels on one page."""

    name: str
    """Name of the file; the dashboard's id is `rose-` and this name."""
    title: str
    panels: list[Panel] = field(default_factory=list)


LENDER = "a lending server"
CONTROL = f"{LENDER} and a control app"
SCRAPED = f"{LENDER} with users, whose own metrics are scraped too"


def mean_and_worst(query: str, *, worst: str = "max") -> dict[str, str]:
    """The mean of a fleet, and its worst member."""
    return {"mean": f"avg({query})", "worst": f"{worst}({query})"}


def quantiles(histogram: str) -> dict[str, str]:
    """The median and the 99th percentile over all processes."""
    buckets = f"sum by (le) (rate({histogram}_bucket[{RATE}]))"
    return {"p50": f"histogram_quantile(0.5, {buckets})", "p99": f"histogram_quantile(0.99, {buckets})"}


def each_mean(histogram: str) -> str:
    """The mean of the observations of a histogram, for each process that made any."""
    return f"rate({histogram}_sum[{RATE}]) / (rate({histogram}_count[{RATE}]) > 0)"


def rate_by(label: str, counter: str) -> dict[str, str]:
    """The growth of a counter per second, by a label."""
    return {f"{{{{{label}}}}}": f"sum by ({label}) (rate({counter}[{RATE}]))"}


NAME = re.compile(r"\b(?:rose_|vllm:)[a-z_]+(?![a-z_(])")
"""A metric in a query."""

WIDTH, HEIGHT, COLUMNS = 12, 8, 2
"""Size of a panel, and panels in a row, in Grafana's grid of 24 columns."""

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class UnknownMetric(ValueError):
    """A query uses a metric that no process exports."""


def names_in(query: str) -> set[str]:
    """The metrics that a query asks for."""
    return set(NAME.findall(query))


def filter_by_job(query: str, known: Collection[str]) -> str:
    """The query, restricted to the jobs that the reader chose. Raises UnknownMetric.

    Example: `rate(rose_x_total{kind="a"}[5m])` -> `rate(rose_x_total{job=~"$job",kind="a"}[5m])`.
    """
    if unknown := names_in(query) - set(known):
        raise UnknownMetric(f"{', '.join(sorted(unknown))} in {query}: no such metric in docs/reference/metrics.md")
    chosen = NAME.sub(lambda name: f'{name[0]}{{job=~"$job"}}', query)
    return chosen.replace('"$job"}{', '"$job",')


def as_json(dashboard: Dashboard, known: Collection[str]) -> dict[str, Any]:
    """The dashboard as Grafana's file. Raises UnknownMetric."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": f"rose-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["rose"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, _job_choice()]},
        "panels": [_panel(number, panel, known) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(number: int, panel: Panel, known: Collection[str]) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    needs = f" Needs {panel.needs}." if panel.needs else ""
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.sentence + needs,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": filter_by_job(query, known),
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _job_choice() -> dict[str, Any]:
    return {
        "name": "job",
        "label": "job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(rose_bus_read_records_total, job)", "refId": "jobs"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
