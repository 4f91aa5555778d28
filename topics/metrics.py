"""Prometheus metrics of the bus, which every role exports, and the registration of a role's own metrics.

Keeps true
- The label of a topic is its name in the catalog, without the namespace of a run.
- A process exports only the metrics of its own role. Roles may be forked from one process that has imported all role
  modules, so each module declares its metrics in a registry of its own. The registry is registered while the role runs,
  so stale values are not exported.
"""

from functools import cache

from prometheus_client import REGISTRY, Counter
from prometheus_client.registry import Collector

from rose.topics.catalog import Topic

WRITTEN = Counter("rose_bus_written_records", "Records that the broker has stored, by topic.", ["topic"])
READ = Counter("rose_bus_read_records", "Records handed out by readers, by topic.", ["topic"])
DEAD_LETTERS = Counter("rose_bus_dead_letters", "Dead letters stored, by the topic of the message.", ["topic"])


@cache  # `labels` would take longer than the count itself
def counter_of(counter: Counter, topic: Topic) -> Counter:
    """Return one of these counters for a topic; from now on the process exports it, beginning with 0."""
    return counter.labels(topic.name)


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
