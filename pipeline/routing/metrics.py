"""What the router exports to Prometheus. Counts are read from the core when they are asked for, not kept twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.routing.counters import Counters
from pipeline.routing.liveness import Standing
from pipeline.routing.router import Router
from pipeline.routing.seat import Seat
from pipeline.routing.skew import Skews
from topics.metrics import export

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

ROUTER = CollectorRegistry()
"""What a router exports beside its core's counts, once it has begun."""

DISPATCH_SECONDS = Histogram(
    "rose_router_dispatch_seconds",
    "How long a turn waited for room before a dispatch.",
    buckets=SECONDS,
    registry=ROUTER,
)
BATCH_SECONDS = Histogram(
    "rose_router_batch_seconds", "Deciding on one batch of records.", buckets=SECONDS, registry=ROUTER
)

COUNTS = {
    "requested": ("turns_requested", "Turns taken in."),
    "finished": ("turns_finished", "Turns completed."),
    "failed": ("turns_failed", "Turns given up: attempts or patience ran out."),
    "dispatched": ("dispatches", "Dispatches written."),
    "reissued": ("turns_reissued", "Times that a turn waited again."),
    "late": ("late_results", "Results of executions that no longer mattered."),
    "duplicate": ("duplicate_requests", "Requests for turns already known."),
    "lost": ("lost_dispatches", "Dispatches that a living executor did not hold."),
    "torn": ("turns_torn", "Times that a turn waited for an anchor: its context could not be read back."),
    "overtaken": ("turns_overtaken", "Turns finished by the request for the next one."),
}
"""Of each of the core's counts, what it is called here and what it means."""


class Reigning(Protocol):
    """What a router has for each cell that it serves."""

    router: Router
    skews: Skews

    @property
    def clock(self) -> Callable[[], float]:
        """The router's own: what has waited is measured by it."""


class Serving(Protocol):
    """A router."""

    @property
    def cells(self) -> int:
        """How many there are."""

    @property
    def reigns(self) -> Mapping[Seat, Reigning]:
        """Of the cells that it serves now."""


class RouterCollector(Collector):
    """Reads a router's counts at the moment of a scrape; of cells that another router serves there are none."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def collect(self) -> Iterable[Metric]:
        serves, cells, *others = self.describe()
        reigns = self._serving.reigns
        serves.add_metric([], len(reigns))
        cells.add_metric([], self._serving.cells)
        yield from (serves, cells)
        families = {family.name: family for family in others}
        for seat, reign in reigns.items():
            self._collect(families, str(seat.cell), reign)
        yield from others

    @staticmethod
    def _collect(families: Mapping[str, CounterMetricFamily | GaugeMetricFamily], cell: str, reign: Reigning) -> None:
        router = reign.router
        for counter in fields(Counters):
            families[f"rose_router_{COUNTS[counter.name][0]}"].add_metric(
                [cell], getattr(router.counters, counter.name)
            )
        families["rose_router_waiting_turns"].add_metric([cell], len(router.waiting))
        families["rose_router_oldest_waiting_seconds"].add_metric([cell], _oldest_seconds(router, reign.clock()))
        families["rose_router_outstanding_turns"].add_metric([cell], router.outstanding)
        executors = list(router.liveness.executors.values())
        found = Counter(executor.standing for executor in executors)
        for standing in Standing:
            families["rose_router_executors"].add_metric([cell, standing.value], found[standing])
        families["rose_router_policy_version"].add_metric([cell], router.liveness.current_version)
        behind = dict(reign.skews.seconds)
        for executor in executors:
            if executor.standing is not Standing.GONE and executor.worker in behind:
                families["rose_router_clock_behind_seconds"].add_metric(
                    [cell, executor.worker], behind[executor.worker]
                )

    @staticmethod
    def describe() -> list[CounterMetricFamily | GaugeMetricFamily]:
        """What `collect` fills in; the first two of them are there whether it serves or not."""
        counters = (
            CounterMetricFamily(f"rose_router_{name}", meaning, labels=["cell"]) for name, meaning in COUNTS.values()
        )

        def gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"rose_router_{name}", meaning, labels=["cell", *labels])

        return [
            GaugeMetricFamily("rose_router_serves", "Cells that this router serves; 0 while it waits for one."),
            GaugeMetricFamily("rose_router_cells", "Cells that there are, whoever serves them."),
            *counters,
            gauge("waiting_turns", "Turns that wait for room."),
            gauge("oldest_waiting_seconds", "How long the one that waits longest has waited."),
            gauge("outstanding_turns", "Turns that executors hold."),
            gauge("executors", "Executors by standing.", "standing"),
            gauge("policy_version", "The newest that is served; -1 for none."),
            gauge("clock_behind_seconds", "How far the clock of an executor is behind.", "worker"),
        ]


def _oldest_seconds(router: Router, now: float) -> float:
    queued = [turn.queued_at for turn in list(router.waiting.turns.values())]
    return max(0.0, now - min(queued)) if queued else 0.0


@contextmanager
def exported(serving: Serving) -> Iterator[None]:
    """Export what this router counts, for as long as this runs."""
    export(ROUTER)
    collector = RouterCollector(serving)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
