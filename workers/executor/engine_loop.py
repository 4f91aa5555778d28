"""The engine's side of an executor: it is ticked, and does one bounded piece of work a tick.

Keeps true
- A tick takes orders in, does one piece of preparing a version or one engine step, in turn, and reports.
  Nothing else runs in this process for it: no bus, no records, no thread.
- Where a tick has an end, orders that take long to obey (a turn's context is hashed) are a piece of work of their own.
- A policy version is swapped in between two steps, whole or not at all.
- Where no tick may be done, a turn that is given up goes back all the same, one at a time; within a step, none does.
- Reports never wait for their reader: what does not fit on the line is kept and sent later, in order.
- Ticks make the heartbeats: an engine that hangs says nothing.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from rose.schemas.arrays import pack_logprobs, pack_tokens, unpack_tokens
from rose.schemas.errors import RecordError
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
from rose.workers.executor.ipc.weight_buffers import StagedTensors
from rose.workers.executor.step_cost import StepCost
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import EngineRefusal, FinishedTurn, SwapRefused

INITIAL_PIECE_COST = {"base_seconds": 0.002, "token_seconds": 1e-6}
"""A guess for a piece of preparing a version, of which none was seen."""

COMMAND_SHARE = 0.1
"""Share of a tick that orders may take beside a step."""


class EngineLoop:
    """One engine at its channel. Whoever owns the thread calls `tick`."""

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
    ) -> None:
        """`reports` is of the channel; `cost` is told of each step; `status_seconds` lie between two `EngineStatus`s,
        which say `serving_stats` and `lending_stats`.
        """
        self.granted_bytes = NO_LIMIT
        """KV bytes that it may hold, as far as it was told; 0: it is not to lend. A guest's alone."""
        self._engine = engine
        self._channel = channel
        self._commands = RingBuffer(channel.commands)
        self._pending: deque[Command] = deque()
        """Read where no tick may be done."""
        self._reports = reports
        self._last_allowed_at = time.monotonic()
        """When it might last compute."""
        self._blocked = False
        """Whether what was last heard within a step is that it may not go on."""
        self._status_seconds = status_seconds
        self._serving_stats, self._lending_stats = serving_stats, lending_stats
        self._cost = cost
        self._seconds_per_turn = 0.0
        """Running sum of device-seconds a turn."""
        self._seconds_at_start: dict[str, float] = {}
        """By turn, what that sum was when it came."""
        self._staging: tuple[int, Iterator[None]] | None = None
        self._piece_cost = StepCost(**INITIAL_PIECE_COST)
        """Of a piece of preparing, whatever it does."""
        self._stepped = False
        """Whether the latest piece of work was a step."""
        self._steps, self._step_seconds = 0, 0.0
        self._next_status = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return bool(self._commands or self._pending) or self._staging is not None or len(self._engine) > 0

    @property
    def rest_seconds(self) -> float:
        """Until it must be ticked although it is not busy."""
        return max(0.0, self._next_status - time.monotonic())

    @property
    def next_work(self) -> NextWork:
        """What the next tick would do beside orders, which take as long as they may."""
        if self._stages_next:
            return NextWork(WorkKind.ATOMIC, self._piece_cost.cautious_seconds(1))
        tokens = self._engine.next_step_tokens
        return (
            NextWork(WorkKind.STEP, self._cost.cautious_seconds(tokens))
            if tokens
            else NextWork(WorkKind.INTERRUPTIBLE, 0.0)
        )

    def tick(self, most_tokens: int | None = None, most_seconds: float = math.inf) -> None:
        """One bounded piece of work: orders, for `most_seconds`; with them what was wanted, which is a step of at most
        `most_tokens` tokens or none, or a piece of preparing a version.

        Raises EngineBroken.
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
        """Obey orders for so long; whether there is time for more than that."""
        began, seconds = time.monotonic(), 0.0
        while self._pending and seconds < most_seconds:
            self._execute(self._pending.popleft())
            seconds = time.monotonic() - began
        return seconds < COMMAND_SHARE * most_seconds

    @property
    def _stages_next(self) -> bool:
        return self._staging is not None and (self._stepped or not len(self._engine))

    def tick_idle(self, *, blocked: bool = False) -> None:
        """Say how the engine stands, if it is time for that, and give a turn up: all that may be done where a step may
        not. `blocked`: whether one may not, or there is just nothing to do.
        """
        if not blocked:
            self._last_allowed_at = time.monotonic()
        elif self._commands or self._pending:
            self._read_commands()
            self._abort_next()
        if time.monotonic() >= self._next_status:
            self.report_status()

    def tick_mid_step(self, *, blocked: bool) -> bool:
        """Within a step that stands still: say how the engine stands, if it is time for that; whether no turn is to be
        given up, which waits for the step's end. `blocked`: whether the step may not go on.
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
        """Give one turn up; whether none is left. Who gave the orders may be slow to hear of it."""
        self._read_commands()
        pending = (command.name for command in self._pending if isinstance(command, SubmitTurn))
        name = next(pending, None) or next(iter(self._seconds_at_start), None)
        if name is not None:
            self.abort_turn(name)
        return name is None

    def detach(self) -> None:
        """Whoever gave the orders is gone: let go of the turns; the engine may have another host."""
        for name in self._seconds_at_start:
            self._engine.abort(name)

    def _read_commands(self) -> None:
        """Orders as they came; what says whether to lend is heard at once."""
        for message in self._commands.read():
            command = COMMAND_DECODER.decode(message)
            if isinstance(command, Resume | Suspend):
                self.granted_bytes = command.most_bytes if isinstance(command, Resume) else 0
            else:
                self._pending.append(command)

    def _abort_next(self) -> None:
        """The first turn that is to be given up, out of its order."""
        for command in self._pending:
            if isinstance(command, AbortTurn):
                self._pending.remove(command)
                self.abort_turn(command.name)
                return

    def abort_turn(self, name: str, reason: str = "") -> None:
        """Take a turn out, and answer with what was sampled of it; it may be in the engine, on the way there, or have
        left.
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
        if command.version != self._engine.version:  # who gave it had not heard that the guest is another
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

    def _finished(self, finished: FinishedTurn, reason: str = "") -> TurnFinished:
        return TurnFinished(
            name=finished.key,
            tokens=pack_tokens(finished.tokens),
            logprobs=pack_logprobs(finished.logprobs),
            finish_reason=finished.finish_reason,
            spans=finished.spans,
            context_tokens=finished.context_tokens,
            cached_tokens=finished.cached_tokens,
            scheduled_at=finished.scheduled_at,
            first_token_at=finished.first_token_at,
            finished_at=finished.finished_at,
            device_seconds=self._seconds_per_turn - self._seconds_at_start.pop(finished.key),
            reason=reason,
        )

    def report_status(self) -> None:
        """Say at once how the engine stands."""
        self._next_status = time.monotonic() + self._status_seconds
        load, lending = self._engine.load(), self._lending_stats()
        self._reports.send(
            EngineStatus(
                version=self._engine.version,
                device=load.device,
                running=load.running,
                waiting=load.waiting,
                kv_bytes_total=load.kv_bytes_total if lending is None else lending.budget_bytes,
                kv_bytes_free=load.kv_bytes_free,
                kv_bytes_per_token=load.kv_bytes_per_token,
                prefill_tokens_per_second=self._cost.prefill_tokens_per_second,
                decode_tokens_per_second=self._cost.decode_tokens_per_second(load.running),
                steps=self._steps,
                step_seconds=self._step_seconds,
                blocked_seconds=time.monotonic() - self._last_allowed_at,
                serving=self._serving_stats(),
                lending=lending,
            )
        )
        self._steps, self._step_seconds = 0, 0.0
