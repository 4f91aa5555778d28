"""The decisions of real routers and of the control app are repeated from their log."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from confluent_kafka.admin import AdminClient

from rose.pipeline.replay.decisions import CoreReplay, replay_core
from rose.pipeline.replay.recorded_cores import (
    KafkaLog,
    RecordedCore,
    read_recorded_cores,
    unjournaled_decisions,
)
from rose.schemas.grants import CapacityGrant, GrantSource, grant_key
from rose.schemas.heartbeats import ExecutorState, WorkerClass
from rose.schemas.journal import EntryKind, JournalDecision
from rose.schemas.turns import FENCING_KEY, TurnOutcome
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, DISPATCHED, GRANTS, JOURNAL, Partitions
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.brokers import AnyBroker
from tests.support.roles import kill, role_process, stop
from tests.support.router_process_fixtures import PARTITIONS, RouterHarness, router_process
from tests.support.routing_fixtures import dispatched, request, result

pytestmark = pytest.mark.slow

TWO_CELLS = Partitions(home=2, slots=2, samples=1, chunks=1, cells=2)


@pytest.fixture
def bus(broker: AnyBroker, namespace: str) -> Iterator[RouterHarness]:
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    bus = RouterHarness(settings)
    yield bus
    bus.close()


def replays(settings: BusSettings) -> list[CoreReplay]:
    with closing(KafkaLog(settings)) as log:
        return [replay_core(core, log, explained=3) for core in read_recorded_cores(settings)]


def play(bus: RouterHarness, first: int, turns: int = 3, *, unanswered: bool = False) -> None:
    """Play four trajectories; one turn is preempted. `unanswered`: the executors keep the last turns."""
    names = [f"g{first + number}:{number}" for number in range(4)]
    for turn in range(turns):
        for number, name in enumerate(names):
            bus.ask(name, turn, home=number % 2, context=40 * (turn + 1), max_tokens=30)
        for name in names:
            bus.until(partial(_is_held, bus, name, turn))
        for held in bus.fleet.held.values():
            for dispatch in list(held):
                if turn + 1 < turns or not unanswered:
                    preempted = dispatch.attempt == 0 and dispatch.request.trajectory_id == names[0]
                    bus.answer(dispatch, TurnOutcome.PREEMPTED if preempted and turn == 1 else TurnOutcome.COMPLETED)


def _is_held(bus: RouterHarness, name: str, turn: int) -> bool:
    held = (each.request for turns in bus.fleet.held.values() for each in turns)
    return any((request.trajectory_id, request.turn) == (name, turn) for request in held)


def test_decisions_of_a_killed_and_a_restarted_router_are_repeated(bus: RouterHarness) -> None:
    with router_process(bus.settings) as first:
        for worker in range(3):
            bus.beat(worker, token_budget=2000, max_turns=5)
        play(bus, 0)
        bus.go_on(2.5)
        play(bus, 10, unanswered=True)
        kill(first)
    bus.ask("late:0", patience_seconds=0.5, context=5000)
    with router_process(bus.settings) as second:
        bus.until(lambda: any(each.outcome is TurnOutcome.FAILED for each in bus.results()))
        bus.fleet.alive.pop(1)
        play(bus, 20)
        bus.go_on(4.0)
        stop(second)
    found = replays(bus.settings)
    assert [(replay.differences, replay.gap) for replay in found] == [([], ""), ([], "")]
    assert found[0].compared > 5 and found[1].compared > 12


def test_stops_are_written_once_over_kills_of_the_router_and_repeated(bus: RouterHarness) -> None:
    with router_process(bus.settings) as first:
        for worker in range(3):
            bus.beat(worker, token_budget=2000, max_turns=5)
        for number in range(6):
            bus.ask(f"g{number}:0", home=number % 2)
        bus.until_dispatched(6)
        bus.withdraw("g0:0", home=0)
        bus.until(lambda: len(bus.stops) == 1)
        bus.go_on(2.5)  # the journal is written
        kill(first)
    bus.withdraw("g1:0", home=1)
    for restart in range(3):
        with router_process(bus.settings) as router:
            bus.until(lambda: len(bus.stops) >= 2)
            bus.ask(f"late{restart}:0")
            bus.until_dispatched(7 + restart)
            bus.go_on(1.5)
            stop(router) if restart == 2 else kill(router)
    assert [each.request.trajectory_id for each in bus.stops] == ["g0:0", "g1:0"]
    found = replays(bus.settings)
    assert [(replay.differences, replay.gap) for replay in found] == [([], "")] * 4


def grants(settings: BusSettings) -> list[CapacityGrant]:
    found = (each.record for each in read_whole_topics(settings, [GRANTS]))
    return [grant for grant in found if isinstance(grant, CapacityGrant)]


def journaled_grants(settings: BusSettings) -> int:
    decisions = (
        decision
        for core in read_recorded_cores(settings)
        for batch in core.batches
        for decision in batch.decisions
        if decision.kind is EntryKind.GRANT
    )
    return sum(1 for _ in decisions)


def test_grants_of_the_control_app_are_repeated(bus: RouterHarness) -> None:
    lender: dict[str, object] = {"worker_class": WorkerClass.SERVING, "by_grant": True, "token_budget": 500}
    quick = {"control.page_port": 0, "control.lease_seconds": 3.0, "control.idle_seconds": 1.0}
    with router_process(bus.settings) as router, role_process("control", bus.settings, 0, quick) as control:
        bus.beat(0, state=ExecutorState.PAUSED, **lender)
        for number in range(6):
            bus.ask(f"g{number}:0")
        bus.until(lambda: any(grant.lend for grant in grants(bus.settings)))
        bus.beat(0, **lender)
        bus.until_dispatched(4)
        for dispatch in list(bus.inboxes):
            bus.answer(dispatch)
        bus.until_dispatched(6)
        bus.until(lambda: journaled_grants(bus.settings) >= 3)
        stop(control)
        stop(router)
    by_core = {replay.core.core: replay for replay in replays(bus.settings)}
    assert {name: (each.differences, each.gap) for name, each in by_core.items()} == {
        "router-0": ([], ""),
        "control-0": ([], ""),
    }
    assert by_core["control-0"].compared >= 3


def test_decisions_of_every_kind_that_no_journal_names_are_counted(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    dispatch = dispatched(request("g0:0"))
    granted = CapacityGrant(worker="w0", lend=True, kv_bytes=0, token_budget=0, granted_at=1.0, lease_seconds=5.0)
    with closing(Writer(settings, "test")) as writer:
        writer.tombstone(DISPATCHED, key=FENCING_KEY, partition=0)
        for _ in range(2):
            writer.write(DISPATCHED, dispatch, key="g0:0", partition=0)
        for outcome in (TurnOutcome.COMPLETED, TurnOutcome.FAILED):
            writer.write(COMPLETED, result(dispatch, outcome), key="g0:0", partition=0)
        for source in GrantSource:
            writer.write(GRANTS, granted, key=grant_key("w0", source), partition=0)
        writer.flush()
    core = RecordedCore("router-0", 0, began_at=0, journaled=[JournalDecision(EntryKind.DISPATCH, 0, 1)])
    assert unjournaled_decisions(settings, [core], 0.0, float("inf")) == 4, "a dispatch, a failed turn and two grants"
    assert unjournaled_decisions(settings, [core], 0.0, 1.0) == 0


def test_router_of_a_log_without_the_journal_topic_routes_and_stops(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, TWO_CELLS)
    admin = AdminClient(settings.client("test"))
    for deleted in admin.delete_topics([settings.topic(JOURNAL)]).values():
        deleted.result()
    bus = RouterHarness(settings, TWO_CELLS)
    with closing(bus), router_process(settings) as router:
        for worker in range(2):
            bus.beat(worker)
        for number in range(2):
            bus.ask(f"g{number}:0", home=number)
        bus.until_dispatched(2)
        bus.go_on(3.0)
        stop(router)
