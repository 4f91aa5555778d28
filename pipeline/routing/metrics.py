"""Prometheus metrics of the router. Counts are read from the core at each scrape and are not kept twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.pipeline.routing.counters import Counters
from rose.pipeline.routing.liveness import ClockSkews, ExecutorStatus
from rose.pipeline.routing.membership import CellOwnership
from rose.pipeline.routing.router import Router
from rose.topics.metrics import register

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

ROUTER_REGISTRY = CollectorRegistry()
"""Histograms of a router, in addition to the counts of its core."""

DISPATCH_SECONDS = Histogram(
    "rose_router_dispatch_seconds",
    "Time that a turn waited for room before its dispatch.",
    buckets=SECONDS,
    registry=ROUTER_REGISTRY,
)
BATCH_SECONDS = Histogram(
    "rose_router_batch_seconds", "Time to decide on one batch of records.", buckets=SECONDS, registry=ROUTER_REGISTRY
)

COUNTS = {
    "requested": ("turns_requested", "Turn requests accepted."),
    "finished": ("turns_finished", "Turns completed."),
    "failed": ("turns_failed", "Turns failed: attempts or patience ran out."),
    "withdrawn": ("turns_withdrawn", "Turns withdrawn because their trajectory ended early."),
    "dispatched": ("dispatches", "Dispatches written."),
    "reissued": ("turns_reissued", "Times that a turn was reissued."),
    "late": ("late_results", "Results of executions that were replaced."),
    "duplicate": ("duplicate_requests", "Requests for turns already known."),
    "lost": ("lost_dispatches", "Dispatches that a live executor did not list."),
    "context_missing": ("turns_torn", "Times that a turn waited for an anchor: its context could not be read back."),
    "overtaken": ("turns_overtaken", "Turns finished by the request for the next one."),
}
"""Name and description of the metric, by field of `Counters`."""


class CellMetricsSource(Protocol):
    """One cell session of a router."""

    router: Router
    clock_skews: ClockSkews

    @property
    def clock(self) -> Callable[[], float]:
        """The router's clock, in seconds."""


class RouterMetricsSource(Protocol):
    """A router, as the metrics read it."""

    @property
    def cells(self) -> int:
        """Number of cells of the run."""

    @property
    def sessions(self) -> Mapping[CellOwnership, CellMetricsSource]:
        """Sessions of the cells that the router serves now."""


class RouterCollector(Collector):
    """Reads a router's counts at each scrape, for the cells that this router serves."""

    def __init__(self, source: RouterMetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with their present values."""
        serves, cells, *others = self.describe()
        sessions = self._source.sessions
        serves.add_metric([], len(sessions))
        cells.add_metric([], self._source.cells)
        yield from (serves, cells)
        families = {family.name: family for family in others}
        for ownership, session in sessions.items():
            self._collect(families, str(ownership.cell), session)
        yield from others

    @staticmethod
    def _collect(
        families: Mapping[str, CounterMetricFamily | GaugeMetricFamily], cell: str, session: CellMetricsSource
    ) -> None:
        router = session.router
        for counter in fields(Counters):
            families[f"rose_router_{COUNTS[counter.name][0]}"].add_metric(
                [cell], getattr(router.counters, counter.name)
            )
        families["rose_router_waiting_turns"].add_metric([cell], len(router.queue))
        families["rose_router_oldest_waiting_seconds"].add_metric([cell], _oldest_seconds(router, session.clock()))
        families["rose_router_outstanding_turns"].add_metric([cell], router.outstanding)
        executors = list(router.liveness.executors.values())
        found = Counter(executor.status for executor in executors)
        for standing in ExecutorStatus:
            families["rose_router_executors"].add_metric([cell, standing.value], found[standing])
        families["rose_router_policy_version"].add_metric([cell], router.liveness.current_version)
        behind = dict(session.clock_skews.seconds)
        for executor in executors:
            if executor.status is not ExecutorStatus.GONE and executor.worker in behind:
                families["rose_router_clock_behind_seconds"].add_metric(
                    [cell, executor.worker], behind[executor.worker]
                )

    @staticmethod
    def describe() -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Empty metric families. The first two have a value also while the router serves no cell."""
        counters = (
            CounterMetricFamily(f"rose_router_{name}", meaning, labels=["cell"]) for name, meaning in COUNTS.values()
        )

        def gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"rose_router_{name}", meaning, labels=["cell", *labels])

        return [
            GaugeMetricFamily("rose_router_serves", "Cells that this router serves; 0 while it waits for one."),
            GaugeMetricFamily("rose_router_cells", "Cells of the run, whether or not this router serves them."),
            *counters,
            gauge("waiting_turns", "Turns that wait for room."),
            gauge("oldest_waiting_seconds", "Longest time that a turn has waited for room."),
            gauge("outstanding_turns", "Turns that are assigned to executors."),
            gauge("executors", "Executors by status.", "standing"),
            gauge("policy_version", "Newest policy version that an executor serves; -1 if none."),
            gauge("clock_behind_seconds", "Time by which the clock of an executor is behind the router's.", "worker"),
        ]


def _oldest_seconds(router: Router, now: float) -> float:
    queued = [turn.queued_at for turn in list(router.queue.turns.values()) if not turn.on_hold]
    return max(0.0, now - min(queued)) if queued else 0.0


@contextmanager
def export_metrics(source: RouterMetricsSource) -> Iterator[None]:
    """Export the metrics of a router for the duration of the context."""
    register(ROUTER_REGISTRY)
    collector = RouterCollector(source)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
