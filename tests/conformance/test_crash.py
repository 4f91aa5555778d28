"""A broker that was killed and started again has everything that it acknowledged.

The broker's own disk is not in question (nothing is fsynced by default): the process is killed, not the machine.
"""

from collections.abc import Iterator
from functools import partial

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from rose.topics.local_broker import Broker
from tests.conformance.bus_driver import WAIT_SECONDS, Cluster, produce, until
from tests.support.brokers import embedded_first, start

pytestmark = [pytest.mark.slow, embedded_first]

RECORDS = 3000
EMBEDDED_LOSES = "saves its whole state about once a second: killed, it loses what it acknowledged since"


@pytest.fixture(scope="module")
def own_broker(broker_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for all tests that kill or stop it. Each test checks its own topics."""
    with start(broker_kind, tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture
def own(own_broker: Broker, namespace: str) -> Cluster:
    return Cluster(own_broker.bootstrap, namespace)


class Acknowledged:
    """Sends numbered records and remembers the acknowledged offsets."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self.producer = producer
        self.topic = topic
        self.places: dict[int, bytes] = {}
        self.errors: list[KafkaError] = []
        self.sent = 0

    def send(self) -> None:
        value = b"%d" % self.sent
        self.producer.produce(self.topic, value, partition=0, on_delivery=self._heard)
        self.sent += 1
        self.producer.poll(0.05 if self.sent - len(self.places) > RECORDS else 0)

    def _heard(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.places[message.offset()] = message.value()
        else:
            self.errors.append(error)


@pytest.mark.embedded_fault(EMBEDDED_LOSES, raises=AssertionError)
def test_acknowledged_records_survive_once(own: Cluster, own_broker: Broker) -> None:
    """The producer sends continuously and recovers by itself."""
    run = Acknowledged(own.producer(message_timeout_ms=120_000), own.topic("stream"))
    while len(run.places) < RECORDS:
        run.send()
    own_broker.kill()
    before = dict(run.places)
    for _ in range(100):
        run.send()
    own_broker.restart()
    assert run.topic in own.admin().list_topics(timeout=WAIT_SECONDS).topics
    stored = {message.offset(): message.value() for message in own.read(run.topic)}
    assert {offset: stored.get(offset) for offset in before} == before
    assert run.producer.flush(4 * WAIT_SECONDS) == 0 and run.errors == []
    assert own.values(run.topic) == [b"%d" % index for index in range(run.sent)]


@pytest.mark.embedded_fault(EMBEDDED_LOSES, raises=AssertionError)
def test_committed_transactions_survive_with_their_offsets(own: Cluster, own_broker: Broker) -> None:
    source, sink = own.topic("source"), own.topic("sink")
    for steps in (10, 20):
        producer, consumer = own.transactional("worker"), own.consumer("steps")
        # A coordinator that is still starting can block send_offsets_to_transaction forever (librdkafka #5456).
        _committed(consumer, source)
        for step in range(steps - 10, steps):
            producer.begin_transaction()
            produce(producer, sink, [b"%d" % step])
            places = [TopicPartition(source, 0, step + 1)]
            producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), WAIT_SECONDS)
            producer.commit_transaction(WAIT_SECONDS)
        committed = [b"%d" % step for step in range(steps)]
        # A commit is acknowledged when it is decided, and visible when its marker is written. A single Apache Kafka
        # node that is killed in between never writes the marker: docs/operations/known-issues.md.
        until(partial(_shows, own, sink, steps), what="the last commit to show")
        assert _committed(consumer, source) == steps
        own_broker.kill()
        own_broker.restart()
        assert own.admin().list_topics(timeout=WAIT_SECONDS).topics.keys() >= {source, sink}
        assert own.values(sink) == committed
        assert _committed(own.consumer("steps"), source) == steps


def _shows(own: Cluster, topic: str, records: int) -> bool:
    return len(own.values(topic)) == records


def _committed(consumer: Consumer, topic: str) -> int:
    """Return the committed offset of the consumer's group. Retry until the coordinator of the group is available."""
    places: list[TopicPartition] = []

    def answered() -> bool:
        try:
            places[:] = consumer.committed([TopicPartition(topic, 0)], WAIT_SECONDS)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.NOT_COORDINATOR:
                raise
        return bool(places)

    until(answered, what="the group's coordinator")
    return int(places[0].offset)


@pytest.fixture
def interrupted(own: Cluster, own_broker: Broker) -> tuple[Producer, str]:
    """A producer within a transaction over which the broker was stopped and restarted."""
    topic = own.topic("sink")
    producer = own.transactional("worker")
    producer.begin_transaction()
    produce(producer, topic, [b"half"])
    assert producer.flush(WAIT_SECONDS) == 0
    own_broker.restart()
    return producer, topic


def test_restart_does_not_commit_an_open_transaction(own: Cluster, interrupted: tuple[Producer, str]) -> None:
    _, topic = interrupted
    assert own.values(topic) == []
    own.transactional("worker")
    assert own.values(topic) == []
    assert own.values(topic, isolation_level="read_uncommitted") == [b"half"]


@pytest.mark.embedded_fault(
    "aborts open transactions when it stops, and says yes to their commit after it has started again",
    raises=AssertionError,
)
def test_offsets_reported_committed_after_a_restart_are_committed(
    own: Cluster, interrupted: tuple[Producer, str]
) -> None:
    producer, topic = interrupted
    producer.commit_transaction(WAIT_SECONDS)
    own.transactional("worker")  # a takeover of the name waits for the markers, which follow the answer
    assert own.values(topic) == [b"half"]


def test_stop_and_start_keep_all_data(own: Cluster, own_broker: Broker) -> None:
    topic = own.topic("kept", 2, retention_ms=3_600_000)
    consumer = own.consumer("readers")
    places = {message.offset(): message.value() for message in own.send(topic, [b"%d" % n for n in range(1000)])}
    consumer.commit(offsets=[TopicPartition(topic, 0, 7)], asynchronous=False)
    own_broker.restart()
    assert {message.offset(): message.value() for message in own.read(topic)} == places
    consumer = own.consumer("readers")
    assert _committed(consumer, topic) == 7
