"""New or deleted topics on a real broker, which not all nodes know yet."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, ResourceType

from rose.topics.admin import connect, create_topics, find_drift
from rose.topics.catalog import GROUPS, OUTCOMES, PROMPTS, Retention
from rose.topics.errors import TopicMissing
from rose.topics.queries import watermarks_of
from rose.topics.reader import Reader
from rose.topics.writer import Writer
from tests.golden.examples import PROMPT
from tests.support.brokers import EMBEDDED, AnyBroker, start
from tests.support.bus_fixtures import PARTITIONS, with_topics
from tests.support.waiting import until


def test_topic_created_during_a_query_is_not_missing(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)

    class Late(Consumer):  # type: ignore[misc]
        """A consumer for which the topic is created after its first query reports it as missing."""

        def list_topics(self, *named: Any, **timeout: Any) -> Any:
            with_topics(settings)
            return super().list_topics(*named, **timeout)

    with closing(Late(settings.consumer("test", "test"))) as consumer:
        assert watermarks_of(consumer, TopicPartition(settings.topic(PROMPTS), 0)) == (0, 0)


def test_topic_retention_unlike_the_settings_is_drift(broker: AnyBroker, namespace: str) -> None:
    settings = replace(broker.settings(namespace), retention=Retention(outcomes=4 * 3600.0))
    with_topics(settings)
    assert find_drift(settings, PARTITIONS) == []
    found = find_drift(broker.settings(namespace), PARTITIONS)
    assert {(each.topic, each.subject, each.expected, each.actual) for each in found} == {
        (settings.topic(OUTCOMES), "retention.ms", "2592000000", "14400000"),
        (settings.topic(OUTCOMES), "segment.ms", "324000000", "1800000"),
    }


def test_missing_partition_is_reported_with_the_topic_that_has_it(broker: AnyBroker, namespace: str) -> None:
    settings = with_topics(broker.settings(namespace))
    admin, many = connect(settings), PARTITIONS.home + 3
    for enlarged in admin.create_partitions([NewPartitions(settings.topic(PROMPTS), many)]).values():
        enlarged.result()
    until(lambda: len(admin.list_topics(timeout=10.0).topics[settings.topic(PROMPTS)].partitions) == many)
    both = f"{settings.topic(GROUPS)} has no partition {many - 1}, but {PARTITIONS.home} in all, and topic "
    with closing(Reader(settings, "test")) as reader, pytest.raises(TopicMissing) as raised:
        reader.watermarks((GROUPS, many - 1))
    sentence = str(raised.value)
    assert f"{both}{settings.topic(PROMPTS)} has {many}: " in sentence and "delete" not in sentence


def test_deleted_topic_exists_after_its_creation(broker: AnyBroker, namespace: str) -> None:
    settings = with_topics(broker.settings(namespace))
    admin = connect(settings)
    for _ in range(3):
        for deleted in admin.delete_topics([settings.topic(PROMPTS)]).values():
            deleted.result()
        assert create_topics(settings, PARTITIONS) == [settings.topic(PROMPTS)]
        with closing(Writer(settings, "test")) as writer:
            writer.write(PROMPTS, PROMPT, key=PROMPT.group_id, partition=0)
            writer.flush()


def test_writer_makes_no_topic_on_a_broker_that_makes_topics_on_first_use(tmp_path: Path) -> None:
    with start(EMBEDDED, tmp_path) as own:
        settings = own.settings("own.")
        admin = connect(settings)
        name = ConfigEntry("auto.create.topics.enable", "true", incremental_operation=AlterConfigOpType.SET)
        broker_id = next(iter(admin.list_topics(timeout=10.0).brokers))
        resource = ConfigResource(ResourceType.BROKER, str(broker_id), incremental_configs=[name])
        for altered in admin.incremental_alter_configs([resource]).values():
            altered.result()
        with closing(Writer(settings, "test")) as writer:
            writer.write(PROMPTS, PROMPT, key="g", partition=0)
            with pytest.raises(TopicMissing):
                writer.partition_count(PROMPTS)
            writer.poll(1.0)
        assert settings.topic(PROMPTS) not in admin.list_topics(timeout=10.0).topics
