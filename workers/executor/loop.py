"""The executor's loop: reads the inbox, sends commands to the engine, reads its reports, writes results and heartbeats.

Keeps true
- The executor writes a heartbeat when the engine has reported its status. An executor whose engine hangs is therefore
  silent, and the router notices. An executor whose engine process is gone reports STOPPING at once.
- Every accepted turn is answered once, and is listed in each heartbeat until its answer is on the log. A turn that
  cannot be accepted is refused with a reason. An aborted turn, as at a stop of the executor, is returned with the
  tokens that were sampled.
- No turn is accepted before a version from the log has been activated. A turn is submitted to the engine with the
  serving version. Turns that arrive while the engine changes to another version are deferred, and so are turns whose
  context is read back from the log.
- While the intake gate is closed (a grant, a stop, a server that is never idle, a move to another cell) the executor
  holds no turn: its turns are returned. A drained executor may have time to finish the running turns.
- After a move to another cell the executor has a new incarnation; engine, KV cache and version stay
  (`cell_membership`).
- Records of an executor mean the same on any clock: the incarnation is a place in the log, and turns are listed by
  name.
- Other executors may read the same inbox. If another executor starts under the same name, this executor ends with
  UsageError and answers no more turns.
- An unreachable broker, or a pause of the process, changes nothing: the executor continues with the turns that it
  holds.

The loop decides nothing about a dispatch: `Inbox` decides.
"""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event

import msgspec
import structlog

from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import MAX_HELD_TURNS, ExecutorState, WorkerClass
from rose.schemas.turns import (
    FENCING_KEY,
    ContextMissing,
    Refusal,
    TurnDispatch,
    TurnKey,
    TurnOutcome,
    TurnResult,
    held_hash,
)
from rose.topics.catalog import COMPLETED, HEARTBEATS
from rose.topics.health import HEALTH, START_SECONDS
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.executor import metrics
from rose.workers.executor.cell_membership import CellMembership
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.contexts import ContextStore
from rose.workers.executor.grants import GrantFollower, IntakeGate, Lease
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
from rose.workers.executor.records import (
    ExecutorIncarnation,
    HeartbeatWriter,
    dispatch_error,
    finished_result,
    health_summary,
    refused_result,
    remaining_sampling,
    resumed_context,
)
from rose.workers.executor.version_swap import VersionSwap
from rose.workers.executor.vllm.types import EngineBroken
from rose.workers.weights.chunk_stores import open_store
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_trust

INBOX_BATCH = 256
"""Most dispatches that are read from the inbox at once."""

IDLE_SECONDS = 0.02
"""Longest wait for the inbox while the engine has nothing to do: bounds the delay of staged weights."""

BUSY_SECONDS = 0.002
"""Longest wait for the inbox while the engine has turns: bounds the delay of the engine's reports."""

RETURN_SECONDS = 5.0
"""How long the engine may take to abort its turns when the executor stops: a few of its longest steps."""

STOPPED = "it stops"
"""Reason of the turns that are returned at the end."""

SUSPENDED = "it is parked"
"""Reason of turns that a guest returned before it has reported why it is suspended."""


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """A turn in the engine."""

    key: TurnKey
    received_at: float
    stopped: str = ""
    """Why the turn is being stopped; empty if it is not."""


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
        """`status`: the engine's first status on the channel of `client`.

        Raises TopicMissing, BusError, or UsageError if the inbox does not exist.
        """
        self._config = config
        self._name = name = config.worker
        self._class = worker_class
        self._client = client
        self._receiver = receiver
        self._log = structlog.get_logger("executor").bind(worker=name)
        self._status = status
        """The engine's newest status."""
        self._gate = gate
        self._running: dict[str, RunningTurn] = {}
        self._answered: deque[int] = deque(maxlen=MAX_HELD_TURNS)
        """`held_hash` of the turns that were answered last."""
        self._swap = VersionSwap(
            client, receiver, name, drain_first=config.drain_before_swap, keep_serving=self._gate.lends
        )
        self._engine_lost = False
        """Whether the engine was lost, and with it all turns and weights that it had. Another engine may be there."""
        self._deferred: list[TurnDispatch] = []
        """Turns that were accepted while the engine changes to the next version."""
        self._contexts = ContextStore(settings, name)
        self._writer = Writer(settings, name)
        self._reader = Reader(settings, name)
        self._homes = self._reader.partition_count(COMPLETED)
        self._membership = CellMembership(self._reader, self._writer, config, gate.cell)
        self._enter_inbox()
        self._count_status(status)

    def _enter_inbox(self) -> None:
        """Start in the current inbox with a new incarnation that holds no turn."""
        membership = self._membership
        slot = membership.inbox[1]
        self._log = self._log.bind(cell=membership.cell, slot=slot)
        self._cell = membership.cell
        self._incarnation = ExecutorIncarnation(self._name, self._class, membership.incarnation)
        self._heartbeats = HeartbeatWriter(self._incarnation, slot, by_grant=self._gate.lends)
        self._inbox = Inbox(self._name, membership.incarnation, max_turns=self._max_turns, token_budget=0)
        self._answered.clear()

    def _change_inbox(self) -> None:
        """Report STOPPING to the old cell, all of whose answers are stored, and enter the new inbox."""
        self._send_heartbeat(ExecutorState.STOPPING, self._answered)
        self._enter_inbox()
        self._log.info("inbox_changed", incarnation=self._incarnation.incarnation)

    def run(self, stop: Event) -> None:
        """Run until `stop` is set, then return all held turns to the router with the tokens that were sampled.

        Raises EngineBroken or BusError, or UsageError if another executor starts under the same name.
        """
        self._log.info("executor_started", incarnation=self._incarnation.incarnation)
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
        except EngineBroken:  # its turns are lost: STOPPING spares the router the wait for the TTL
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
                if is_own and (error := dispatch_error(item.record, homes=self._homes)):
                    self._writer.dead_letter(item, error)
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
        elif decision.action is InboxAction.STOP:
            self._stop_turn(dispatch.key, decision.reason)
        elif self._gate.reason:
            self._inbox.release(dispatch.key)
            self._refuse(dispatch, self._gate.reason, Refusal.ROOM, listed=False)
        elif self._swap.defers_turns:
            self._deferred.append(dispatch)
        else:
            self._start_turn(dispatch)

    def _stop_turn(self, key: TurnKey, reason: str) -> None:
        """Return a held turn with the tokens that were sampled: nobody waits for the rest."""
        name = "/".join(map(str, key))
        if name in self._running:
            self._running[name] = replace(self._running[name], stopped=reason)
            self._client.send(AbortTurn(name))
            return
        self._contexts.cancel(key)
        self._deferred = [dispatch for dispatch in self._deferred if dispatch.key != key]
        self._refuse(self._inbox.release(key), reason, Refusal.ROOM)

    def _start_found(self) -> None:
        """Continue with the turns whose contexts were read back."""
        for dispatch, context, seconds in self._contexts.take_found():
            if isinstance(context, ContextMissing):
                self._inbox.release(dispatch.key)
                # A request without a chain is an anchor and carries the whole context: another anchor would not help.
                self._refuse(dispatch, str(context), Refusal.CONTEXT if dispatch.request.chain else Refusal.ENGINE)
            elif self._swap.defers_turns:
                self._deferred.append(dispatch)
            else:
                self._submit_turn(dispatch, context, received_at=time.time() - seconds)

    def _start_turn(self, dispatch: TurnDispatch) -> None:
        """Submit an accepted turn to the engine if its context is cached; otherwise start to read the context back."""
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
        """Handle the engine's reports. Only the newest of several queued statuses becomes a heartbeat."""
        before = self._status
        for report in self._client.reports():
            self._on_report(report)
        if self._status is not before:
            self._send_heartbeat(self._state)
            _, refused = self._receiver.refused_newest or (-1, "")
            summary, ready = health_summary(
                self._version, self._receiver.newest, refused, pause_reason=self._gate.reason
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
        """Update cell membership and intake gate, and return turns if the gate has closed or the engine was lost."""
        before, was_shut = self._gate.reason, self._gate.evicts_running
        if self._membership.advance(self._gate.cell, held_turns=self._inbox.listed_turns):
            self._change_inbox()
        command = self._gate.update(self._status, busy=bool(self._running), leaving_for=self._membership.leaving_for)
        self._inbox.offer(max_turns=self._max_turns, token_budget=self._gate.allowed_tokens)
        reason = self._gate.reason
        if command is not None:
            self._client.send(command)
        if reason and self._gate.evicts_running and not was_shut:
            self._abort_all(reason)
        elif reason and not before:
            self._refuse_waiting(reason, Refusal.ROOM)
        if reason != before:
            self._log.info("intake_closed" if reason else "intake_opened", reason=reason or "")
            self._send_heartbeat(self._state)
        if self._engine_lost:
            self._engine_lost = False
            self._swap.on_engine_lost()
            self._refuse_waiting("its engine is gone, and the next one serves no version yet", Refusal.VERSION)

    def _abort_all(self, reason: str) -> None:
        """Return all turns: running turns by an abort in the engine, with the tokens sampled; the others at once."""
        for name in self._running:
            self._client.send(AbortTurn(name))
        self._refuse_waiting(reason, Refusal.ROOM)

    def _refuse_waiting(self, reason: str, refusal: Refusal) -> None:
        """Refuse the turns that were accepted and not yet submitted to the engine."""
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
                self._inbox.offer(max_turns=self._max_turns, token_budget=self._gate.allowed_tokens)
                metrics.show_steps(report)
                self._count_status(report)

    def _count_status(self, status: EngineStatus) -> None:
        self._heartbeats.on_status(status)
        metrics.show_lending(status)

    @property
    def _max_turns(self) -> int:
        """Most turns that the executor may hold at once."""
        most, may = self._config.max_turns, self._status.most_turns
        return most if may is None else min(most, may)

    def _on_activated(self, report: WeightsActivated) -> None:
        self._swap.on_activated(report)
        self._status = msgspec.structs.replace(self._status, version=report.version)  # may be older than this report
        metrics.SWAP_SECONDS.observe(report.seconds)
        self._log.info("version_activated", version=report.version, swap_seconds=round(report.seconds, 4))
        if not self._gate.reason:  # a closed gate returns its turns soon, or leaves them the time to finish
            self._membership.on_version_change(self._gate.cell)
        if not self._membership.leaving_for:
            self._start_deferred()

    def _on_rejected(self, report: WeightsRejected) -> None:
        metrics.SWAPS_REFUSED.inc()
        self._log.error("version_not_activated", version=report.version, reason=report.reason)
        self._swap.on_rejected(report)
        self._start_deferred()

    def _start_deferred(self) -> None:
        """Start the deferred turns: the engine takes turns again."""
        deferred, self._deferred = self._deferred, []
        for dispatch in deferred:
            self._start_turn(dispatch)

    def _return_all(self) -> None:
        """Return all turns, then write a STOPPING heartbeat that lists the turns whose answers are on the log.

        An engine that hangs returns nothing; the router then reissues its turns without the tokens sampled here.
        """
        self._gate.close(STOPPED)
        self._abort_all(STOPPED)
        deadline = time.monotonic() + RETURN_SECONDS
        while self._running and time.monotonic() < deadline:
            self._client.wait(BUSY_SECONDS)
            self._read_reports()
            self._writer.poll()
        self._writer.flush()
        self._send_heartbeat(ExecutorState.STOPPING, self._answered)

    def _on_finished(self, finished: TurnFinished) -> None:
        running = self._running.pop(finished.turn.name)
        dispatch = self._inbox.release(running.key)
        given_up = finished.turn.finish_reason == ABORTED
        outcome = TurnOutcome.PREEMPTED if given_up else TurnOutcome.COMPLETED
        reason = (finished.reason or running.stopped or self._gate.reason or SUSPENDED) if given_up else ""
        result = finished_result(
            self._incarnation, dispatch, finished, outcome, reason, received_at=running.received_at
        )
        if not given_up and (error := result.part.validation_error):  # of an aborted turn, the next executor checks it
            reason = f"its engine's answer cannot be learned from: {error}"
            self._refuse(dispatch, reason, Refusal.ENGINE, ran=result)
        else:
            metrics.count_finished(outcome, finished, received_at=running.received_at)
            self._send(result)

    def _refuse(
        self,
        dispatch: TurnDispatch,
        reason: str,
        refusal: Refusal | None,
        *,
        listed: bool = True,
        ran: TurnResult | None = None,
    ) -> None:
        """Answer a turn with a refusal.

        `listed`: whether a heartbeat may have listed the turn. A turn that was never listed stays unlisted. `ran`: the
        result that cannot be used.
        """
        request = dispatch.request
        metrics.TURNS.labels("refused").inc()
        self._log.info("turn_refused", trajectory=request.trajectory_id, turn=request.turn, reason=reason)
        result = refused_result(self._incarnation, dispatch, reason, refusal, now=time.time(), ran=ran)
        self._send(result, listed=listed)

    def _send(self, result: TurnResult, *, listed: bool = True) -> None:
        """Write the answer to a turn. A `listed` turn stays listed until its answer is stored."""
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
        """Write a heartbeat. `turns`: `held_hash` of the listed turns; None lists the turns of the inbox."""
        status = self._status
        metrics.show_held(status, turns=len(self._inbox), version=self._version)
        heartbeat = self._heartbeats.next_heartbeat(
            status,
            self._inbox,
            state=state,
            version=self._version,
            pause_reason=self._gate.reason,
            now=time.time(),
            turns=turns,
            refused=self._receiver.refused_newest,
            swap_seconds=self._swap.swap_seconds,
        )
        self._writer.write(HEARTBEATS, heartbeat, key=self._name, partition=self._cell)


def run_executor(
    settings: BusSettings,
    config: ExecutorConfig,
    client: EngineClient,
    shapes: Mapping[str, Sequence[int]],
    stop: Event,
    worker_class: WorkerClass = WorkerClass.DEDICATED,
    *,
    weights: WeightsConfig | None = None,
    lease: Lease | None = None,
) -> None:
    """Run turns for `config.worker` on the engine of `client` until `stop` is set.

    `shapes`: shapes of the model's tensors, by name. `lease`: the lease of a lender; without one, only drains and cells
    apply. Raises RoseError if the engine cannot be built with these settings, breaks or is gone, a key file or store
    is invalid, the broker is unreachable, a topic is missing, or another executor has the same name.
    """
    name, weights = config.worker, weights or WeightsConfig()
    trust = make_trust(settings, config.model_id, weights)
    store = open_store(weights)
    lease = lease or Lease()
    receiver = WeightReceiver(
        settings,
        trust,
        shapes=shapes,
        store=store,
        engine_dtype=config.dtype,
        client_id=f"{name}-weights",
        threads=1 if lease.lends else None,  # the cores of a lender's host are serving's
    )
    receiver.start()
    grants = GrantFollower(settings, name, lease)
    try:
        grants.wait_until_read(stop)
        HEALTH.report("waits for its engine, which loads", ready=False, lasts_seconds=START_SECONDS)
        status = client.wait_until_ready(stop)
        if status is not None:
            gate = IntakeGate(grants.permission, lends=lease.lends)
            Executor(settings, config, worker_class, client, status, receiver, gate).run(stop)
    finally:
        grants.stop()
        receiver.stop()
