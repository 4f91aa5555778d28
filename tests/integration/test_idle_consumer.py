"""A consumer that rests reads the same records as any other: on the embedded broker, its purpose, and on Apache
Kafka."""

import random
from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import KafkaError, Message, Producer, TopicPartition

from rose.topics.admin import create_topics
from rose.topics.catalog import REQUESTED, Partitions
from rose.topics.idle_consumer import MAX_REST_SECONDS, IdleConsumer
from rose.topics.settings import BusSettings
from tests.support.brokers import AnyBroker

HOMES = 3
RECORDS = 150
LONG_ENOUGH_SECONDS = 10 * MAX_REST_SECONDS
"""A silence after which the consumer rests most of the time."""
WAIT_SECONDS = 30.0


class Log:
    """A topic that is written and read in turns, and the read records."""

    def __init__(self, settings: BusSettings) -> None:
        self._topic = settings.topic(REQUESTED)
        self._producer = Producer(settings.producer("resting-writer"))
        self.reader = IdleConsumer({**settings.consumer("resting", "resting"), "enable.partition.eof": False})
        self.read: list[list[int]] = [[] for _ in range(HOMES)]
        self.written = [0] * HOMES

    def places(self, *offsets: int) -> list[TopicPartition]:
        return [TopicPartition(self._topic, home, offset) for home, offset in enumerate(offsets or [0] * HOMES)]

    def write(self, home: int) -> None:
        self._producer.produce(self._topic, b"%d" % self.written[home], partition=home)
        self.written[home] += 1

    def stored(self) -> None:
        assert self._producer.flush(WAIT_SECONDS) == 0

    def listen(self, seconds: float) -> bool:
        """Whether a record arrived."""
        message: Message | None = self.reader.poll(seconds)
        if message is None:
            return False
        assert message.error() is None, "it was not asked to report ends"
        self.read[message.partition()].append(int(message.value()))
        return True

    def read_to_the_end(self) -> None:
        while sum(map(len, self.read)) < sum(self.written):
            assert self.listen(WAIT_SECONDS), f"read {self.read} of {self.written}"
        assert not self.listen(LONG_ENOUGH_SECONDS)
        assert self.read == [list(range(count)) for count in self.written]


@pytest.fixture
def log(broker: AnyBroker, namespace: str) -> Iterator[Log]:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=HOMES, slots=1, samples=1, chunks=1))
    log = Log(settings)
    with closing(log.reader):
        yield log


def test_no_record_is_lost_or_doubled_between_rests(log: Log) -> None:
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    log.reader.assign(log.places())
    for _ in range(RECORDS):
        log.write(moments.randrange(HOMES))
        if moments.random() < 0.5:
            log.stored()
        log.listen(moments.choice((0.0, 0.001, 0.01, 0.05)))
        if moments.random() < 0.05:
            log.reader.assign(log.places(*map(len, log.read)))
    log.read_to_the_end()


def test_consumer_at_the_end_gets_new_records(log: Log) -> None:
    ends = [log.reader.get_watermark_offsets(place)[1] for place in log.places()]
    log.reader.assign(log.places(*ends))
    assert not log.listen(LONG_ENOUGH_SECONDS)
    for home in range(HOMES):
        log.write(home)
    log.read_to_the_end()


def test_paused_partition_stays_paused_over_rests(log: Log) -> None:
    log.reader.assign(log.places())
    assert not log.listen(LONG_ENOUGH_SECONDS)
    first, *others = log.places()
    log.reader.pause([first])
    log.write(first.partition)
    log.stored()
    assert not log.listen(LONG_ENOUGH_SECONDS)
    for other in others:
        log.write(other.partition)
    while not all(log.read[1:]):
        assert log.listen(WAIT_SECONDS)
    assert not log.read[first.partition]
    log.reader.resume([first])
    log.read_to_the_end()


def test_partition_end_is_reported_if_requested(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    config = {**settings.consumer("resting", "resting"), "enable.partition.eof": True}
    with closing(IdleConsumer(config)) as reader:
        reader.assign([TopicPartition(settings.topic(REQUESTED), 0, 0)])
        message = reader.poll(WAIT_SECONDS)
        assert message is not None
        error = message.error()
        assert error is not None and error.code() == KafkaError._PARTITION_EOF
