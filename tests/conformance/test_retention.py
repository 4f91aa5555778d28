"""A broker deletes exactly the records that the topic configuration names."""

import time
from typing import Any

import pytest

from tests.conformance.bus_driver import Cluster, until

SLOW_SECONDS = 120
"""Apache Kafka deletes at its own times: its cleaner pauses 15 s, and its retention begins after 30 s."""

COMPACTED_SOON: dict[str, Any] = {
    "cleanup_policy": "compact",
    "segment_ms": 1000,
    "min_cleanable_dirty_ratio": 0.01,
    "max_compaction_lag_ms": 1000,
}


def history(cluster: Cluster, topic: str) -> list[tuple[bytes, bytes | None]]:
    return [(message.key(), message.value()) for message in cluster.read(topic)]


@pytest.mark.slow
def test_compaction_keeps_the_newest_of_each_key(cluster: Cluster) -> None:
    """The compacted topics (grants, snapshots, manifests) are read completely at a start, so old values must not
    accumulate."""
    topic = cluster.topic(
        "compacted",
        cleanup_policy="compact",
        segment_ms=1000,
        min_cleanable_dirty_ratio=0.01,
        max_compaction_lag_ms=1000,
    )
    rounds = 0

    def compacted() -> bool:
        nonlocal rounds
        for key in (b"a", b"b"):
            cluster.send(topic, [b"%d" % rounds], key=key)
        rounds += 1
        kept = history(cluster, topic)
        newest = dict(kept)
        assert newest == {b"a": b"%d" % (rounds - 1), b"b": b"%d" % (rounds - 1)}
        time_passes(cluster)
        return rounds > 3 and len(kept) < 2 * rounds

    until(compacted, what="old values to go", seconds=SLOW_SECONDS)


@pytest.mark.slow
def test_tombstone_removes_its_key(cluster: Cluster) -> None:
    topic = cluster.topic("ended", **COMPACTED_SOON, delete_retention_ms=1000)
    cluster.send(topic, [b"snapshot", None], key=b"trajectory")

    def ended() -> bool:
        cluster.send(topic, [b"x"], key=b"another")  # the newest segment is never compacted
        time_passes(cluster)
        return b"trajectory" not in dict(history(cluster, topic))

    until(ended, what="key and tombstone to go", seconds=SLOW_SECONDS)


@pytest.mark.slow
def test_records_are_deleted_after_their_retention(cluster: Cluster) -> None:
    topic = cluster.topic("short", cleanup_policy="delete", retention_ms=2000, segment_ms=1000)
    cluster.send(topic, [b"old"] * 10)

    def gone() -> bool:
        cluster.send(topic, [b"new"])
        time_passes(cluster)
        values = cluster.values(topic)
        assert values and values[-1] == b"new"
        return b"old" not in values

    until(gone, what="old records to go", seconds=SLOW_SECONDS)


def test_records_are_kept_for_their_retention(cluster: Cluster) -> None:
    topic = cluster.topic("long", cleanup_policy="delete", retention_ms=3_600_000, segment_ms=60_000)
    producer = cluster.producer()
    now = int(time.time() * 1000)
    for age_seconds in (3000, 60, 0):
        producer.produce(topic, b"%d" % age_seconds, partition=0, timestamp=now - 1000 * age_seconds)
    assert producer.flush(30) == 0
    assert cluster.values(topic) == [b"3000", b"60", b"0"]


def time_passes(cluster: Cluster) -> None:
    """Wait a little for a report that never comes."""
    cluster.admin().poll(0.3)
