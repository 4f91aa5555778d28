"""Serves the records of a run again, in the topics of a scratch namespace and at the pace at which they were written.

Keeps true
- A record keeps its topic, partition, key, value and headers, and the order within its partition. Its offset and the
  broker's timestamp are new.
- Records of different partitions are served in the order of their timestamps.
- Of each partition only a few records are in memory.
- Nothing is written to a namespace of which any topic has ever had a record, whichever topics are served. So a running
  job is never written to.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from rose.pipeline.replay.recorded_cores import CLIENT
from rose.schemas.errors import UsageError
from rose.topics.admin import create_topics
from rose.topics.catalog import CATALOG, RECORD_TOPICS, Partitions, PartitionSetting, Topic
from rose.topics.errors import TopicMissing
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Place, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

BUFFERED_RECORDS = 1_000
"""Records of a partition in memory after which the partition is paused. It goes on at half of them."""

READ_RECORDS = 500
READ_SECONDS = 0.2
"""Most records of one read, and its longest wait."""

POLL_SECONDS = 0.1
"""Longest pause between two looks whether to stop, and whether writes have failed."""


class TimedMessage(NamedTuple):
    """A message with its place and time."""

    at: float
    """Timestamp in unix seconds."""
    place: Place
    raw: RawMessage


@dataclass(slots=True)
class TimeMerge:
    """Merges messages of several partitions by their times. A time that goes back within a partition is kept in order.

    Example: a1 at 1, a2 at 3 and b1 at 2 come out as a1, b1, a2; before b1 or the end of b is known, only a1 does not.
    """

    open_places: set[Place]
    """Partitions of which more messages may come."""
    _waiting: dict[Place, deque[TimedMessage]] = field(default_factory=dict)

    def add(self, message: TimedMessage) -> None:
        """Add the next message of its partition."""
        self._waiting.setdefault(message.place, deque()).append(message)

    def end(self, place: Place) -> None:
        """Note that no more messages of this partition come."""
        self.open_places.discard(place)

    def waiting(self, place: Place) -> int:
        """Number of messages of the partition in memory."""
        return len(self._waiting.get(place, ()))

    def pop(self) -> TimedMessage | None:
        """The earliest message, once no partition can have an earlier one; None before that and at the end."""
        if not self._waiting or any(place not in self._waiting for place in self.open_places):
            return None
        first = min(self._waiting.values(), key=lambda messages: messages[0].at)
        message = first.popleft()
        if not first:
            del self._waiting[message.place]
        return message


class Pace(NamedTuple):
    """When messages are due."""

    first_at: float
    """Timestamp of the first message, in unix seconds."""
    began: float
    """When the first message was served, on the clock of `wait_seconds`."""
    speed: float

    def wait_seconds(self, at: float, now: float) -> float:
        """Seconds from `now` until the message with the timestamp `at` is due; negative if it is overdue."""
        return self.began + (at - self.first_at) / self.speed - now


def scratch_settings(source: BusSettings, namespace: str) -> BusSettings:
    """The settings of the scratch namespace on the same broker. Raises UsageError for the run's own namespace."""
    if namespace == source.namespace:
        raise UsageError(f"--serve {namespace or repr('')} is the run's own namespace: name another one")
    return BusSettings(source.bootstrap, namespace, source.properties, source.embedded, source.retention)


class RecordServer:
    """Serves the records of some topics between two times."""

    def __init__(self, source: BusSettings, target: BusSettings, topics: Sequence[Topic]) -> None:
        """Create the topics of the target. Raises UsageError if its namespace is used, TopicMissing or BusError."""
        self._source, self._target = source, target
        with closing(Reader(source, CLIENT)) as reader:
            counts = {topic: count for topic in topics if (count := _partitions(reader, topic))}
        self._places: list[Place] = [(topic, part) for topic, count in counts.items() for part in range(count)]
        if not self._places:
            raise UsageError("the log has none of these topics")
        _check_unused(target)
        create_topics(target, partitions_of(source))

    def serve(
        self,
        since: float,
        until: float,
        speed: float,
        *,
        on_progress: Callable[[int, int], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Serve the records with timestamps from `since` to `until`, in unix seconds, at `speed` times their pace.

        `on_progress` is called with the number of records that are served, and of all records that may be. Returns the
        number of records. Raises TopicMissing or BusError.
        """
        reader = Reader(self._source.for_bounded_reads(), CLIENT, report_ends=True)
        writer = Writer(self._target, CLIENT)
        with closing(reader), closing(writer):
            begins = reader.offsets_at(self._places, max(0.0, since))
            ends = reader.all_watermarks(self._places)
            total = sum(max(0, ends[place][1] - begin) for place, begin in begins.items())
            reader.assign(begins)
            served = self._pump(reader, writer, until, speed, lambda count: on_progress(count, total), should_stop)
            writer.flush()
        on_progress(served, served)
        return served

    def _pump(
        self,
        reader: Reader,
        writer: Writer,
        until: float,
        speed: float,
        on_progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> int:
        merge, paused, served = TimeMerge(set(self._places)), set[Place](), 0
        pace: Pace | None = None
        while not should_stop():
            message = merge.pop()
            if message is None:
                if not merge.open_places:
                    break
                paused = _balance(merge, reader, paused)
                _fill(merge, reader, until)
                continue
            pace = pace or Pace(message.at, time.monotonic(), speed)
            while (wait := pace.wait_seconds(message.at, time.monotonic())) > 0 and not should_stop():
                writer.poll(min(wait, POLL_SECONDS))
            if wait > 0:
                break  # it was asked to stop before the record was due
            topic, partition = message.place
            writer.forward(topic, message.raw, partition=partition, key=message.raw.key)
            writer.poll()
            served += 1
            on_progress(served)
        return served


def partitions_of(source: BusSettings) -> Partitions:
    """The numbers of partitions of the topics on a broker. Raises TopicMissing or BusError."""
    sample: Mapping[PartitionSetting, Topic] = {topic.partition_setting: topic for topic in reversed(RECORD_TOPICS)}
    with closing(Reader(source, CLIENT)) as reader:
        counts = {setting: reader.partition_count(topic) for setting, topic in sample.items()}
    return Partitions(
        home=counts[PartitionSetting.HOME],
        slots=counts[PartitionSetting.SLOTS],
        samples=counts[PartitionSetting.SAMPLES],
        chunks=counts[PartitionSetting.CHUNKS],
        cells=counts[PartitionSetting.CELLS],
    )


def _partitions(reader: Reader, topic: Topic) -> int:
    """Number of partitions; 0 if the log, of an earlier version, lacks the topic."""
    try:
        return reader.partition_count(topic)
    except TopicMissing:
        return 0


def _check_unused(target: BusSettings) -> None:
    """Raise UsageError if a topic of the namespace has records, or had some that are deleted."""
    with closing(Reader(target, CLIENT)) as reader:
        places = [(topic, part) for topic in CATALOG for part in range(_partitions(reader, topic))]
        for (topic, _), (_, end) in reader.all_watermarks(places).items():
            if end:
                raise UsageError(f"{target.topic(topic)} has or had records: name a namespace that has never had any")


def _fill(merge: TimeMerge, reader: Reader, until: float) -> None:
    for item in reader.read(READ_RECORDS, READ_SECONDS):
        place = item.topic, item.partition
        if place not in merge.open_places:
            continue
        if isinstance(item, EndOfPartition):
            merge.end(place)
            continue
        if item.timestamp_seconds > until:
            merge.end(place)
            reader.pause([place])
        else:
            merge.add(TimedMessage(item.timestamp_seconds, place, item.raw))


def _balance(merge: TimeMerge, reader: Reader, paused: set[Place]) -> set[Place]:
    """Pause the partitions with many records in memory and resume those with few; return the paused ones."""
    full = {place for place in merge.open_places if merge.waiting(place) >= BUFFERED_RECORDS}
    low = {place for place in paused & merge.open_places if merge.waiting(place) <= BUFFERED_RECORDS // 2}
    reader.pause(full - paused)
    reader.resume(low)
    return (paused | full) - low
