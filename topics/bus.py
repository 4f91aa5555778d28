"""Typed records in and out of Kafka.

Keeps true
- What a Reader hands out has been decoded and checked. What does not decode is written, with its bytes and the reason,
  to the topic's dead letters before the next record is handed out (by all but those who read the log back).
- What a Writer was given is on the broker once `flush` or `commit` has returned; a delivery that failed raises there.
- Nothing is committed on its own.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from schemas.errors import RecordError
from schemas.record import Record
from schemas.wire import decode, encode, headers_of
from topics.catalog import Topic
from topics.errors import BusError, TopicMissing
from topics.resting import RestingConsumer
from topics.settings import BusSettings

FLUSH_SECONDS = 60.0
"""How long a flush may wait for the broker before it is an error."""

TRANSACTION_SECONDS = 60.0
"""How long beginning or committing a transaction may take before it is an error."""

Place = tuple[Topic, int]
"""A topic and one of its partitions."""

NO_SUCH_PLACE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
"""What client and broker say of a topic or partition that is not there."""

COORDINATOR_COMES_UP = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
"""What Apache Kafka says of a group in its first seconds, and after its coordinator has moved."""

COORDINATOR_SECONDS = 30.0
"""How long a group's coordinator may take to come up before it is an error."""

COORDINATOR_BACKOFF_SECONDS = 0.1
"""Between two questions to it."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A record with its place in the log."""

    record: Record | None
    """None is a tombstone: the key has ended."""
    topic: Topic
    partition: int
    offset: int
    key: str
    timestamp_seconds: float
    """When the broker or the producer stamped it, unix seconds."""


@dataclass(frozen=True, slots=True)
class EndOfPartition:
    """The reader has reached the end of what is committed in this partition."""

    topic: Topic
    partition: int


class Writer:
    """Writes records. With a `transactional_id` it writes only between `begin` and `commit`.

    Raises BusError when the broker refuses; a transactional writer that raised is to be thrown away.
    """

    def __init__(self, settings: BusSettings, client_id: str, *, transactional_id: str | None = None) -> None:
        self._settings = settings
        self._failure: KafkaError | None = None
        if transactional_id is None:
            self._producer = Producer(settings.producer(client_id))
        else:
            self._producer = Producer(settings.transactional(client_id, transactional_id))
            self._guarded("fencing older transactions", self._producer.init_transactions, TRANSACTION_SECONDS)

    def write(
        self,
        topic: Topic,
        record: Record,
        *,
        key: str,
        partition: int | None = None,
        trajectory_id: str | None = None,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        """Hand a record over. `on_delivery(partition, offset)` is called from `poll` or `flush` once it is stored."""
        headers = headers_of(record, trajectory_id, record.SCHEMA)
        self._produce(self._settings.topic(topic), key.encode(), encode(record), partition, headers, on_delivery)

    def tombstone(self, topic: Topic, *, key: str, partition: int) -> None:
        """Say that the key has ended."""
        self._produce(self._settings.topic(topic), key.encode(), None, partition, [], None)

    def dead_letter(self, topic: Topic, message: Message, reason: str) -> None:
        """Store a message that could not be used, as it came, with why and where it came from."""
        headers: list[tuple[str, bytes]] = [(name, value) for name, value in message.headers() or () if value]
        headers += _origin(str(message.topic()), message.partition(), message.offset(), reason)
        name = f"{self._settings.namespace}{topic.dead_letters}"
        self._produce(name, message.key(), message.value(), None, headers, None)

    def dead_letter_record(self, envelope: Envelope, reason: str) -> None:
        """Store a record that decodes and yet cannot be used, with why and where it came from."""
        assert envelope.record is not None
        headers = headers_of(envelope.record)
        headers += _origin(self._settings.topic(envelope.topic), envelope.partition, envelope.offset, reason)
        name = f"{self._settings.namespace}{envelope.topic.dead_letters}"
        self._produce(name, envelope.key.encode(), encode(envelope.record), None, headers, None)

    def poll(self) -> None:
        """Take delivery reports in without waiting. Raises BusError if a delivery failed."""
        self._producer.poll(0)
        self._raise_failure()

    def flush(self) -> None:
        """Wait until all that was written is stored. Raises BusError if it is not."""
        left = self._producer.flush(FLUSH_SECONDS)
        self._raise_failure()
        if left:
            raise BusError(
                f"storing {left} records within {FLUSH_SECONDS:.0f} s", KafkaError(KafkaError._MSG_TIMED_OUT)
            )

    def begin(self) -> None:
        self._guarded("beginning a transaction", self._producer.begin_transaction)

    def commit(self, offsets: Mapping[Place, int] | None = None, reader: "Reader | None" = None) -> None:
        """Commit what was written since `begin` together with the `reader`'s next `offsets`."""
        if offsets and reader is not None:
            self._guarded(
                "committing offsets",
                self._producer.send_offsets_to_transaction,
                [
                    TopicPartition(self._settings.topic(topic), part, offset)
                    for (topic, part), offset in offsets.items()
                ],
                reader.group_metadata(),
                TRANSACTION_SECONDS,
            )
        self._guarded("committing a transaction", self._producer.commit_transaction, TRANSACTION_SECONDS)
        self._raise_failure()

    def abort(self) -> None:
        self._guarded("aborting a transaction", self._producer.abort_transaction, TRANSACTION_SECONDS)

    def _produce(
        self,
        name: str,
        key: bytes | str | None,
        value: bytes | str | None,
        partition: int | None,
        headers: list[tuple[str, bytes]],
        on_delivery: Callable[[int, int], None] | None,
    ) -> None:
        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failure = error
            elif on_delivery is not None:
                on_delivery(message.partition(), message.offset())

        place: dict[str, Any] = {} if partition is None else {"partition": partition}
        while True:
            try:
                self._producer.produce(name, value=value, key=key, headers=headers, on_delivery=delivered, **place)
                return
            except BufferError:  # the local queue is full: let it drain
                self._producer.poll(1.0)
                self._raise_failure()
            except KafkaException as error:
                raise BusError(f"writing to {name}", error.args[0]) from error

    def _guarded(self, doing: str, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except KafkaException as error:
            raise BusError(doing, error.args[0]) from error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise BusError("storing a record", failure)


class Reader:
    """Reads typed records, either of partitions assigned by hand or as a member of a consumer group."""

    def __init__(
        self,
        settings: BusSettings,
        client_id: str,
        *,
        group: str,
        instance: str | None = None,
        ends: bool = False,
        bury: bool = True,
        **overrides: object,
    ) -> None:
        """`instance` makes it a static member; `ends` makes `read` report EndOfPartition too.

        Without `bury`, what does not decode is passed over: for who reads again what a consumer has read before.
        """
        config = {**settings.consumer(client_id, group), "enable.partition.eof": ends, **overrides}
        if instance is not None:
            config["group.instance.id"] = settings.name(instance)
        self._settings = settings
        self._client_id = client_id
        # With nothing held at the broker a waiting consumer would ask without end: this one rests.
        self._consumer = (RestingConsumer if str(config["fetch.wait.max.ms"]) == "0" else Consumer)(config)
        self._topics: dict[str, Topic] = {}
        self._buries = bury
        self._dead_letters: Writer | None = None

    def assign(self, places: Mapping[Place, int]) -> None:
        """Read these partitions from these offsets (or confluent_kafka's OFFSET_BEGINNING, OFFSET_END).

        Raises TopicMissing or BusError.
        """
        self._know(topic for topic, _ in places)
        self._consumer.assign([self._partition(place, self._found(place, at)) for place, at in places.items()])

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        assigned: Callable[[list[Place]], Mapping[Place, int]],
        revoked: Callable[[list[Place]], None],
    ) -> None:
        """Join the group. `assigned` says where to begin in each partition that comes; both run inside `read`."""
        self._know(topics)

        def on_assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            begins = assigned([self._place(partition) for partition in partitions])
            consumer.assign([self._partition(place, self._found(place, at)) for place, at in begins.items()])

        def on_revoke(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            revoked([self._place(partition) for partition in partitions])
            consumer.unassign()

        names = [self._settings.topic(topic) for topic in topics]
        self._consumer.subscribe(names, on_assign=on_assign, on_revoke=on_revoke, on_lost=on_revoke)

    def read(self, limit: int, timeout_seconds: float) -> list[Envelope | EndOfPartition]:
        """Up to `limit` records; returns as soon as any are there, or empty after the timeout.

        Raises TopicMissing or BusError.
        """
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            return []
        messages = [first, *self._consumer.consume(limit - 1, 0)] if limit > 1 else [first]
        taken = (self._take(message) for message in messages)
        return [item for item in taken if item is not None]

    def committed(self, places: Sequence[Place]) -> dict[Place, int | None]:
        """The group's committed offsets; None where there is none. Waits for a coordinator that is coming up."""
        wanted, deadline = [self._partition(place, 0) for place in places], time.monotonic() + COORDINATOR_SECONDS
        while True:
            left = deadline - time.monotonic()
            try:
                answers = self._consumer.committed(wanted, timeout=left)
                break
            except KafkaException as error:
                if error.args[0].code() not in COORDINATOR_COMES_UP or left < COORDINATOR_BACKOFF_SECONDS:
                    raise BusError("reading committed offsets", error.args[0]) from error
                time.sleep(COORDINATOR_BACKOFF_SECONDS)  # it tells nobody that it has come up
        return {
            place: answer.offset if answer.offset >= 0 else None for place, answer in zip(places, answers, strict=True)
        }

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Have the next offset to read of each partition committed, by the time of `close` at the latest.

        Waits for nothing: a commit that the broker refuses is a warning in the log, the group's offsets are the older
        ones then.
        """
        try:
            self._consumer.commit(offsets=[self._partition(place, offset) for place, offset in offsets.items()])
        except KafkaException as error:
            raise BusError("committing offsets", error.args[0]) from error

    def watermarks(self, place: Place) -> tuple[int, int]:
        """The first offset kept and the next one to be written. Raises TopicMissing or BusError."""
        try:
            low, high = self._consumer.get_watermark_offsets(self._partition(place, 0), timeout=30)
        except KafkaException as error:
            if error.args[0].code() in NO_SUCH_PLACE:
                raise TopicMissing(self._settings.topic(place[0])) from error
            raise BusError(f"reading the ends of {place[0].name}", error.args[0]) from error
        return low, high

    def partitions(self, topic: Topic) -> int:
        """How many partitions the topic has on the broker. Raises TopicMissing."""
        name = self._settings.topic(topic)
        found = self._consumer.list_topics(name, timeout=30).topics[name]
        if found.error is not None or not found.partitions:
            raise TopicMissing(name)
        return len(found.partitions)

    def pause(self, places: Iterable[Place]) -> None:
        self._consumer.pause([self._partition(place, 0) for place in places])

    def resume(self, places: Iterable[Place]) -> None:
        self._consumer.resume([self._partition(place, 0) for place in places])

    def group_metadata(self) -> object:
        """What a transaction needs in order to commit this reader's offsets."""
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        """Leave the group (a static member stays known until its session ends)."""
        self._consumer.close()
        if self._dead_letters is not None:
            self._dead_letters.flush()

    def _know(self, topics: Iterable[Topic]) -> None:
        self._topics.update({self._settings.topic(topic): topic for topic in topics})

    def _partition(self, place: Place, offset: int) -> TopicPartition:
        topic, partition = place
        return TopicPartition(self._settings.topic(topic), partition, offset)

    def _found(self, place: Place, offset: int) -> int:
        """The offset as a number, asked for here: librdkafka takes half a second to find the beginning or the end."""
        if offset not in (OFFSET_BEGINNING, OFFSET_END):
            return offset
        low, high = self.watermarks(place)
        return low if offset == OFFSET_BEGINNING else high

    def _place(self, partition: TopicPartition) -> Place:
        return self._topics[partition.topic], partition.partition

    def _take(self, message: Message) -> Envelope | EndOfPartition | None:
        name = message.topic()
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return EndOfPartition(self._topics[name], message.partition())
            if error.code() in NO_SUCH_PLACE:
                raise TopicMissing(name or "?")
            if error.retriable() or error.code() in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
                return None  # librdkafka reconnects by itself
            raise BusError(f"reading {name}", error)
        topic = self._topics[name]
        value, key = message.value(), message.key()
        record: Record | None = None
        if value is not None:
            assert topic.record is not None
            try:
                record = decode(topic.record, value, message.headers() or ())
            except RecordError as error:
                self._bury(topic, message, str(error))
                return None
        return Envelope(
            record,
            topic,
            message.partition(),
            message.offset(),
            key.decode(errors="replace") if key else "",
            message.timestamp()[1] / 1000,
        )

    def _bury(self, topic: Topic, message: Message, reason: str) -> None:
        if not self._buries:
            return
        if self._dead_letters is None:
            self._dead_letters = Writer(self._settings, f"{self._client_id}-dead-letters")
        self._dead_letters.dead_letter(topic, message, reason)
        self._dead_letters.flush()


def _origin(topic: str, partition: int | None, offset: int | None, reason: str) -> list[tuple[str, bytes]]:
    """The headers of a dead letter."""
    return [
        ("exception", reason.encode(errors="replace")),
        ("topic", topic.encode()),
        ("partition", str(partition).encode()),
        ("offset", str(offset).encode()),
    ]
