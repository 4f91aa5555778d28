"""A log in a file: the records that a replay of decisions reads, with their places.

`python -m tests.support.captured_log RUN FILE` captures the log of the ended run in runs/RUN. `demo_log.xz` is the log
of a small demo on the embedded broker:

    rose demo --name captured --set tasks.steps=3 --set tasks.group_size=4 --set trainer.groups_per_step=4 \\
        --set environment.window_groups=8 --set run.executors=2 --set run.lenders=0 --set tasks.held_out=16
    python -m tests.support.captured_log captured demo_log.xz
"""

import lzma
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log
from rose.schemas.journal import CoreJournal
from rose.schemas.wire import decode
from rose.topics.catalog import (
    COMPLETED,
    DISPATCHED,
    GRANTS,
    HEARTBEATS,
    JOURNAL,
    RECORD_TOPICS,
    REQUESTED,
    SUMMARIES,
    Topic,
)
from rose.topics.log_reader import read_keyed_messages, topic_starts
from rose.topics.records import Envelope, Place, RawMessage
from rose.topics.settings import BusSettings

CAPTURED = (REQUESTED, DISPATCHED, COMPLETED, HEARTBEATS, SUMMARIES, GRANTS, JOURNAL)


DEMO_LOG = Path(__file__).with_name("demo_log.xz")


class CapturedMessage(msgspec.Struct, array_like=True):
    """One message of the log."""

    topic: str
    partition: int
    offset: int
    key: str
    value: bytes | None


def capture(settings: BusSettings, file: Path) -> None:
    """Write the messages of the topics that a replay of decisions reads to the file."""
    starts = topic_starts(settings, CAPTURED)
    found = [
        CapturedMessage(each.topic.name, each.partition, each.offset, each.key, each.raw.value)
        for each in read_keyed_messages(settings, starts)
    ]
    found.sort(key=lambda each: (each.topic, each.partition, each.offset))
    file.write_bytes(lzma.compress(msgspec.msgpack.encode(found)))


class CapturedLog:
    """The records of such a file; a `RecordSource`."""

    def __init__(self, file: Path = DEMO_LOG) -> None:
        topics: dict[str, Topic] = {topic.name: topic for topic in RECORD_TOPICS}
        messages = msgspec.msgpack.decode(lzma.decompress(file.read_bytes()), type=list[CapturedMessage])
        self._found = {(topics[each.topic], each.partition, each.offset): each for each in messages}

    def drop(self, topic: Topic, partition: int, before: int) -> None:
        """Drop the messages of a partition before an offset, as retention does."""
        self._found = {
            place: each
            for place, each in self._found.items()
            if (place[0], place[1]) != (topic, partition) or place[2] >= before
        }

    def journals(self) -> Iterator[CoreJournal]:
        for topic, partition, offset in self._found:
            record = self._envelope(topic, partition, offset).record if topic is JOURNAL else None
            if isinstance(record, CoreJournal):
                yield record

    def fetch(self, places: Mapping[Place, Sequence[int]]) -> Iterator[Envelope]:
        for (topic, partition), offsets in places.items():
            for offset in sorted(offsets):
                if (topic, partition, offset) in self._found:
                    yield self._envelope(topic, partition, offset)

    def first_offsets(self, places: Sequence[Place]) -> dict[Place, int]:
        return {
            place: min((offset for topic, part, offset in self._found if (topic, part) == place), default=0)
            for place in places
        }

    def _envelope(self, topic: Topic, partition: int, offset: int) -> Envelope:
        message = self._found[topic, partition, offset]
        assert topic.record is not None
        record = None if message.value is None else decode(topic.record, message.value)
        raw = RawMessage(message.key.encode(), message.value)
        return Envelope(record, topic, partition, offset, message.key, 0.0, raw)


if __name__ == "__main__":
    with readable_log(load(Common(run=sys.argv[1]))) as bus:
        capture(bus, Path(sys.argv[2]))
