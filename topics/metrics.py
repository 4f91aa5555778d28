"""What every role exports of its talk with the bus, and how a role comes to export more.

Keeps true
- A process exports what it is. Roles may be forked from one process that has imported all of them: so what a module
  declares is in a registry of its own, from when whoever it tells of begins until it ends: what nobody looks at any
  more is not told as if it were so.
"""

from collections.abc import Iterable

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.topics import counts


class BusCollector(Collector):
    """What the process has counted of its talk with the bus."""

    def collect(self) -> Iterable[Metric]:
        """Called by whoever serves the metrics, on a thread of its own."""
        counted = counts.WRITTEN, counts.READ, counts.DEAD_LETTERS
        for family, by_topic in zip(self.describe(), counted, strict=True):
            for topic, value in counts.values(by_topic):
                family.add_metric([topic], value)
            yield family

    @staticmethod
    def describe() -> tuple[CounterMetricFamily, CounterMetricFamily, CounterMetricFamily]:
        """What `collect` fills in."""
        topic = ["topic"]
        return (
            CounterMetricFamily(
                "rose_bus_written_records", "Records that the broker has stored, by topic.", labels=topic
            ),
            CounterMetricFamily("rose_bus_read_records", "Records handed out by readers, by topic.", labels=topic),
            CounterMetricFamily(
                "rose_bus_dead_letters", "Dead letters stored, by the topic that they lay in.", labels=topic
            ),
        )


REGISTRY.register(BusCollector())

_registered: set[Collector] = set()


def register(collector: Collector) -> None:
    """Have this process export these from here on."""
    if collector not in _registered:
        REGISTRY.register(collector)
        _registered.add(collector)


def unregister(collector: Collector) -> None:
    """Have it export these no more, until somebody does again."""
    if collector in _registered:
        REGISTRY.unregister(collector)
        _registered.remove(collector)
