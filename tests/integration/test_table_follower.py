"""A follower of a compacted topic receives the newest record of each key and all new records."""

import threading
import time

from rose.schemas.grants import CapacityGrant
from rose.topics.admin import create_topics
from rose.topics.catalog import GRANTS, Partitions
from rose.topics.records import Envelope
from rose.topics.table_follower import TableFollower
from rose.topics.writer import Writer
from tests.support.brokers import AnyBroker

WAIT_SECONDS = 30.0


def test_record_superseded_before_the_start_is_not_delivered(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    writer = Writer(settings, "test")

    def write_grant(key: str, reason: str) -> None:
        grant = CapacityGrant(worker="w", lend=True, kv_bytes=0, token_budget=0, granted_at=time.time(), reason=reason)
        writer.write(GRANTS, grant, key=key)
        writer.flush()

    for key, reason in (("w", "old"), ("w/drain", "drain"), ("w/cell", "cell"), ("w", "new")):
        write_grant(key, reason)
    writer.tombstone(GRANTS, key="w/drain", partition=0)
    writer.flush()
    received: list[tuple[str, str, bool]] = []
    came = threading.Event()

    def take(item: Envelope, seen: bool) -> None:
        received.append((item.key, item.record.reason if isinstance(item.record, CapacityGrant) else "", seen))
        if seen:
            came.set()

    following = TableFollower(settings, GRANTS, "test-following", take)
    assert following.is_caught_up.wait(WAIT_SECONDS)
    write_grant("w", "newest")
    assert came.wait(WAIT_SECONDS)
    following.stop()
    assert received == [("w/cell", "cell", False), ("w", "new", False), ("w/drain", "", False), ("w", "newest", True)]
