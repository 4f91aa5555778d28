"""Records are read as they were written, in order, from the offset that the producer was told."""

import random
import time

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, TIMESTAMP_CREATE_TIME, KafkaError, TopicPartition

from tests.conformance.bus_driver import WAIT_SECONDS, Cluster, produce, read_to_end


def test_keys_values_headers_timestamps_and_order_survive(cluster: Cluster) -> None:
    topic = cluster.topic("all", 3)
    producer = cluster.producer()
    start = int(time.time() * 1000) - 60_000  # recent, because retention would delete older records
    for index in range(300):
        headers = [("rose-schema", b"turn-request/1"), ("twice", b"1"), ("twice", bytes([index % 256])), ("none", None)]
        producer.produce(
            topic,
            b"%d" % index,
            key=b"\x00key-%d" % index,
            partition=index % 3,
            headers=headers,
            timestamp=start + index,
        )
    producer.produce(topic, None, key=b"tombstone", partition=0)
    assert producer.flush(WAIT_SECONDS) == 0
    for partition in range(3):
        messages = cluster.read(topic, partition=partition)
        if partition == 0:
            tombstone = messages.pop()
            assert (tombstone.key(), tombstone.value(), tombstone.headers()) == (b"tombstone", None, None)
        assert [message.value() for message in messages] == [b"%d" % index for index in range(partition, 300, 3)]
        for message in messages:
            index = int(message.value())
            assert message.key() == b"\x00key-%d" % index
            assert message.timestamp() == (TIMESTAMP_CREATE_TIME, start + index)
            assert message.headers()[2:] == [("twice", bytes([index % 256])), ("none", None)]


@pytest.mark.embedded_fault("keeps the last header of a name where it stamps records", raises=AssertionError)
def test_headers_of_one_name_survive_where_the_broker_stamps_records(cluster: Cluster) -> None:
    topic = cluster.topic("stamped", message_timestamp_type="LogAppendTime")
    producer = cluster.producer()
    producer.produce(topic, b"value", headers=[("twice", b"1"), ("once", b"2"), ("twice", b"3")])
    assert producer.flush(WAIT_SECONDS) == 0
    [message] = cluster.read(topic)
    assert message.headers() == [("twice", b"1"), ("once", b"2"), ("twice", b"3")]


def test_last_header_of_a_name_survives_where_the_broker_stamps_records(cluster: Cluster) -> None:
    """ROSE reads the last header of a name, which the last writer of the record added."""
    topic = cluster.topic("stamped", message_timestamp_type="LogAppendTime")
    producer = cluster.producer()
    producer.produce(topic, b"value", headers=[("twice", b"1"), ("once", b"2"), ("twice", b"3")])
    assert producer.flush(WAIT_SECONDS) == 0
    [message] = cluster.read(topic)
    assert dict(message.headers() or ()) == {"twice": b"3", "once": b"2"}


def test_delivery_report_names_the_offset_of_the_record(cluster: Cluster) -> None:
    """ROSE refers to records by partition and offset, so the report must be correct under batches and interleaving."""
    topic = cluster.topic("places", 2)
    seed = 20_240
    draw = random.Random(seed)
    producers = [cluster.producer(linger_ms=draw.choice([0, 5])) for _ in range(3)]
    reported = {}
    for index in range(600):
        value = b"%d:" % index + draw.randbytes(draw.randrange(2000))
        partition = draw.randrange(2)

        def remember(error: KafkaError | None, message: object, value: bytes = value) -> None:
            assert error is None
            reported[message.partition(), message.offset()] = value  # type: ignore[attr-defined]

        producer = draw.choice(producers)
        producer.produce(topic, value, partition=partition, on_delivery=remember)
        producer.poll(0)
    for producer in producers:
        assert producer.flush(WAIT_SECONDS) == 0
    stored = {
        (partition, message.offset()): message.value()
        for partition in range(2)
        for message in cluster.read(topic, partition=partition)
    }
    assert stored == reported, f"seed {seed}"


def test_delivery_report_offsets_are_correct_inside_transactions(cluster: Cluster) -> None:
    """Commit and abort markers take offsets of their own."""
    topic = cluster.topic("marked")
    producer = cluster.transactional("marker")
    kept: dict[int, bytes] = {}
    for round_number in range(4):
        producer.begin_transaction()
        delivered = produce(producer, topic, [b"%d-%d" % (round_number, index) for index in range(3)])
        if round_number % 2:
            producer.flush(WAIT_SECONDS)
            producer.abort_transaction(WAIT_SECONDS)
        else:
            producer.commit_transaction(WAIT_SECONDS)
            kept |= {message.offset(): message.value() for message in delivered}
    assert len(kept) == 6
    assert {message.offset(): message.value() for message in cluster.read(topic)} == kept


def test_one_record_is_fetched_by_its_offset(cluster: Cluster) -> None:
    topic = cluster.topic("index")
    cluster.send(topic, [b"%d" % index for index in range(2000)])
    consumer = cluster.consumer()
    for offset in [1999, 0, 1234, 1, 999]:
        consumer.assign([TopicPartition(topic, 0, offset)])
        message = consumer.poll(WAIT_SECONDS)
        assert (message.offset(), message.value()) == (offset, b"%d" % offset)
    consumer.close()


def test_reading_from_the_beginning_the_end_and_an_offset(cluster: Cluster) -> None:
    topic = cluster.topic("ends")
    cluster.send(topic, [b"old-0", b"old-1", b"old-2"])
    assert cluster.values(topic, offset=OFFSET_BEGINNING) == [b"old-0", b"old-1", b"old-2"]
    assert cluster.values(topic, offset=2) == [b"old-2"]
    consumer = cluster.consumer()
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    assert read_to_end(consumer) == []
    cluster.send(topic, [b"new"])
    message = consumer.poll(WAIT_SECONDS)
    assert (message.value(), message.offset()) == (b"new", 3)
    consumer.close()


def test_watermarks_follow_the_log(cluster: Cluster) -> None:
    topic = cluster.topic("marks", 2)
    consumer = cluster.consumer()
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), WAIT_SECONDS) == (0, 0)
    cluster.send(topic, [b"x"] * 5)
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), WAIT_SECONDS) == (0, 5)
    assert consumer.get_watermark_offsets(TopicPartition(topic, 1), WAIT_SECONDS) == (0, 0)
    admin = cluster.admin()
    admin.delete_records([TopicPartition(topic, 0, 2)])[TopicPartition(topic, 0, 2)].result()
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), WAIT_SECONDS) == (2, 5)
    consumer.close()


def test_offsets_are_found_by_time(cluster: Cluster) -> None:
    topic = cluster.topic("clock")
    start = int(time.time() * 1000) - 60_000  # recent, because retention would delete older records
    producer = cluster.producer(linger_ms=50)  # one batch: the offset must be exact inside it
    for index in range(50):
        producer.produce(topic, b"%d" % index, partition=0, timestamp=start + 10 * index)
    assert producer.flush(WAIT_SECONDS) == 0
    consumer = cluster.consumer()

    def at(milliseconds: int) -> int:
        [found] = consumer.offsets_for_times([TopicPartition(topic, 0, milliseconds)], WAIT_SECONDS)
        assert found.error is None
        offset: int = found.offset
        return offset

    assert [at(start - 1), at(start), at(start + 1), at(start + 250), at(start + 490)] == [0, 0, 1, 25, 49]
    assert at(start + 491) == OFFSET_END
    consumer.close()


def test_idempotent_producer_writes_each_record_once_in_order(cluster: Cluster) -> None:
    topic = cluster.topic("once")
    values = [b"%06d" % index for index in range(5_000)]
    assert len(cluster.send(topic, values)) == len(values)
    assert cluster.values(topic) == values


def test_waiting_consumer_gets_new_records(cluster: Cluster) -> None:
    topic = cluster.topic("wake")
    late = 2 * WAIT_SECONDS * 1000
    consumer = cluster.consumer(enable_partition_eof=False, fetch_wait_max_ms=late, socket_timeout_ms=late + 30_000)
    consumer.assign([TopicPartition(topic, 0, 0)])
    for index in range(20):
        cluster.send(topic, [b"%d" % index])
        message = consumer.poll(WAIT_SECONDS)  # a broker that does not wake the fetch answers later
        assert message is not None and message.value() == b"%d" % index
    consumer.close()
