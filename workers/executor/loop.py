"""The executor's loop beside its engine: inbox, orders, reports, staged weights, results, heartbeats; again.

Keeps true
- The engine ticks, and each of its ticks is a heartbeat: one that hangs is a silent executor, and the router notices.
  One that is gone is told at once.
- Every turn taken on is answered once, and listed in each heartbeat until the answer is on the log; a turn that cannot
  be taken is refused with the reason. One that is given up, as when the executor stops, goes back with what was sampled
  of it.
- No turn is taken on before a version from the log has been applied. A turn is handed to the engine with the version
  that serves; while the engine changes to another one, turns that come wait here, as do those whose context is read
  back from the log.
- While its gate is closed (a grant, a stop, a server that is never idle, another cell) it holds nothing: what it held
  goes back. To one that is drained time is left to end what runs.
- In another cell it is one that starts; engine, KV cache and version stay (`cell_membership`).
- What it says to others holds without a clock: its incarnation is a place in the log, its turns are named.
- Others may share its inbox, which changes nothing for it. One that begins under its own name takes its place: it ends,
  with a sentence, and answers nothing more.
- A broker that is away, or a process that was stopped for a while, changes nothing: it goes on with what it holds.

It decides nothing: the inbox does.
"""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from threading import Event

import msgspec
import structlog

from rose.schemas.contexts import ContextMissing
from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import MAX_HELD_TURNS, ExecutorState, WorkerClass
from rose.schemas.turns import FENCING_KEY, Refusal, TurnDispatch, TurnKey, TurnOutcome, TurnResult, held_hash
from rose.topics.catalog import COMPLETED, HEARTBEATS
from rose.topics.health import HEALTH
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.executor import metrics
from rose.workers.executor.cell_membership import CellMembership
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.contexts import ContextStore
from rose.workers.executor.grants import IntakeGate
from rose.workers.executor.heartbeats import Heartbeats, health_summary
from rose.workers.executor.inbox import Inbox, InboxAction
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import (
    ABORTED,
    AbortTurn,
    EngineStatus,
    Report,
    SubmitTurn,
    TurnFinished,
    TurnRejected,
    WeightsActivated,
    WeightsRejected,
    WeightsStaged,
)
from rose.workers.executor.results import (
    ExecutorIncarnation,
    dispatch_error,
    finished_result,
    refused_result,
    remaining_sampling,
    resumed_context,
)
from rose.workers.executor.version_swap import VersionSwap
from rose.workers.executor.vllm.types import EngineBroken
from rose.workers.weights.receive import WeightReceiver

INBOX_BATCH = 256
"""Dispatches taken from the inbox at once."""

IDLE_SECONDS = 0.02
"""Longest wait for the inbox while the engine has nothing to do: staged weights are picked up within it."""

BUSY_SECONDS = 0.002
"""Longest wait for the inbox while the engine has turns: its reports are picked up within it."""

RETURN_SECONDS = 5.0
"""How long the engine may take to give its turns up when the executor stops: a few of its longest steps."""

STOPPED = "it stops"
"""Why it gives everything back in the end."""

SUSPENDED = "it is parked"
"""Why a guest gave turns back, before it has said so."""


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """A turn in the engine."""

    key: TurnKey
    received_at: float


class Executor:
    """Moves turns between the inbox and the engine."""

    def __init__(
        self,
        settings: BusSettings,
        config: ExecutorConfig,
        worker_class: WorkerClass,
        client: EngineClient,
        status: EngineStatus,
        receiver: WeightReceiver,
        gate: IntakeGate,
    ) -> None:
        """`status`: the first of the engine at the link.

        Raises TopicMissing, BusError, or UsageError where there is no such inbox.
        """
        self._config = config
        self._name = name = config.worker
        self._class = worker_class
        self._client = client
        self._receiver = receiver
        self._log = structlog.get_logger("executor").bind(worker=name)
        self._status = status
        """The engine's newest."""
        self._gate = gate
        self._running: dict[str, RunningTurn] = {}
        self._answered: deque[int] = deque(maxlen=MAX_HELD_TURNS)
        """By `held_hash`, the turns that it answered last."""
        self._swap = VersionSwap(
            client, receiver, name, drain_first=config.drain_before_swap, keep_serving=self._gate.lends
        )
        self._engine_lost = False
        """There was no engine for a while: what it had been given is lost, also where there is one again by now."""
        self._deferred: list[TurnDispatch] = []
        """Taken on while the engine changes to the next version."""
        self._contexts = ContextStore(settings, name)
        self._writer = Writer(settings, name)
        self._reader = Reader(settings, name)
        self._homes = self._reader.partition_count(COMPLETED)
        self._membership = CellMembership(self._reader, self._writer, config, gate.cell)
        self._enter_inbox()
        self._count_status(status)

    def _enter_inbox(self) -> None:
        """Be one that starts where it is now: who was here before under its name, or elsewhere, holds nothing."""
        membership = self._membership
        slot = membership.inbox[1]
        self._log = self._log.bind(cell=membership.cell, slot=slot)
        self._cell = membership.cell
        self._incarnation = ExecutorIncarnation(self._name, self._class, membership.incarnation)
        self._heartbeats = Heartbeats(self._incarnation, slot, by_grant=self._gate.lends)
        self._inbox = Inbox(self._name, membership.incarnation, max_turns=self._max_turns, token_budget=0)
        self._answered.clear()

    def _change_inbox(self) -> None:
        """It has begun elsewhere, and all that it answered here is stored: whoever hears it here lets it go at once."""
        self._send_heartbeat(ExecutorState.STOPPING, self._answered)
        swap_seconds = self._heartbeats.swap_seconds
        self._enter_inbox()
        self._heartbeats.swap_seconds = swap_seconds
        self._log.info("moved", incarnation=self._incarnation.incarnation)

    def run(self, stop: Event) -> None:
        """Until `stop` is set; what it holds then goes back to the router, with what was sampled of it.

        Raises EngineBroken or BusError, or UsageError when another begins under its name.
        """
        self._log.info("started", incarnation=self._incarnation.incarnation)
        try:
            with metrics.exported():
                while not stop.is_set():
                    self._read_inbox()
                    self._start_found()
                    self._read_reports()
                    self._update_gate()
                    if not self._status.suspended_reason:
                        self._swap.advance(busy=bool(self._running))
                    self._writer.poll()
                self._return_all()
            self._writer.flush()
        except EngineBroken:  # its turns are lost: the router need not wait for silence
            self._writer.flush()
            self._send_heartbeat(ExecutorState.STOPPING, self._answered)
            self._writer.flush()
            raise
        finally:
            self._swap.close()
            self._contexts.close()
            self._writer.close()
            self._reader.close()

    def _read_inbox(self) -> None:
        busy = self._running or self._swap.in_progress or self._contexts.is_reading
        for item in self._reader.read(INBOX_BATCH, BUSY_SECONDS if busy else IDLE_SECONDS):
            if isinstance(item, InvalidMessage):
                self._writer.dead_letter(item, item.reason)
            elif isinstance(item, Envelope) and isinstance(item.record, TurnDispatch):
                is_own = item.record.worker == self._name
                if is_own and (flaw := dispatch_error(item.record, homes=self._homes)):
                    self._writer.dead_letter(item, flaw)
                else:
                    self._on_dispatch(item.record, item.offset)
            elif isinstance(item, Envelope) and item.key == FENCING_KEY:
                self._inbox.on_claim(item.offset)
            elif isinstance(item, Envelope) and item.key == self._name:
                raise UsageError(
                    f"another executor has begun as {self._name}, and takes its place: no two have the same "
                    "executor.name at a time (`--name`)"
                )

    def _on_dispatch(self, dispatch: TurnDispatch, offset: int) -> None:
        decision = self._inbox.on_dispatch(dispatch, self._version, offset=offset)
        if decision.action is InboxAction.IGNORE:
            return
        if decision.action is InboxAction.DROP:
            metrics.TURNS.labels(f"dropped_{decision.reason}").inc()
        elif decision.action is InboxAction.REFUSE:
            self._refuse(dispatch, decision.reason, decision.refusal, listed=False)
        elif self._gate.reason:
            self._inbox.release(dispatch.key)
            self._refuse(dispatch, self._gate.reason, Refusal.ROOM, listed=False)
        elif self._swap.defers_turns:
            self._deferred.append(dispatch)
        else:
            self._start_turn(dispatch)

    def _start_found(self) -> None:
        """Go on with the turns whose contexts were read back."""
        for dispatch, context, seconds in self._contexts.take_found():
            if isinstance(context, ContextMissing):
                self._inbox.release(dispatch.key)
                # Of an anchor nothing more can be asked for than it has: what is wrong with that is somebody's fault.
                self._refuse(dispatch, str(context), Refusal.CONTEXT if dispatch.request.chain else Refusal.ENGINE)
            elif self._swap.defers_turns:
                self._deferred.append(dispatch)
            else:
                self._submit_turn(dispatch, context, received_at=time.time() - seconds)

    def _start_turn(self, dispatch: TurnDispatch) -> None:
        """Hand a turn that was taken on to the engine, once its context is there."""
        context = self._contexts.find(dispatch)
        if context is not None:
            self._submit_turn(dispatch, context, received_at=time.time())

    def _submit_turn(self, dispatch: TurnDispatch, context: bytes, *, received_at: float) -> None:
        name = "/".join(map(str, dispatch.key))
        self._running[name] = RunningTurn(dispatch.key, received_at)
        self._client.send(
            SubmitTurn(name, resumed_context(dispatch, context), remaining_sampling(dispatch), self._version)
        )

    def _read_reports(self) -> None:
        """Take in what the engine reports. Of ticks that came together the last one is told on."""
        before = self._status
        for report in self._client.reports():
            self._on_report(report)
        if self._status is not before:
            self._send_heartbeat(self._state)
            summary, ready = health_summary(
                self._version, self._receiver.newest, self._heartbeats.refused[1], pause_reason=self._gate.reason
            )
            HEALTH.report(summary, ready=ready)

    @property
    def _version(self) -> int:
        return self._swap.serving_version

    @property
    def _state(self) -> ExecutorState:
        if self._gate.reason:
            return ExecutorState.PAUSED
        return ExecutorState.READY if self._version >= 0 else ExecutorState.STARTING

    def _update_gate(self) -> None:
        """Follow what grants and the engine say of taking turns, and of where."""
        before, was_shut = self._gate.reason, self._gate.evicts_running
        if self._membership.advance(self._gate.cell, held_turns=self._inbox.listed_turns):
            self._change_inbox()
        command = self._gate.update(self._status, busy=bool(self._running), leaving_for=self._membership.leaving_for)
        self._inbox.token_budget, reason = self._gate.allowed_tokens, self._gate.reason
        if command is not None:
            self._client.send(command)
        if self._gate.evicts_running and not was_shut:
            self._abort_all()
        elif reason and not before:
            self._refuse_waiting(reason, Refusal.ROOM)
        if reason != before:
            self._log.info("takes no turns" if reason else "takes turns", reason=reason)
            self._send_heartbeat(self._state)
        if self._engine_lost:
            self._engine_lost = False
            self._swap.on_engine_lost()
            self._refuse_waiting("its engine is gone, and the next one serves no version yet", Refusal.VERSION)

    def _abort_all(self) -> None:
        """Have everything go back: the engine's with what was sampled of it."""
        for name in self._running:
            self._client.send(AbortTurn(name))
        self._refuse_waiting(self._gate.reason, Refusal.ROOM)

    def _refuse_waiting(self, reason: str, refusal: Refusal) -> None:
        """Have those go back that the engine has not been given yet."""
        deferred, self._deferred = self._deferred, []
        for key in [*(dispatch.key for dispatch in deferred), *self._contexts.cancel_all()]:
            self._refuse(self._inbox.release(key), reason, refusal)

    def _on_report(self, report: Report) -> None:
        match report:
            case TurnFinished():
                self._on_finished(report)
            case TurnRejected():
                dispatch = self._inbox.release(self._running.pop(report.name).key)
                self._refuse(dispatch, report.reason, Refusal.ENGINE)
            case WeightsStaged():
                self._swap.on_staged()
            case WeightsActivated():
                self._on_activated(report)
            case WeightsRejected():
                self._on_rejected(report)
            case EngineStatus():
                self._status = report
                self._engine_lost |= bool(report.suspended_reason) or report.version < 0 <= self._version
                self._inbox.max_turns = self._max_turns
                metrics.show_steps(report)
                self._count_status(report)

    def _count_status(self, status: EngineStatus) -> None:
        self._heartbeats.on_status(status)
        metrics.show_lending(status)

    @property
    def _max_turns(self) -> int:
        """That it holds at once."""
        most, may = self._config.max_turns, self._status.most_turns
        return most if may is None else min(most, may)

    def _on_activated(self, report: WeightsActivated) -> None:
        self._swap.on_activated(report.version)
        self._heartbeats.swap_seconds = report.seconds
        self._status = msgspec.structs.replace(self._status, version=report.version)  # it may be older than this report
        metrics.SWAP_SECONDS.observe(report.seconds)
        self._log.info("serving", version=report.version, swap_seconds=round(report.seconds, 4))
        if not self._gate.reason:  # a closed one holds nothing for long, and what it ends yet it was left the time for
            self._membership.on_version_change(self._gate.cell)
        if not self._membership.leaving_for:
            self._start_deferred()

    def _on_rejected(self, report: WeightsRejected) -> None:
        metrics.SWAPS_REFUSED.inc()
        self._log.error("version refused, the old one serves on", version=report.version, reason=report.reason)
        self._swap.on_rejected(report)
        self._start_deferred()

    def _start_deferred(self) -> None:
        """The engine takes turns again."""
        deferred, self._deferred = self._deferred, []
        for dispatch in deferred:
            self._start_turn(dispatch)

    def _return_all(self) -> None:
        """Give everything back and say goodbye: the heartbeat lists the turns whose answers are on the log by then.

        An engine that hangs gives nothing back; the router then issues its turns again from their beginning.
        """
        self._gate.reason = STOPPED
        self._abort_all()
        deadline = time.monotonic() + RETURN_SECONDS
        while self._running and time.monotonic() < deadline:
            self._client.wait(BUSY_SECONDS)
            self._read_reports()
            self._writer.poll()
        self._writer.flush()
        self._send_heartbeat(ExecutorState.STOPPING, self._answered)

    def _on_finished(self, finished: TurnFinished) -> None:
        running = self._running.pop(finished.name)
        dispatch = self._inbox.release(running.key)
        given_up = finished.finish_reason == ABORTED
        outcome = TurnOutcome.PREEMPTED if given_up else TurnOutcome.COMPLETED
        reason = (finished.reason or self._gate.reason or SUSPENDED) if given_up else ""
        result = finished_result(
            self._incarnation, dispatch, finished, outcome, reason, received_at=running.received_at
        )
        if not given_up and (flaw := result.part.validation_error):  # else who would go on from it looks
            self._refuse(dispatch, f"its engine's answer cannot be learned from: {flaw}", Refusal.ENGINE)
        else:
            metrics.count_finished(outcome, finished, received_at=running.received_at)
            self._send(result)

    def _refuse(self, dispatch: TurnDispatch, reason: str, refusal: Refusal | None, *, listed: bool = True) -> None:
        """`listed`: whether it was; else what is listed goes on saying what there is room for."""
        request = dispatch.request
        metrics.TURNS.labels("refused").inc()
        self._log.info("refused", trajectory=request.trajectory_id, turn=request.turn, reason=reason)
        self._send(refused_result(self._incarnation, dispatch, reason, refusal, now=time.time()), listed=listed)

    def _send(self, result: TurnResult, *, listed: bool = True) -> None:
        """Answer a turn. One that is listed is until that is stored."""
        inbox, key = self._inbox, result.key
        if listed:
            inbox.on_answer_sent(key)
        self._answered.append(held_hash(key))
        self._writer.write(
            COMPLETED,
            result,
            key=key.trajectory_id,
            partition=result.home,
            trajectory_id=key.trajectory_id,
            on_delivery=lambda *_: inbox.on_answer_stored(key),
        )

    def _send_heartbeat(self, state: ExecutorState, turns: Collection[int] | None = None) -> None:
        """`turns`: by hash, those that it lists; left out, those of its inbox."""
        status = self._status
        self._heartbeats.refused = self._receiver.refused_newest or (-1, "")
        metrics.show_held(status, turns=len(self._inbox), version=self._version)
        heartbeat = self._heartbeats.next_heartbeat(
            status,
            self._inbox,
            state=state,
            version=self._version,
            pause_reason=self._gate.reason,
            now=time.time(),
            turns=turns,
        )
        self._writer.write(HEARTBEATS, heartbeat, key=self._name, partition=self._cell)
