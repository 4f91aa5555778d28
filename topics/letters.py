"""Dead letters read back: what could not be used, as it came, with why and where it lay.

Keeps true: one that was written twice is handed out once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from topics.catalog import Topic
from topics.errors import BusError, TopicMissing
from topics.records import Raw, raw_of
from topics.settings import BusSettings
from topics.writer import ORIGIN_HEADERS

BATCH = 500
"""Letters taken from librdkafka at once."""

NOWHERE = -1
"""Partition and offset of a letter that somebody else wrote and that does not say where it comes from."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that could not be used."""

    topic: Topic
    partition: int
    """Where it lay in its own topic."""
    offset: int
    raw: Raw
    """As it came, under the key that it had there."""
    reason: str
    buried_at: float
    """Unix seconds."""


def read_letters(settings: BusSettings, topic: Topic, *, client_id: str = "rose-letters") -> Iterator[Letter]:
    """Every committed dead letter of this topic, oldest first, to the present end. Raises TopicMissing or BusError."""
    name = f"{settings.namespace}{topic.dead_letters}"
    consumer = Consumer({**settings.consumer(client_id, "log"), "enable.partition.eof": True})
    known: set[tuple[int, int]] = set()
    try:
        consumer.assign([TopicPartition(name, 0, OFFSET_BEGINNING)])
        while True:
            first = consumer.poll(1.0)  # `consume` would wait the whole second for a full batch
            for message in [first, *consumer.consume(BATCH, 0)] if first is not None else []:
                error = message.error()
                if error is None:
                    letter = _letter(topic, raw_of(message), message.timestamp()[1] / 1000)
                    place = letter.partition, letter.offset
                    if letter.partition == NOWHERE or place not in known:
                        known.add(place)
                        yield letter
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


def buried(settings: BusSettings, topic: Topic, *, client_id: str = "rose-letters") -> set[tuple[int, int]]:
    """Partition and offset of every message of the topic that is a dead letter. Raises TopicMissing or BusError."""
    return {(letter.partition, letter.offset) for letter in read_letters(settings, topic, client_id=client_id)}


def _letter(topic: Topic, found: Raw, buried_at: float) -> Letter:
    kept = tuple(header for header in found.headers if header[0] not in ORIGIN_HEADERS)
    return Letter(
        topic=topic,
        partition=_number(found.header("partition")),
        offset=_number(found.header("offset")),
        raw=Raw(found.header("key") or None, found.value, kept),
        reason=found.header("exception").decode(errors="replace"),
        buried_at=buried_at,
    )


def _number(header: bytes) -> int:
    return int(header) if header.isdigit() else NOWHERE
