"""What every role exports of its talk with the bus, and how a role comes to export more.

Keeps true
- A topic is named as in the catalog, not as in a run.
- A process exports what it is. Roles may be forked from one process that has imported all of them: so what a module
  declares is in a registry of its own, from when whoever it tells of begins until it ends: what nobody looks at any
  more is not told as if it were so.
"""

from functools import cache

from prometheus_client import REGISTRY, Counter
from prometheus_client.registry import Collector

from topics.catalog import Topic

WRITTEN = Counter("rose_bus_written_records_total", "Records that the broker has stored, by topic.", ["topic"])
READ = Counter("rose_bus_read_records_total", "Records handed out by readers, by topic.", ["topic"])
DEAD_LETTERS = Counter("rose_bus_dead_letters_total", "Dead letters stored, by the topic that they lay in.", ["topic"])


@cache
def written(topic: Topic) -> Counter:
    """The count of this topic, found once."""
    return WRITTEN.labels(topic.name)


@cache
def read(topic: Topic) -> Counter:
    """The same, of what was read."""
    return READ.labels(topic.name)


@cache
def dead_letters(topic: Topic) -> Counter:
    """The same, of what was buried."""
    return DEAD_LETTERS.labels(topic.name)


_exported: set[Collector] = set()


def export(figures: Collector) -> None:
    """Have this process export these from here on."""
    if figures not in _exported:
        REGISTRY.register(figures)
        _exported.add(figures)


def withdraw(figures: Collector) -> None:
    """Have it export these no more, until somebody does again."""
    if figures in _exported:
        REGISTRY.unregister(figures)
        _exported.remove(figures)
