"""Recorded records are served again in a scratch namespace on a real broker."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from rose.pipeline.replay.serving import RecordServer, scratch_settings
from rose.schemas.errors import UsageError
from rose.schemas.record import Record
from rose.topics.admin import create_topics
from rose.topics.catalog import GRANTS, HEARTBEATS, JOURNAL, PROMPTS, REQUESTED, Topic
from rose.topics.log_reader import read_keyed_messages, topic_starts
from rose.topics.records import RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.brokers import EMBEDDED, AnyBroker, flags
from tests.support.rose_command import Rose
from tests.support.router_process_fixtures import PARTITIONS
from tests.support.routing_fixtures import heartbeat, request
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TOPICS = (REQUESTED, HEARTBEATS, GRANTS)
FAST = 1e6


@pytest.fixture
def source(broker: AnyBroker, namespace: str) -> BusSettings:
    """The log of a run: requests in two homes, more than are kept in memory at once, heartbeats, and a tombstone."""
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    writer = Writer(settings, "test")
    for number in range(3_000):
        put(writer, REQUESTED, request(f"g{number}:0", home=number % 2), f"g{number}:0", number % 2)
        if number % 100 == 0:
            put(writer, HEARTBEATS, heartbeat(0, sequence=number), "w0", 0)
    writer.tombstone(GRANTS, key="w0", partition=0)
    writer.flush()
    writer.close()
    return settings


def put(writer: Writer, topic: Topic, record: Record, key: str, partition: int) -> None:
    writer.write(topic, record, key=key, partition=partition, headers={"own": b"kept"})


def messages(settings: BusSettings, topic: Topic) -> dict[int, list[object]]:
    """Return key, value and headers of the messages by partition, in order."""
    found: dict[int, list[object]] = {}
    for each in read_keyed_messages(settings, topic_starts(settings, [topic])):
        found.setdefault(each.partition, []).append(each.raw)
    return found


def test_served_records_keep_topic_partition_key_headers_and_order(source: BusSettings) -> None:
    target = scratch_settings(source, f"{source.namespace}again.")
    progress: list[tuple[int, int]] = []
    server = RecordServer(source, target, TOPICS)
    served = server.serve(0.0, float("inf"), FAST, on_progress=lambda *now: progress.append(now))
    assert served == 3_031 and progress[-1] == (3_031, 3_031)
    for topic in TOPICS:
        assert messages(target, topic) == messages(source, topic)
    assert ("own", b"kept") in messages(target, HEARTBEATS)[0][0].headers  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="has or had records: name a namespace that has never had any"):
        RecordServer(source, target, TOPICS)


def test_namespace_of_another_run_is_refused_and_unchanged_whichever_topics_are_served(source: BusSettings) -> None:
    """The other run has more partitions, no grants, and records in its last partition alone."""
    other = scratch_settings(source, f"{source.namespace}other.")
    create_topics(other, replace(PARTITIONS, cells=3))
    admin = AdminClient(other.client("test"))
    admin.delete_topics([other.topic(JOURNAL)])[other.topic(JOURNAL)].result()
    until(lambda: other.topic(JOURNAL) not in admin.list_topics(timeout=10.0).topics)  # a broker lists it for a while
    writer = Writer(other, "test")
    put(writer, HEARTBEATS, heartbeat(0), "w0", 2)
    writer.flush()
    writer.close()
    with pytest.raises(UsageError, match="has or had records"):
        RecordServer(source, other, [GRANTS])
    assert other.topic(JOURNAL) not in admin.list_topics(timeout=10.0).topics
    assert messages(other, GRANTS) == {}


def test_record_that_is_not_due_when_the_command_is_stopped_is_not_served(source: BusSettings) -> None:
    target = scratch_settings(source, f"{source.namespace}stopped.")
    with closing(Writer(source, "test")) as later:
        put(later, HEARTBEATS, heartbeat(0, sequence=3_000), "w0", 0)
        later.flush()
    stamps = [each.timestamp_seconds for each in read_keyed_messages(source, topic_starts(source, [HEARTBEATS]))]
    at_once, served, looks = stamps.count(min(stamps)), [0], iter((False, False))
    RecordServer(source, target, [HEARTBEATS]).serve(
        0.0,
        float("inf"),
        1e-9,
        on_progress=lambda count, _: served.append(count),
        should_stop=lambda: served[-1] >= at_once and next(looks, True),
    )
    assert len(messages(target, HEARTBEATS)[0]) == at_once < len(stamps)


def test_record_that_does_not_decode_is_served_at_its_time(source: BusSettings) -> None:
    """It is the first record of its partition, so no record before it tells the time."""
    writer = Writer(source, "test")
    spoiled = RawMessage(b"g", b"no record", (("own", b"kept"),))
    writer.forward(PROMPTS, spoiled, partition=0, key=b"g")
    writer.flush()
    writer.close()
    target = scratch_settings(source, f"{source.namespace}spoiled.")
    looks = iter([False] * 1_000)
    served = RecordServer(source, target, [PROMPTS, GRANTS]).serve(
        0.0, float("inf"), FAST, on_progress=lambda *_: None, should_stop=lambda: next(looks, True)
    )
    assert (served, next(looks, True)) == (2, False), "it ended by itself"
    assert messages(target, PROMPTS) == {0: [spoiled]}


def test_only_the_named_topics_and_times_are_served(source: BusSettings) -> None:
    stamps = [each.timestamp_seconds for each in read_keyed_messages(source, topic_starts(source, [HEARTBEATS]))]
    target = scratch_settings(source, f"{source.namespace}part.")
    server = RecordServer(source, target, [HEARTBEATS])
    until = sorted(stamps)[len(stamps) // 2]
    served = server.serve(0.0, until, FAST, on_progress=lambda *_: None)
    assert served == sum(stamp <= until for stamp in stamps)
    assert messages(target, REQUESTED) == {}


@pytest.mark.parametrize("broker_kind", [EMBEDDED], indirect=True)
def test_command_serves_and_refuses_the_namespace_of_the_run(source: BusSettings, tmp_path: Path) -> None:
    rose = Rose(EMBEDDED, tmp_path)
    options = ["--speed", "100000", "--topics", "slack.heartbeats", *flags(source)]
    with rose.start("replay", "--serve", source.namespace, *options) as refused:
        assert "is the run's own namespace" in refused.communicate(timeout=60)[0]
    assert refused.returncode == 2
    output = rose("replay", "--serve", f"{source.namespace}scratch.", *options)
    assert "30 records served" in output
