"""The log read back: what is committed in a topic, from a place to its present end.

Keeps true
- Only committed records are seen, in order within a partition, and reading ends by itself.
- What does not decode is passed over: whoever consumes the topic puts it into the dead letters.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from topics.bus import EndOfPartition, Envelope, Place, Reader
from topics.catalog import Topic
from topics.errors import BusError, TopicMissing
from topics.settings import BusSettings

BATCH = 500
"""Records taken from librdkafka at once."""

DECIDED_SECONDS = 60.0
"""How long a transaction may stay open; the broker aborts those of the dead well before (`transaction.timeout.ms`)."""

DECIDED_POLL_SECONDS = 0.02
"""Pause between two looks at a partition with an open transaction."""


def read_back(
    settings: BusSettings,
    begins: Mapping[Place, int],
    *,
    client_id: str = "rose-log",
    group: str = "log",
    bury: bool = False,
) -> Iterator[Envelope]:
    """Every committed record from each place's offset to the end that it has when reading gets there.

    `bury`: for who consumes the topic, and may be the first to read there. Raises TopicMissing or BusError.
    """
    reader = Reader(settings, client_id, group=group, ends=True, bury=bury)
    open_places = set(begins)
    try:
        reader.assign(begins)
        while open_places:
            for item in reader.read(BATCH, 1.0):
                if isinstance(item, EndOfPartition):
                    open_places.discard((item.topic, item.partition))
                elif (item.topic, item.partition) in open_places:
                    yield item
    finally:
        reader.close()


def read_topics(settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log") -> Iterator[Envelope]:
    """Every committed record that these topics still hold, all partitions."""
    reader = Reader(settings, client_id, group="log")
    try:
        begins = {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partitions(topic))}
    finally:
        reader.close()
    yield from read_back(settings, begins, client_id=client_id)


def await_decided(
    settings: BusSettings, places: Sequence[Place], *, seconds: float = DECIDED_SECONDS, client_id: str = "rose-log"
) -> None:
    """Wait until every transaction in these partitions has been committed or aborted.

    A transaction counts as committed before each of its partitions says so: who takes over what another has written
    waits for this before it reads back. Raises BusError when one is still open after the time given.
    """
    committed = Reader(settings, client_id, group="log")
    uncommitted: dict[str, Any] = {"isolation.level": "read_uncommitted"}
    written = Reader(settings, client_id, group="log", **uncommitted)
    deadline = time.monotonic() + seconds
    try:
        for place in places:
            end = written.watermarks(place)[1]
            while committed.watermarks(place)[1] < end:
                if time.monotonic() > deadline:
                    where = f"{settings.topic(place[0])} [{place[1]}]"
                    raise BusError(f"waiting for a transaction in {where}", KafkaError(KafkaError._TIMED_OUT))
                written.read(1, DECIDED_POLL_SECONDS)
    finally:
        committed.close()
        written.close()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be used, as it came."""

    key: bytes | None
    value: bytes | None
    reason: str
    partition: int
    """Where it lay in its own topic."""
    offset: int


def read_dead_letters(
    settings: BusSettings, topic: Topic, *, client_id: str = "rose-dead-letters"
) -> Iterator[DeadLetter]:
    """Every committed dead letter of this topic, to the present end. The same record may be there twice.

    Raises TopicMissing or BusError.
    """
    name = f"{settings.namespace}{topic.dead_letters}"
    consumer = Consumer({**settings.consumer(client_id, "log"), "enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(name, 0, OFFSET_BEGINNING)])
        while True:
            for message in consumer.consume(BATCH, 1.0):
                error = message.error()
                if error is None:
                    headers = {key: value for key, value in message.headers() or () if isinstance(value, bytes)}
                    yield DeadLetter(
                        key=message.key(),
                        value=message.value(),
                        reason=headers.get("exception", b"").decode(errors="replace"),
                        partition=_number(headers.get("partition", b"")),
                        offset=_number(headers.get("offset", b"")),
                    )
                elif error.code() == KafkaError._PARTITION_EOF:
                    return
                elif error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                    raise TopicMissing(name)
                elif not error.retriable() and error.code() not in (
                    KafkaError._ALL_BROKERS_DOWN,
                    KafkaError._TRANSPORT,
                ):
                    raise BusError(f"reading {name}", error)
    finally:
        consumer.close()


def _number(header: bytes) -> int:
    """-1 for a header that is no offset: somebody else wrote this dead letter."""
    return int(header) if header.isdigit() else -1
