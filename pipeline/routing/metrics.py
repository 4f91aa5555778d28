"""What the router exports to Prometheus. Counts are read from the core when they are asked for, not kept twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Protocol

from prometheus_client import REGISTRY, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.routing.liveness import Standing
from pipeline.routing.router import Counters, Router
from pipeline.routing.skew import Skews

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

DISPATCH_SECONDS = Histogram(
    "rose_router_dispatch_seconds", "How long a turn waited for room before a dispatch.", buckets=SECONDS
)
BATCH_SECONDS = Histogram("rose_router_batch_seconds", "Deciding on one batch of records.", buckets=SECONDS)

MEANINGS = {
    "requested": "Turns taken in.",
    "finished": "Turns completed.",
    "failed": "Turns given up: attempts or patience ran out.",
    "dispatched": "Dispatches written.",
    "reissued": "Times that a turn waited again.",
    "late": "Results of executions that no longer mattered.",
    "duplicate": "Requests for turns already known.",
    "lost": "Dispatches that a living executor did not hold.",
    "overtaken": "Turns finished by the request for the next one.",
}


class Serving(Protocol):
    """What a router has while it serves."""

    router: Router
    skews: Skews


class RouterCollector(Collector):
    """Reads a router's counts at the moment of a scrape; while another router serves there are none."""

    def __init__(self, serving: Callable[[], Serving | None]) -> None:
        self._serving = serving

    def collect(self) -> Iterable[Metric]:
        serving = self._serving()
        yield GaugeMetricFamily("rose_router_serves", "Whether this router has the seat.", serving is not None)
        if serving is None:
            return
        router = serving.router
        for counter in fields(Counters):
            value = getattr(router.counters, counter.name)
            yield CounterMetricFamily(f"rose_router_{counter.name}", MEANINGS[counter.name], value)
        yield GaugeMetricFamily("rose_router_waiting_turns", "Turns that wait for room.", len(router.waiting))
        yield GaugeMetricFamily("rose_router_outstanding_turns", "Turns that executors hold.", router.outstanding)
        executors = GaugeMetricFamily("rose_router_executors", "Executors by standing.", labels=["standing"])
        found = Counter(executor.standing for executor in list(router.liveness.executors.values()))
        for standing in Standing:
            executors.add_metric([standing.value], found[standing])
        yield executors
        version = router.liveness.current_version
        yield GaugeMetricFamily("rose_router_policy_version", "The newest that is served; -1 for none.", version)
        skews = GaugeMetricFamily("rose_router_clock_behind_seconds", "By executor.", labels=["worker"])
        for worker, seconds in list(serving.skews.seconds.items()):
            skews.add_metric([worker], seconds)
        yield skews


@contextmanager
def exported(serving: Callable[[], Serving | None]) -> Iterator[None]:
    """Export the counts of the router that serves at the moment, for as long as this runs."""
    collector = RouterCollector(serving)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
