"""An emulated executor: the real inbox, gate, lease, memory and heartbeats, with an emulated engine. Pure.

Keeps true, as `rose.workers.executor.loop` and a lender's guest do
- Every accepted turn is answered once, and listed in each heartbeat until then; a turn without room is refused.
- While its gate is closed the executor holds nothing: its turns go back, with their partial output.
- A lender computes only while it has no user. When its users need memory the guest is cut: whole turns go back at once,
  the turns with the least loss first.
- A guest is ready `wake_seconds` after the grant that wakes it, and a parked guest loses its prefix cache.

A dispatch that does not fit the largest of its recent offers is noted as `overfilled`, which no router may cause.

Example
    dispatched(g:0 turn 0)      -> ContextRequest: its context
    context(..., 150 tokens)    -> nothing
    step(0.2 s later)           -> a heartbeat that lists the turn
    step(1.5 s later)           -> COMPLETED, a heartbeat
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from bench.fleet.engine import VERSION, Engine, Lengths, Rates, sampled_of
from bench.fleet.users import Step
from rose.schemas.arrays import ITEM_BYTES, count
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import (
    BUILDING_REASON,
    MAX_HELD_TURNS,
    NOT_RESUMED_REASON,
    TTL_SECONDS,
    ExecutorState,
    SlackHeartbeat,
    WorkerClass,
)
from rose.schemas.turns import ContextMissing, Refusal, TurnDispatch, TurnKey, TurnOutcome, TurnResult, held_hash
from rose.workers.executor.grants import UNRESTRICTED, IntakeGate, Lease, Permission
from rose.workers.executor.inbox import Inbox, InboxAction, kv_tokens_needed
from rose.workers.executor.ipc.messages import (
    ABORTED,
    EngineStatus,
    LendingStats,
    Resume,
    ServingStats,
    Suspend,
    TurnFinished,
)
from rose.workers.executor.records import (
    ExecutorIncarnation,
    HeartbeatWriter,
    finished_result,
    refused_result,
    resumed_context,
)
from rose.workers.lender.kv_budget import KvBudget, KvShares, KvUsage

BEAT_SECONDS = 0.2
"""Time between two heartbeats while nothing changes."""

ROOM_TOKENS = 180
"""Free tokens with which a lender counts as having room: nine of ten turns of the calculator fit."""

NOT_RESUMED, BUILT = NOT_RESUMED_REASON, BUILDING_REASON

STOPPED = "it stops"

GRANT, USERS, MEMORY, GROWN, TURNS = "grant", "users", "memory", "grown", "turns"
"""Causes in a journal for turns to come and go."""


class ExecutorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one executor."""

    name: str
    slot: int
    rates: Rates
    lends: bool = False
    """Whether it is a serving worker that follows grants; otherwise it is dedicated."""
    kv_bytes_per_token: int = 1
    wake_seconds: float = 0.0
    """Time until a granted guest is ready, with its weights."""


class NoteKind(Enum):
    """The events of a journal."""

    GRANTED = "granted"
    """A new or renewing grant was read; `since`: when it was written."""
    FREE = "free"
    """A lender has room for another turn; `reason`: cause of the room, `grant` or `users`. `since`: when that grant was
    written, or now."""
    FIRST = "first"
    """The first turn was accepted; `since`: when the lender had room; `reason` as in FREE."""
    SHUT = "shut"
    """The lender has no more room, for another reason than its turns; `reason`: the cause."""
    OFF = "off"
    """The returned turns are answered; `since`: when users came, or the gate closed. `reason`: `memory` that users
    took, `grown` beyond the memory that is left, `users` who left no time to compute, or `grant`."""
    OVERFILLED = "overfilled"
    """The executor was sent more than it offered."""


class Note(NamedTuple):
    """An event for the journal."""

    what: NoteKind
    at: float
    since: float
    reason: str = ""


class ContextRequest(NamedTuple):
    """Request for the context of an accepted turn."""

    dispatch: TurnDispatch


class ReturnedTurns(NamedTuple):
    """Turns that had to go back: once all are on the log, the note's time is known."""

    results: Sequence[TurnResult]
    note: Note


Output = TurnResult | SlackHeartbeat | ContextRequest | ReturnedTurns | Note


@dataclass(slots=True)
class Offers:
    """Recent offers of heartbeats, on which a router may still act."""

    recent: deque[tuple[float, int, int]] = field(default_factory=deque)

    def take(self, heartbeat: SlackHeartbeat, now: float) -> None:
        self.recent.append((now, heartbeat.max_turns, heartbeat.token_budget))
        while self.recent[0][0] < now - TTL_SECONDS:
            self.recent.popleft()

    def fit(self, turns: int, tokens: int) -> bool:
        """Return whether one of the offers had this much room."""
        return any(turns <= most and tokens <= budget for _, most, budget in self.recent)


class FleetExecutor:
    """One incarnation of one executor. `now`: unix seconds that never jump."""

    def __init__(
        self,
        spec: ExecutorSpec,
        lengths: Lengths,
        incarnation: int,
        now: float,
        *,
        lease: Lease | None = None,
        memory: KvBudget | None = None,
        prompts: dict[str, int] | None = None,
    ) -> None:
        """Create an executor. `lease` and `memory` are for lenders; `prompts`: see `Engine`."""
        self.spec = spec
        self._lengths = lengths
        self._lease = lease
        self._memory = memory
        self._now = self._beat_at = now
        self._start = ExecutorIncarnation(
            spec.name, WorkerClass.SERVING if spec.lends else WorkerClass.DEDICATED, incarnation
        )
        self._inbox = Inbox(spec.name, incarnation, max_turns=spec.rates.max_turns, token_budget=0)
        self._heartbeats = HeartbeatWriter(self._start, spec.slot, by_grant=spec.lends)
        self._gate = IntakeGate(self._permission, lends=spec.lends)
        self._engine = Engine(spec.rates, prompts)
        self._shares: KvShares | None = None
        self._offers = Offers()
        self._waiting: dict[TurnKey, float] = {}
        """Turns whose contexts are awaited, with the start time of the wait."""
        self._keys: dict[str, tuple[TurnKey, float]] = {}
        """Turns in the engine, with their arrival times."""
        self._answered: deque[int] = deque(maxlen=MAX_HELD_TURNS)
        self._parked = NOT_RESUMED if spec.lends else ""
        self._built_at = 0.0
        self._computed_at = now
        self._users = Step(now, 0, 0)
        self._cuts = 0
        self._shut = GRANT if spec.lends else ""
        """Cause that prevents another turn: the turns that it holds, or another cause; empty if there is room."""
        self._most_tokens = 0
        """Largest budget since its guest is ready: the budget without users."""
        self._freed: Note | None = None
        """Note of a lender that has accepted no turn since it had room."""
        self._granted_at = 0.0
        """Time at which the newest grant was written."""
        self._beat_of: tuple[object, ...] = ()

    @property
    def incarnation(self) -> int:
        return self._start.incarnation

    @property
    def holds(self) -> int:
        """Return the number of held turns."""
        return len(self._inbox)

    def on_claim(self, claim: int) -> None:
        """Take in a router's claim of the inbox."""
        self._inbox.on_claim(claim)

    def on_grant(self, grant: CapacityGrant | None, now: float, *, source: GrantSource, live: bool) -> list[Output]:
        """Take in the newest grant under one of its two keys."""
        assert self._lease is not None
        self._lease.on_grant(grant, now, source=source, live=live)
        if grant is None or not grant.lend or not live:
            return []
        self._granted_at = grant.granted_at
        return [Note(NoteKind.GRANTED, now, grant.granted_at, grant.reason)]

    def on_dispatch(self, dispatch: TurnDispatch, offset: int, now: float) -> list[Output]:
        """Take in a dispatch from its inbox."""
        answer = self._inbox.on_dispatch(dispatch, self._version, offset=offset)
        if answer.action is InboxAction.DROP:
            return []
        if answer.action is InboxAction.STOP:
            return [self._stop_turn(dispatch, answer.reason, now)]
        if answer.action is InboxAction.REFUSE:
            outputs: list[Output] = [self._refused(dispatch, answer.reason, answer.refusal, now)]
            fits = self._offers.fit(len(self._inbox) + 1, self._inbox.tokens + kv_tokens_needed(dispatch))
            if answer.refusal is Refusal.ROOM and not fits:
                outputs.append(Note(NoteKind.OVERFILLED, now, now, "/".join(map(str, dispatch.key))))
            return outputs
        if self._gate.reason:
            self._inbox.release(dispatch.key)
            return [self._refused(dispatch, self._gate.reason, Refusal.ROOM, now)]
        self._waiting[dispatch.key] = now
        if self._freed is None:
            return [ContextRequest(dispatch)]
        freed, self._freed = self._freed, None
        return [ContextRequest(dispatch), Note(NoteKind.FIRST, now, freed.at, freed.reason)]

    def on_context(self, dispatch: TurnDispatch, context: bytes | ContextMissing, now: float) -> list[Output]:
        """Take in the context of a turn, or the reason why it is missing. Ignored if the turn has gone back."""
        if self._waiting.pop(dispatch.key, None) is None:
            return []
        if isinstance(context, ContextMissing):
            self._inbox.release(dispatch.key)
            refusal = Refusal.CONTEXT if dispatch.request.chain else Refusal.ENGINE
            return [self._refused(dispatch, str(context), refusal, now)]
        name = "/".join(map(str, dispatch.key))
        request = dispatch.request
        whole, finish = sampled_of(request.trajectory_id, request.turn, request.sampling, self._lengths)
        sampled = 0 if dispatch.partial is None else count(dispatch.partial.tokens)
        rest = whole[ITEM_BYTES * sampled :]
        if not rest:
            self._inbox.release(dispatch.key)
            return [self._refused(dispatch, "nothing of it is left to sample", Refusal.ENGINE, now)]
        self._keys[name] = dispatch.key, now
        self._engine.take(name, request, count(resumed_context(dispatch, context)), rest, finish)
        return []

    def step(self, users: Step, idle_seconds: float, now: float) -> list[Output]:
        """Advance to `now`, with `idle_seconds` of this time without users.

        `users`: present users, who last changed at `at`.
        """
        self._now, self._users = now, users
        if idle_seconds > 0:
            self._computed_at = now
        if self._parked == BUILT and now >= self._built_at:
            self._parked, self._computed_at = "", now
        outputs: list[Output] = [self._done(done) for done in self._engine.advance(idle_seconds, now)]
        outputs += self._share_memory(now)
        outputs += self._open_or_close(now)
        outputs += self._note_room(now)
        state = (self._state, self._gate.reason, self._inbox.token_budget)
        if state != self._beat_of or now >= self._beat_at:
            self._beat_of, self._beat_at = state, now + BEAT_SECONDS
            outputs.append(self._heartbeat(self._state, now))
        return outputs

    def stop(self, now: float) -> list[Output]:
        """Stop: all turns go back, and the last heartbeat lists the answered turns."""
        self._gate.close(STOPPED)
        back = self._give_up(STOPPED, now)
        return [*back, self._heartbeat(ExecutorState.STOPPING, now, self._answered)]

    @property
    def _version(self) -> int:
        return -1 if self._parked else VERSION

    @property
    def _state(self) -> ExecutorState:
        return ExecutorState.PAUSED if self._gate.reason else ExecutorState.READY

    def _permission(self) -> Permission:
        return UNRESTRICTED if self._lease is None else self._lease.permission(self._now)

    def _share_memory(self, now: float) -> list[Output]:
        """Update the memory of turns next to users; return the turns that have to go back."""
        if self._memory is None or self._parked:
            return []
        per_token = self.spec.kv_bytes_per_token
        use = KvUsage(serving_bytes=self._users.tokens, guest_bytes=self._engine.held_tokens * per_token)
        most, grow = self.spec.rates.kv_tokens * per_token, not self._users.running
        self._shares = self._memory.decide(use, most_bytes=most, policy_version=VERSION, grow=grow, now=now)
        self._cuts += self._shares.cuts
        back: list[TurnResult] = []
        while self._engine.held_tokens * per_token > self._shares.budget_bytes:
            done = self._engine.give_up(self._engine.youngest(), now, "serving takes its memory")
            back.append(self._done(done))
        note = (
            Note(NoteKind.OFF, now, self._users.at, MEMORY)
            if self._shares.cuts
            else Note(NoteKind.OFF, now, now, GROWN)
        )
        return [ReturnedTurns(back, note)] if back else []

    def _open_or_close(self, now: float) -> list[Output]:
        """Follow the grant and the users."""
        before = self._gate.reason
        order = self._gate.update(self._engine_status(), busy=bool(self._keys))
        if isinstance(order, Resume) and self._parked == NOT_RESUMED:
            self._parked, self._built_at = BUILT, now + self.spec.wake_seconds
        elif isinstance(order, Suspend):
            self._parked, self._shares = NOT_RESUMED, None
        self._inbox.offer(max_turns=self.spec.rates.max_turns, token_budget=self._gate.allowed_tokens)
        why, since = (GRANT, now) if self._parked else (USERS, self._computed_at)
        back = self._give_up(self._gate.reason, now) if self._gate.reason and not before else []
        if isinstance(order, Suspend):
            self._engine.drop()
        return [ReturnedTurns(back, Note(NoteKind.OFF, now, since, why))] if back else []

    def _note_room(self, now: float) -> list[Output]:
        before, shut = self._shut, self._who_shuts()
        self._shut = shut
        if not self.spec.lends or shut in (before, TURNS):
            return []
        if shut:
            self._freed = None
            return [Note(NoteKind.SHUT, now, now, shut)]
        if before == TURNS:  # one of its turns has ended: no new room was given
            return []
        self._freed = Note(NoteKind.FREE, now, self._granted_at if before == GRANT else now, before)
        return [self._freed]

    def _who_shuts(self) -> str:
        """Return the cause that prevents another turn.

        Users are not the cause if there would be no room without them either.
        """
        inbox = self._inbox
        self._most_tokens = 0 if self._parked else max(self._most_tokens, inbox.token_budget)
        if self._parked:
            return GRANT
        if self._gate.reason:
            return USERS
        if len(inbox) == inbox.max_turns or (len(inbox) and self._most_tokens - inbox.tokens < ROOM_TOKENS):
            return TURNS
        return "" if inbox.token_budget - inbox.tokens >= ROOM_TOKENS else USERS

    def _give_up(self, reason: str, now: float) -> list[TurnResult]:
        back = [self._done(self._engine.give_up(name, now, reason)) for name in self._engine.names]
        for key in list(self._waiting):
            del self._waiting[key]
            back.append(self._refused(self._inbox.release(key), reason, Refusal.ROOM, now))
        return back

    def _stop_turn(self, dispatch: TurnDispatch, reason: str, now: float) -> TurnResult:
        if self._waiting.pop(dispatch.key, None) is None:
            return self._done(self._engine.give_up("/".join(map(str, dispatch.key)), now, reason))
        return self._refused(self._inbox.release(dispatch.key), reason, Refusal.ROOM, now)

    def _done(self, done: TurnFinished) -> TurnResult:
        key, received_at = self._keys.pop(done.turn.name)
        dispatch = self._inbox.release(key)
        outcome = TurnOutcome.PREEMPTED if done.turn.finish_reason == ABORTED else TurnOutcome.COMPLETED
        self._answered.append(held_hash(key))
        return finished_result(self._start, dispatch, done, outcome, done.reason, received_at=received_at)

    def _refused(self, dispatch: TurnDispatch, reason: str, refusal: Refusal | None, now: float) -> TurnResult:
        self._answered.append(held_hash(dispatch.key))
        return refused_result(self._start, dispatch, reason, refusal, now=now)

    def _heartbeat(self, state: ExecutorState, now: float, turns: Collection[int] | None = None) -> SlackHeartbeat:
        status = self._engine_status()
        self._heartbeats.on_status(status)
        self._cuts = 0
        heartbeat = self._heartbeats.next_heartbeat(
            status,
            self._inbox,
            state=state,
            version=self._version,
            pause_reason=self._gate.reason,
            now=now,
            turns=turns,
        )
        self._offers.take(heartbeat, now)
        return heartbeat

    def _engine_status(self) -> EngineStatus:
        rates, per_token = self.spec.rates, self.spec.kv_bytes_per_token
        total = rates.kv_tokens * per_token
        if self._memory is not None:
            total = self._shares.budget_bytes if self._shares is not None else 0
        lends, busy = self.spec.lends, bool(self._users.running)
        return EngineStatus(
            version=self._version,
            device="emulated",
            running=len(self._engine.names),
            waiting=0,
            kv_bytes_total=total,
            kv_bytes_free=max(0, total - self._engine.held_tokens * per_token),
            kv_bytes_per_token=per_token,
            prefill_tokens_per_second=rates.prefill_tokens_per_second,
            decode_tokens_per_second=rates.decode_tokens_per_second,
            steps=0,
            step_seconds=0.0,
            blocked_seconds=self._now - self._computed_at if busy and not self._parked else 0.0,
            suspended_reason=self._parked,
            serving=ServingStats(self._users.running, 0, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {}) if lends else None,
            lending=LendingStats(total, self._shares.frozen, cuts=self._cuts) if self._shares is not None else None,
        )
