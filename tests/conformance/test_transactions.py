"""A transaction is visible as a whole or not at all, and only its current owner can commit it."""

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from tests.conformance.bus_driver import WAIT_SECONDS, Cluster, poll_all, produce, read_to_end, until


def store(producer: Producer, topic: str, *values: bytes, partition: int = 0) -> None:
    """Send the records of an open transaction to the broker."""
    delivered = produce(producer, topic, values, partition=partition)
    assert producer.flush(WAIT_SECONDS) == 0 and len(delivered) == len(values)


def fenced(error: KafkaException) -> bool:
    code = error.args[0].code()
    return code in (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


def test_committed_records_are_visible_and_aborted_records_are_not(cluster: Cluster) -> None:
    topic = cluster.topic("outcome")
    producer = cluster.transactional("writer")
    producer.begin_transaction()
    store(producer, topic, b"committed")
    producer.commit_transaction(WAIT_SECONDS)
    producer.begin_transaction()
    store(producer, topic, b"aborted")
    producer.abort_transaction(WAIT_SECONDS)
    assert cluster.values(topic) == [b"committed"]
    assert cluster.values(topic, isolation_level="read_uncommitted") == [b"committed", b"aborted"]


def test_open_transaction_is_invisible_and_holds_back_later_records(cluster: Cluster) -> None:
    topic = cluster.topic("open")
    producer = cluster.transactional("writer")
    cluster.send(topic, [b"before"])
    producer.begin_transaction()
    store(producer, topic, b"inside")
    cluster.send(topic, [b"after"])
    assert cluster.values(topic) == [b"before"]
    assert cluster.values(topic, isolation_level="read_uncommitted") == [b"before", b"inside", b"after"]
    producer.commit_transaction(WAIT_SECONDS)
    assert cluster.values(topic) == [b"before", b"inside", b"after"]


def test_transaction_over_many_partitions_is_atomic(cluster: Cluster) -> None:
    first, second = cluster.topic("first", 3), cluster.topic("second", 3)
    places = [(topic, partition) for topic in (first, second) for partition in range(3)]
    producer = cluster.transactional("writer")

    def seen() -> list[bytes | None]:
        return [value for topic, partition in places for value in cluster.values(topic, partition=partition)]

    for outcome in (b"aborted", b"committed"):
        producer.begin_transaction()
        for topic, partition in places:
            store(producer, topic, outcome, partition=partition)
        assert seen() == []
        if outcome == b"aborted":
            producer.abort_transaction(WAIT_SECONDS)
            assert seen() == []
    producer.commit_transaction(WAIT_SECONDS)
    assert seen() == [b"committed"] * len(places)


def test_offsets_move_with_the_commit_and_not_before(cluster: Cluster) -> None:
    source, sink = cluster.topic("source"), cluster.topic("sink")
    cluster.send(source, [b"input"] * 5)
    consumer = cluster.consumer("steps")
    consumer.subscribe([source])
    until(lambda: bool(poll_all([consumer])), what="the first input")
    producer = cluster.transactional("worker")

    def committed() -> int:
        [place] = consumer.committed([TopicPartition(source, 0)], WAIT_SECONDS)
        offset: int = place.offset
        return offset

    def step(offset: int) -> None:
        producer.begin_transaction()
        store(producer, sink, b"output")
        places = [TopicPartition(source, 0, offset)]
        producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), WAIT_SECONDS)

    step(2)
    producer.abort_transaction(WAIT_SECONDS)
    assert committed() < 0
    step(3)
    producer.commit_transaction(WAIT_SECONDS)
    assert committed() == 3
    step(5)
    producer.abort_transaction(WAIT_SECONDS)
    assert committed() == 3
    assert cluster.values(sink) == [b"output"]
    consumer.close()


@pytest.mark.embedded_fault("tells the offsets of a transaction that is open", raises=pytest.fail.Exception)
def test_offsets_of_an_open_transaction_are_not_reported(cluster: Cluster) -> None:
    """A new owner of a home starts only after the open transaction of the previous owner is decided."""
    source = cluster.topic("source")
    cluster.send(source, [b"input"])
    consumer = cluster.consumer("steps")
    consumer.subscribe([source])
    until(lambda: bool(poll_all([consumer])), what="the input")
    producer = cluster.transactional("worker")
    producer.begin_transaction()
    places = [TopicPartition(source, 0, 1)]
    producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), WAIT_SECONDS)
    with pytest.raises(KafkaException) as held_back:
        consumer.committed([TopicPartition(source, 0)], 1.0)
    assert held_back.value.args[0].code() == KafkaError._TIMED_OUT
    producer.commit_transaction(WAIT_SECONDS)
    [place] = consumer.committed([TopicPartition(source, 0)], WAIT_SECONDS)
    assert place.offset == 1
    consumer.close()


def test_next_owner_of_a_name_fences_the_previous_owner(cluster: Cluster) -> None:
    topic = cluster.topic("fence")
    zombie = cluster.transactional("home-0")
    zombie.begin_transaction()
    store(zombie, topic, b"half a step")
    owner = cluster.transactional("home-0")
    owner.begin_transaction()
    store(owner, topic, b"whole step")
    owner.commit_transaction(WAIT_SECONDS)
    with pytest.raises(KafkaException) as refused:
        zombie.commit_transaction(WAIT_SECONDS)
    assert fenced(refused.value) and refused.value.args[0].fatal()
    assert cluster.values(topic) == [b"whole step"]


@pytest.mark.slow
@pytest.mark.embedded_fault(
    "hides all that a name commits after an abort from readers who have read past the abort", raises=AssertionError
)
def test_reader_sees_what_the_next_owner_of_a_name_commits(cluster: Cluster) -> None:
    topic = cluster.topic("after-abort")
    cluster.send(topic, [b"before"])
    consumer = cluster.consumer()
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert [message.value() for message in read_to_end(consumer)] == [b"before"]
    zombie = cluster.transactional("home-0")
    zombie.begin_transaction()
    store(zombie, topic, b"half a step")
    owner = cluster.transactional("home-0")
    seen: list[bytes | None] = []

    def sees(*values: bytes) -> Callable[[], bool]:
        def poll() -> bool:
            seen.extend(message.value() for message in poll_all([consumer]))
            return seen == list(values)

        return poll

    assert read_to_end(consumer) == []
    for steps in ((b"first",), (b"first", b"second")):
        owner.begin_transaction()
        store(owner, topic, steps[-1])
        owner.commit_transaction(WAIT_SECONDS)
        until(sees(*steps), what="what was committed after the abort", seconds=10)
    consumer.close()


def test_idle_fenced_owner_cannot_begin_again(cluster: Cluster) -> None:
    topic = cluster.topic("idle")
    zombie = cluster.transactional("home-0")
    cluster.transactional("home-0")
    with pytest.raises(KafkaException) as refused:
        zombie.begin_transaction()
        zombie.produce(topic, b"late", partition=0)
        zombie.commit_transaction(WAIT_SECONDS)
    assert fenced(refused.value)
    assert cluster.values(topic) == []


@pytest.mark.embedded_fault("commits the offsets of a member that was replaced", raises=pytest.fail.Exception)
def test_member_without_its_former_partitions_cannot_commit_their_offsets(cluster: Cluster) -> None:
    """A worker that was frozen while its group moved on must not commit work that its successor repeats."""
    source, sink = cluster.topic("source"), cluster.topic("sink")
    cluster.send(source, [b"input"] * 3)
    old = cluster.consumer("steps", group_instance_id="worker-0")
    old.subscribe([source])
    until(lambda: bool(poll_all([old])), what="the first input")
    stale = old.consumer_group_metadata()
    new = cluster.consumer("steps", group_instance_id="worker-0")
    new.subscribe([source])
    until(lambda: bool(poll_all([new])), what="the input at the new member")
    producer = cluster.transactional("another-name-than-its-successors")
    producer.begin_transaction()
    store(producer, sink, b"too late")
    with pytest.raises(KafkaException):
        producer.send_offsets_to_transaction([TopicPartition(source, 0, 3)], stale, WAIT_SECONDS)
        producer.commit_transaction(WAIT_SECONDS)
    producer.abort_transaction(WAIT_SECONDS)
    assert cluster.values(sink) == []
    new.close()
    old.close()


def test_many_consecutive_small_transactions_all_arrive(cluster: Cluster) -> None:
    topic = cluster.topic("serial")
    producer = cluster.transactional("writer")
    for index in range(100):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % index, partition=0)
        producer.commit_transaction(WAIT_SECONDS)
    assert cluster.values(topic) == [b"%d" % index for index in range(100)]


@pytest.mark.slow
@pytest.mark.embedded_fault(
    "never aborts the open transaction of a dead producer: readers of what is committed stop at it until a producer of "
    "the same name begins",
    raises=AssertionError,
)
def test_open_transaction_of_a_lost_producer_is_aborted_in_time(cluster: Cluster) -> None:
    topic = cluster.topic("abandoned")
    producer = cluster.transactional("gone", transaction_timeout_ms=1000)
    producer.begin_transaction()
    store(producer, topic, b"abandoned")
    del producer
    cluster.send(topic, [b"after"])
    reader, seen = cluster.consumer(), list[bytes | None]()
    reader.assign([TopicPartition(topic, 0, 0)])

    def sees_what_came_after() -> bool:
        seen.extend(message.value() for message in poll_all([reader]))
        return seen == [b"after"]

    until(sees_what_came_after, what="the abort of the open transaction")
    reader.close()
