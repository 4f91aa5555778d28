"""Records a history for the router's core: the events that simulated executors and live trajectories would cause.

Keeps true: a recorded history holds the input of a router's decisions, so a second router with the same input decides
the same. Recording costs additional time; replaying costs the router's time only.
"""

import heapq
import random
from dataclasses import dataclass, field
from itertools import count
from zlib import crc32

from rose.pipeline.routing.router import Decision, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.arrays import count as token_count
from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import TurnDispatch, TurnKey, TurnOutcome, TurnRequest, TurnResult, context_fields, held_hash

Event = tuple[float, Record | ReceivedRequest]
"""Time and content of one input of the router."""

HEARTBEAT_SECONDS = 0.2
GROUP_SIZE = 8
MAX_TOKENS = 256
KV_BYTES_PER_TOKEN = 100_000


@dataclass(slots=True)
class Fleet:
    """The shape of the load."""

    workers: int
    trajectories: int
    """Number of live trajectories; a new trajectory follows each ended one."""
    turn_seconds: float
    """Mean time from a dispatch to the request for the next turn."""
    seed: int = 0


@dataclass
class Recorder:
    """Drives a router with simulated executors and environments, and records its input."""

    fleet: Fleet
    router: Router = field(default_factory=Router)
    history: list[Event] = field(default_factory=list)
    now: float = 0.0
    live: int = 0
    """Number of trajectories that have begun and not ended."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.fleet.seed)
        self._due: list[tuple[float, int, Record | ReceivedRequest | int]] = []
        """Events by time. A worker's number stands for its next heartbeat, which lists the turns that it holds at that
        time."""
        self._order = count()
        self._groups = count()
        self._contexts = [bytes(4 * tokens) for tokens in range(8192)]
        self._sampling = Sampling(max_tokens=MAX_TOKENS)
        self._requests: dict[str, TurnRequest] = {}
        """Newest request of each trajectory."""
        self._held: list[dict[TurnKey, bytes]] = [{} for _ in range(self.fleet.workers)]
        """Held turns in the heartbeats of each worker."""
        for worker in range(self.fleet.workers):
            self._at(worker / self.fleet.workers * HEARTBEAT_SECONDS, worker)
        for opened in range(0, self.fleet.trajectories, GROUP_SIZE):
            self._open_group(HEARTBEAT_SECONDS + opened / self.fleet.trajectories * self.fleet.turn_seconds)

    def record(self, seconds: float) -> None:
        """Simulate `seconds` seconds."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, due = heapq.heappop(self._due)
            event = self._beat(due) if isinstance(due, int) else due
            self.history.append((self.now, event))
            for decision in self.router.on_event(event, self.now):
                self._obey(decision)
            self._follow(event)
        self.now = until

    def _obey(self, decision: Decision) -> None:
        assert isinstance(decision, TurnDispatch), "nothing fails in this history"
        request = self._requests[decision.request.trajectory_id]
        self._held[decision.slot][decision.key] = held_hash(decision.key).to_bytes(8, "little")
        new_tokens = self._random.randint(MAX_TOKENS // 8, MAX_TOKENS)
        result = TurnResult(
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            home=request.home,
            turn=request.turn,
            attempt=decision.attempt,
            outcome=TurnOutcome.COMPLETED,
            worker=decision.worker,
            incarnation=decision.incarnation,
            tokens=self._contexts[new_tokens],
            spans=(VersionSpan(0, new_tokens, 0),),
            context_tokens=request.context_tokens,
        )
        self._at(self.now + self._random.expovariate(1 / (0.9 * self.fleet.turn_seconds)), result)

    def _follow(self, event: Record | ReceivedRequest) -> None:
        if isinstance(event, SlackHeartbeat):
            self._at(self.now + HEARTBEAT_SECONDS, event.slot)
        elif isinstance(event, TurnResult):
            del self._held[int((event.worker or "").removeprefix("worker-"))][event.key]
            if event.turn + 1 < self._turns(event.trajectory_id):
                tokens = event.context_tokens + token_count(event.tokens) + self._random.randint(10, 60)
                self._ask(
                    event.trajectory_id,
                    event.group_id,
                    event.turn + 1,
                    tokens,
                    0.1 * self.fleet.turn_seconds,
                    known=event.context_tokens,
                )
            else:
                del self._requests[event.trajectory_id]
                self.live -= 1
                if self.live <= self.fleet.trajectories - GROUP_SIZE:
                    self._open_group(self.now)

    @staticmethod
    def _turns(trajectory_id: str) -> int:
        """Return the number of turns of a trajectory, from 2 to 12."""
        return 2 + crc32(trajectory_id.encode()) % 11

    def _open_group(self, at: float) -> None:
        group, tokens = f"group-{next(self._groups)}", self._random.randint(50, 500)
        self.live += GROUP_SIZE
        for index in range(GROUP_SIZE):
            self._ask(f"{group}:{index}", group, 0, tokens, at - self.now)

    def _ask(
        self, trajectory_id: str, group_id: str, turn: int, tokens: int, after_seconds: float, *, known: int = 0
    ) -> None:
        at = self.now + after_seconds
        request = TurnRequest(
            trajectory_id=trajectory_id,
            group_id=group_id,
            home=0,
            environment="calculator",
            turn=turn,
            **context_fields(self._contexts[tokens], (0,) if turn else (), known_tokens=known),
            sampling=self._sampling,
            requested_at=at,
            patience_seconds=600.0,
        )
        self._requests[trajectory_id] = request
        self._at(at, ReceivedRequest.from_record(request))

    def _beat(self, worker: int) -> SlackHeartbeat:
        speed = 1 + worker % 4
        return SlackHeartbeat(
            worker=f"worker-{worker}",
            incarnation=1,
            slot=worker,
            sequence=next(self._order),
            worker_class=WorkerClass.DEDICATED,
            state=ExecutorState.READY,
            policy_version=0,
            hardware=Hardware(
                prefill_tokens_per_second=5_000.0 * speed * self._random.uniform(0.95, 1.05),
                decode_tokens_per_second=200.0 * speed * self._random.uniform(0.95, 1.05),
            ),
            kv_bytes_total=KV_BYTES_PER_TOKEN * 400_000,
            kv_bytes_free=KV_BYTES_PER_TOKEN * 200_000,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            max_turns=128,
            token_budget=400_000,
            ttl_seconds=2.0,
            holds=b"".join(self._held[worker].values()),
            sent_at=self.now,
        )

    def _at(self, at: float, event: Record | ReceivedRequest | int) -> None:
        heapq.heappush(self._due, (at, next(self._order), event))
