"""Executors that move between cells: real processes of a router per cell, the control app and executors."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from rose.schemas.grants import CapacityGrant
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnResult
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, DISPATCHED, GRANTS, HEARTBEATS, REQUESTED, Partitions
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.integration.test_control import control_process
from tests.support.brokers import AnyBroker, kafka_first
from tests.support.router_process_fixtures import router_process
from tests.support.routing_fixtures import request
from tests.support.scripted_engine import ScriptedExecutorProcess, scripted_process

pytestmark = pytest.mark.slow

WAIT_SECONDS = 120.0
CELLS = 2


class RequestSender:
    """Requests turns in both cells, and reads results and heartbeats."""

    def __init__(self, settings: BusSettings) -> None:
        self._writer = Writer(settings, "test")
        self._reader = Reader(settings, "test", group="test")
        places = [(topic, cell) for topic in (HEARTBEATS, COMPLETED) for cell in range(CELLS)]
        self._reader.assign(dict.fromkeys(places, 0))
        self.requested: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.heartbeats: dict[str, tuple[int, SlackHeartbeat]] = {}
        """The newest heartbeat of each worker, with its cell."""
        self.stays: defaultdict[str, list[int]] = defaultdict(list)
        """The cells of the starts of each worker."""
        self._starts: set[int] = set()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def ask(self, cell: int, count: int) -> None:
        """Request a turn; home and cell have the same number."""
        for _ in range(count):
            turn = request(f"g{len(self.requested)}:0", home=cell, requested_at=time.time(), patience_seconds=600.0)
            self.requested.add(turn.trajectory_id)
            self._writer.write(REQUESTED, turn, key=turn.trajectory_id, partition=cell)

    def until(self, met: Callable[[], bool], on_wait: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not met():
            assert time.monotonic() < deadline, (
                f"{len(self.requested)} asked, {len(self.ended)} ended: {self.heartbeats}"
            )
            on_wait()
            self._writer.poll()
            for item in self._reader.read(100, 0.05):
                if isinstance(item, Envelope):
                    self._take(item.record, item.partition)

    def _take(self, record: Record | None, partition: int) -> None:
        if isinstance(record, TurnResult) and record.outcome is TurnOutcome.COMPLETED:
            self.ended[record.trajectory_id] += 1
        elif isinstance(record, SlackHeartbeat) and record.state is not ExecutorState.STOPPING:
            self.heartbeats[record.worker] = partition, record
            if record.incarnation not in self._starts:
                self._starts.add(record.incarnation)
                self.stays[record.worker].append(partition)

    def ready(self, *workers: str) -> bool:
        return all(
            each in self.heartbeats and self.heartbeats[each][1].state is ExecutorState.READY for each in workers
        )

    def all_ended(self) -> bool:
        return self.ended.keys() == self.requested


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=CELLS, slots=2 * CELLS, samples=1, chunks=1, cells=CELLS))
    return settings


@pytest.fixture
def sender(settings: BusSettings) -> Iterator[RequestSender]:
    with closing(RequestSender(settings)) as sender:
        yield sender


@pytest.fixture
def start(settings: BusSettings, tmp_path: Path) -> Iterator[Callable[[str, int], ScriptedExecutorProcess]]:
    with ExitStack() as running:
        yield lambda name, slot: running.enter_context(scripted_process(settings, tmp_path, name, slot=slot))


def sent(settings: BusSettings) -> dict[str, list[TurnDispatch]]:
    """Return every dispatch of each turn, in order."""
    found: dict[str, list[TurnDispatch]] = defaultdict(list)
    for each in read_whole_topics(settings, [DISPATCHED]):
        if isinstance(each.record, TurnDispatch):
            found[each.record.request.trajectory_id].append(each.record)
    return found


def nothing_lost(sender: RequestSender, settings: BusSettings) -> None:
    """Assert that every turn completed once in its own cell, and that moves caused no failure."""
    assert set(sender.ended.values()) == {1}
    for dispatches in sent(settings).values():
        assert all(each.slot % CELLS == each.home % CELLS and not each.failures for each in dispatches)


@kafka_first
def test_executor_moves_to_the_loaded_cell_and_restarts_there(
    settings: BusSettings, sender: RequestSender, start: Callable[[str, int], ScriptedExecutorProcess], tmp_path: Path
) -> None:
    with router_process(settings), control_process(settings, tmp_path / "control.log", dwell_seconds=5.0):
        both = {name: start(name, slot) for name, slot in (("one", 0), ("two", 2))}
        sender.until(lambda: sender.ready(*both))
        sender.ask(1, 12)
        sender.until(sender.all_ended, lambda: sender.ask(0, 1) if len(sender.requested) < 60 else None)
        [moved] = [name for name, cells in sender.stays.items() if cells == [0, 1]]
        [stayed] = set(both) - {moved}
        assert sender.stays[stayed] == [0], "the other one does what there is in cell 0"

        assert both[moved].stop() == 0
        again = start(moved, 0)
        sender.until(lambda: len(sender.stays[moved]) == 3 and sender.ready(moved))
        assert sender.stays[moved] == [0, 1, 1], "not to and fro"
        sender.ask(1, 4)
        sender.until(sender.all_ended)
        assert (again.stop(), both[stayed].stop()) == (0, 0)
    counted = [json.loads(each.message_file.read_bytes()) for each in (*both.values(), again)]
    nothing_lost(sender, settings)
    assert set[str]().union(*counted) <= {"completed", "preempted", "refused"}
    words = [each.record for each in read_whole_topics(settings, [GRANTS]) if isinstance(each.record, CapacityGrant)]
    assert [(each.worker, each.cell) for each in words] == [(moved, 1)]
    assert "no executor works there" in words[0].reason
