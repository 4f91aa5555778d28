"""The engine's side of an executor: each tick does one bounded piece of work.

Keeps true
- A tick executes commands, then does one piece of staging a version or one engine step, in turn, and reports. The loop
  uses nothing else in this process: no bus, no records, no thread.
- In a tick with a time limit, commands that take long (the context of a turn is hashed) use up the tick.
- A policy version is activated between two steps, completely or not at all.
- While no tick is allowed, turns are still aborted, one at a time. During a step, no turn is aborted.
- Reports do not wait for their reader: reports that do not fit into the ring buffer are kept and sent later, in order.
- Ticks produce the statuses that become heartbeats: an engine that hangs is silent.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from rose.schemas.arrays import unpack_tokens
from rose.schemas.errors import RecordError
from rose.workers.executor.ipc.engine_client import StagedTensors
from rose.workers.executor.ipc.messages import (
    COMMAND_DECODER,
    NO_LIMIT,
    AbortTurn,
    ActivateWeights,
    Command,
    EngineStatus,
    LendingStats,
    MessageSender,
    NextWork,
    Resume,
    ServingStats,
    StageWeights,
    SubmitTurn,
    Suspend,
    TurnFinished,
    TurnRejected,
    WeightsActivated,
    WeightsRejected,
    WeightsStaged,
    WorkKind,
    aborted_before_start,
)
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.executor.step_cost import ComputeShare, StepCost
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import EngineRefusal, FinishedTurn, SwapRefused

INITIAL_PIECE_COST = {"base_seconds": 0.002, "token_seconds": 1e-6}
"""Initial estimate for a piece of staging a version, before any piece was observed."""

COMMAND_SHARE = 0.1
"""Share of a tick's time that commands may take if a step is to follow in the tick."""


class EngineLoop:
    """One engine at its channel. The owner of the thread calls `tick`."""

    def __init__(
        self,
        engine: Engine,
        channel: ChannelFds,
        reports: MessageSender,
        cost: StepCost,
        *,
        status_seconds: float,
        serving_stats: Callable[[], ServingStats | None] = lambda: None,
        lending_stats: Callable[[], LendingStats | None] = lambda: None,
        granted_bytes: int = NO_LIMIT,
    ) -> None:
        """`reports`: sender into the report ring buffer of `channel`. `cost`: observes each step.

        `status_seconds`: time between two `EngineStatus` reports. `serving_stats`, `lending_stats`: called for each
        status, for the parts of the same name.
        """
        self.granted_bytes = granted_bytes
        """KV bytes that a guest may hold by the newest Resume or Suspend; 0 for a guest that may not lend."""
        self._engine = engine
        self._channel = channel
        self._commands = RingBuffer(channel.commands)
        self._pending: deque[Command] = deque()
        """Commands that were read and not yet executed."""
        self._reports = reports
        self._last_allowed_at = time.monotonic()
        """When the engine was last allowed to compute, monotonic seconds."""
        self._blocked = False
        """Whether the engine was blocked at the latest `tick_mid_step`."""
        self._status_seconds = status_seconds
        self._serving_stats, self._lending_stats = serving_stats, lending_stats
        self._cost = cost
        self._seconds_per_turn = 0.0
        """Running sum over steps of device-seconds divided by the turns in the engine."""
        self._seconds_at_start: dict[str, float] = {}
        """The running sum when a turn was added to the engine, by turn."""
        self._staging: tuple[int, Iterator[None]] | None = None
        self._piece_cost = StepCost(**INITIAL_PIECE_COST)
        """Cost of a piece of staging; each piece counts as one token."""
        self._stepped = False
        """Whether the latest piece of work was a step."""
        self._steps, self._step_seconds = 0, 0.0
        self._share = ComputeShare()
        """Measured for a guest alone: a dedicated engine computes whenever it has turns."""
        self._had_turns = False
        """Whether the engine held turns at the latest status."""
        self._status_at = time.monotonic()
        self._next_status = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return bool(self._commands or self._pending) or self._staging is not None or len(self._engine) > 0

    @property
    def rest_seconds(self) -> float:
        """Seconds until the next tick is due although the loop is not busy."""
        return max(0.0, self._next_status - time.monotonic())

    @property
    def next_work(self) -> NextWork:
        """The piece of work of the next tick, without commands."""
        if self._stages_next:
            return NextWork(WorkKind.ATOMIC, self._piece_cost.cautious_seconds(1))
        tokens = self._engine.next_step_tokens
        return (
            NextWork(WorkKind.STEP, self._cost.cautious_seconds(tokens))
            if tokens
            else NextWork(WorkKind.INTERRUPTIBLE, 0.0)
        )

    def tick(self, most_tokens: int | None = None, most_seconds: float = math.inf) -> None:
        """Execute commands for up to `most_seconds`, then do one piece of work if the commands were short.

        The piece is a piece of staging a version, or a step of at most `most_tokens` tokens; None sets no limit and 0
        forbids a step. Raises EngineBroken.
        """
        self._last_allowed_at, self._blocked = time.monotonic(), False
        self._reports.flush()
        prepares = self._stages_next
        self._read_commands()
        if self._execute_pending(most_seconds):
            if prepares:
                self._continue_staging()
            elif len(self._engine) and most_tokens != 0:
                self._step(most_tokens)
        self.tick_idle(blocked=self._blocked)

    def _execute_pending(self, most_seconds: float) -> bool:
        """Execute commands for up to `most_seconds`. Return whether there is time for other work in this tick."""
        began, seconds = time.monotonic(), 0.0
        while self._pending and seconds < most_seconds:
            self._execute(self._pending.popleft())
            seconds = time.monotonic() - began
        return seconds < COMMAND_SHARE * most_seconds

    @property
    def _stages_next(self) -> bool:
        return self._staging is not None and (self._stepped or not len(self._engine))

    def tick_idle(self, *, blocked: bool = False) -> None:
        """Report the status if it is due, and abort at most one turn: the work that is allowed while no step is.

        `blocked`: whether a step is not allowed; False if there is only nothing to do.
        """
        if not blocked:
            self._last_allowed_at = time.monotonic()
        elif self._commands or self._pending:
            self._read_commands()
            self._abort_next()
        if time.monotonic() >= self._next_status:
            self.report_status()

    def tick_mid_step(self, *, blocked: bool) -> bool:
        """Report the status if it is due while a step is paused. Return whether no abort is pending.

        A pending abort waits for the end of the step. `blocked`: whether the step is not allowed to continue.
        """
        self._blocked = blocked
        if not blocked:
            self._last_allowed_at = time.monotonic()
        if self._commands:
            self._read_commands()
        if time.monotonic() >= self._next_status:
            self.report_status()
        return not any(isinstance(command, AbortTurn) for command in self._pending)

    def abort_one_turn(self) -> bool:
        """Abort one turn. Return whether no turn is left.

        The executor may still submit turns until it learns of the suspension; those turns are aborted too.
        """
        self._read_commands()
        pending = (command.name for command in self._pending if isinstance(command, SubmitTurn))
        name = next(pending, None) or next(iter(self._seconds_at_start), None)
        if name is not None:
            self.abort_turn(name)
        return name is None

    def detach(self) -> None:
        """Abort all turns without a report: the executor is gone, and the engine may get another one."""
        for name in self._seconds_at_start:
            self._engine.abort(name)

    def _read_commands(self) -> None:
        """Read commands into the queue. Resume and Suspend take effect at once."""
        for message in self._commands.read():
            command = COMMAND_DECODER.decode(message)
            if isinstance(command, Resume | Suspend):
                self.granted_bytes = command.most_bytes if isinstance(command, Resume) else 0
            else:
                self._pending.append(command)

    def _abort_next(self) -> None:
        """Execute the first abort in the queue before the commands ahead of it."""
        for command in self._pending:
            if isinstance(command, AbortTurn):
                self._pending.remove(command)
                self.abort_turn(command.name)
                return

    def abort_turn(self, name: str, reason: str = "") -> None:
        """Abort a turn and report the tokens that were sampled.

        The turn may be in the engine or in the queue. A turn that has finished is ignored.
        """
        finished = self._engine.abort(name)
        if finished is not None:
            self._reports.send(self._finished(finished, reason))
        for command in self._pending:
            if isinstance(command, SubmitTurn) and command.name == name:
                self._pending.remove(command)
                self._reports.send(aborted_before_start(name, time.time()))
                return

    def _execute(self, command: Command) -> None:
        match command:
            case SubmitTurn():
                self._submit(command)
            case AbortTurn():
                self.abort_turn(command.name)
            case StageWeights():
                tensors = StagedTensors(self._channel.weight_buffers[command.buffer], command.layout)
                self._staging = command.version, self._engine.stage(tensors)
            case ActivateWeights():
                self._activate(command.version)

    def _submit(self, command: SubmitTurn) -> None:
        if command.version != self._engine.version:  # the executor did not know yet that the guest was replaced
            reason = f"version {self._engine.version} serves, not {command.version}"
            self._reports.send(aborted_before_start(command.name, time.time(), reason))
            return
        try:
            context = unpack_tokens(command.context)
            self._engine.add(command.name, context, command.sampling, policy_version=command.version)
        except (EngineRefusal, RecordError) as refusal:
            self._reports.send(TurnRejected(command.name, str(refusal)))
        else:
            self._seconds_at_start[command.name] = self._seconds_per_turn

    def _continue_staging(self) -> None:
        assert self._staging is not None
        version, pieces = self._staging
        self._stepped, began = False, time.monotonic()
        try:
            next(pieces)
            self._piece_cost.observe(1, time.monotonic() - began)
        except StopIteration:
            self._staging = None
            self._reports.send(WeightsStaged(version))
        except SwapRefused as refusal:
            self._staging = None
            self._reports.send(WeightsRejected(version, str(refusal)))

    def _activate(self, version: int) -> None:
        try:
            seconds = self._engine.activate(version)
        except SwapRefused as refusal:
            self._reports.send(WeightsRejected(version, str(refusal)))
        else:
            self._reports.send(WeightsActivated(version, seconds))
            self.report_status()

    def _step(self, most_tokens: int | None) -> None:
        self._stepped = True
        step = self._engine.step(most_tokens)
        self._seconds_per_turn += self._engine.devices * step.seconds / max(1, len(self._seconds_at_start))
        self._steps += 1
        self._step_seconds += step.seconds
        if step.tokens:
            self._cost.observe(step.tokens, step.seconds)
        for finished in step.finished:
            self._reports.send(self._finished(finished))

    def _finished(self, turn: FinishedTurn, reason: str = "") -> TurnFinished:
        seconds = self._seconds_per_turn - self._seconds_at_start.pop(turn.name)
        return TurnFinished(turn, device_seconds=seconds, reason=reason)

    def report_status(self) -> None:
        """Report the engine's status now."""
        now = time.monotonic()
        self._next_status = now + self._status_seconds
        load, lending, serving = self._engine.load(), self._lending_stats(), self._serving_stats()
        has_turns = len(self._engine) > 0
        if serving is not None:
            self._share.observe(self._step_seconds, now - self._status_at, has_turns=has_turns and self._had_turns)
        self._status_at, self._had_turns = now, has_turns
        self._reports.send(
            EngineStatus(
                version=self._engine.version,
                device=load.device,
                running=load.running,
                waiting=load.waiting,
                kv_bytes_total=load.kv_bytes_total if lending is None else lending.budget_bytes,
                kv_bytes_free=load.kv_bytes_free,
                kv_bytes_per_token=load.kv_bytes_per_token,
                prefill_tokens_per_second=self._share.value * self._cost.prefill_tokens_per_second,
                decode_tokens_per_second=self._share.value * self._cost.decode_tokens_per_second(load.running),
                steps=self._steps,
                step_seconds=self._step_seconds,
                blocked_seconds=now - self._last_allowed_at,
                serving=serving,
                lending=lending,
                devices=self._engine.devices,
            )
        )
        self._steps, self._step_seconds = 0, 0.0
