"""Simulated executors: the executor's own inbox, gate, lease and heartbeats around a simulated engine.

Keeps true
- What an executor decides is decided by the production code: which turns it takes (`Inbox`), whether it takes any
  (`IntakeGate`, `Lease`), what it tells the router (`HeartbeatWriter`). Only the engine and the time of links are
  models.
- Every accepted turn is answered once, and each heartbeat lists it until then.
- A policy version serves after its transfer and a swap between two steps. Cached prefixes of the version before are
  dropped. A turn counts for the version that it began with.
- A dispatch that does not fit the largest offer of the last heartbeats is counted in `overfilled`: no router may send
  such a dispatch.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rose.pipeline.simulation.cost_model import CostModel
from rose.pipeline.simulation.engine import Engine, EngineRequest, EngineResult
from rose.pipeline.simulation.events import EventQueue
from rose.pipeline.simulation.prefix_cache import Segment
from rose.pipeline.simulation.recorder import HeldTurn, Recorder, Swap
from rose.schemas.arrays import ITEM_BYTES, count
from rose.schemas.heartbeats import TTL_SECONDS, ExecutorState, SlackHeartbeat, WorkerClass
from rose.schemas.sampled_tokens import SampledTokens, VersionSpan
from rose.schemas.turns import Refusal, TurnDispatch, TurnKey, TurnOutcome, TurnResult, TurnTimes
from rose.workers.executor.grants import UNRESTRICTED, IntakeGate, Permission
from rose.workers.executor.inbox import Inbox, InboxAction, kv_tokens_needed
from rose.workers.executor.ipc.messages import ABORTED, EngineStatus, TurnFinished
from rose.workers.executor.records import ExecutorIncarnation, HeartbeatWriter, finished_result, refused_result
from rose.workers.executor.vllm.types import FinishedTurn

HEARTBEAT_SECONDS = 0.2
"""Time between two heartbeats, as an engine reports its status."""


@dataclass(slots=True)
class Work:
    """The work of a simulated turn."""

    segments: tuple[Segment, ...]
    new_tokens: int
    """Tokens that the whole turn samples."""
    blocks: tuple[str, ...] = ()
    """See `EngineRequest.blocks`."""


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """The surroundings of an executor: clock, bus and work."""

    events: EventQueue
    send: Callable[["Executor", TurnResult | SlackHeartbeat], None]
    """Writes a record to the bus."""
    work_of: Callable[[TurnDispatch], Work]
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    recorder: Recorder | None = None


class AttemptFigures(NamedTuple):
    """One answered attempt."""

    key: TurnKey
    device_seconds: float
    tokens_before: int
    """Tokens of the turn that it went on from."""
    tokens: int
    """Tokens of the turn that its answer has."""
    outcome: TurnOutcome
    ended_at: float


class Executor:
    """One dedicated executor, and what a lender has in common with it."""

    worker_class = WorkerClass.DEDICATED

    def __init__(
        self, name: str, slot: int, cost: CostModel, around: Surroundings, *, max_turns: int, step_tokens: int
    ) -> None:
        self._around = around
        self._events = around.events
        self.name = name
        self.slot = slot
        self.cost = cost
        self.engine = Engine(cost, max_running=max_turns, step_tokens=step_tokens, kv_tokens=cost.kv_cache_tokens)
        self.version = -1
        self.incarnation = 1
        self.overfilled = 0
        self.silent = False
        """Whether its heartbeats are lost."""
        self.gone = False
        self.inbox = Inbox(name, self.incarnation, max_turns=max_turns, token_budget=0)
        self.gate = IntakeGate(self._permission, lends=self.worker_class is WorkerClass.SERVING)
        self._max_turns = max_turns
        self._prefill_rate = cost.prefill_tokens_per_second
        self._start = ExecutorIncarnation(name, self.worker_class, self.incarnation)
        self._heartbeats = HeartbeatWriter(self._start, slot, by_grant=self.worker_class is WorkerClass.SERVING)
        self._held: dict[str, tuple[TurnKey, float, int]] = {}
        """Turns in the engine: key, time of arrival, and version at the beginning."""
        self._offers: deque[tuple[float, int, int]] = deque()
        self.attempts: list[AttemptFigures] = []
        """Answered attempts, for the cost."""
        self.lost_attempts = 0
        """Attempts that were lost when the executor was killed."""
        self.held: list[tuple[float, float]] = []
        """Ended times in which the rollouts had its devices."""
        self.held_since: float | None = None
        self._next_version: int | None = None
        self._swaps = False
        """Whether the engine stands still for a version swap."""
        self._looked_at = 0.0
        self._beats = False

    def start(self, first: float) -> None:
        """Begin to send heartbeats `first` seconds from now."""
        self.gone = False
        self.held_since = self._events.now if self.held_since is None else self.held_since
        if not self._beats:
            self._beats = True
            self._events.repeat(self._around.heartbeat_seconds, self._beat, first=first)

    def on_dispatch(self, dispatch: TurnDispatch, offset: int) -> None:
        """Take a dispatch from the inbox; refuse it if there is no room."""
        now = self._events.now
        if self.gone:
            return
        answer = self.inbox.on_dispatch(dispatch, self.version, offset=offset)
        if answer.action is InboxAction.REFUSE:
            if answer.refusal is Refusal.ROOM and not self._was_offered(dispatch):
                self.overfilled += 1
            self._send(refused_result(self._start, dispatch, answer.reason, answer.refusal, now=now))
        if answer.action is InboxAction.STOP:
            self._catch_up()
            self._preempt("/".join(map(str, dispatch.key)), answer.reason)
            self.on_work()
        if answer.action is not InboxAction.ACCEPT:
            return
        if self.gate.reason:
            self.inbox.release(dispatch.key)
            self._send(refused_result(self._start, dispatch, self.gate.reason, Refusal.ROOM, now=now))
            return
        work = self._around.work_of(dispatch)
        sampled = 0 if dispatch.partial is None else count(dispatch.partial.tokens)
        *shared, own = work.segments
        name = "/".join(map(str, dispatch.key))
        segments = (*shared, Segment(own.name, own.tokens + sampled))
        self._held[name] = dispatch.key, now, self.version
        self._catch_up()
        self.engine.add(EngineRequest(name, segments, work.new_tokens - sampled, now, work.blocks), now)
        self.on_work()

    def on_work(self) -> None:
        """Schedule the engine's next event, after the engine has changed."""
        self._look_again()

    def publish(self, version: int, transfer_seconds: float, swap_seconds: float) -> None:
        """Take a policy version: it arrives after its transfer, and the engine stops for the swap."""
        self._next_version = version
        self._events.after(transfer_seconds, partial(self._swap, version, swap_seconds))

    def _swap(self, version: int, swap_seconds: float) -> None:
        if self._next_version != version or self.gone:
            return
        self._catch_up()
        self.engine.drop_cache()
        self.version = version
        if self._around.recorder is not None:
            self._around.recorder.add(Swap(self.name, version, self._events.now, swap_seconds))
        if not self._swaps:
            self._swaps = True
            self.engine.pause(self._events.now)
            self._events.after(swap_seconds, self._swapped)
        self._beat_now()

    def _swapped(self) -> None:
        self._swaps = False
        self._resume()
        self.on_work()

    def _resume(self) -> None:
        """Let the engine go on after a swap."""
        self.engine.resume(self._events.now)

    def _end(self) -> None:
        self.gone = True
        if self.held_since is not None:
            self.held.append((self.held_since, self._events.now))
            self.held_since = None

    def held_times(self, now: float) -> list[tuple[float, float]]:
        """Return the times up to now in which the rollouts had its devices."""
        return [*self.held, (self.held_since, now)] if self.held_since is not None else self.held

    def speak(self) -> None:
        """Send heartbeats again."""
        self.silent = False

    def leave(self, reason: str) -> None:
        """Return all turns, and send a last heartbeat with STOPPING."""
        self._catch_up()
        self.gate.close(reason)
        self._return_turns(reason)
        self.heartbeat(ExecutorState.STOPPING)
        self._end()

    def kill(self) -> None:
        """End without a last heartbeat: held turns are not answered."""
        self._catch_up()
        self._end()
        self.lost_attempts += len(self._held)
        for name in self.engine.names():
            self.engine.abort(name, self._events.now)
        self._held.clear()

    def open_attempts(self) -> list[tuple[TurnKey, float]]:
        """Return the turns in the engine, with the device time that they have so far."""
        if not self._held:
            return []
        self.engine.count_steps(self._events.now)
        seconds = self.engine.device_seconds()
        return [(key, self.cost.tensor_parallel * seconds.get(name, 0.0)) for name, (key, _, _) in self._held.items()]

    def restart(self, version: int) -> None:
        """Come back as a new incarnation that serves `version`; nothing happens if it is there."""
        if not self.gone:
            return
        self.incarnation += 1
        self.version = version
        self._start = ExecutorIncarnation(self.name, self.worker_class, self.incarnation)
        self.inbox = Inbox(self.name, self.incarnation, max_turns=self._max_turns, token_budget=0)
        self.gate = IntakeGate(self._permission, lends=self.gate.lends)
        self._heartbeats = HeartbeatWriter(self._start, self.slot, by_grant=self.gate.lends)
        self.engine.drop_cache()
        self.start(0.0)
        self._beat_now()

    def heartbeat(self, state: ExecutorState | None = None) -> None:
        """Send a heartbeat."""
        now = self._events.now
        status = self._status()
        self._heartbeats.on_status(status)
        record = self._heartbeats.next_heartbeat(
            status,
            self.inbox,
            state=state or self._state,
            version=self.version,
            pause_reason=self.gate.reason,
            now=now,
        )
        self._offers.append((now, record.max_turns, record.token_budget))
        while self._offers[0][0] < now - TTL_SECONDS:
            self._offers.popleft()
        if not self.silent:
            self._around.send(self, record)

    def _permission(self) -> Permission:
        return UNRESTRICTED

    @property
    def _state(self) -> ExecutorState:
        if self.version < 0 and not self.gate.reason:
            return ExecutorState.STARTING
        return ExecutorState.PAUSED if self.gate.reason else ExecutorState.READY

    def _beat(self) -> None:
        if not self.gone:
            self._beat_now()

    def _beat_now(self) -> None:
        self._update_gate()
        self.heartbeat()

    def _update_gate(self) -> None:
        """Offer what the engine has."""
        self.gate.update(self._status(), busy=bool(self._held))
        self.inbox.offer(max_turns=self._max_turns, token_budget=self.gate.allowed_tokens)

    def _catch_up(self) -> None:
        """Answer the turns that have ended up to now."""
        for result in self.engine.advance(self._events.now):
            self._answer(result, TurnOutcome.COMPLETED, "")

    def _look_again(self) -> None:
        at = self.engine.next_at
        if at != self._looked_at:
            self._looked_at = at
            self._events.at(at, lambda: self._look(at))

    def _look(self, at: float) -> None:
        if at != self._looked_at:
            return
        self._looked_at = 0.0
        self._catch_up()
        self.on_work()

    def _return_turns(self, reason: str) -> None:
        for name in list(self._held):
            self._preempt(name, reason)

    def _preempt(self, name: str, reason: str) -> None:
        self._answer(self.engine.abort(name, self._events.now), TurnOutcome.PREEMPTED, reason)

    def _answer(self, result: EngineResult, outcome: TurnOutcome, reason: str) -> None:
        name = result.request.name
        key, received_at, version = self._held.pop(name)
        dispatch = self.inbox.release(key)
        many = result.sampled_tokens
        sampled = SampledTokens(
            tokens=bytes(ITEM_BYTES * many),
            logprobs=bytes(ITEM_BYTES * many),
            spans=(VersionSpan(0, many, version),) if many else (),
        )
        turn = FinishedTurn(
            name=name,
            sampled=sampled,
            finish_reason="stop" if outcome is TurnOutcome.COMPLETED else ABORTED,
            context_tokens=result.request.context_tokens,
            cached_tokens=result.cached_tokens,
            times=TurnTimes(
                scheduled_at=result.scheduled_at,
                first_token_at=result.first_token_at if many else 0.0,
                finished_at=result.finished_at,
            ),
        )
        if self._around.recorder is not None:
            self._around.recorder.add(HeldTurn(self.name, key, received_at, result, version, outcome))
        device_seconds = self.cost.tensor_parallel * result.device_seconds
        before = 0 if dispatch.partial is None else count(dispatch.partial.tokens)
        self.attempts.append(
            AttemptFigures(key, device_seconds, before, before + many, outcome, result.finished_at),
        )
        done = TurnFinished(turn, device_seconds=device_seconds)
        self._send(finished_result(self._start, dispatch, done, outcome, reason, received_at=received_at))

    def _send(self, result: TurnResult) -> None:
        self._around.send(self, result)

    def _was_offered(self, dispatch: TurnDispatch) -> bool:
        turns, tokens = len(self.inbox) + 1, self.inbox.tokens + kv_tokens_needed(dispatch)
        return any(turns <= most and tokens <= budget for _, most, budget in self._offers)

    def _status(self) -> EngineStatus:
        engine, per_token = self.engine, self.cost.kv_bytes_per_token
        return EngineStatus(
            version=self.version,
            device=self.cost.card,
            running=engine.running,
            waiting=len(engine.waiting),
            kv_bytes_total=engine.kv_tokens * per_token,
            kv_bytes_free=max(0, engine.kv_tokens - engine.held_tokens) * per_token,
            kv_bytes_per_token=per_token,
            prefill_tokens_per_second=self._prefill_rate,
            decode_tokens_per_second=self.cost.decode_tokens_per_second(
                max(1, engine.running), engine.decode_context_tokens
            ),
            steps=0,
            step_seconds=0.0,
        )
