"""Counts of the records that this process writes and reads. `topics/metrics.py` exports them to Prometheus.

Keeps true: counts use the names of the catalog, without the namespace of a run.
"""

from collections.abc import Mapping
from functools import cache
from threading import Lock

from rose.topics.catalog import Topic


class Count:
    """A counter that any thread may increment."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = Lock()
        self.value = 0

    def inc(self) -> None:
        """Add one. Any thread may call this."""
        with self._lock:
            self.value += 1


WRITTEN: dict[str, Count] = {}
READ: dict[str, Count] = {}
DEAD_LETTERS: dict[str, Count] = {}


@cache
def written(topic: Topic) -> Count:
    """The count of this topic's records that this process wrote and the broker has stored."""
    return WRITTEN.setdefault(topic.name, Count())


@cache
def read(topic: Topic) -> Count:
    """The count of this topic's messages that readers of this process have returned."""
    return READ.setdefault(topic.name, Count())


@cache
def dead_letters(topic: Topic) -> Count:
    """The count of dead letters of this topic that this process wrote and the broker has stored."""
    return DEAD_LETTERS.setdefault(topic.name, Count())


def values(counts: Mapping[str, Count]) -> list[tuple[str, int]]:
    """The present values by topic."""
    return [(topic, count.value) for topic, count in list(counts.items())]
