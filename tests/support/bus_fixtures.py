"""Fixtures for tests of readers and writers: topics with few partitions, and messages of any client."""

import time
from collections.abc import Sequence

from rose.topics.admin import create_topics
from rose.topics.catalog import PROMPTS, Partitions
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Item, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

WAIT_SECONDS = 60.0
HOMES = 2
PARTITIONS = Partitions(home=HOMES, slots=1, samples=1, chunks=1)
BAD = b"{ no prompt"


def with_topics(settings: BusSettings) -> BusSettings:
    """Create all topics and return the same settings."""
    create_topics(settings, PARTITIONS)
    return settings


def put(settings: BusSettings, values: Sequence[bytes], *, partition: int = 0) -> None:
    """Produce messages in order, as any client would."""
    writer = Writer(settings, "test")
    for value in values:
        writer.forward(
            PROMPTS, RawMessage(b"own key", value, (("from", b"elsewhere"),)), partition=partition, key=b"own key"
        )
    writer.flush()


def read_until(reader: Reader, count: int) -> list[Item]:
    found: list[Item] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += [item for item in reader.read(100, 0.2) if not isinstance(item, EndOfPartition)]
    return found
