"""Routing policies with which the router is compared: round robin, session affinity, least load.

Keeps true
- A policy offers the interface of the router's core, reads the same records and keeps the same limits: it dispatches
  only to executors that are ready, within their newest offer. A turn that finds no room waits, oldest first.
- A turn that was refused or preempted is dispatched again with what it has.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat
from rose.schemas.record import Record
from rose.schemas.turns import Part, PlacementCost, TurnDispatch, TurnKey, TurnOutcome, TurnResult

NO_COST = PlacementCost(wait_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0)


@dataclass(slots=True)
class KnownExecutor:
    """An executor as a policy sees it."""

    heartbeat: SlackHeartbeat
    heard_at: float
    silent: bool = False
    """Whether its heartbeats stopped: its turns are dispatched again."""
    held: dict[TurnKey, int] = field(default_factory=dict)
    """Most KV tokens of each turn that it was sent and has not answered."""
    tokens: int = 0
    """Sum of `held`."""

    def release(self, key: TurnKey) -> None:
        """Forget a turn that it has answered."""
        self.tokens -= self.held.pop(key, 0)


@dataclass(slots=True)
class OpenTurn:
    """An unfinished turn."""

    received: ReceivedRequest
    attempt: int = 0
    worker: str = ""
    partial: Part | None = None

    @property
    def need(self) -> int:
        """Most KV tokens that the turn may hold."""
        request = self.received.request
        return request.context_tokens + request.sampling.max_tokens


@dataclass(slots=True)
class PolicyRouter:
    """A router whose choice is a policy: the key by which executors with room are compared."""

    policy: str
    executors: dict[str, KnownExecutor] = field(default_factory=dict)
    turns: dict[str, OpenTurn] = field(default_factory=dict)
    waiting: deque[str] = field(default_factory=deque)
    sessions: dict[str, str] = field(default_factory=dict)
    _next: int = 0

    def on_event(self, event: Record | ReceivedRequest, now: float) -> list[TurnDispatch | TurnResult]:
        """Handle a request, result or heartbeat."""
        if isinstance(event, ReceivedRequest):
            stops = self._stops(event.request.trajectory_id, now) if event.request.withdrawn else []
            self._close(event.request.trajectory_id)  # the answer to its last turn may be under way
            if event.request.withdrawn:
                return [*stops, *self._dispatch(now)]
            self.turns[event.request.trajectory_id] = OpenTurn(event)
            self.waiting.append(event.request.trajectory_id)
        elif isinstance(event, SlackHeartbeat):
            self._on_heartbeat(event, now)
        elif isinstance(event, TurnResult):
            self._on_result(event)
        return self._dispatch(now)

    def tick(self, now: float) -> list[TurnDispatch | TurnResult]:
        """Take back the turns of silent executors."""
        for name, executor in self.executors.items():
            if not executor.silent and now - executor.heard_at >= executor.heartbeat.ttl_seconds:
                executor.silent = True
                self._take_back(name)
        return self._dispatch(now)

    def _on_heartbeat(self, heartbeat: SlackHeartbeat, now: float) -> None:
        known = self.executors.get(heartbeat.worker)
        if known is not None and known.heartbeat.incarnation == heartbeat.incarnation:
            known.heartbeat, known.heard_at, known.silent = heartbeat, now, False
        else:
            self.executors[heartbeat.worker] = KnownExecutor(heartbeat, now)
            self._take_back(heartbeat.worker)
        if heartbeat.state is ExecutorState.STOPPING:
            self._take_back(heartbeat.worker)

    def _on_result(self, result: TurnResult) -> None:
        executor = self.executors.get(result.worker or "")
        if executor is not None:
            executor.release(result.key)
        turn = self.turns.get(result.trajectory_id)
        if turn is None or turn.received.request.turn != result.turn:
            return
        if result.outcome in (TurnOutcome.COMPLETED, TurnOutcome.FAILED):
            self._close(result.trajectory_id)
        elif turn.attempt == result.attempt:
            if result.outcome is TurnOutcome.PREEMPTED:
                turn.partial = result.part
            self._again(result.trajectory_id, turn)

    def _close(self, trajectory: str) -> None:
        """Forget a turn that is answered, by whichever of its attempts."""
        turn = self.turns.pop(trajectory, None)
        if turn is not None and not turn.worker:
            self.waiting.remove(trajectory)

    def _take_back(self, name: str) -> None:
        for trajectory, turn in self.turns.items():
            if turn.worker == name:
                self._again(trajectory, turn)

    def _again(self, trajectory: str, turn: OpenTurn) -> None:
        turn.worker, turn.attempt = "", turn.attempt + 1
        self.waiting.appendleft(trajectory)

    def _dispatch(self, now: float) -> list[TurnDispatch | TurnResult]:
        decisions: list[TurnDispatch | TurnResult] = []
        for _ in range(len(self.waiting)):
            turn = self.turns[self.waiting[0]]
            name = self._choose(turn)
            if name is None:
                break
            self.waiting.popleft()
            decisions.append(self._send(turn, name, now))
        return decisions

    def _choose(self, turn: OpenTurn) -> str | None:
        names = [name for name, each in self.executors.items() if _has_room(each, turn)]
        if not names:
            return None
        if self.policy == "session":
            trajectory = turn.received.request.trajectory_id
            chosen = self.sessions.get(trajectory)
            if chosen in names:
                return chosen
            self.sessions[trajectory] = min(names, key=self._load)
            return self.sessions[trajectory]
        if self.policy == "round_robin":
            self._next += 1
            return names[self._next % len(names)]
        return min(names, key=self._load)

    def _load(self, name: str) -> int:
        return len(self.executors[name].held)

    def _stops(self, trajectory: str, now: float) -> list[TurnDispatch]:
        """Return the dispatch that stops a withdrawn turn, if an executor holds the turn."""
        turn = self.turns.get(trajectory)
        if turn is None or not turn.worker:
            return []
        return [msgspec.structs.replace(self._dispatch_to(turn, turn.worker, now), withdrawn=True)]

    def _send(self, turn: OpenTurn, name: str, now: float) -> TurnDispatch:
        executor, request = self.executors[name], turn.received.request
        turn.worker = name
        executor.held[TurnKey(request.trajectory_id, request.turn, turn.attempt)] = turn.need
        executor.tokens += turn.need
        return self._dispatch_to(turn, name, now)

    def _dispatch_to(self, turn: OpenTurn, name: str, now: float) -> TurnDispatch:
        executor, request = self.executors[name], turn.received.request
        return TurnDispatch(
            request_wire=msgspec.Raw(turn.received.request_bytes),
            home=request.home,
            offset=turn.received.offset,
            attempt=turn.attempt,
            worker=name,
            slot=executor.heartbeat.slot,
            incarnation=executor.heartbeat.incarnation,
            claim=0,
            dispatched_at=now,
            cost=NO_COST,
            queued_at=now,
            partial=turn.partial,
        )


def _has_room(executor: KnownExecutor, turn: OpenTurn) -> bool:
    heartbeat = executor.heartbeat
    return (
        heartbeat.state is ExecutorState.READY
        and not executor.silent
        and len(executor.held) < heartbeat.max_turns
        and executor.tokens + turn.need <= heartbeat.token_budget
    )
