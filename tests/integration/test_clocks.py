"""Wrong clocks on a real broker: records of any writer clock are accepted and kept for their retention."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Producer
from confluent_kafka.admin import NewTopic

from rose.schemas.wire import encode
from rose.topics import admin
from rose.topics.admin import connect, create_topics, expected_settings, find_drift
from rose.topics.catalog import CATALOG, PROMPTS, SAMPLES, Retention
from rose.topics.settings import BusSettings
from tests.golden.examples import PROMPT
from tests.support.brokers import AnyBroker
from tests.support.bus_fixtures import PARTITIONS, put, with_topics

DAY_SECONDS = 24 * 3600.0
LEAST_SECONDS = 3600.0
"""Smaller than the error of any wrong clock below."""


@pytest.mark.parametrize("days", [-400, 400])
def test_records_of_any_writer_clock_are_accepted_with_broker_time(
    broker: AnyBroker, namespace: str, days: int
) -> None:
    settings = with_topics(broker.settings(namespace))
    wrong = int(1000 * (time.time() + days * DAY_SECONDS))
    producer = Producer(settings.producer("wrong"))
    timestamps: list[Any] = []
    for topic in CATALOG:
        producer.produce(
            settings.topic(topic),
            b"value",
            key=b"key",
            timestamp=wrong,
            on_delivery=lambda *each: timestamps.append(each),
        )
    assert producer.flush(60) == 0
    assert len(timestamps) == len(CATALOG)
    for error, message in timestamps:
        assert error is None, message.topic()
        kind, stamp = message.timestamp()
        assert kind == TIMESTAMP_LOG_APPEND_TIME, message.topic()
        assert abs(stamp / 1000 - time.time()) < LEAST_SECONDS


def test_deletion_by_age_keeps_young_records_at_a_fast_local_clock(
    broker: AnyBroker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, place = with_topics(broker.settings(namespace)), (PROMPTS, 0)
    put(settings, [encode(PROMPT)] * 3)
    monkeypatch.setattr(
        admin, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 400 * DAY_SECONDS)
    )
    assert admin.delete_before(settings, {place: 3}, client_id="test") == {}
    assert admin.delete_before(replace(settings, retention=Retention(prompts=-1.0)), {place: 2}, client_id="test") == {
        place: 2
    }


def test_topic_with_create_time_differs_from_the_catalog(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    _make_stamped_by_writers(settings)
    create_topics(settings, PARTITIONS)
    [found] = find_drift(settings, PARTITIONS)
    assert (found.topic, found.subject, found.expected, found.actual) == (
        settings.topic(SAMPLES),
        "message.timestamp.type",
        "LogAppendTime",
        "CreateTime",
    )
    assert not found.creatable


def _make_stamped_by_writers(settings: BusSettings) -> None:
    """Make the topic as version 0.2.0 did."""
    config = {
        name: value
        for name, value in expected_settings(SAMPLES, settings.retention).items()
        if name != "message.timestamp.type"
    }
    topic = NewTopic(settings.topic(SAMPLES), num_partitions=1, replication_factor=1, config=config)
    admin = connect(settings)  # keeps a reference during the query
    for made in admin.create_topics([topic]).values():
        made.result()
