"""Executors that share an inbox: real processes and a router, on each broker."""

import json
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnResult
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, Partitions
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.brokers import AnyBroker, flags, kafka_first
from tests.support.roles import rose
from tests.support.router_process_fixtures import router_process
from tests.support.routing_fixtures import request
from tests.support.scripted_engine import ScriptedExecutorProcess, scripted_process

pytestmark = pytest.mark.slow

WAIT_SECONDS = 120.0
FLIGHT = 12
"""Number of turns in flight, which three executors can hold."""

Start = tuple[str, int]
"""A worker and its incarnation."""


class RequestSender:
    """An environment worker that requests turns and reads all topics."""

    def __init__(self, settings: BusSettings) -> None:
        self.settings = settings
        self._writer = Writer(settings, "test")
        self._reader = Reader(settings, "test", group="test")
        self._reader.assign({(HEARTBEATS, 0): 0, (COMPLETED, 0): 0})
        self.requested = 0
        self.ended: dict[str, TurnResult] = {}
        self.heartbeats: dict[str, SlackHeartbeat] = {}
        """The newest heartbeat of each worker."""
        self.starts: dict[str, list[Start]] = defaultdict(list)

    def close(self) -> None:
        self._reader.close()

    def until(self, met: Callable[[], bool], *, sends_requests: bool = True) -> None:
        """Request turns and read records until the condition holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not met():
            assert time.monotonic() < deadline, f"{self.requested} asked, {len(self.ended)} ended: {self.heartbeats}"
            while sends_requests and self.requested < len(self.ended) + FLIGHT:
                turn = request(f"g{self.requested}:0", requested_at=time.time(), patience_seconds=600.0)
                self._writer.write(REQUESTED, turn, key=turn.trajectory_id, partition=0)
                self.requested += 1
            self._writer.poll()
            for item in self._reader.read(100, 0.05):
                if isinstance(item, Envelope):
                    self._take(item.record)

    def _take(self, record: Record | None) -> None:
        if isinstance(record, TurnResult) and record.outcome is TurnOutcome.COMPLETED:
            self.ended.setdefault(record.trajectory_id, record)
        elif isinstance(record, SlackHeartbeat):
            self.heartbeats[record.worker] = record
            start = (record.worker, record.incarnation)
            if start not in self.starts[record.worker]:
                self.starts[record.worker].append(start)

    def start_of(self, worker: str) -> Start:
        return self.starts[worker][-1]

    def ready(self, *workers: str) -> Callable[[], bool]:
        return lambda: all(
            each in self.heartbeats and self.heartbeats[each].state is ExecutorState.READY for each in workers
        )

    def works(self, start: Start) -> Callable[[], bool]:
        """Wait until the executor finishes another turn."""
        before = len(self.ended)
        return lambda: any((each.worker, each.incarnation) == start for each in list(self.ended.values())[before:])


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    return settings


@pytest.fixture
def sender(settings: BusSettings) -> Iterator[RequestSender]:
    sender = RequestSender(settings)
    yield sender
    sender.close()


@pytest.fixture
def start(settings: BusSettings, tmp_path: Path) -> Iterator[Callable[[str], ScriptedExecutorProcess]]:
    with ExitStack() as running:
        yield lambda name: running.enter_context(scripted_process(settings, tmp_path, name))


def attempts(settings: BusSettings) -> dict[str, list[TurnDispatch]]:
    """Return every dispatch of each turn, in order."""
    found: dict[str, list[TurnDispatch]] = defaultdict(list)
    for each in read_whole_topics(settings, [DISPATCHED]):
        if isinstance(each.record, TurnDispatch):
            found[each.record.request.trajectory_id].append(each.record)
    return found


@kafka_first
def test_only_turns_of_leaving_executors_move_in_a_shared_inbox(
    settings: BusSettings, sender: RequestSender, start: Callable[[str], ScriptedExecutorProcess]
) -> None:
    left: list[Start] = []
    with router_process(settings):
        stays, dies = start("stays"), start("dies")
        sender.until(sender.ready("stays", "dies"))
        sender.until(sender.works(sender.start_of("dies")))

        freezes = start("freezes")
        sender.until(sender.ready("freezes"))
        sender.until(sender.works(sender.start_of("freezes")))

        dies.send(signal.SIGKILL)
        left.append(sender.start_of("dies"))
        ended_before = len(sender.ended)
        sender.until(lambda: len(sender.ended) >= ended_before + 2 * FLIGHT)

        again = start("dies")
        sender.until(lambda: sender.start_of("dies") not in left and sender.ready("dies")())
        sender.until(sender.works(sender.start_of("dies")))

        freezes.send(signal.SIGSTOP)
        left.append(sender.start_of("freezes"))
        sender.until(lambda: any(held[-1].attempt and held[0].worker == "freezes" for held in lost(settings)))
        freezes.send(signal.SIGCONT)
        sender.until(sender.works(sender.start_of("freezes")))

        left.append(sender.start_of("dies"))
        assert again.stop() == 0
        sender.until(sender.works(sender.start_of("stays")))
        sender.until(lambda: len(sender.ended) == sender.requested, sends_requests=False)
        assert [stays.stop(), freezes.stop()] == [0, 0]
    assert {name: len(starts) for name, starts in sender.starts.items()} == {"stays": 1, "dies": 2, "freezes": 1}
    for sent in attempts(settings).values():
        assert all((each.worker, each.incarnation) in left for each in sent[:-1]), "only a leaver's leases move"
    counted = set[str]().union(*(json.loads(each.message_file.read_bytes()) for each in (stays, freezes, again)))
    assert counted <= {"completed", "preempted", "refused"}, "what is for others is not counted"


def lost(settings: BusSettings) -> list[list[TurnDispatch]]:
    """Return the dispatches of turns with more than one dispatch."""
    return [sent for sent in attempts(settings).values() if len(sent) > 1]


def test_executor_with_a_taken_name_replaces_the_other_which_ends_with_a_message(
    settings: BusSettings, sender: RequestSender, start: Callable[[str], ScriptedExecutorProcess]
) -> None:
    with router_process(settings):
        first, other = start("twin"), start("other")
        sender.until(sender.ready("twin", "other"))
        before = sender.start_of("twin")
        second = start("twin")
        sender.until(lambda: not first.process.is_alive())
        assert first.process.exitcode == 2
        assert "another executor has begun as twin" in first.message_file.read_text()
        sender.until(lambda: sender.start_of("twin") != before and sender.ready("twin")())
        sender.until(sender.works(sender.start_of("twin")))
        sender.until(lambda: len(sender.ended) == sender.requested, sends_requests=False)
        assert [second.stop(), other.stop()] == [0, 0]
    assert all(sent[0].worker == "twin" for sent in lost(settings))


@kafka_first
def test_drained_executor_leaves_no_turn_and_restarts_drained_until_undrained(
    settings: BusSettings, sender: RequestSender, start: Callable[[str], ScriptedExecutorProcess]
) -> None:
    with router_process(settings), ThreadPoolExecutor(1) as operator:
        other, first = start("other"), start("leaves")
        sender.until(sender.ready("other", "leaves"))
        sender.until(sender.works(sender.start_of("leaves")))
        left = sender.start_of("leaves")
        outcome = operator.submit(rose, "drain", "leaves", "--within", "0", "--reason", "a new disk", *flags(settings))
        sender.until(outcome.done)
        assert (outcome.result().returncode, "it holds nothing" in outcome.result().stdout) == (0, True), (
            outcome.result()
        )
        first.send(signal.SIGKILL)

        again = start("leaves")
        sender.until(lambda: sender.start_of("leaves") != left)
        before = len(sender.ended)
        sender.until(lambda: len(sender.ended) >= before + 2 * FLIGHT)
        assert sender.heartbeats["leaves"].paused_reason == "it is drained: a new disk"
        assert rose("drain", "leaves", "--release", *flags(settings)).returncode == 0
        sender.until(sender.works(sender.start_of("leaves")))
        sender.until(lambda: len(sender.ended) == sender.requested, sends_requests=False)
        assert [other.stop(), again.stop()] == [0, 0]
    for sent in attempts(settings).values():
        assert all((each.worker, each.incarnation) == left for each in sent[:-1]), "only a leaver's leases move"
        assert sent[-1].failures == 0, "to leave is nobody's fault"
