"""Prometheus metrics of the bus, which every role exports, and the registration of a role's own metrics.

Keeps true
- A process exports only the metrics of its own role. Roles may be forked from one process that has imported all role
  modules, so each module declares its metrics in a registry of its own. The registry is registered while the role runs,
  so stale values are not exported.
"""

from collections.abc import Iterable

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.topics import counts


class BusCollector(Collector):
    """Exports the counts of `topics/counts.py`."""

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape, on the thread of the metrics server."""
        counted = counts.WRITTEN, counts.READ, counts.DEAD_LETTERS
        for family, by_topic in zip(self.describe(), counted, strict=True):
            for topic, value in counts.values(by_topic):
                family.add_metric([topic], value)
            yield family

    @staticmethod
    def describe() -> tuple[CounterMetricFamily, CounterMetricFamily, CounterMetricFamily]:
        """Empty metric families, which `collect` fills."""
        topic = ["topic"]
        return (
            CounterMetricFamily(
                "rose_bus_written_records", "Records that the broker has stored, by topic.", labels=topic
            ),
            CounterMetricFamily("rose_bus_read_records", "Records handed out by readers, by topic.", labels=topic),
            CounterMetricFamily(
                "rose_bus_dead_letters", "Dead letters stored, by the topic of the message.", labels=topic
            ),
        )


REGISTRY.register(BusCollector())

_registered: set[Collector] = set()


def register(collector: Collector) -> None:
    """Export these metrics from now on. Does nothing if they are registered already."""
    if collector not in _registered:
        REGISTRY.register(collector)
        _registered.add(collector)


def unregister(collector: Collector) -> None:
    """Stop exporting these metrics until they are registered again."""
    if collector in _registered:
        REGISTRY.unregister(collector)
        _registered.remove(collector)
