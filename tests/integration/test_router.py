"""The router on a real broker: requests reach inboxes through restarts, silences and invalid records."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.liveness import ExecutorStatus
from rose.pipeline.routing.service import RouterService
from rose.schemas.turns import Refusal, TurnOutcome
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, HEARTBEATS, REQUESTED, ROUTER_GROUP, Topic
from rose.topics.dead_letters import read_dead_letters
from rose.topics.errors import TopicMissing
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from tests.support.brokers import AnyBroker, kafka_first
from tests.support.roles import kill, stop
from tests.support.router_process_fixtures import PARTITIONS, RouterHarness, router_process, with_properties
from tests.support.routing_fixtures import request, result

pytestmark = [pytest.mark.slow, kafka_first]


@pytest.fixture
def bus(broker: AnyBroker, namespace: str) -> Iterator[RouterHarness]:
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    bus = RouterHarness(settings)
    yield bus
    bus.close()


def committed(settings: BusSettings, home: int) -> int:
    """Return the low water of the requests of the home."""
    reader = Reader(settings, "test-committed", group=ROUTER_GROUP)
    found = reader.committed([(REQUESTED, home)])[REQUESTED, home]
    reader.close()
    return found or 0


def spoil(settings: BusSettings, topic: Topic, partition: int, value: bytes) -> None:
    producer = Producer(settings.producer("test-raw"))
    producer.produce(settings.topic(topic), value=value, key=b"g0:0", partition=partition)
    producer.flush()


def test_turns_go_to_inboxes_and_their_results_free_capacity(bus: RouterHarness) -> None:
    with router_process(bus.settings):
        bus.beat(0, max_turns=1)
        bus.ask("g0:0")
        bus.ask("g0:1")
        bus.until_dispatched(1)
        (first,) = bus.inboxes
        assert (first.worker, first.slot, first.request.home) == ("w0", 0, 1)
        bus.go_on(0.5)
        assert len(bus.inboxes) == 1
        bus.answer(first)
        bus.until_dispatched(2)
        bus.answer(bus.inboxes[1])
        bus.ask("g1:0")
        bus.until_dispatched(3)


def test_restarted_router_knows_outstanding_and_waiting_turns(bus: RouterHarness) -> None:
    with router_process(bus.settings) as before:
        bus.beat(0, max_turns=1)
        for index in range(3):
            bus.ask(f"g0:{index}", home=index % 2)
        bus.until_dispatched(1)
        kill(before)
    bus.ask("g1:0")
    with router_process(bus.settings):
        bus.beat(0, max_turns=4)
        bus.until(lambda: len(bus.inboxes) >= 4)
        bus.go_on(0.5)
    assert sorted(each.request.trajectory_id for each in bus.inboxes) == ["g0:0", "g0:1", "g0:2", "g1:0"]
    assert {each.attempt for each in bus.inboxes} == {0}
    assert not bus.zombies


def test_low_water_stays_at_the_oldest_unfinished_turn(bus: RouterHarness) -> None:
    with router_process(bus.settings) as before:
        bus.beat(0, max_turns=5)
        for index in range(5):
            bus.ask(f"g0:{index}")
            bus.until_dispatched(index + 1)
        for dispatch in bus.inboxes[:2] + bus.inboxes[3:]:
            bus.answer(dispatch)
        bus.until(lambda: committed(bus.settings, 1) > 0)
        kill(before)
    assert committed(bus.settings, 1) <= 2
    with router_process(bus.settings):
        bus.go_on(3.0)
        assert len(bus.inboxes) == 5, "what is finished is not dispatched again, nor what an executor holds"
        bus.answer(bus.inboxes[2])
        bus.until(lambda: committed(bus.settings, 1) == 5)


def test_partial_turn_survives_a_router_restart(bus: RouterHarness) -> None:
    with router_process(bus.settings) as before:
        bus.beat(0)
        bus.ask("g0:0")
        bus.until_dispatched(1)
        bus.answer(bus.inboxes[0])
        bus.until(lambda: committed(bus.settings, 1) > 0)
        bus.ask("g1:0", max_tokens=100)
        bus.until_dispatched(2)
        bus.fleet.alive.clear()
        bus.answer(bus.inboxes[1], TurnOutcome.PREEMPTED)
        bus.go_on(1.0)
        assert len(bus.inboxes) == 2, "nobody offers room"
        kill(before)
    with router_process(bus.settings):
        bus.beat(1)
        bus.until_dispatched(3)
    again = bus.inboxes[2]
    assert again.partial == result(bus.inboxes[1], TurnOutcome.PREEMPTED).part
    assert (again.attempt, again.failures) == (1, 0)


def test_turns_of_a_silent_executor_are_reissued_to_another(bus: RouterHarness) -> None:
    with router_process(bus.settings):
        bus.beat(0)
        bus.ask("g0:0")
        bus.until_dispatched(1)
        bus.fleet.alive.clear()
        bus.beat(1)
        bus.until_dispatched(2)
    first, second = bus.inboxes
    assert (first.worker, second.worker) == ("w0", "w1")
    assert (first.attempt, second.attempt) == (0, 1)


def test_silence_of_the_whole_fleet_fails_no_turn_and_uses_no_attempt(bus: RouterHarness) -> None:
    with router_process(bus.settings, max_attempts=1):
        bus.beat(0, max_turns=4)
        for index in range(12):
            bus.ask(f"g{index}:0")
        bus.until_dispatched(4)
        alive, bus.fleet.alive = bus.fleet.alive, {}
        bus.go_on(2.5)
        bus.fleet.alive = alive
        while len(bus.results()) < 12:
            bus.until(lambda: bus.fleet.held[0])
            bus.answer(bus.fleet.held[0][0])
    assert len(bus.inboxes) == 12
    assert {(each.attempt, each.failures) for each in bus.inboxes} == {(0, 0)}
    assert all(each.outcome is TurnOutcome.COMPLETED for each in bus.results())


def test_turn_without_an_executor_gets_a_failed_result_in_its_home(bus: RouterHarness) -> None:
    with router_process(bus.settings):
        bus.ask("g0:0", home=1, patience_seconds=0.2)
        bus.until(lambda: bus.results())
    (failed,) = bus.results()
    assert (failed.outcome, failed.home, failed.worker) == (TurnOutcome.FAILED, 1, None)
    assert "no executor has taken it up in 0.2 s" in failed.reason


def test_failed_result_lost_with_its_router_is_written_by_the_next(bus: RouterHarness) -> None:
    # This router sends only the records that it awaits: its results stay in memory.
    slow = with_properties(bus.settings, {"linger.ms": "600000"})
    bus.ask("g0:0", home=1)
    with router_process(slow) as before:
        bus.ask("g0:1", home=1, patience_seconds=0.2)
        bus.go_on(4.0)
        assert before.poll() is None and bus.results() == []
        kill(before)
    assert committed(bus.settings, 1) == 0
    with router_process(bus.settings):
        bus.until(lambda: bus.results())
    (failed,) = bus.results()
    assert (failed.outcome, failed.trajectory_id) == (TurnOutcome.FAILED, "g0:1")


def test_undecodable_message_is_dead_lettered_once_over_router_changes(bus: RouterHarness) -> None:
    poison = b"\xc1 this is no record"
    spoil(bus.settings, REQUESTED, 1, poison)  # while no router runs
    bent = msgspec.msgpack.encode(msgspec.structs.replace(request("g0:0", home=1), appended=b"\0" * 400))
    spoil(bus.settings, REQUESTED, 1, bent)
    with router_process(bus.settings):
        bus.beat(0)
        bus.ask("g0:0", home=1)
        bus.until_dispatched(1)
        spoil(bus.settings, REQUESTED, 1, bent)
        spoil(bus.settings, COMPLETED, 1, b"no result")  # an environment worker dead-letters the record
        spoil(bus.settings, HEARTBEATS, 0, b"no heartbeat")
        bus.until(lambda: list(read_dead_letters(bus.settings, HEARTBEATS)))
    with router_process(bus.settings):
        bus.ask("g0:1", home=1)
        bus.until_dispatched(2)
    assert list(read_dead_letters(bus.settings, COMPLETED)) == []
    dead_letter, *others = read_dead_letters(bus.settings, REQUESTED)
    assert [other.raw.value for other in others] == [bent, bent] and "appended" in others[0].reason
    assert (dead_letter.raw.value, dead_letter.raw.key) == (poison, b"g0:0")
    assert (dead_letter.partition, dead_letter.offset) == (1, 0) and "turn-request" in dead_letter.reason
    reader = Reader(bus.settings, "test-letters", group="test")
    dead = Topic(REQUESTED.dead_letters, None, "", REQUESTED.partition_setting)
    assert reader.watermarks((dead, 0))[1] == 3, "there is one copy of each"
    reader.close()


def test_executor_of_a_nonexistent_inbox_gets_no_turn(bus: RouterHarness) -> None:
    with router_process(bus.settings):
        bus.beat(7, slot=7)
        bus.beat(1)
        for index in range(6):
            bus.ask(f"g{index}:0")
        bus.until_dispatched(4)
        bus.go_on(0.5)
    assert {each.worker for each in bus.inboxes} == {"w1"} and len(bus.inboxes) == 4


@pytest.fixture
def short_of_room(bus: RouterHarness) -> Iterator[RouterService]:
    """A router in this process that serves, and leaves requests on their topic while more than two turns wait."""
    config = RouterConfig(max_waiting_turns=2, low_water_seconds=0.0)
    with closing(RouterService(bus.settings, config, name="router-0")) as loop:
        bus.until(lambda: bool(loop.sessions), loop.run_once)
        yield loop


def test_requests_stay_on_their_topic_while_too_many_turns_wait(
    bus: RouterHarness, short_of_room: RouterService
) -> None:
    (reign,) = short_of_room.sessions.values()
    for group in ("g0", "g1", "g2"):
        waiting = len(reign.router.queue)
        bus.ask(f"{group}:0")
        bus.until(lambda: len(reign.router.queue) > waiting, short_of_room.run_once)  # noqa: B023
    bus.ask("g3:0")
    for _ in range(5):
        short_of_room.run_once()
    assert len(reign.router.queue) == 3
    bus.beat(0)
    bus.until(lambda: len(bus.inboxes) == 4, short_of_room.run_once)


def test_turns_without_context_do_not_hold_back_their_anchors(bus: RouterHarness, short_of_room: RouterService) -> None:
    (reign,) = short_of_room.sessions.values()
    bus.beat(0)
    for number in range(3):
        bus.ask(f"g{number}:0", 1)
        bus.until(lambda: len(bus.inboxes) > number, short_of_room.run_once)  # noqa: B023
        torn = bus.fleet.held[0].pop()
        bus.write(COMPLETED, result(torn, TurnOutcome.REFUSED, refusal=Refusal.CONTEXT), "", torn.home)
        bus.until(lambda: reign.router.counters.context_missing > number, short_of_room.run_once)  # noqa: B023
    for number in range(3):
        bus.ask(f"g{number}:0", 1, anchors=True)
    bus.until(lambda: len(bus.inboxes) == 6, short_of_room.run_once)


def worker_of(bus: RouterHarness) -> dict[str, str]:
    """Return the last executor of each trajectory."""
    return {each.request.trajectory_id: each.worker for each in bus.inboxes}


def test_inbox_that_accepts_no_fencing_token_delays_no_other(
    bus: RouterHarness, short_of_room: RouterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader of the inbox is away: to wait for it would cost the router its membership."""
    loop, later = short_of_room, list[Callable[[], None]]()
    (reign,) = loop.sessions.values()
    bus.beat(0)
    bus.ask("g0:0")
    bus.until(lambda: len(bus.inboxes) == 1, loop.run_once)
    assert loop._context is not None
    writer, write = loop._context.writer, loop._context.writer.tombstone

    def tombstone(topic: Topic, *, partition: int, **more: Any) -> None:
        now = partial(write, topic, partition=partition, **more)
        later.append(now) if partition == 0 else now()

    def flush() -> None:
        raise AssertionError("it waits for all that it has written")

    monkeypatch.setattr(writer, "tombstone", tombstone)
    monkeypatch.setattr(writer, "flush", flush)
    bus.beat(1)
    bus.fleet.held[0].clear()  # a lost dispatch
    bus.until(lambda: bool(later), loop.run_once)
    away = reign.router.liveness.executors["w0"]
    bus.until(lambda: away.status is ExecutorStatus.GONE, loop.run_once)  # despite its heartbeats
    bus.ask("g1:0")
    bus.until(lambda: len(newest := worker_of(bus)) == 2 and set(newest.values()) == {"w1"}, loop.run_once)
    [now] = later
    now()
    for number in range(4):
        bus.ask(f"g2:{number}")
    bus.until(lambda: len(worker_of(bus)) == 6, loop.run_once)
    assert "w0" in worker_of(bus).values()
    assert not bus.zombies
    monkeypatch.undo()


def test_router_program_stops_cleanly_when_asked(bus: RouterHarness) -> None:
    with router_process(bus.settings, low_water_seconds=1000.0) as router:
        bus.beat(0)
        bus.ask("g0:0", home=0)
        bus.until_dispatched(1)
        bus.answer(bus.inboxes[0])
        bus.ask("g0:1", home=0)
        bus.until_dispatched(2)
        stop(router)
    assert committed(bus.settings, 0) <= 1, "g0:1 is unfinished"


def test_missing_topics_are_named(broker: AnyBroker, namespace: str) -> None:
    with pytest.raises(TopicMissing, match=rf"{namespace}rose\.turns\.requested\.v1.*rose topics create"):
        RouterService(broker.settings(namespace), RouterConfig())
