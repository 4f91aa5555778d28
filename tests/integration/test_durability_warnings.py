"""Broker settings that lose or forget data too soon are reported, and unanswered queries are not."""

import pytest

from rose.topics.admin import _replica_warnings, _retention_warnings, create_topics, durability_warnings
from rose.topics.catalog import CATALOG, DEFAULT_RETENTION, Partitions
from tests.support.brokers import KAFKA, AnyBroker


def test_missing_replicas_are_reported_once_for_all_topics(broker: AnyBroker, namespace: str, broker_kind: str) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    one = durability_warnings(settings)
    three = durability_warnings(settings, replication_factor=3)
    assert three == [
        *one,
        f"{namespace}rose.prompts.submitted.v1 and {len(CATALOG) - 1} more topics: "
        "partitions have 1 of the 3 copies that topics.replication_factor asks for",
    ]
    if broker_kind == KAFKA:
        assert any("offsets.retention.minutes is" in sentence for sentence in one), "its default is 7 days"


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ({"offsets.retention.minutes": "10080"}, ["offsets.retention.minutes is 10080", "longer than 7 days"]),
        ({"transaction.max.timeout.ms": "1000"}, ["transaction.max.timeout.ms is 1000"]),
        ({"offsets.retention.minutes": "43200", "transaction.max.timeout.ms": "900000"}, []),
        ({}, []),
    ],
)
def test_too_short_offset_retention_or_transaction_timeout_is_reported(
    broker: dict[str, str], words: list[str]
) -> None:
    warnings = "\n".join(_retention_warnings(broker, DEFAULT_RETENTION))
    assert bool(warnings) == bool(words)
    assert all(word in warnings for word in words)


@pytest.mark.parametrize(
    ("copies", "insync", "words"),
    [(3, 2, ""), (3, 1, "set 2"), (1, 1, ""), (1, 2, "nothing can be written"), (1, None, "")],
)
def test_replication_that_may_lose_acknowledged_records_is_reported(
    copies: int, insync: int | None, words: str
) -> None:
    warnings = list(_replica_warnings(copies, insync, 1))
    assert bool(warnings) == bool(words)
    assert all(words in sentence for sentence in warnings)
