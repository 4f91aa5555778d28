"""What the router exports to Prometheus. Counts are read from the core when they are asked for, not kept twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.routing.liveness import Standing
from pipeline.routing.router import Counters, Router
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


class Serving(Protocol):
    """What a router has while it serves."""

    router: Router
    skews: Skews

    @property
    def clock(self) -> Callable[[], float]:
        """The router's own: what has waited is measured by it."""


class RouterCollector(Collector):
    """Reads a router's counts at the moment of a scrape; while another router serves there are none."""

    def __init__(self, serving: Callable[[], Serving | None]) -> None:
        self._serving = serving

    def collect(self) -> Iterable[Metric]:
        serves, *others = self.describe()
        serving = self._serving()
        serves.add_metric([], serving is not None)
        yield serves
        if serving is None:
            return
        families = {family.name: family for family in others}
        router = serving.router
        for counter in fields(Counters):
            families[f"rose_router_{COUNTS[counter.name][0]}"].add_metric([], getattr(router.counters, counter.name))
        families["rose_router_waiting_turns"].add_metric([], len(router.waiting))
        families["rose_router_oldest_waiting_seconds"].add_metric([], _oldest_seconds(router, serving.clock()))
        families["rose_router_outstanding_turns"].add_metric([], router.outstanding)
        executors = list(router.liveness.executors.values())
        found = Counter(executor.standing for executor in executors)
        for standing in Standing:
            families["rose_router_executors"].add_metric([standing.value], found[standing])
        families["rose_router_policy_version"].add_metric([], router.liveness.current_version)
        behind = dict(serving.skews.seconds)
        for executor in executors:
            if executor.standing is not Standing.GONE and executor.worker in behind:
                families["rose_router_clock_behind_seconds"].add_metric([executor.worker], behind[executor.worker])
        yield from others

    @staticmethod
    def describe() -> list[CounterMetricFamily | GaugeMetricFamily]:
        """What `collect` fills in; the first of them is there whether it serves or not."""
        return [
            GaugeMetricFamily("rose_router_serves", "Whether this router has the seat; of several one does."),
            *(CounterMetricFamily(f"rose_router_{name}", meaning) for name, meaning in COUNTS.values()),
            GaugeMetricFamily("rose_router_waiting_turns", "Turns that wait for room."),
            GaugeMetricFamily("rose_router_oldest_waiting_seconds", "How long the one that waits longest has waited."),
            GaugeMetricFamily("rose_router_outstanding_turns", "Turns that executors hold."),
            GaugeMetricFamily("rose_router_executors", "Executors by standing.", labels=["standing"]),
            GaugeMetricFamily("rose_router_policy_version", "The newest that is served; -1 for none."),
            GaugeMetricFamily(
                "rose_router_clock_behind_seconds", "How far the clock of an executor is behind.", labels=["worker"]
            ),
        ]


def _oldest_seconds(router: Router, now: float) -> float:
    queued = [turn.queued_at for turn in list(router.waiting.turns.values())]
    return max(0.0, now - min(queued)) if queued else 0.0


@contextmanager
def exported(serving: Callable[[], Serving | None]) -> Iterator[None]:
    """Export the counts of the router that serves at the moment, for as long as this runs."""
    export(ROUTER)
    collector = RouterCollector(serving)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
