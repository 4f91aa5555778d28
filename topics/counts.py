"""What a process counts of its talk with the bus. `topics/metrics.py` exports it; who looks at a log needs no more.

Keeps true: a topic is named as in the catalog, not as in a run.
"""

from collections.abc import Mapping
from functools import cache
from threading import Lock

from rose.topics.catalog import Topic


class Count:
    """Only grows. Any thread."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = Lock()
        self.value = 0

    def inc(self) -> None:
        with self._lock:
            self.value += 1


WRITTEN: dict[str, Count] = {}
READ: dict[str, Count] = {}
DEAD_LETTERS: dict[str, Count] = {}


@cache
def written(topic: Topic) -> Count:
    """Records of this topic that the broker has stored; found once."""
    return WRITTEN.setdefault(topic.name, Count())


@cache
def read(topic: Topic) -> Count:
    """Records of it that readers have handed out."""
    return READ.setdefault(topic.name, Count())


@cache
def dead_letters(topic: Topic) -> Count:
    """Dead letters stored that lay in it."""
    return DEAD_LETTERS.setdefault(topic.name, Count())


def values(counts: Mapping[str, Count]) -> list[tuple[str, int]]:
    """By topic, as of now."""
    return [(topic, count.value) for topic, count in list(counts.items())]
