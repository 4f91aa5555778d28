"""Short helpers around plain confluent-kafka for tests of a broker. They wait for events with a deadline and never for
time."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

WAIT_SECONDS = 30
"""A broker that takes longer for anything not marked slow is broken."""

FAULT_SECONDS = 10
"""Time after which a known missing capability of a broker counts as missing."""

LARGEST_BYTES = 900 * 1024
"""Size of a record value, within ROSE's own bound."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The namespace of one test on a broker, with the client settings of ROSE's own clients."""

    bootstrap: str
    namespace: str

    def client(self, **more: object) -> dict[str, Any]:
        return {"bootstrap.servers": self.bootstrap, "log_level": 2, **more}

    def admin(self) -> AdminClient:
        return AdminClient(self.client())

    def topic(self, name: str, partitions: int = 1, **config: Any) -> str:
        """Create a topic (`_` in a setting stands for a dot) and wait for its leaders; return its full name."""
        full = self.namespace + name
        admin = self.admin()
        settings = {key: str(value) for key, value in _dotted(config).items()}
        admin.create_topics([NewTopic(full, partitions, 1, config=settings)])[full].result()
        places = {TopicPartition(full, partition): OffsetSpec.latest() for partition in range(partitions)}

        def leaders_answer() -> bool:
            try:
                return all(future.result().offset >= 0 for future in admin.list_offsets(places).values())
            except KafkaException:  # Apache Kafka reports "not yet" with many errors in the first tenths of a second
                admin.poll(0.05)
                return False

        until(leaders_answer, what=f"leaders of {full}")
        return full

    def producer(self, **more: object) -> Producer:
        settings = {"enable.idempotence": True, "linger.ms": 0, "compression.type": "lz4", **_dotted(more)}
        return Producer(self.client(**settings))

    def transactional(self, name: str, **more: object) -> Producer:
        """A producer that has fenced all earlier ones of this name.

        Back-to-back transactions meet CONCURRENT_TRANSACTIONS; at librdkafka's default of 100 ms between tries the p99
        of a commit on Apache Kafka is more than 100 ms, so it tries again at once.
        """
        patience = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 5}
        producer = self.producer(transactional_id=self.namespace + name, **patience, **more)
        producer.init_transactions(WAIT_SECONDS)
        return producer

    def consumer(self, group: str = "by-hand", **more: object) -> Consumer:
        settings = {
            "group.id": self.namespace + group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
            "heartbeat.interval.ms": 300,
            "enable.partition.eof": True,
            "partition.assignment.strategy": "range",
            **_dotted(more),
        }
        return Consumer(self.client(**settings))

    def send(self, topic: str, values: Iterable[bytes | None], *, partition: int = 0, **more: Any) -> list[Message]:
        """Produce to one partition; return the acknowledged messages in order."""
        producer = _sender(self.bootstrap)
        messages = produce(producer, topic, values, partition=partition, **more)
        assert producer.flush(WAIT_SECONDS) == 0
        return messages

    def read(self, topic: str, *, partition: int = 0, offset: int = 0, **more: Any) -> list[Message]:
        """Return all messages from `offset` to the end that this isolation level shows."""
        consumer = self.consumer(**more)
        consumer.assign([TopicPartition(topic, partition, offset)])
        try:
            return read_to_end(consumer)
        finally:
            consumer.close()

    def values(self, topic: str, **more: Any) -> list[bytes | None]:
        return [message.value() for message in self.read(topic, **more)]


@cache
def _sender(bootstrap: str) -> Producer:
    """Return one producer for all simple writes: a new idempotent producer takes half a second to start."""
    return Cluster(bootstrap, "").producer()


def until(condition: Callable[[], bool], *, what: str, seconds: float | None = None) -> None:
    """Poll until the condition holds. The condition itself waits (for a poll, a process); this function only keeps the
    deadline."""
    seconds = WAIT_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"


def produce(
    producer: Producer, topic: str, values: Iterable[bytes | None], *, partition: int = 0, **more: Any
) -> list[Message]:
    """Produce values. The list fills with acknowledged messages as the producer polls or flushes."""
    delivered: list[Message] = []

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        if error is None:
            delivered.append(message)

    for value in values:
        while True:
            try:
                producer.produce(topic, value, partition=partition, on_delivery=on_delivery, **more)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    return delivered


def read_to_end(consumer: Consumer) -> list[Message]:
    """Return the messages of an assigned consumer with `enable.partition.eof` until every partition has reported its
    end."""
    waiting = {(place.topic, place.partition) for place in consumer.assignment()}
    messages: list[Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while waiting:
        message = consumer.poll(0.2)
        assert time.monotonic() < deadline, f"no end of {waiting} after {len(messages)} messages"
        if message is None:
            continue
        error = message.error()
        if error is None:
            messages.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            waiting.discard((message.topic(), message.partition()))
        else:
            raise KafkaException(error)
    return messages


def poll_all(consumers: Sequence[Consumer], seconds: float = 0.05) -> list[Message]:
    """Poll each member of a group once, which keeps all members in it. Only records are returned."""
    polled = [consumer.poll(seconds) for consumer in consumers]
    return [message for message in polled if message is not None and message.error() is None]


def owned(consumer: Consumer, topic: str) -> set[int]:
    """Return the partitions of `topic` that the consumer owns."""
    return {place.partition for place in consumer.assignment() if place.topic == topic}


def _dotted(settings: dict[str, object]) -> dict[str, object]:
    return {name if name.endswith("_cb") else name.replace("_", "."): value for name, value in settings.items()}
