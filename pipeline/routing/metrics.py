"""What the router exports to Prometheus. Counts are read from the core when they are asked for, not kept twice."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from prometheus_client import REGISTRY, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.routing.liveness import Standing
from pipeline.routing.router import Counters, Router

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

DISPATCH_SECONDS = Histogram(
    "rose_router_dispatch_seconds", "From a turn's request to its dispatch, waiting for room included.", buckets=SECONDS
)
BATCH_SECONDS = Histogram("rose_router_batch_seconds", "Deciding on one batch of records.", buckets=SECONDS)

MEANINGS = {
    "requested": "Turns taken in.",
    "finished": "Turns completed.",
    "failed": "Turns given up: attempts or deadline ran out.",
    "dispatched": "Dispatches written.",
    "reissued": "Attempts after a turn's first.",
    "late": "Results of executions that no longer mattered.",
    "duplicate": "Requests for turns already known.",
    "expired": "Dispatches whose lease ran out.",
    "overtaken": "Turns finished by the request for the next one.",
}


class RouterCollector(Collector):
    """Reads a router's counts at the moment of a scrape."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        for counter in fields(Counters):
            value = getattr(self._router.counters, counter.name)
            yield CounterMetricFamily(f"rose_router_{counter.name}", MEANINGS[counter.name], value)
        yield GaugeMetricFamily("rose_router_waiting_turns", "Turns that wait for room.", len(self._router.waiting))
        yield GaugeMetricFamily("rose_router_outstanding_turns", "Turns that executors hold.", self._router.outstanding)
        executors = GaugeMetricFamily("rose_router_executors", "Executors by standing.", labels=["standing"])
        found = Counter(executor.standing for executor in list(self._router.liveness.executors.values()))
        for standing in Standing:
            executors.add_metric([standing.value], found[standing])
        yield executors
        version = self._router.liveness.current_version
        yield GaugeMetricFamily("rose_router_policy_version", "The newest on the log; -1 before the first.", version)


@contextmanager
def exported(router: Router) -> Iterator[None]:
    """Export this router's counts for as long as it runs."""
    collector = RouterCollector(router)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
