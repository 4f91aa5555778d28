"""The executor's loop: inbox, staged weights, one engine step, results, heartbeat; again.

Keeps true
- Everything happens in one thread, in this order: a hung engine is a silent executor, and the router notices. Only a
  staged policy version is prepared on another thread, while the old one serves.
- A policy version is swapped in between two steps, whole or not at all.
- Every turn taken on is answered once, and listed in each heartbeat until then; a turn that cannot be taken is refused
  with the reason. One that is given up, as when the executor stops, goes back with what was sampled of it.
- No turn is taken on before a version from the log has been applied.
- What it says to others holds without a clock: its incarnation is a place in the log, its turns are named.
- A broker that is away, or a process that was stopped for a while, changes nothing: it goes on with what it holds.

It decides nothing: the inbox does.
"""

import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import structlog

from schemas.arrays import pack_logprobs, pack_tokens, unpack_tokens
from schemas.errors import RecordError
from schemas.slack import ExecutorState, Hardware, SlackHeartbeat, Tenant, WorkerClass
from schemas.turns import CLAIM_KEY, Part, Refusal, TurnDispatch, TurnKey, TurnOutcome, TurnResult, TurnTimes
from topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS
from topics.reader import Reader
from topics.records import Envelope, Spoiled
from topics.settings import BusSettings
from topics.writer import Writer
from workers.executor import metrics
from workers.executor.config import ExecutorConfig
from workers.executor.inbox import Inbox, Verdict
from workers.executor.parts import context_of, joined, sampling_of
from workers.executor.step_cost import StepCost
from workers.executor.vllm.engine import Engine, Prepared
from workers.executor.vllm.types import EngineRefusal, Finished, SwapRefused
from workers.weights.receive import StagedVersion, WeightReceiver

INBOX_BATCH = 256
"""Dispatches taken from the inbox between two steps."""

TTL_SECONDS = 2.0
"""How long a heartbeat is good for: after that, silence means no slack."""

IDLE_SECONDS = 0.02
"""Longest wait for the inbox while the engine has nothing to do: staged weights are picked up within it."""


STOPPED = "it stops"
"""Why it gives everything back in the end."""

MOST_CHARACTERS = 4_096
"""Of a reason in a record."""

START_BITS = 16
"""Random bits of an incarnation, below the offset: a broker that lost its newest records may give an offset twice."""


@dataclass(frozen=True, slots=True)
class Running:
    """A turn in the engine."""

    key: TurnKey
    received_at: float
    share_before: float
    """The executor's running sum of seconds per turn when this one began."""


class Executor:
    """Moves turns between the inbox and the engine."""

    def __init__(
        self, settings: BusSettings, config: ExecutorConfig, name: str, engine: Engine, receiver: WeightReceiver
    ) -> None:
        self._config = config
        self._name = name
        self._engine = engine
        self._receiver = receiver
        self._log = structlog.get_logger("executor").bind(worker=name)
        load = engine.load()
        self._token_budget = load.kv_bytes_total // load.kv_bytes_per_token
        self._running: dict[str, Running] = {}
        self._share = 0.0
        self._cost = StepCost(base_seconds=0.01, token_seconds=0.0001)
        self._version = -1
        self._swap_seconds = 0.0
        self._helper = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-prepares")
        self._next_version: tuple[StagedVersion, Future[Prepared]] | None = None
        """Staged, and being prepared while the old version serves."""
        self._deferred: list[TurnDispatch] = []
        """Taken on while the engine ran empty for the next version."""
        self._sequence = 0
        self._next_heartbeat = 0.0
        self._writer = Writer(settings, name)
        self._reader = Reader(settings, name, group="executor")
        self._incarnation = self._begin()
        self._inbox = Inbox(self._incarnation, max_turns=config.max_turns, token_budget=self._token_budget)

    def _begin(self) -> int:
        """Mark this start in the inbox and read on from there: what is dispatched after a heartbeat is read.

        Returns the incarnation. Raises TopicMissing or BusError.
        """
        inbox = (DISPATCHED, self._config.slot)
        self._reader.watermarks(inbox)
        marks: list[int] = []
        self._writer.tombstone(
            DISPATCHED, key=self._name, partition=inbox[1], on_delivery=lambda _, offset: marks.append(offset)
        )
        self._writer.flush()
        self._reader.assign({inbox: marks[0] + 1})
        return marks[0] << START_BITS | secrets.randbits(START_BITS)

    def run(self, stop: Event) -> None:
        """Until `stop` is set; what it holds then goes back to the router, with what was sampled of it."""
        self._log.info("started", incarnation=self._incarnation, slot=self._config.slot, tokens=self._token_budget)
        while not stop.is_set():
            self._take_in()
            self._swap_if_staged()
            if self._running:
                self._step()
            self._writer.poll()
            self._beat_if_due(ExecutorState.READY if self._version >= 0 else ExecutorState.STARTING)
        self._hand_back()
        self._helper.shutdown()
        self._writer.flush()
        self._reader.close()

    def _take_in(self) -> None:
        for item in self._reader.read(INBOX_BATCH, 0.0 if self._running else IDLE_SECONDS):
            if isinstance(item, Spoiled):
                self._writer.dead_letter(item, item.reason)
            elif isinstance(item, Envelope) and isinstance(item.record, TurnDispatch):
                self._consider(item.record)
            elif isinstance(item, Envelope) and item.key == CLAIM_KEY:
                self._inbox.claimed(item.offset)

    def _consider(self, dispatch: TurnDispatch) -> None:
        answer = self._inbox.offer(dispatch, self._version)
        if answer.verdict is Verdict.DROP:
            metrics.TURNS.labels(f"dropped_{answer.reason}").inc()
        elif answer.verdict is Verdict.REFUSE:
            self._refuse(dispatch, answer.reason, answer.refusal)
        elif self._draining:
            self._deferred.append(dispatch)
        else:
            self._add(dispatch)

    def _add(self, dispatch: TurnDispatch) -> None:
        """Hand a turn that was taken on to the engine."""
        request, now = dispatch.request, time.time()
        name = "/".join(map(str, request.key))
        try:
            context = unpack_tokens(context_of(dispatch))
            self._engine.add(name, context, sampling_of(dispatch), policy_version=self._version)
        except (EngineRefusal, RecordError) as refusal:
            self._inbox.release(request.key)
            self._refuse(dispatch, str(refusal), Refusal.ENGINE)
        else:
            self._running[name] = Running(request.key, now, self._share)

    @property
    def _draining(self) -> bool:
        """Whether the next version waits for the engine to be empty."""
        waiting = self._next_version is not None and self._next_version[1].done()
        return waiting and self._config.drain_before_swap

    def _swap_if_staged(self) -> None:
        if self._next_version is None:
            newest = self._receiver.staged()
            if newest is not None:
                prepared = self._helper.submit(self._engine.prepare, newest.tensors.items())
                self._next_version = newest, prepared
            return
        staged, prepared = self._next_version
        if not prepared.done() or (self._config.drain_before_swap and self._running):
            return
        self._next_version = None
        try:
            self._swap_seconds = self._engine.serve(staged.version, prepared.result())
        except SwapRefused as refusal:
            metrics.SWAPS_REFUSED.inc()
            self._log.error("version refused, the old one serves on", version=staged.version, reason=str(refusal))
            self._receiver.refuse(staged.version, str(refusal))
            self._resume()
            return
        self._version = staged.version
        metrics.SWAP_SECONDS.observe(self._swap_seconds)
        metrics.POLICY_VERSION.set(staged.version)
        self._log.info("serving", version=staged.version, swap_seconds=round(self._swap_seconds, 4))
        self._resume()
        self._beat(ExecutorState.READY)

    def _resume(self) -> None:
        """The engine takes turns again."""
        deferred, self._deferred = self._deferred, []
        for dispatch in deferred:
            self._add(dispatch)

    def _step(self) -> None:
        step = self._engine.step()
        self._share += step.seconds / len(self._running)
        if step.tokens:
            self._cost.observe(step.tokens, step.seconds)
        metrics.STEP_SECONDS.observe(step.seconds)
        for finished in step.finished:
            self._answer(finished)

    def _preempt(self, name: str, reason: str) -> None:
        """Give a turn that is in the engine back, with what was sampled of it."""
        finished = self._engine.abort(name)
        assert finished is not None
        self._answer(finished, TurnOutcome.PREEMPTED, reason)

    def _hand_back(self) -> None:
        """Give everything back and say goodbye: the heartbeat lists the turns whose answers are on the log by then."""
        handed_back = self._inbox.holds
        for name in list(self._running):
            self._preempt(name, STOPPED)
        for dispatch in self._deferred:
            self._inbox.release(dispatch.request.key)
            self._refuse(dispatch, STOPPED, Refusal.ROOM)
        self._writer.flush()
        self._beat(ExecutorState.STOPPING, handed_back)

    def _answer(self, finished: Finished, outcome: TurnOutcome = TurnOutcome.COMPLETED, reason: str = "") -> None:
        running = self._running.pop(finished.key)
        dispatch = self._inbox.release(running.key)
        request = dispatch.request
        metrics.TURNS.labels(outcome.value).inc()
        metrics.TOKENS.labels("sampled").inc(len(finished.tokens))
        metrics.TOKENS.labels("cached").inc(finished.cached_tokens)
        metrics.TURN_SECONDS.observe(finished.finished_at - running.received_at)
        sampled = Part(
            tokens=pack_tokens(finished.tokens),
            logprobs=pack_logprobs(finished.logprobs),
            spans=finished.spans,
            device_seconds={WorkerClass.DEDICATED.value: self._share - running.share_before},
        )
        whole = joined(dispatch.begun, sampled)
        self._send(
            TurnResult(
                trajectory_id=request.trajectory_id,
                group_id=request.group_id,
                home=request.home,
                turn=request.turn,
                attempt=request.attempt,
                outcome=outcome,
                reason=reason,
                worker=self._name,
                incarnation=self._incarnation,
                tokens=whole.tokens,
                logprobs=whole.logprobs,
                finish_reason=finished.finish_reason if outcome is TurnOutcome.COMPLETED else "",
                spans=whole.spans,
                context_tokens=finished.context_tokens,
                cached_tokens=finished.cached_tokens,
                times=TurnTimes(
                    requested_at=request.requested_at,
                    queued_at=dispatch.queued_at,
                    dispatched_at=dispatch.dispatched_at,
                    received_at=running.received_at,
                    scheduled_at=finished.scheduled_at,
                    first_token_at=finished.first_token_at,
                    finished_at=finished.finished_at,
                ),
                device_seconds=whole.device_seconds,
            )
        )

    def _refuse(self, dispatch: TurnDispatch, reason: str, refusal: Refusal | None) -> None:
        request, now = dispatch.request, time.time()
        metrics.TURNS.labels("refused").inc()
        self._log.info("refused", trajectory=request.trajectory_id, turn=request.turn, reason=reason)
        times = TurnTimes(
            requested_at=request.requested_at,
            queued_at=dispatch.queued_at,
            dispatched_at=dispatch.dispatched_at,
            received_at=now,
            finished_at=now,
        )
        self._send(
            TurnResult(
                trajectory_id=request.trajectory_id,
                group_id=request.group_id,
                home=request.home,
                turn=request.turn,
                attempt=request.attempt,
                outcome=TurnOutcome.REFUSED,
                reason=reason[:MOST_CHARACTERS],
                refusal=refusal,
                worker=self._name,
                incarnation=self._incarnation,
                times=times,
            )
        )

    def _send(self, result: TurnResult) -> None:
        self._writer.write(
            COMPLETED, result, key=result.trajectory_id, partition=result.home, trajectory_id=result.trajectory_id
        )

    def _beat_if_due(self, state: ExecutorState) -> None:
        if time.monotonic() >= self._next_heartbeat:
            self._beat(state)

    def _beat(self, state: ExecutorState, handed_back: bytes = b"") -> None:
        self._next_heartbeat = time.monotonic() + self._config.heartbeat_seconds
        load = self._engine.load()
        refused_version, refused_reason = self._receiver.refused_newest or (-1, "")
        metrics.HELD_TURNS.set(len(self._inbox))
        metrics.KV_FREE_BYTES.set(load.kv_bytes_free)
        beat = SlackHeartbeat(
            worker=self._name,
            incarnation=self._incarnation,
            slot=self._config.slot,
            sequence=self._sequence,
            worker_class=WorkerClass.DEDICATED,
            state=state,
            policy_version=self._version,
            hardware=Hardware(
                device=load.device,
                prefill_tokens_per_second=self._cost.prefill_tokens_per_second,
                decode_tokens_per_second=self._cost.decode_tokens_per_second(load.running),
            ),
            kv_bytes_total=load.kv_bytes_total,
            kv_bytes_free=load.kv_bytes_free,
            kv_bytes_per_token=load.kv_bytes_per_token,
            rollout=Tenant(running=load.running, waiting=load.waiting),
            max_turns=self._config.max_turns,
            token_budget=self._token_budget,
            ttl_seconds=TTL_SECONDS,
            holds=handed_back or self._inbox.holds,
            refused_version=refused_version,
            refused_reason=refused_reason[:MOST_CHARACTERS],
            sent_at=time.time(),
            swap_seconds=self._swap_seconds,
        )
        self._sequence += 1
        self._writer.write(HEARTBEATS, beat, key=self._name)
