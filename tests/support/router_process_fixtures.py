"""The counterparts of a router on a real broker, operated by hand: environment workers and executors; and routers as
processes."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING

from rose.pipeline.local.fork_server import ForkedProcess
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnResult
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, Partitions, Topic
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.roles import role_process
from tests.support.routing_fixtures import heartbeat, packed, request, result

WAIT_SECONDS = 60.0
PARTITIONS = Partitions(home=2, slots=3, samples=1, chunks=1)
BEAT_SECONDS = 0.2


@dataclass
class Fleet:
    """Executors that hold every accepted turn until the test answers it."""

    alive: dict[int, dict[str, object]] = field(default_factory=dict)
    """Executors that send heartbeats, with the fields of their heartbeats."""
    held: dict[int, list[TurnDispatch]] = field(default_factory=dict)
    """Held turns by executor. The first and the third executor share one inbox."""
    claims: dict[int, int] = field(default_factory=dict)
    """The newest fencing token of each inbox."""


class RouterHarness:
    """The counterparts of a router."""

    def __init__(self, settings: BusSettings, partitions: Partitions = PARTITIONS) -> None:
        self.settings = settings
        self.homes, self.cells = partitions.home, partitions.cells
        self.writer = Writer(settings, "test")
        self.reader = Reader(settings, "test", group="test")
        self.reader.assign({(DISPATCHED, slot): OFFSET_BEGINNING for slot in range(partitions.slots)})
        self.inboxes: list[TurnDispatch] = []
        """All dispatches that executors accept as valid, in the order in which they were read."""
        self.zombies: list[TurnDispatch] = []
        """Dispatches with an outdated fencing token."""
        self.stops: list[TurnDispatch] = []
        """Stops of withdrawn turns. The executors keep the turns until the test answers them."""
        self.fleet = Fleet()
        self.most_held = 0
        """Largest number of turns that one executor held at once."""
        self.requested = 0
        self._next_beat = 0.0

    def write(self, topic: Topic, record: Record, key: str, partition: int = 0) -> None:
        self.writer.write(topic, record, key=key, partition=partition)
        self.writer.flush()

    def ask(self, trajectory: str, turn: int = 0, home: int = 1, **fields: object) -> None:
        request_fields: dict[str, Any] = {"patience_seconds": 600.0, "requested_at": time.time(), **fields}
        turn_request = request(trajectory, turn, home=home, **request_fields)
        self.requested += 1
        self.write(REQUESTED, turn_request, trajectory, home)

    def withdraw(self, trajectory: str, turn: int = 0, home: int = 1) -> None:
        self.ask(trajectory, turn, home, context=0, anchors=True, withdrawn=True)
        self.requested -= 1

    def beat(self, worker: int, **fields: object) -> None:
        """Send a heartbeat, and repeat it during every later wait."""
        self.fleet.alive[worker] = fields
        holds = packed(self.fleet.held.get(worker, []))
        record = heartbeat(worker, **{"holds": holds, "sent_at": time.time(), **fields})
        self.writer.write(HEARTBEATS, record, key=f"w{worker}", partition=record.slot % self.cells)
        self.writer.flush()

    def answer(self, dispatch: TurnDispatch, outcome: TurnOutcome = TurnOutcome.COMPLETED) -> None:
        held = self.fleet.held.get(_number(dispatch), [])
        if dispatch in held:
            held.remove(dispatch)
        self.write(COMPLETED, result(dispatch, outcome), dispatch.request.trajectory_id, dispatch.home)

    def answer_with(self, tokens: int, outcome: TurnOutcome) -> None:
        """Answer the newest dispatch with this many tokens more."""
        dispatch = self.inboxes[-1]
        self.fleet.held[_number(dispatch)].remove(dispatch)
        record = result(dispatch, outcome, tokens)
        self.write(COMPLETED, record, dispatch.request.trajectory_id, dispatch.home)

    def look(self) -> list[TurnDispatch]:
        """Let live executors accept turns and send heartbeats; return all dispatches so far."""
        for item in self.reader.read(100, 0.01):
            if not isinstance(item, Envelope):
                continue
            newest = self.fleet.claims.get(item.partition, 0)
            if not isinstance(item.record, TurnDispatch):
                self.fleet.claims[item.partition] = max(newest, item.offset)
            elif item.record.claim < newest:
                self.zombies.append(item.record)
            elif item.record.withdrawn:
                self.stops.append(item.record)
            else:
                self.fleet.claims[item.partition] = item.record.claim
                self.inboxes.append(item.record)
                held = self.fleet.held.setdefault(_number(item.record), [])
                held.append(item.record)
                self.most_held = max(self.most_held, len(held))
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            for worker, fields in self.fleet.alive.items():
                self.beat(worker, **fields)
        return self.inboxes

    def until(self, condition: Callable[[], object], on_wait: Callable[[], None] = lambda: None) -> None:
        """Poll until the condition holds. Live executors continue meanwhile."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{self.requested} asked for, {len(self.inboxes)} dispatched"
            on_wait()
            self.look()

    def until_dispatched(self, count: int) -> None:
        self.until(lambda: len(self.inboxes) >= count)
        assert len(self.inboxes) == count

    def go_on(self, seconds: float) -> None:
        """Let the given time pass."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def keep_turns_moving(self, seconds: float, turns: int = 6) -> None:
        """Answer turns and start new trajectories continuously."""
        for _ in range(turns):
            self.ask(f"g:{self.requested}", home=self.requested % self.homes)
            for held in self.fleet.held.values():
                if held:
                    self.answer(held[0])
            self.go_on(seconds / turns)

    def finish(self) -> None:
        """Answer until every turn has a result. Assert that no turn has two results, and none was lost or failed."""

        def answer_next() -> None:
            for held in self.fleet.held.values():
                if held:
                    self.answer(held[0])

        self.until(lambda: len({each.request.trajectory_id for each in self.inboxes}) == self.requested, answer_next)
        self.until(lambda: not any(self.fleet.held.values()), answer_next)
        results = self.results()
        assert len(results) == len({each.trajectory_id for each in results}) == self.requested
        assert {each.attempt for each in self.inboxes} == {0}

    def results(self) -> list[TurnResult]:
        found = read_whole_topics(self.settings, [COMPLETED])
        return [envelope.record for envelope in found if isinstance(envelope.record, TurnResult)]

    def close(self) -> None:
        self.reader.close()


def _number(dispatch: TurnDispatch) -> int:
    return int(dispatch.worker.removeprefix("w"))


def router_process(
    settings: BusSettings, number: int = 0, *, log: Path | None = None, **config: object
) -> AbstractContextManager[ForkedProcess]:
    """Run a router in its own process, which is killed at the end. Its output is appended to `log`."""
    own = {f"router.{name}": value for name, value in config.items()}
    return role_process("router", settings, number, {"router.low_water_seconds": 0.0, **own}, log=log)


def with_properties(settings: BusSettings, properties: Mapping[str, str]) -> BusSettings:
    """Return settings for the same broker with more librdkafka properties."""
    return BusSettings(
        settings.bootstrap, settings.namespace, {**settings.properties, **properties}, embedded=settings.embedded
    )
