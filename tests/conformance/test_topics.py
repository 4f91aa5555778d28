"""Topics are created with the settings of the catalog, and only on request."""

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ConfigResource, NewTopic

from tests.conformance.bus_driver import LARGEST_BYTES, WAIT_SECONDS, Cluster, produce


def test_topic_has_the_partitions_and_settings_it_was_created_with(cluster: Cluster) -> None:
    settings = {
        "cleanup.policy": "compact,delete",
        "retention.ms": "600000",
        "segment.ms": "60000",
        "max.message.bytes": "986624",
        "min.cleanable.dirty.ratio": "0.2",
    }
    topic = cluster.topic("asked", 7, **{name.replace(".", "_"): value for name, value in settings.items()})
    admin = cluster.admin()
    assert sorted(admin.list_topics(timeout=WAIT_SECONDS).topics[topic].partitions) == list(range(7))
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    found = admin.describe_configs([resource])[resource].result()
    assert {name: found[name].value for name in settings} == settings


def test_creating_a_topic_again_changes_nothing(cluster: Cluster) -> None:
    topic = cluster.topic("twice", 2)
    cluster.send(topic, [b"stays"])
    admin = cluster.admin()
    with pytest.raises(KafkaException) as refused:
        admin.create_topics([NewTopic(topic, 5, 1)])[topic].result()
    assert refused.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    assert len(admin.list_topics(timeout=WAIT_SECONDS).topics[topic].partitions) == 2
    assert cluster.values(topic) == [b"stays"]


def test_write_to_a_missing_topic_fails_and_creates_none(cluster: Cluster) -> None:
    topic = cluster.namespace + "never-created"
    producer = cluster.producer(message_timeout_ms=3000, topic_metadata_propagation_max_ms=500)
    errors: list[KafkaError | None] = []
    producer.produce(topic, b"lost?", on_delivery=lambda error, _: errors.append(error))
    producer.flush(WAIT_SECONDS)
    assert len(errors) == 1 and errors[0] is not None
    assert topic not in cluster.admin().list_topics(timeout=WAIT_SECONDS).topics


def test_largest_record_is_stored_completely(cluster: Cluster) -> None:
    topic = cluster.topic("large", max_message_bytes=LARGEST_BYTES + 64 * 1024)
    incompressible = bytes((index * 2654435761 >> 13) & 255 for index in range(LARGEST_BYTES))
    assert len(cluster.send(topic, [incompressible], key=b"k")) == 1
    assert cluster.values(topic) == [incompressible]


def test_record_over_the_topics_limit_is_refused(cluster: Cluster) -> None:
    topic = cluster.topic("bounded", max_message_bytes=100_000)
    producer = cluster.producer(compression_type="none")
    errors: list[KafkaError | None] = []
    producer.produce(topic, bytes(200_000), on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(WAIT_SECONDS) == 0
    assert [error and error.code() for error in errors] == [KafkaError.MSG_SIZE_TOO_LARGE]
    assert cluster.values(topic) == []


def test_size_limit_applies_after_compression(cluster: Cluster) -> None:
    topic = cluster.topic("packed", max_message_bytes=100_000)
    assert len(produce_one(cluster, topic, bytes(200_000))) == 1


def produce_one(cluster: Cluster, topic: str, value: bytes) -> list[object]:
    producer = cluster.producer()
    delivered = produce(producer, topic, [value])
    assert producer.flush(WAIT_SECONDS) == 0
    return list(delivered)
