"""The router's loop on a real broker: what is asked for comes out of an inbox, through restarts and bad records."""

import time
from collections.abc import Callable, Iterator
from threading import Event, Thread

import pytest
from confluent_kafka import OFFSET_BEGINNING, Producer

from pipeline.routing.config import RouterConfig
from pipeline.routing.loop import GROUP, RouterLoop
from pipeline.routing.main import run_router
from schemas.record import Record
from schemas.turns import TurnDispatch, TurnOutcome, TurnResult
from tests.brokers import AnyBroker
from tests.unit.routing_world import heartbeat, manifest, request, result
from topics.admin import create_topics
from topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, MANIFESTS, REQUESTED, Partitions, Topic
from topics.errors import TopicMissing
from topics.log import read_letters, read_topics
from topics.reader import Reader
from topics.records import Envelope
from topics.settings import BusSettings
from topics.writer import Writer

WAIT_SECONDS = 30.0
PARTITIONS = Partitions(home=2, slots=3, samples=1, chunks=1)
CONFIG = RouterConfig(low_water_seconds=0.0)
"""Every turn of the loop commits the low water."""


class Bus:
    """The other side of the topics: environment workers, executors and the trainer, by hand."""

    def __init__(self, settings: BusSettings) -> None:
        self.settings = settings
        self.writer = Writer(settings, "test")
        self.reader = Reader(settings, "test", group="test")
        self.reader.assign({(DISPATCHED, slot): OFFSET_BEGINNING for slot in range(PARTITIONS.slots)})
        self.inboxes: list[TurnDispatch] = []
        self.alive: dict[int, dict[str, object]] = {}
        """Executors that send heartbeats while somebody waits, and what they say."""

    def say(self, topic: Topic, record: Record, key: str, partition: int = 0) -> None:
        self.writer.write(topic, record, key=key, partition=partition)
        self.writer.flush()

    def ask(self, trajectory: str, turn: int = 0, home: int = 1, **fields: object) -> None:
        now = time.time()
        asked = request(trajectory, turn, home=home, **{"deadline": now + 600, "requested_at": now, **fields})  # type: ignore[arg-type]
        self.say(REQUESTED, asked, trajectory, home)

    def beat(self, worker: int, **fields: object) -> None:
        """Send a heartbeat, and from now on more of it whenever somebody waits."""
        self.alive[worker] = fields
        self.say(HEARTBEATS, heartbeat(worker, **fields), f"w{worker}")

    def answer(self, dispatch: TurnDispatch, outcome: TurnOutcome = TurnOutcome.COMPLETED) -> None:
        self.say(COMPLETED, result(dispatch, outcome), dispatch.request.trajectory_id, dispatch.request.home)

    def look(self) -> list[TurnDispatch]:
        """All dispatches so far, in the order in which they were found."""
        for item in self.reader.read(100, 0.01):
            if isinstance(item, Envelope) and isinstance(item.record, TurnDispatch):
                self.inboxes.append(item.record)
        return self.inboxes

    def results(self) -> list[TurnResult]:
        found = read_topics(self.settings, [COMPLETED])
        return [envelope.record for envelope in found if isinstance(envelope.record, TurnResult)]


@pytest.fixture
def bus(broker: AnyBroker, namespace: str) -> Iterator[Bus]:
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    bus = Bus(settings)
    bus.say(MANIFESTS, manifest(0), "m/0")
    yield bus
    bus.reader.close()


class Running:
    """A router in this thread: it moves when `until` lets it."""

    def __init__(self, bus: Bus, config: RouterConfig = CONFIG) -> None:
        self.bus = bus
        self.loop = RouterLoop(bus.settings, config)
        self.router = self.loop.router
        self.loop.restore()

    def until(self, condition: Callable[[], object]) -> None:
        """Turn the loop over until something is so; those alive send heartbeats all the while."""
        deadline = time.monotonic() + WAIT_SECONDS
        next_beat = 0.0
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + 0.2
                for worker, fields in self.bus.alive.items():
                    self.bus.beat(worker, **fields)
            self.loop.turn_over()

    def until_dispatched(self, count: int) -> None:
        self.until(lambda: len(self.bus.look()) == count)

    def die(self) -> None:
        """As a crash does: nothing is flushed or committed, its memory is gone."""
        self.loop.close()


def test_turns_go_to_inboxes_and_their_results_free_the_room(bus: Bus) -> None:
    running = Running(bus)
    bus.beat(0, max_turns=1)
    bus.ask("g0:0")
    bus.ask("g0:1")
    running.until(lambda: bus.look() and len(running.router.waiting) == 1)
    (first,) = bus.inboxes
    assert (first.worker, first.slot, first.request.home) == ("w0", 0, 1)
    bus.answer(first)
    running.until(lambda: len(bus.look()) == 2)
    bus.answer(bus.inboxes[1])
    running.until(lambda: running.router.counters.finished == 2)
    running.die()


def test_a_restarted_router_knows_what_is_outstanding_and_what_waits(bus: Bus) -> None:
    before = Running(bus)
    bus.beat(0, max_turns=1)
    for index in range(3):
        bus.ask(f"g0:{index}", home=index % 2)
    before.until(lambda: bus.look() and len(before.router.waiting) == 2)
    (first,) = bus.inboxes
    before.die()
    bus.ask("g1:0")
    after = Running(bus)
    assert after.router.turns[first.request.trajectory_id].worker == "w0"
    assert set(after.router.turns) == {"g0:0", "g0:1", "g0:2", "g1:0"}
    assert len(after.router.waiting) == 3
    bus.beat(0, max_turns=4)
    after.until(lambda: len(bus.look()) == 4)
    assert sorted(each.request.trajectory_id for each in bus.inboxes) == ["g0:0", "g0:1", "g0:2", "g1:0"]
    assert {each.request.attempt for each in bus.inboxes} == {0}
    after.die()


def test_a_restart_reads_from_the_oldest_unfinished_turn_and_no_further_back(bus: Bus) -> None:
    before = Running(bus)
    bus.beat(0, max_turns=5)
    for index in range(5):
        bus.ask(f"g0:{index}")
        before.until_dispatched(index + 1)
    for dispatch in bus.inboxes[:2] + bus.inboxes[3:]:
        bus.answer(dispatch)
    before.until(lambda: before.router.counters.finished == 4)
    before.until(lambda: before.loop.committed.get((REQUESTED, 1), 0) > 0)
    before.die()
    after = Running(bus)
    assert list(after.router.turns) == ["g0:2"]
    assert after.router.counters.requested < 5, "what was finished before the oldest unfinished turn is not read again"
    assert after.router.turns["g0:2"].worker == "w0"
    bus.answer(bus.inboxes[2])
    after.until(lambda: after.router.counters.finished == after.router.counters.requested)
    after.until(lambda: after.loop.committed.get((REQUESTED, 1)) == 5)
    after.die()
    last = Running(bus)
    assert last.router.counters.requested == 0
    last.die()


def test_turns_of_a_silent_executor_go_to_another_as_the_next_attempt(bus: Bus) -> None:
    running = Running(bus)
    bus.beat(0)
    bus.ask("g0:0")
    running.until(lambda: bus.look())
    bus.alive.clear()
    bus.beat(1)
    running.until(lambda: len(bus.look()) == 2)
    first, second = bus.inboxes
    assert (first.worker, second.worker) == ("w0", "w1")
    assert (first.request.attempt, second.request.attempt) == (0, 1)
    bus.answer(second)
    running.until(lambda: running.router.counters.finished == 1)
    bus.answer(first)
    running.until(lambda: running.router.counters.late == 1)
    running.die()


def test_a_turn_past_its_deadline_gets_a_failed_result_at_its_home(bus: Bus) -> None:
    running = Running(bus)
    bus.ask("g0:0", home=1, deadline=time.time() + 0.2)
    running.until(lambda: running.router.counters.failed)
    running.until(lambda: bus.results())
    (failed,) = bus.results()
    assert (failed.outcome, failed.home, failed.worker) == (TurnOutcome.FAILED, 1, "")
    assert "deadline" in failed.reason
    running.die()


def test_what_does_not_decode_is_buried_and_the_stream_goes_on(bus: Bus) -> None:
    bytes_in = b"\xc1 this is no record"
    running = Running(bus)
    producer = Producer(bus.settings.producer("test-raw"))
    producer.produce(bus.settings.topic(REQUESTED), value=bytes_in, key=b"g0:0", partition=1)
    producer.flush()
    bus.beat(0)
    bus.ask("g0:1", home=1)
    running.until(lambda: bus.look())
    (letter,) = read_letters(bus.settings, REQUESTED)
    assert letter.value == bytes_in and letter.key == b"g0:0"
    assert (letter.partition, letter.offset) == (1, 0) and "turn-request" in letter.reason
    running.die()


def test_what_does_not_decode_is_buried_even_if_it_came_while_no_router_ran(bus: Bus) -> None:
    producer = Producer(bus.settings.producer("test-raw"))
    producer.produce(bus.settings.topic(REQUESTED), value=b"{}", key=b"g0:0", partition=0)
    producer.flush()
    bus.ask("g0:1", home=0)
    running = Running(bus)
    assert list(running.router.turns) == ["g0:1"]
    assert [letter.value for letter in read_letters(bus.settings, REQUESTED)] == [b"{}"]
    running.die()


def test_an_executor_of_an_inbox_that_does_not_exist_gets_nothing(bus: Bus) -> None:
    running = Running(bus)
    bus.beat(7)
    bus.beat(1)
    for index in range(6):
        bus.ask(f"g{index}:0")
    running.until(lambda: len(bus.look()) == 4 and len(running.router.waiting) == 2)
    assert {each.worker for each in bus.inboxes} == {"w1"}
    running.die()


def test_requests_are_left_on_their_topic_while_too_many_turns_wait(bus: Bus) -> None:
    running = Running(bus, RouterConfig(max_waiting_turns=2, low_water_seconds=0.0))
    for group in ("g0", "g1", "g2"):
        waiting = len(running.router.waiting)
        bus.ask(f"{group}:0")
        running.until(lambda: len(running.router.waiting) > waiting)  # noqa: B023
    bus.ask("g3:0")
    for _ in range(5):
        running.loop.turn_over()
    assert len(running.router.waiting) == 3
    bus.beat(0)
    running.until(lambda: len(bus.look()) == 4)
    running.die()


def test_the_program_stops_cleanly_when_asked(bus: Bus) -> None:
    stop = Event()
    thread = Thread(target=run_router, args=(bus.settings, RouterConfig(), stop))
    thread.start()
    deadline = time.monotonic() + WAIT_SECONDS
    bus.ask("g0:0", home=0)
    while not bus.look():
        bus.beat(0)
        assert time.monotonic() < deadline and thread.is_alive()
    bus.answer(bus.inboxes[0])
    while sum(envelope.topic is COMPLETED for envelope in read_topics(bus.settings, [COMPLETED])) < 1:
        assert time.monotonic() < deadline
    stop.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    reader = Reader(bus.settings, "test-committed", group=GROUP)
    committed = reader.committed([(REQUESTED, 0)])[REQUESTED, 0]
    reader.close()
    assert committed is not None


def test_missing_topics_are_named(broker: AnyBroker, namespace: str) -> None:
    with pytest.raises(TopicMissing, match=rf"{namespace}rose\.turns\.requested\.v1.*rose topics create"):
        RouterLoop(broker.settings(namespace), CONFIG)
