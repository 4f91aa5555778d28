"""Messages read back as they came, undecoded: for who looks for keys, or for bytes that are no record.

Keeps true: only what is committed is seen, in order within a partition, and reading ends by itself at the present end.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from topics.asking import NO_SUCH_PLACE, ends_of, missing, nothing
from topics.catalog import LOG_GROUP, Topic
from topics.clients import made
from topics.errors import BROKER_AWAY, BusError
from topics.reader import Reader
from topics.records import Place, Raw, raw_of
from topics.settings import BusSettings

BATCH = 500
"""Messages taken from librdkafka at once."""

LOOK_SECONDS = 0.5
"""How long one look for messages lasts."""

NamedPlace = tuple[str, int]
"""A topic's name on the broker, and one of its partitions."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """A message of a known topic with its place; what it holds is not looked at."""

    topic: Topic
    partition: int
    offset: int
    key: str
    raw: Raw
    """A value of None is a tombstone: the key has ended."""
    timestamp_seconds: float
    """When the broker or the producer stamped it, unix seconds."""


def read_messages(
    settings: BusSettings,
    begins: Mapping[NamedPlace, int],
    *,
    client_id: str,
    ahead: Mapping[str, object] = MappingProxyType({}),
    meanwhile: Callable[[], None] = nothing,
) -> Iterator[tuple[NamedPlace, int, Raw, float]]:
    """Place, offset, message and stamp (unix seconds) of all that is committed from these offsets on.

    `ahead`: librdkafka settings that say how much of it is held in memory. `meanwhile` is called at least once a
    second, and every few seconds while a question to the broker has no answer; what it raises ends the reading.
    Raises TopicMissing or BusError.
    """
    consumer = made(
        Consumer, {**settings.to_an_end().consumer(client_id, LOG_GROUP), "enable.partition.eof": True, **ahead}
    )
    with closing(consumer):
        found = {place: _begin(consumer, place, offset, meanwhile) for place, offset in begins.items()}
        left = {place for place, begin in found.items() if begin is not None}
        consumer.assign([TopicPartition(*place, found[place]) for place in left])
        while left:
            meanwhile()
            first = consumer.poll(LOOK_SECONDS)  # `consume` would wait until the batch is full
            for message in () if first is None else (first, *consumer.consume(BATCH - 1, 0)):
                error, place = message.error(), (str(message.topic()), int(message.partition() or 0))
                if error is None:
                    if place in left:
                        yield place, int(message.offset() or 0), raw_of(message), message.timestamp()[1] / 1000
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(place)
                elif error.code() in NO_SUCH_PLACE:
                    raise missing(consumer, *place)
                elif not error.retriable() and error.code() not in BROKER_AWAY:
                    what = "the log" if message.topic() is None else place[0]
                    rights = f"Read on topic {place[0]}", f"Describe on group {settings.name(LOG_GROUP)}"
                    raise BusError(f"reading {what}", error, *rights)
        consumer.unassign()  # nothing is being fetched any more when it closes


def _begin(consumer: Consumer, place: NamedPlace, offset: int, meanwhile: Callable[[], None]) -> int | None:
    """Where to begin, asked for here: librdkafka takes half a second to find a beginning. None: nothing is there."""
    low, high = ends_of(consumer, TopicPartition(*place), meanwhile)
    begin = max(low, offset)
    return begin if begin < high else None


def read_keyed(
    settings: BusSettings, begins: Mapping[Place, int], *, client_id: str = "rose-log"
) -> Generator[Keyed, None, None]:
    """The messages of these partitions from these offsets on. Raises TopicMissing or BusError."""
    named = {(settings.topic(topic), part): offset for (topic, part), offset in begins.items()}
    topics = {settings.topic(topic): topic for topic, _ in begins}
    for (name, part), offset, raw, stamp in read_messages(settings, named, client_id=client_id):
        key = raw.key.decode(errors="replace") if raw.key else ""
        yield Keyed(topics[name], part, offset, key, raw, stamp)


def whole(settings: BusSettings, topics: Sequence[Topic], *, client_id: str = "rose-log") -> dict[Place, int]:
    """Every partition of these topics, from its beginning: for `read_keyed`. Raises TopicMissing."""
    with closing(Reader(settings, client_id)) as reader:
        return {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partitions(topic))}
