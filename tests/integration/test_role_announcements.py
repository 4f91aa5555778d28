"""A role that restarts again and again is reported, whichever role it is and whatever stops its work."""

import itertools
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import structlog
from confluent_kafka.admin import NewTopic

from rose.pipeline import clock
from rose.pipeline.audit import inspect_log
from rose.pipeline.cli import roles as tells
from rose.pipeline.cli.roles import announce_starts
from rose.pipeline.monitor.diagnosis import Severity, diagnose
from rose.pipeline.monitor.follower import RunFollower
from rose.schemas.heartbeats import RoleBegun
from rose.topics.acl import VIEW
from rose.topics.admin import connect, create_topics, expected_settings
from rose.topics.catalog import DISPATCHED, ROLE_STARTS, Retention
from rose.topics.dead_letters import read_dead_letter_infos
from rose.topics.errors import TopicMissing
from rose.topics.health import RESTART_LIMIT, Health
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.workers.weights.trust import Trust
from tests.support.brokers import AnyBroker
from tests.support.roles import role_process
from tests.support.router_process_fixtures import PARTITIONS, RouterHarness
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def role_starts(settings: BusSettings) -> list[RoleBegun]:
    return [each.record for each in read_whole_topics(settings, [ROLE_STARTS]) if isinstance(each.record, RoleBegun)]


def test_each_start_is_on_the_log_once(broker: AnyBroker, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tells, "ANNOUNCEMENT_PAUSE_SECONDS", 0.01)
    settings, health = broker.settings(namespace), Health()
    create_topics(settings, PARTITIONS)
    with announce_starts(settings, "router-0", health):
        until(lambda: [(each.role, each.times, each.reason) for each in role_starts(settings)] == [("router-0", 1, "")])
        for _ in range(5):
            health.report_restart("the topic refuses it")
        until(lambda: sum(each.times for each in role_starts(settings)) == 6)
    assert {(each.role, each.reason) for each in role_starts(settings)[1:]} == {("router-0", "the topic refuses it")}


def test_concurrent_namesakes_have_own_partitions_and_a_restart_keeps_its_partition(
    broker: AnyBroker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tells, "ANNOUNCEMENT_PAUSE_SECONDS", 0.01)
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)

    def places(count: int) -> list[str]:
        until(lambda: len(role_starts(settings)) == count)
        return [each.place for each in role_starts(settings)]

    with announce_starts(settings, "router-0", Health()):
        places(1)
        with announce_starts(settings, "router-0", Health()):
            places(2)
        with announce_starts(settings, "router-0", Health()):
            places(3)
        with announce_starts(settings, "router-1", Health()):
            first, second, again, other = places(4)
    assert second == again != first
    assert other == first, "another name is counted apart"


def test_missing_topic_of_starts_prevents_no_start_and_no_stop(
    broker: AnyBroker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tells, "ANNOUNCEMENT_STOP_SECONDS", 0.01)
    settings, health = broker.settings(namespace), Health()
    with announce_starts(settings, "router-0", health):
        health.report_restart("there are no topics")
    with pytest.raises(TopicMissing):
        role_starts(settings)


def test_clock_that_is_set_back_is_logged_once_by_a_role(
    broker: AnyBroker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "CLOCK_CHECK_SECONDS", 0.01)
    settings, wall, readings = broker.settings(namespace), time.time, itertools.count()
    create_topics(settings, PARTITIONS)
    with structlog.testing.capture_logs() as logs, announce_starts(settings, "router-0", Health()):
        until(lambda: len(role_starts(settings)) == 1)
        monkeypatch.setattr(time, "time", lambda: wall() - 60 * (next(readings) > 0))
        until(lambda: any(each["event"] == "clock_set_back" for each in logs))
    assert [each["seconds"] for each in logs if each["event"] == "clock_set_back"] == [60.0]


def test_log_without_the_topic_of_starts_can_be_observed(broker: AnyBroker, namespace: str) -> None:
    """The log is that of 0.2.0: without the topic and its dead letters."""
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    admin = connect(settings)  # keeps a reference during the query
    for gone in admin.delete_topics(
        [settings.topic(ROLE_STARTS), f"{settings.namespace}{ROLE_STARTS.dead_letters}"]
    ).values():
        gone.result()
    watch = RunFollower(settings, trust=Trust("policy", "run"), whole=False, window_groups=1, max_lag_versions=4)

    def answered() -> bool:
        watch.poll(0.1)
        assert not watch.broker_error
        return watch.caught_up and watch.snapshot is not None

    with closing(watch):
        until(answered)
    assert inspect_log(settings).dead_letters == {}
    assert read_dead_letter_infos(settings, *VIEW.reads_dead_letters) == []


@pytest.fixture
def refusing(broker: AnyBroker, namespace: str) -> Iterator[BusSettings]:
    """A broker that accepts no dispatch."""
    settings = broker.settings(namespace)
    config = {**expected_settings(DISPATCHED, Retention()), "max.message.bytes": "200"}
    topic = NewTopic(settings.topic(DISPATCHED), num_partitions=PARTITIONS.slots, replication_factor=1, config=config)
    admin = connect(settings)  # keeps a reference during the query
    for made in admin.create_topics([topic]).values():
        made.result()
    create_topics(settings, PARTITIONS)
    yield settings


def test_role_that_cannot_work_is_unhealthy_in_status(refusing: BusSettings) -> None:
    bus = RouterHarness(refusing)
    bus.beat(1)
    bus.ask("g:0")
    watch = RunFollower(refusing, trust=Trust("policy", "run"), whole=False, window_groups=1, max_lag_versions=4)

    def accused() -> list[str]:
        watch.poll(0.1)
        bus.beat(1)
        found = diagnose(watch.facts())
        return [each.sentence for each in found if each.severity is Severity.UNWELL and each.who == "roles"]

    with closing(watch), closing(bus), role_process("router", refusing, 0, {}):
        until(lambda: bool(accused()))
        [sentence] = accused()
    assert sentence.startswith("router-0 restarts again and again, ")
    assert sum(each.times for each in role_starts(refusing)) >= RESTART_LIMIT
