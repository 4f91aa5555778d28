"""Two router processes: one serves, one waits and takes over; a replaced router does no harm."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from rose.pipeline.local.fork_server import ForkedProcess
from rose.pipeline.routing.membership import MAX_UNPOLLED_SECONDS, SESSION_SECONDS, RouterMembership
from rose.schemas.turns import TurnDispatch
from rose.topics.admin import create_topics
from rose.topics.catalog import HEARTBEATS
from rose.topics.idle_consumer import IdleConsumer
from tests.support.brokers import EMBEDDED, KAFKA, AnyBroker, kafka_first, start
from tests.support.roles import freeze, kill, thaw
from tests.support.router_process_fixtures import PARTITIONS, RouterHarness, router_process
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def bus(broker: AnyBroker, namespace: str) -> Iterator[RouterHarness]:
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    bus = RouterHarness(settings)
    yield bus
    bus.close()


@kafka_first
def test_router_resumed_after_a_freeze_does_no_harm(bus: RouterHarness, broker_kind: str) -> None:
    with router_process(bus.settings, 0) as first:
        bus.beat(0, max_turns=3)
        bus.ask("warm:0")
        bus.until_dispatched(1)
        with router_process(bus.settings, 1):
            bus.go_on(6.0)
            bus.keep_turns_moving(3.0)
            freeze(first)
            dispatched = len(bus.inboxes)
            bus.keep_turns_moving(15.0)
            if broker_kind != EMBEDDED:  # the embedded broker never gives the cells of a member to another
                assert len(bus.inboxes) > dispatched, "the other router serves meanwhile"
            thaw(first)
            bus.keep_turns_moving(3.0)
            bus.finish()
            assert not repeated(bus.zombies), bus.zombies


def repeated(zombies: list[TurnDispatch]) -> list[TurnDispatch]:
    """Return the dispatches that executors drop. A router that releases in time writes none except those in transit."""
    return zombies[1:]


def test_freeze_shorter_than_the_session_has_no_lasting_effect(bus: RouterHarness) -> None:
    with router_process(bus.settings, 0) as router:
        bus.beat(0, max_turns=3)
        bus.ask("warm:0")
        bus.until_dispatched(1)
        for seconds in (1.0, MAX_UNPOLLED_SECONDS + 0.5):
            freeze(router)
            bus.go_on(seconds)
            thaw(router)
            bus.keep_turns_moving(2.0)
        bus.finish()


@kafka_first
def test_killed_router_is_replaced_within_its_session(bus: RouterHarness, broker_kind: str) -> None:
    with ExitStack() as processes:

        def begin(number: int) -> ForkedProcess:
            return processes.enter_context(router_process(bus.settings, number))

        running = {number: begin(number) for number in (0, 1)}
        bus.beat(0, max_turns=3)
        bus.ask("warm:0")
        bus.until_dispatched(1)
        # The broker chooses which of the two serves: each is killed once and returns under its name.
        for number, router in running.items():
            kill(router)
            served = len(bus.inboxes)
            if broker_kind == EMBEDDED:
                begin(number)
            bus.keep_turns_moving(SESSION_SECONDS)
            bus.until(lambda: len(bus.inboxes) > served)  # noqa: B023
            if broker_kind != EMBEDDED:
                begin(number)
            bus.keep_turns_moving(3.0)
        bus.finish()


@pytest.mark.parametrize(
    "away",
    [
        pytest.param("for as long as it starts", marks=pytest.mark.long),
        "for longer than a group may take to decide",
    ],
)
def test_router_continues_when_its_broker_is_back(broker_kind: str, tmp_path: Path, namespace: str, away: str) -> None:
    if broker_kind != KAFKA:
        pytest.skip("the embedded broker loses its last half second when it is killed, and idempotent producers fail")
    log = tmp_path / "router.log"
    with start(KAFKA, tmp_path / "broker") as broker:
        settings = broker.settings(namespace)
        create_topics(settings, PARTITIONS)
        bus = RouterHarness(settings)
        with router_process(settings, log=log) as router:
            bus.beat(0, max_turns=3)
            bus.ask("warm:0")
            bus.until_dispatched(1)
            broker.kill()
            freeze(router)
            thaw(router)
            until(lambda: "longer" not in away or "cell_ownership_lost" in log.read_text())
            broker.restart()
            bus.keep_turns_moving(5.0)
            bus.finish()
            assert router.poll() is None, "by itself"
        bus.close()


def test_departed_router_owns_no_cell_despite_late_assignments(
    bus: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unread assignment is still reported while its member leaves."""
    subscriptions: list[tuple[IdleConsumer, dict[str, Any]]] = []
    monkeypatch.setattr(IdleConsumer, "subscribe", lambda self, _, **answers: subscriptions.append((self, answers)))
    settings = replace(bus.settings, embedded=True)
    membership = RouterMembership(settings, "router-0")
    ((former, answers),) = subscriptions
    cell = TopicPartition(settings.topic(HEARTBEATS), 0)
    answers["on_assign"](former, [cell])
    assert [ownership.cell for ownership in membership.owned] == [0]
    membership.rejoin()
    answers["on_assign"](former, [cell])
    assert not membership.owned
    membership.close()
