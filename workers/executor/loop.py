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
- In another cell it is one that starts; engine, KV cache and version stay (`stay`).
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

from schemas.contexts import Torn
from schemas.errors import UsageError
from schemas.slack import HELD, ExecutorState, WorkerClass
from schemas.turns import CLAIM_KEY, Refusal, TurnDispatch, TurnKey, TurnOutcome, TurnResult, held_hash
from topics.catalog import COMPLETED, HEARTBEATS
from topics.health import HEALTH
from topics.reader import Reader
from topics.records import Envelope, Spoiled
from topics.settings import BusSettings
from topics.writer import Writer
from workers.executor import metrics
from workers.executor.answers import Start, ended, refused
from workers.executor.change import Versions
from workers.executor.config import ExecutorConfig
from workers.executor.contexts import Contexts
from workers.executor.gate import Gate
from workers.executor.heartbeats import Heartbeats, in_short
from workers.executor.inbox import Inbox, Verdict
from workers.executor.link import EngineLink
from workers.executor.parts import begun_from, flaw_of, sampling_of
from workers.executor.stay import Stay
from workers.executor.vllm.types import EngineBroken
from workers.executor.words import ABORTED, Done, GiveUp, NotTaken, Prepared, Refused, Report, Serving, Take, Tick
from workers.weights.receive import WeightReceiver

INBOX_BATCH = 256
"""Dispatches taken from the inbox at once."""

IDLE_SECONDS = 0.02
"""Longest wait for the inbox while the engine has nothing to do: staged weights are picked up within it."""

BUSY_SECONDS = 0.002
"""Longest wait for the inbox while the engine has turns: its reports are picked up within it."""

HAND_BACK_SECONDS = 5.0
"""How long the engine may take to give its turns up when the executor stops: a few of its longest steps."""

STOPPED = "it stops"
"""Why it gives everything back in the end."""

PARKED = "it is parked"
"""Why a guest gave turns back, before it has said so."""


@dataclass(frozen=True, slots=True)
class Running:
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
        link: EngineLink,
        tick: Tick,
        receiver: WeightReceiver,
        gate: Gate,
    ) -> None:
        """`tick`: the first of the engine at the link.

        Raises TopicMissing, BusError, or UsageError where there is no such inbox.
        """
        self._config = config
        self._name = name = config.worker
        self._class = worker_class
        self._link = link
        self._receiver = receiver
        self._log = structlog.get_logger("executor").bind(worker=name)
        self._tick = tick
        """The engine's newest."""
        self._gate = gate
        self._running: dict[str, Running] = {}
        self._answered: deque[int] = deque(maxlen=HELD)
        """By `held_hash`, the turns that it answered last."""
        self._versions = Versions(link, receiver, name, drains=config.drain_before_swap, keeps=self._gate.lends)
        self._bereft = False
        """There was no engine for a while: what it had been given is lost, also where there is one again by now."""
        self._deferred: list[TurnDispatch] = []
        """Taken on while the engine changes to the next version."""
        self._contexts = Contexts(settings, name)
        self._writer = Writer(settings, name)
        self._reader = Reader(settings, name)
        self._homes = self._reader.partitions(COMPLETED)
        self._stay = Stay(self._reader, self._writer, config, gate.cell)
        self._settle()
        self._note_lent(tick)

    def _settle(self) -> None:
        """Be one that starts where it is now: who was here before under its name, or elsewhere, holds nothing."""
        stay = self._stay
        slot = stay.place[1]
        self._log = self._log.bind(cell=stay.cell, slot=slot)
        self._cell = stay.cell
        self._start = Start(self._name, self._class, stay.incarnation)
        self._beats = Heartbeats(self._start, slot, by_grant=self._gate.lends)
        self._inbox = Inbox(self._name, stay.incarnation, max_turns=self._most_turns, token_budget=0)
        self._answered.clear()

    def _go(self) -> None:
        """It has begun elsewhere, and all that it answered here is stored: whoever hears it here lets it go at once."""
        self._beat(ExecutorState.STOPPING, self._answered)
        swap_seconds = self._beats.swap_seconds
        self._settle()
        self._beats.swap_seconds = swap_seconds
        self._log.info("moved", incarnation=self._start.incarnation)

    def run(self, stop: Event) -> None:
        """Until `stop` is set; what it holds then goes back to the router, with what was sampled of it.

        Raises EngineBroken or BusError, or UsageError when another begins under its name.
        """
        self._log.info("started", incarnation=self._start.incarnation)
        try:
            with metrics.exported():
                while not stop.is_set():
                    self._take_in()
                    self._take_contexts()
                    self._hear()
                    self._open_or_close()
                    if not self._tick.parked:
                        self._versions.go_on(busy=bool(self._running))
                    self._writer.poll()
                self._hand_back()
            self._writer.flush()
        except EngineBroken:  # its turns are lost: the router need not wait for silence
            self._writer.flush()
            self._beat(ExecutorState.STOPPING, self._answered)
            self._writer.flush()
            raise
        finally:
            self._versions.close()
            self._contexts.close()
            self._writer.close()
            self._reader.close()

    def _take_in(self) -> None:
        busy = self._running or self._versions.coming or self._contexts.reading
        for item in self._reader.read(INBOX_BATCH, BUSY_SECONDS if busy else IDLE_SECONDS):
            if isinstance(item, Spoiled):
                self._writer.dead_letter(item, item.reason)
            elif isinstance(item, Envelope) and isinstance(item.record, TurnDispatch):
                ours = item.record.worker == self._name
                if ours and (flaw := flaw_of(item.record, homes=self._homes)):
                    self._writer.dead_letter(item, flaw)
                else:
                    self._consider(item.record, item.offset)
            elif isinstance(item, Envelope) and item.key == CLAIM_KEY:
                self._inbox.claimed(item.offset)
            elif isinstance(item, Envelope) and item.key == self._name:
                raise UsageError(
                    f"another executor has begun as {self._name}, and takes its place: no two have the same "
                    "executor.name at a time (`--name`)"
                )

    def _consider(self, dispatch: TurnDispatch, offset: int) -> None:
        answer = self._inbox.offer(dispatch, self._version, offset=offset)
        if answer.verdict is Verdict.PASS:
            return
        if answer.verdict is Verdict.DROP:
            metrics.TURNS.labels(f"dropped_{answer.reason}").inc()
        elif answer.verdict is Verdict.REFUSE:
            self._refuse(dispatch, answer.reason, answer.refusal, listed=False)
        elif self._gate.reason:
            self._inbox.release(dispatch.key)
            self._refuse(dispatch, self._gate.reason, Refusal.ROOM, listed=False)
        elif self._versions.changing:
            self._deferred.append(dispatch)
        else:
            self._order(dispatch)

    def _take_contexts(self) -> None:
        """Go on with the turns whose contexts were read back."""
        for dispatch, context, seconds in self._contexts.found():
            if isinstance(context, Torn):
                self._inbox.release(dispatch.key)
                # Of an anchor nothing more can be asked for than it has: what is wrong with that is somebody's fault.
                self._refuse(dispatch, str(context), Refusal.CONTEXT if dispatch.request.chain else Refusal.ENGINE)
            elif self._versions.changing:
                self._deferred.append(dispatch)
            else:
                self._begin_turn(dispatch, context, received_at=time.time() - seconds)

    def _order(self, dispatch: TurnDispatch) -> None:
        """Hand a turn that was taken on to the engine, once its context is there."""
        context = self._contexts.find(dispatch)
        if context is not None:
            self._begin_turn(dispatch, context, received_at=time.time())

    def _begin_turn(self, dispatch: TurnDispatch, context: bytes, *, received_at: float) -> None:
        name = "/".join(map(str, dispatch.key))
        self._running[name] = Running(dispatch.key, received_at)
        self._link.order(Take(name, begun_from(dispatch, context), sampling_of(dispatch), self._version))

    def _hear(self) -> None:
        """Take in what the engine reports. Of ticks that came together the last one is told on."""
        before = self._tick
        for report in self._link.reports():
            self._take_report(report)
        if self._tick is not before:
            self._beat(self._state)
            said, ready = in_short(
                self._version, self._receiver.newest, self._beats.refused[1], paused=self._gate.reason
            )
            HEALTH.says(said, ready=ready)

    @property
    def _version(self) -> int:
        return self._versions.serving

    @property
    def _state(self) -> ExecutorState:
        if self._gate.reason:
            return ExecutorState.PAUSED
        return ExecutorState.READY if self._version >= 0 else ExecutorState.STARTING

    def _open_or_close(self) -> None:
        """Follow what grants and the engine say of taking turns, and of where."""
        before, was_shut = self._gate.reason, self._gate.shut
        if self._stay.follow(self._gate.cell, held=self._inbox.listed):
            self._go()
        order = self._gate.follow(self._tick, busy=bool(self._running), leaving=self._stay.leaving)
        self._inbox.token_budget, reason = self._gate.budget_tokens, self._gate.reason
        if order is not None:
            self._link.order(order)
        if self._gate.shut and not was_shut:
            self._give_up()
        elif reason and not before:
            self._refuse_waiting(reason, Refusal.ROOM)
        if reason != before:
            self._log.info("takes no turns" if reason else "takes turns", reason=reason)
            self._beat(self._state)
        if self._bereft:
            self._bereft = False
            self._versions.lost()
            self._refuse_waiting("its engine is gone, and the next one serves no version yet", Refusal.VERSION)

    def _give_up(self) -> None:
        """Have everything go back: the engine's with what was sampled of it."""
        for name in self._running:
            self._link.order(GiveUp(name))
        self._refuse_waiting(self._gate.reason, Refusal.ROOM)

    def _refuse_waiting(self, reason: str, refusal: Refusal) -> None:
        """Have those go back that the engine has not been given yet."""
        deferred, self._deferred = self._deferred, []
        for key in [*(dispatch.key for dispatch in deferred), *self._contexts.give_up()]:
            self._refuse(self._inbox.release(key), reason, refusal)

    def _take_report(self, report: Report) -> None:
        match report:
            case Done():
                self._answer(report)
            case Refused():
                dispatch = self._inbox.release(self._running.pop(report.name).key)
                self._refuse(dispatch, report.reason, Refusal.ENGINE)
            case Prepared():
                self._versions.prepared()
            case Serving():
                self._served(report)
            case NotTaken():
                self._not_taken(report)
            case Tick():
                self._tick = report
                self._bereft |= bool(report.parked) or report.version < 0 <= self._version
                self._inbox.max_turns = self._most_turns
                metrics.show_steps(report)
                self._note_lent(report)

    def _note_lent(self, tick: Tick) -> None:
        self._beats.heard(tick)
        metrics.show_lent(tick)

    @property
    def _most_turns(self) -> int:
        """That it holds at once."""
        most, may = self._config.max_turns, self._tick.most_turns
        return most if may is None else min(most, may)

    def _served(self, report: Serving) -> None:
        self._versions.served(report.version)
        self._beats.swap_seconds = report.seconds
        self._tick = msgspec.structs.replace(self._tick, version=report.version)  # it may be older than this report
        metrics.SWAP_SECONDS.observe(report.seconds)
        self._log.info("serving", version=report.version, swap_seconds=round(report.seconds, 4))
        if not self._gate.reason:  # a closed one holds nothing for long, and what it ends yet it was left the time for
            self._stay.changed(self._gate.cell)
        if not self._stay.leaving:
            self._resume()

    def _not_taken(self, report: NotTaken) -> None:
        metrics.SWAPS_REFUSED.inc()
        self._log.error("version refused, the old one serves on", version=report.version, reason=report.reason)
        self._versions.not_taken(report)
        self._resume()

    def _resume(self) -> None:
        """The engine takes turns again."""
        deferred, self._deferred = self._deferred, []
        for dispatch in deferred:
            self._order(dispatch)

    def _hand_back(self) -> None:
        """Give everything back and say goodbye: the heartbeat lists the turns whose answers are on the log by then.

        An engine that hangs gives nothing back; the router then issues its turns again from their beginning.
        """
        self._gate.reason = STOPPED
        self._give_up()
        deadline = time.monotonic() + HAND_BACK_SECONDS
        while self._running and time.monotonic() < deadline:
            self._link.wait(BUSY_SECONDS)
            self._hear()
            self._writer.poll()
        self._writer.flush()
        self._beat(ExecutorState.STOPPING, self._answered)

    def _answer(self, done: Done) -> None:
        running = self._running.pop(done.name)
        dispatch = self._inbox.release(running.key)
        given_up = done.finish_reason == ABORTED
        outcome = TurnOutcome.PREEMPTED if given_up else TurnOutcome.COMPLETED
        reason = (done.reason or self._gate.reason or PARKED) if given_up else ""
        result = ended(self._start, dispatch, done, outcome, reason, received_at=running.received_at)
        if not given_up and (flaw := result.part.flaw):  # else who would go on from it looks
            self._refuse(dispatch, f"its engine's answer cannot be learned from: {flaw}", Refusal.ENGINE)
        else:
            metrics.count_ended(outcome, done, received_at=running.received_at)
            self._send(result)

    def _refuse(self, dispatch: TurnDispatch, reason: str, refusal: Refusal | None, *, listed: bool = True) -> None:
        """`listed`: whether it was; else what is listed goes on saying what there is room for."""
        request = dispatch.request
        metrics.TURNS.labels("refused").inc()
        self._log.info("refused", trajectory=request.trajectory_id, turn=request.turn, reason=reason)
        self._send(refused(self._start, dispatch, reason, refusal, now=time.time()), listed=listed)

    def _send(self, result: TurnResult, *, listed: bool = True) -> None:
        """Answer a turn. One that is listed is until that is stored."""
        inbox, key = self._inbox, result.key
        if listed:
            inbox.answered(key)
        self._answered.append(held_hash(key))
        self._writer.write(
            COMPLETED,
            result,
            key=key.trajectory_id,
            partition=result.home,
            trajectory_id=key.trajectory_id,
            on_delivery=lambda *_: inbox.stored(key),
        )

    def _beat(self, state: ExecutorState, turns: Collection[int] | None = None) -> None:
        """`turns`: by hash, those that it lists; left out, those of its inbox."""
        tick = self._tick
        self._beats.refused = self._receiver.refused_newest or (-1, "")
        metrics.show_held(tick, turns=len(self._inbox), version=self._version)
        beat = self._beats.next(
            tick,
            self._inbox,
            state=state,
            version=self._version,
            paused=self._gate.reason,
            now=time.time(),
            turns=turns,
        )
        self._writer.write(HEARTBEATS, beat, key=self._name, partition=self._cell)
