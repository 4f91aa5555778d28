"""Measures the heartbeats of a large fleet: their cost for a router, and how soon the router acts on a change.

    KAFKA_HOME=... python -m bench.heartbeats            1,000 executors in 4 cells, on Apache Kafka
    python -m bench.heartbeats                           on the embedded broker

One router process serves all cells. A separate process sends a heartbeat of every executor each `BEAT_SECONDS`, spread
over time. Each executor holds TURNS turns without room for another, and its rates vary with each heartbeat.

share       Share of one core for each cell: the router's processor time per heartbeat, in a window with heartbeats
            only, times the heartbeats of a cell in one second. Only heartbeats on the log count, because a delayed
            sender sends fewer. A fleet of 5,000 is 20 such cells, which is more than one router serves, and more than
            two cores can send heartbeats for.
acted       p99 in milliseconds from the heartbeat in which a full executor first offers room until a waiting turn has
            reached its inbox. One executor of each cell changes, in turn; the heartbeats of all others continue.
`--json FILE` stores the result.
"""

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.broker import scratch_broker
from bench.check import Check, options, tell
from bench.processes import processor_seconds, start_program
from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, Tenant, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult
from rose.schemas.wire import decode, encode
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, LOG_GROUP, REQUESTED, Partitions, Topic
from rose.topics.queries import watermarks_of
from rose.topics.settings import BusSettings

BEAT_SECONDS = 0.2
"""The longest heartbeat interval that an executor's configuration allows; the default is half of it."""

TURNS = 8
"""Number of turns that each steady executor holds; it offers no room for another turn."""

WARM_SECONDS = 10.0
CHANGES = 200
FIRST_CHANGES = 20
"""Number of changes at the start that are not counted."""
PATIENCE_SECONDS = 60.0
SHARE, ACTED_MILLISECONDS = 0.1, 250.0


def heartbeat(worker: str, slot: int, sequence: int, *, room: int, running: int, noise: float) -> SlackHeartbeat:
    """Return a heartbeat. `room`: turns that the executor may hold; `noise`: factor of its rates."""
    return SlackHeartbeat(
        worker=worker,
        incarnation=1,
        slot=slot,
        sequence=sequence,
        worker_class=WorkerClass.DEDICATED,
        state=ExecutorState.READY,
        policy_version=0,
        hardware=Hardware(prefill_tokens_per_second=20_000.0 * noise, decode_tokens_per_second=200.0 * noise),
        kv_bytes_total=10**10,
        kv_bytes_free=10**10,
        kv_bytes_per_token=10_000,
        rollout=Tenant(running=running),
        max_turns=room,
        token_budget=1_000_000,
        ttl_seconds=2.0,
        holds=bytes(8 * running),
        sent_at=time.time(),
    )


def send_heartbeats(settings: BusSettings, executors: int, cells: int) -> None:
    """Send the heartbeats of the steady executors until the process is ended."""
    producer, topic, noise = Producer(settings.producer("bench-beats")), settings.topic(HEARTBEATS), random.Random(0)
    began, sent = time.perf_counter(), 0
    while True:
        due = int((time.perf_counter() - began) / BEAT_SECONDS * executors)
        sent = max(sent, due - executors)  # after a pause each executor sends one heartbeat
        for number in range(sent, due):
            rounds, executor = divmod(number, executors)
            slot = executor % cells
            record = heartbeat(
                f"steady-{executor}", slot, rounds, room=0, running=TURNS, noise=noise.uniform(0.97, 1.03)
            )
            producer.produce(topic, value=encode(record), partition=slot)
        sent = due
        producer.poll(0.002)


class ChangingExecutors:
    """One executor for each cell that offers room for a turn on request, and the turns that wait for the room."""

    def __init__(self, settings: BusSettings, cells: int) -> None:
        self._settings, self._cells = settings, cells
        self._producer = Producer(settings.producer("bench-changing"))
        self._consumer = Consumer(settings.consumer("bench-changing", LOG_GROUP))
        inbox = settings.topic(DISPATCHED)
        self._consumer.assign([TopicPartition(inbox, slot, 0) for slot in range(cells)])
        self._sequence = [0] * cells
        self._requests = 0
        self._beaten_at = 0.0
        self._open: int | None = None
        """The cell whose executor offers room."""

    def change(self, cell: int) -> float:
        """Return the seconds from the heartbeat with room until a turn has reached the inbox. Raises TimeoutError."""
        while (stray := self._taken()) is not None:
            self._send_back(stray)
        began = time.perf_counter()
        self._open = cell
        self._beat(cell)
        while time.perf_counter() < began + PATIENCE_SECONDS:
            dispatch = self._taken()
            if dispatch is not None and dispatch.request.home != cell:
                self._send_back(dispatch)
            elif dispatch is not None:
                took = time.perf_counter() - began
                self._open = None
                self._beat(cell)
                self.ask(cell)
                self.wait(BEAT_SECONDS)  # an earlier answer would leave room, as far as the router knows
                self._answer(dispatch)
                return took
            self.send_if_due()
        raise TimeoutError(f"no turn reached cell {cell} within {PATIENCE_SECONDS:.0f} s")

    def _send_back(self, dispatch: TurnDispatch) -> None:
        """Return a turn that arrived after its executor withdrew the room; another turn waits in its place."""
        self.ask(dispatch.request.home)
        self._answer(dispatch)

    def wait(self, seconds: float) -> None:
        """Keep sending heartbeats for this time."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.send_if_due()
            self._producer.poll(0.01)

    def ask(self, cell: int) -> None:
        """Request a turn, which waits because no executor has room."""
        name = f"{self._requests}"
        self._requests += 1
        request = TurnRequest(
            trajectory_id=f"{name}:0",
            group_id=name,
            home=cell,
            environment="calculator",
            turn=0,
            appended=bytes(400),
            context_tokens=100,
            digest=bytes(16),  # no executor computes with it
            chain=(),
            sampling=Sampling(max_tokens=10),
            requested_at=time.time(),
            patience_seconds=3600.0,
        )
        self._write(REQUESTED, encode(request), cell)

    def send_if_due(self) -> None:
        """Send the last heartbeats again when they are due."""
        if time.perf_counter() >= self._beaten_at + BEAT_SECONDS:
            self._beaten_at = time.perf_counter()
            for cell in range(self._cells):
                self._beat(cell)

    def close(self) -> None:
        self._producer.flush()
        self._consumer.close()

    def _beat(self, cell: int) -> None:
        room = int(cell == self._open)
        record = heartbeat(f"changer-{cell}", cell, self._sequence[cell], room=room, running=0, noise=1.0)
        self._sequence[cell] += 1
        self._write(HEARTBEATS, encode(record), cell)

    def _taken(self) -> TurnDispatch | None:
        """Return the next dispatch that has reached an inbox, after a short wait."""
        message = self._consumer.poll(0.001)
        if message is None:
            self._producer.poll(0)
            return None
        if message.error() is not None:
            raise RuntimeError(f"the broker fails the benchmark: {message.error()}")
        value = message.value()
        return None if value is None else decode(TurnDispatch, value)  # a claim has no value

    def heartbeats(self) -> int:
        """Return the number of heartbeats of all executors that are on the log."""
        topic = self._settings.topic(HEARTBEATS)
        return sum(watermarks_of(self._consumer, TopicPartition(topic, cell))[1] for cell in range(self._cells))

    def _answer(self, dispatch: TurnDispatch) -> None:
        request = dispatch.request
        result = TurnResult(
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            home=request.home,
            turn=0,
            attempt=dispatch.attempt,
            outcome=TurnOutcome.COMPLETED,
            worker=dispatch.worker,
            incarnation=1,
            tokens=bytes(40),
            logprobs=bytes(40),
            finish_reason="stop",
            spans=(VersionSpan(0, 10, 0),),
            context_tokens=request.context_tokens,
        )
        self._write(COMPLETED, encode(result), request.home)

    def _write(self, topic: Topic, value: bytes, cell: int) -> None:
        self._producer.produce(self._settings.topic(topic), value=value, partition=cell)


@contextmanager
def running(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """Yield the process, and end it afterwards."""
    with process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def share(used: float, sent: int, executors: int, cells: int, details: dict[str, float]) -> Check:
    """Return the check for a router that used this much processor time for this many heartbeats."""
    heartbeat = used / sent if sent else math.inf
    return Check(
        name="share",
        value=round(heartbeat * executors / BEAT_SECONDS / cells, 4),
        unit="of a core a cell",
        bound=SHARE,
        direction="max",
        against=f"{executors} executors in {cells} cells, each with a heartbeat every {BEAT_SECONDS} s",
        details={"microseconds a heartbeat": round(1e6 * heartbeat, 1), **details},
    )


def measure(settings: BusSettings, executors: int, cells: int, seconds: float) -> list[Check]:
    """Measure the figures with a new router."""
    create_topics(settings, Partitions(home=cells, slots=cells, cells=cells))
    changing, order = ChangingExecutors(settings, cells), random.Random(1)
    counts = ["--executors", str(executors - cells), "--cells", str(cells)]
    sender = [sys.executable, "-m", "bench.heartbeats", "--send", json.dumps(asdict(settings)), *counts]
    with (
        running(start_program("router", settings)) as router,
        running(subprocess.Popen(sender, stdout=subprocess.DEVNULL)) as sender_process,
    ):
        for cell in (cell for _ in range(2) for cell in range(cells)):
            changing.ask(cell)
        changing.change(0)  # returns once the router serves
        changing.wait(WARM_SECONDS)
        sent, before = -changing.heartbeats(), [processor_seconds(each.pid) for each in (router, sender_process)]
        at = time.perf_counter()
        changing.wait(seconds)
        after, took = [processor_seconds(each.pid) for each in (router, sender_process)], time.perf_counter() - at
        sent += changing.heartbeats()
        found: list[float] = []
        for _ in range(FIRST_CHANGES + CHANGES):
            changing.wait(order.uniform(0, BEAT_SECONDS))
            found.append(1e3 * changing.change(order.randrange(cells)))
    changing.close()
    used, sending = (there - here for here, there in zip(before, after, strict=True))
    percentiles = statistics.quantiles(found[FIRST_CHANGES:], n=100)
    details = {"heartbeats a second": round(sent / took), "the sender": round(sending / took, 3)}
    return [
        share(used, sent, executors, cells, details),
        Check(
            name="acted",
            value=round(percentiles[98], 1),
            unit="ms at p99",
            bound=ACTED_MILLISECONDS,
            direction="max",
            against=f"{CHANGES} changes, among the heartbeats of all others",
            details={"median": round(percentiles[49], 1), "longest": round(max(found[FIRST_CHANGES:]), 1)},
        ),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--executors", type=int, default=1000)
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the window without changes")
    parser.add_argument("--send", help=argparse.SUPPRESS)  # internal: this program starts itself with it
    arguments = parser.parse_args()
    if arguments.send is not None:
        send_heartbeats(BusSettings(**json.loads(arguments.send)), arguments.executors, arguments.cells)
    with scratch_broker() as broker:
        name = broker.name
        checks = measure(broker.settings("beats."), arguments.executors, arguments.cells, arguments.seconds)
    tell(checks, broker=name, file=arguments.json)


if __name__ == "__main__":
    main()
