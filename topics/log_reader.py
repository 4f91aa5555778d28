"""Bounded reads of the log: the committed messages of a topic from an offset to the present end, decoded or raw.

Keeps true
- Only committed records are returned, in order within a partition, and reading ends by itself.
- A message that does not decode is skipped unless the caller asks for it: the consumer of the topic writes the dead
  letter.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from rose.topics.catalog import LOG_GROUP, Topic
from rose.topics.errors import UNKNOWN_PARTITION_CODES, BusError, is_transient
from rose.topics.queries import missing_error, noop, watermarks_of
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, InvalidMessage, Place, RawMessage, raw_of
from rose.topics.settings import BusSettings, new_client

MESSAGE_BATCH = 500
"""Messages taken from librdkafka at once."""

MESSAGE_POLL_SECONDS = 0.5
"""Longest wait of one poll for messages."""

NamedPlace = tuple[str, int]
"""A topic's name on the broker, and one of its partitions."""


@dataclass(frozen=True, slots=True)
class KeyedMessage:
    """A message of a known topic with its place, not decoded."""

    topic: Topic
    partition: int
    offset: int
    key: str
    raw: RawMessage
    """A value of None is a tombstone: the key was deleted."""
    timestamp_seconds: float
    """Timestamp of the broker or the producer, unix seconds."""


def read_messages(
    settings: BusSettings,
    offsets: Mapping[NamedPlace, int],
    *,
    client_id: str,
    prefetch_settings: Mapping[str, object] = MappingProxyType({}),
    on_wait: Callable[[], None] = noop,
) -> Iterator[tuple[NamedPlace, int, RawMessage, float]]:
    """Place, offset, message and timestamp (unix seconds) of each committed message from these offsets on.

    `prefetch_settings`: librdkafka settings that bound the messages in memory. `on_wait` is called at least once a
    second, and every few seconds while a query has no answer from the broker; an exception of `on_wait` ends the
    reading. Raises TopicMissing or BusError.
    """
    consumer = new_client(
        Consumer,
        {
            **settings.for_bounded_reads().consumer(client_id, LOG_GROUP),
            "enable.partition.eof": True,
            **prefetch_settings,
        },
    )
    with closing(consumer):
        found = {place: _start_offset(consumer, place, offset, on_wait) for place, offset in offsets.items()}
        remaining = {place for place, begin in found.items() if begin is not None}
        consumer.assign([TopicPartition(*place, found[place]) for place in remaining])
        while remaining:
            on_wait()
            first = consumer.poll(MESSAGE_POLL_SECONDS)  # `consume` would wait until the batch is full
            for message in () if first is None else (first, *consumer.consume(MESSAGE_BATCH - 1, 0)):
                error, place = message.error(), (str(message.topic()), int(message.partition() or 0))
                if error is None:
                    if place in remaining:
                        yield place, int(message.offset() or 0), raw_of(message), message.timestamp()[1] / 1000
                elif error.code() == KafkaError._PARTITION_EOF:
                    remaining.discard(place)
                elif error.code() in UNKNOWN_PARTITION_CODES:
                    raise missing_error(consumer, *place)
                elif not is_transient(error):
                    action = "the log" if message.topic() is None else place[0]
                    rights = f"Read on topic {place[0]}", f"Describe on group {settings.name(LOG_GROUP)}"
                    raise BusError(f"reading {action}", error, *rights)
        consumer.unassign()  # no fetch is under way when the consumer closes then


def _start_offset(consumer: Consumer, place: NamedPlace, offset: int, on_wait: Callable[[], None]) -> int | None:
    """The offset at which to begin; None if the partition has no message from there on.

    Queried here, because librdkafka takes half a second to find a beginning.
    """
    low, high = watermarks_of(consumer, TopicPartition(*place), on_wait)
    begin = max(low, offset)
    return begin if begin < high else None


def read_keyed_messages(
    settings: BusSettings, offsets: Mapping[Place, int], *, client_id: str = "rose-log"
) -> Generator[KeyedMessage, None, None]:
    """The messages of these partitions from these offsets on. Raises TopicMissing or BusError."""
    named = {(settings.topic(topic), part): offset for (topic, part), offset in offsets.items()}
    topics = {settings.topic(topic): topic for topic, _ in offsets}
    for (name, part), offset, raw, stamp in read_messages(settings, named, client_id=client_id):
        key = raw.key.decode(errors="replace") if raw.key else ""
        yield KeyedMessage(topics[name], part, offset, key, raw, stamp)


def topic_starts(settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log") -> dict[Place, int]:
    """Every partition of these topics, from its beginning: for `read_keyed_messages`. Raises TopicMissing."""
    with closing(Reader(settings, client_id)) as reader:
        return {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partition_count(topic))}


BATCH = 500
"""Records taken from librdkafka at once."""

POLL_SECONDS = 0.5
"""Longest wait of one poll for records."""

OPEN_TRANSACTION_SECONDS = 60.0
"""How long a transaction may stay open. The broker aborts the transaction of a dead producer long before
(`transaction.timeout.ms`)."""

OPEN_TRANSACTION_POLL_SECONDS = 0.02
"""Pause between two checks of a partition with an open transaction."""


def read_to_end(
    settings: BusSettings,
    offsets: Mapping[Place, int],
    *,
    client_id: str = "rose-log",
    on_invalid: Callable[[InvalidMessage], None] = lambda found: None,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[Envelope]:
    """Every committed record from each place's offset to the end that the partition has when the reader arrives there.

    `on_invalid` is called with each message that does not decode. `on_wait` is called at least once a second, so the
    caller can, for example, keep a membership alive; an exception of `on_wait` ends the reading. Raises TopicMissing or
    BusError.
    """
    reader = Reader(settings.for_bounded_reads(), client_id, report_ends=True, on_wait=on_wait)
    open_places = set(offsets)
    try:
        reader.assign(offsets)
        while open_places:
            on_wait()
            for item in reader.read(BATCH, POLL_SECONDS):
                if isinstance(item, EndOfPartition):
                    open_places.discard((item.topic, item.partition))
                elif (item.topic, item.partition) not in open_places:
                    continue
                elif isinstance(item, InvalidMessage):
                    on_invalid(item)
                else:
                    yield item
    finally:
        reader.close()


def read_whole_topics(
    settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log"
) -> Iterator[Envelope]:
    """Every committed record that these topics still hold, in all partitions. Raises TopicMissing or BusError."""
    reader = Reader(settings, client_id)
    try:
        begins = {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partition_count(topic))}
    finally:
        reader.close()
    yield from read_to_end(settings, begins, client_id=client_id)


def await_transactions(
    settings: BusSettings,
    places: Sequence[Place],
    *,
    seconds: float = OPEN_TRANSACTION_SECONDS,
    client_id: str = "rose-log",
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every transaction that is open now in these partitions has been committed or aborted.

    A transaction counts as committed before the commit marker is in each of its partitions, so a successor waits for
    this before it reads the records of its predecessor. `on_wait`: as in `read_to_end`. Raises BusError if a
    transaction is still open after `seconds`.
    """
    committed = Reader(settings, client_id, on_wait=on_wait)
    uncommitted: dict[str, Any] = {"isolation.level": "read_uncommitted"}
    written = Reader(settings, client_id, on_wait=on_wait, **uncommitted)
    deadline = time.monotonic() + seconds
    try:
        ends = {place: end for place, (_, end) in written.all_watermarks(places).items()}
        while ends:
            decided = committed.all_watermarks(list(ends))
            ends = {place: end for place, end in ends.items() if decided[place][1] < end}
            if ends and time.monotonic() > deadline:
                topic, partition = next(iter(ends))
                ended = "kafka-transactions.sh find-hanging tells whose it is, and abort ends it"
                where = f"{settings.topic(topic)} [{partition}]"
                raise BusError(f"waiting for a transaction in {where} ({ended})", KafkaError(KafkaError._TIMED_OUT))
            if ends:
                on_wait()
                written.read(1, OPEN_TRANSACTION_POLL_SECONDS)
    finally:
        committed.close()
        written.close()
