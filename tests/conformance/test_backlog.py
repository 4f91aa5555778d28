"""A long partition is read in pieces of the requested size; a partition without new records is fetched rarely."""

import json
import random
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition

from tests.conformance.bus_driver import Cluster, until

RECORDS, RECORD_BYTES = 24, 500_000


@pytest.fixture
def backlog(cluster: Cluster) -> str:
    topic = cluster.topic("backlog")
    noise = random.Random(7).randbytes(RECORD_BYTES)
    assert len(cluster.send(topic, (b"%04d" % index + noise for index in range(RECORDS)))) == RECORDS
    return topic


def whole(cluster: Cluster, topic: str, **limits: int) -> list[int]:
    return [int(message.value()[:4]) for message in cluster.read(topic, **limits)]


def test_backlog_is_read_with_a_large_enough_receive_buffer(cluster: Cluster, backlog: str) -> None:
    """The limits are those of ROSE's readers, which accept responses far larger than requested."""
    limits = {"fetch_message_max_bytes": 4 * 2**20, "receive_message_max_bytes": 512 * 2**20}
    assert whole(cluster, backlog, **limits) == list(range(RECORDS))


@pytest.mark.embedded_fault(
    "ignores fetch limits: one answer holds the whole partition, and a reader with less room for it stops",
    raises=(KafkaException, AssertionError),
)
def test_fetch_is_no_larger_than_requested(cluster: Cluster, backlog: str) -> None:
    limits = {
        "fetch_message_max_bytes": 2**20,
        "fetch_max_bytes": 2 * 2**20,
        "message_max_bytes": 2**20,
        "receive_message_max_bytes": 4 * 2**20,
    }
    assert whole(cluster, backlog, **limits) == list(range(RECORDS))


@pytest.mark.embedded_fault("answers an empty fetch at once: a waiting reader asks without end", raises=AssertionError)
def test_fetch_without_records_is_held(cluster: Cluster) -> None:
    """The broker holds a fetch as long as the reader allows: two fetches a second, and some more at the start."""
    reported: list[int] = []

    def statistics(text: str) -> None:
        brokers = json.loads(text)["brokers"].values()
        reported.append(sum(broker["req"].get("Fetch", 0) for broker in brokers))

    topic = cluster.topic("quiet")
    often: dict[str, Any] = {"statistics_interval_ms": 500, "stats_cb": statistics}
    consumer = cluster.consumer(fetch_wait_max_ms=500, **often)
    consumer.assign([TopicPartition(topic, 0, 0)])
    until(lambda: consumer.poll(0.1) is None and len(reported) > 4, what="statistics")
    consumer.close()
    assert reported[-1] < 100
