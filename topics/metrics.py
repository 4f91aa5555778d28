"""What every role exports of its talk with the bus. Keeps true: a topic is named as in the catalog, not as in a run."""

from functools import cache

from prometheus_client import Counter

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
    return READ.labels(topic.name)


@cache
def dead_letters(topic: Topic) -> Counter:
    return DEAD_LETTERS.labels(topic.name)
