"""Load for the bus benchmark: environments that request turns and executors that answer, in one process.

Keeps true
- A turn's latency runs from the moment before its request is handed to the producer until its record has been read from
  an inbox, on one clock.
- The work for each turn is the same for every program between request and inbox: the record is decoded, and a result is
  written.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult
from rose.schemas.wire import decode, encode
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, LOG_GROUP, REQUESTED, Partitions, Topic
from rose.topics.settings import BusSettings

NEW_TOKENS = 20
HEARTBEAT_SECONDS = 0.2
GROUP_SIZE = 8
READ_LIMIT = 500
POLL_SECONDS = 0.001
"""Time to wait for dispatches before the next look whether a request is due."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of trajectories."""

    first: int
    """Tokens of the first request."""
    more: int
    """Tokens that each further request appends."""
    turns: Sequence[int]
    """Numbers of turns, from which one is drawn at random."""


USUAL = Shape(150, 30, range(2, 13))


@dataclass(slots=True)
class Trajectory:
    name: str
    group: str
    home: int
    turns: int
    turn: int = 0


class Executors:
    """The heartbeats of a fleet with one executor for every inbox.

    The heartbeats are spread over time, as the heartbeats of separate processes are.
    """

    def __init__(self, settings: BusSettings, partitions: Partitions) -> None:
        self._settings = settings
        self._slots, self._cells = partitions.slots, partitions.cells
        self._producer = Producer(settings.producer("bench-executors"))
        self._beats = 0
        """Number of heartbeats sent so far; executors take turns."""
        self._began = time.time()

    def beat_if_due(self) -> None:
        now = time.time()
        due = int((now - self._began) / HEARTBEAT_SECONDS * self._slots)
        self._beats = max(self._beats, due - self._slots)  # after a pause an executor sends one heartbeat
        while self._beats < due:
            heartbeat = self._next_heartbeat(now)
            topic, cell = self._settings.topic(HEARTBEATS), heartbeat.slot % self._cells
            self._producer.produce(topic, value=encode(heartbeat), partition=cell)
            self._beats += 1
        self._producer.poll(0)

    def _next_heartbeat(self, now: float) -> SlackHeartbeat:
        rounds, slot = divmod(self._beats, self._slots)
        return SlackHeartbeat(
            worker=f"bench-{slot}",
            incarnation=1,
            slot=slot,
            sequence=rounds + 1,
            worker_class=WorkerClass.DEDICATED,
            state=ExecutorState.READY,
            policy_version=0,
            hardware=Hardware(prefill_tokens_per_second=20_000.0 + 10 * slot, decode_tokens_per_second=200.0),
            kv_bytes_total=10**10,
            kv_bytes_free=10**10,
            kv_bytes_per_token=10_000,
            max_turns=256,
            token_budget=1_000_000,
            ttl_seconds=2.0,
            sent_at=now,
        )


class Lane:
    """One way from requests to inboxes: the topics of one namespace, with any program that carries records between
    them.
    """

    def __init__(self, settings: BusSettings, partitions: Partitions, *, routed: bool, shape: Shape = USUAL) -> None:
        self._settings = settings
        self._shape = shape
        self._homes = partitions.home
        self._record: type[TurnDispatch | TurnRequest] = TurnDispatch if routed else TurnRequest
        self._random = random.Random(0)
        self._producer = Producer(settings.producer("bench-load"))
        self._consumer = Consumer(settings.consumer("bench-load", LOG_GROUP))
        inbox = settings.topic(DISPATCHED)
        self._inboxes = [TopicPartition(inbox, slot, 0) for slot in range(partitions.slots)]
        self._consumer.assign(self._inboxes)
        self._topics = {topic: settings.topic(topic) for topic in (REQUESTED, COMPLETED)}
        self._first, self._more, self._tokens = (bytes(4 * n) for n in (shape.first, shape.more, NEW_TOKENS))
        self._sampling = Sampling(max_tokens=2 * NEW_TOKENS)
        self._idle: deque[Trajectory] = deque()
        self._flying: dict[str, tuple[Trajectory, float]] = {}
        """Turns that are requested and not yet in an inbox, with the time of the request."""
        self._opened = 0

    @property
    def flying(self) -> int:
        return len(self._flying)

    def pause(self) -> None:
        """Fetch nothing: the embedded broker keeps even an idle consumer busy, which would disturb the other lane."""
        self._consumer.pause(self._inboxes)

    def resume(self) -> None:
        self._consumer.resume(self._inboxes)

    def ask(self) -> None:
        """Request the next turn of one trajectory."""
        if not self._idle:
            self._open_group()
        trajectory = self._idle.popleft()
        now = time.time()
        request = TurnRequest(
            trajectory_id=trajectory.name,
            group_id=trajectory.group,
            home=trajectory.home,
            environment="calculator",
            turn=trajectory.turn,
            appended=self._more if trajectory.turn else self._first,
            context_tokens=self._shape.first + trajectory.turn * self._shape.more,
            digest=bytes(16),  # no executor computes with it
            chain=tuple(range(trajectory.turn)),
            sampling=self._sampling,
            requested_at=now,
            patience_seconds=600.0,
        )
        self._write(REQUESTED, encode(request), trajectory, time.perf_counter())

    def take(self, wait_seconds: float) -> list[float]:
        """Read the inboxes and answer the dispatches; return the latency of each turn in seconds."""
        first = self._consumer.poll(wait_seconds)
        if first is None:
            self._producer.poll(0)
            return []
        found = [(first, time.perf_counter())]
        rest = self._consumer.consume(READ_LIMIT - 1, 0)
        now = time.perf_counter()
        found += [(message, now) for message in rest]
        taken = [self._answer(message, at) for message, at in found]
        self._producer.poll(0)
        return [seconds for seconds in taken if seconds is not None]

    def close(self) -> None:
        self._producer.flush()
        self._consumer.close()

    def _answer(self, message: Message, at: float) -> float | None:
        if message.error() is not None:
            raise RuntimeError(f"the broker fails the benchmark: {message.error()}")
        value = message.value()
        if value is None:
            return None  # a router's claim
        decoded = decode(self._record, value)
        dispatch = decoded if isinstance(decoded, TurnDispatch) else None
        request = decoded if dispatch is None else dispatch.request
        assert isinstance(request, TurnRequest)
        flying = self._flying.pop(request.trajectory_id, None)
        if flying is None:
            return None  # a reissued turn: its first dispatch was measured
        trajectory, asked_at = flying
        result = TurnResult(
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            home=request.home,
            turn=request.turn,
            attempt=dispatch.attempt if dispatch else 0,
            outcome=TurnOutcome.COMPLETED,
            worker=dispatch.worker if dispatch else "bare",
            incarnation=1,
            tokens=self._tokens,
            logprobs=self._tokens,
            finish_reason="stop",
            spans=(VersionSpan(0, NEW_TOKENS, 0),),
            context_tokens=request.context_tokens,
        )
        self._write(COMPLETED, encode(result), trajectory, None)
        trajectory.turn += 1
        if trajectory.turn < trajectory.turns:
            self._idle.append(trajectory)
        return at - asked_at

    def _write(self, topic: Topic, value: bytes, trajectory: Trajectory, asked_at: float | None) -> None:
        if asked_at is not None:
            self._flying[trajectory.name] = (trajectory, asked_at)
        self._producer.produce(self._topics[topic], value=value, key=trajectory.name, partition=trajectory.home)

    def _open_group(self) -> None:
        group = f"{self._opened}"
        home = self._opened % self._homes
        self._opened += 1
        for index in range(GROUP_SIZE):
            self._idle.append(Trajectory(f"{group}:{index}", group, home, self._random.choice(self._shape.turns)))


def closed_loop(lane: Lane, executors: Executors, *, flying: int, seconds: float) -> tuple[int, float]:
    """Keep `flying` turns in flight for this time; return the number of arrived turns, and the seconds."""
    began, arrived = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + seconds:
        executors.beat_if_due()
        for _ in range(flying - lane.flying):
            lane.ask()
        arrived += len(lane.take(POLL_SECONDS))
    return arrived, now - began


def open_loop(lane: Lane, executors: Executors, *, rate: float, seconds: float, seed: int) -> Sequence[float]:
    """Request turns at random times, `rate` a second, then wait for the last turn. Return the latencies."""
    moments = random.Random(seed)
    due = began = time.perf_counter()
    latencies: list[float] = []
    while (now := time.perf_counter()) < began + seconds:
        executors.beat_if_due()
        while due <= now:
            lane.ask()
            due += moments.expovariate(rate)
        latencies += lane.take(POLL_SECONDS)
    drain(lane, executors)
    return latencies


def drain(lane: Lane, executors: Executors, *, patience_seconds: float = 60.0) -> None:
    """Wait until no turn is in flight. Raises TimeoutError when turns do not arrive."""
    deadline = time.perf_counter() + patience_seconds
    while lane.flying:
        executors.beat_if_due()
        lane.take(POLL_SECONDS)
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{lane.flying} turns did not arrive within {patience_seconds:.0f} s")
