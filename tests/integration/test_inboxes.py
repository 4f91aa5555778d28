"""Inboxes added to a run: no process restarts, and no other topic changes."""

from dataclasses import replace

import pytest

from rose.schemas.turns import FENCING_KEY
from rose.topics.admin import create_topics, describe_topics, find_drift
from rose.topics.catalog import DISPATCHED
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from tests.support.brokers import AnyBroker
from tests.support.router_process_fixtures import PARTITIONS, RouterHarness, router_process
from tests.support.waiting import until

ONE = replace(PARTITIONS, slots=1)


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, ONE)
    return settings


def claimed(settings: BusSettings) -> set[int]:
    """Return the inboxes with a fencing token."""
    return {each.partition for each in read_whole_topics(settings, [DISPATCHED]) if each.key == FENCING_KEY}


def test_repeated_topic_creation_adds_inboxes_and_changes_nothing_else(settings: BusSettings) -> None:
    before = {state.topic: state.partitions for state in describe_topics(settings)}
    [found] = find_drift(settings, PARTITIONS)
    assert found.creatable and (found.subject, found.actual, found.expected) == ("partitions", "1", "3")
    assert create_topics(settings, replace(PARTITIONS, home=5, samples=7)) == []
    assert {state.topic: state.partitions for state in describe_topics(settings)} == before | {DISPATCHED: 3}
    assert find_drift(settings, PARTITIONS) == []
    assert create_topics(settings, ONE) == [], "inboxes are never taken away"
    assert find_drift(settings, PARTITIONS) == []


def test_running_router_uses_added_inboxes(settings: BusSettings) -> None:
    with router_process(settings):
        until(lambda: claimed(settings) == {0})
        create_topics(settings, PARTITIONS)
        bus = RouterHarness(settings)
        bus.beat(2, slot=2)
        bus.ask("g:0")
        bus.until_dispatched(1)
        bus.close()
    assert bus.inboxes[0].slot == 2 and not bus.zombies
    assert claimed(settings) == {0, 1, 2}
