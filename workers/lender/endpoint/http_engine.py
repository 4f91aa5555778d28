"""The HTTP engine: turns the commands of an executor's channel into requests to an endpoint, and answers into reports.

Keeps true
- The executor uses it like any other engine: turns in, tokens and logprobs out, versions staged and activated.
- Statuses are sent only if the endpoint has just answered. An executor whose endpoint hangs is therefore silent.
- A turn that the endpoint ends early, or that exceeds the limit, is returned with the tokens that it has.
- An error of one turn affects only this turn, unless the endpoint is unreachable or is another server by then: the
  engine then ends and is started again.
- None of the lender's turns is at the endpoint while a version is loaded. A version is reported as active after its
  proof. If the proof fails, the weights before are loaded again and proven; if that fails too, the engine ends.

The engine runs on its own thread in the executor's process, because it mostly waits.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from rose.schemas.arrays import logprob_error, unpack_tokens
from rose.schemas.errors import RecordError
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import SampledTokensBuilder
from rose.schemas.turns import TurnTimes
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.ipc.engine_client import StagedTensors
from rose.workers.executor.ipc.messages import (
    ABORTED,
    COMMAND_DECODER,
    AbortTurn,
    ActivateWeights,
    Command,
    EngineStatus,
    MessageSender,
    StageWeights,
    SubmitTurn,
    TurnFinished,
    TurnRejected,
    WeightsActivated,
    WeightsRejected,
    WeightsStaged,
)
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.executor.vllm.types import EngineBroken, EngineRefusal, FinishedTurn, SwapRefused, turn_error
from rose.workers.lender.config import EndpointConfig
from rose.workers.lender.endpoint.concurrency_limit import AimdLimit, LatencyWindow, TokenRates, exceeds_budget
from rose.workers.lender.endpoint.server_interface import Endpoint, TurnChunk, TurnLost
from rose.workers.lender.endpoint.versions import EndpointVersions

LATENCY_WINDOW_SECONDS = 1.0
"""Length of a latency window, after which the concurrency limit is adjusted."""

DEVICE = "request-level"
"""Device name in the status."""

KEEPS_LATENCY = "the endpoint keeps its latency"
"""Reason of turns that are returned because the limit has fallen."""


@dataclass(frozen=True, slots=True)
class KvAllowance:
    """The part of the endpoint's KV cache that turns may use."""

    bytes_total: int
    bytes_per_token: int


@dataclass(slots=True, eq=False)
class EndpointTurn:
    """A turn that waits in this process or runs at the endpoint. Times are unix seconds."""

    name: str
    context: list[int]
    sampling: Sampling
    version: int
    sampled: SampledTokensBuilder = field(default_factory=SampledTokensBuilder)
    cached_tokens: int = 0
    sent_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    first_tokens: int = 0
    """Tokens in the first chunk with tokens."""
    counted: int = 0
    """Tokens that earlier latency windows have counted."""
    counted_at: float = 0.0
    share_before: float = 0.0
    """Running sum of seconds per turn when the turn was sent."""
    task: asyncio.Task[None] | None = None


class HttpEngine:
    """Answers the channel of one incarnation of an executor."""

    def __init__(
        self,
        endpoint: Endpoint,
        versions: EndpointVersions,
        channel: ChannelFds,
        config: ExecutorConfig,
        promise: EndpointConfig,
        *,
        vocabulary: int,
        kv: KvAllowance,
    ) -> None:
        """`promise`: the latencies that the endpoint keeps. `vocabulary`: size of the policy's vocabulary.

        Call it within a running event loop.
        """
        self._endpoint = endpoint
        self._versions = versions
        self._channel = channel
        self._config = config
        self._vocabulary = vocabulary
        self._kv = kv
        self._commands = RingBuffer(channel.commands)
        self._reports = MessageSender(RingBuffer(channel.reports))
        self._budgets = promise.ttft_seconds, promise.tpot_seconds
        self._limit = AimdLimit(
            ttft_seconds=promise.ttft_seconds, tpot_seconds=promise.tpot_seconds, max_limit=config.max_turns
        )
        self._rates = TokenRates()
        self._waiting: deque[EndpointTurn] = deque()
        self._running: dict[str, EndpointTurn] = {}
        self._was_full = False
        """Whether the limit was reached since the window before."""
        self._ttft: list[float] = []
        """Times to first token since the window before."""
        self._fails = False
        """Whether the endpoint failed at the turn that ended last."""
        self._seconds_per_turn, self._shared_at = 0.0, time.monotonic()
        """Running sum over time of seconds divided by the turns at the endpoint."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Run until the endpoint breaks or the calling task is cancelled. Raises EngineBroken."""
        self._spawn(self._report_forever())
        self._spawn(self._adjust_limit())
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.wake_event, self._read_commands)
        try:
            await self._broken
        finally:
            loop.remove_reader(self._channel.wake_event)
            for turn in [*self._running.values(), *self._waiting]:
                self._abort_turn(turn, f"{self._endpoint.url} is away")
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, duty: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a task; an error that the task does not handle ends the engine."""
        task = asyncio.create_task(duty)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _read_commands(self) -> None:
        os.eventfd_read(self._channel.wake_event)
        for command in self._commands.read():
            self._execute(COMMAND_DECODER.decode(command))
        self._send_waiting()

    def _execute(self, command: Command) -> None:
        match command:
            case SubmitTurn():
                self._submit(command)
            case AbortTurn():
                turn = self._running.get(command.name) or next(
                    (t for t in self._waiting if t.name == command.name), None
                )
                if turn is not None:
                    self._abort_turn(turn, "")
            case StageWeights():
                tensors = dict(StagedTensors(self._channel.weight_buffers[command.buffer], command.layout))
                self._spawn(self._stage(command.version, tensors))
            case ActivateWeights():
                self._spawn(self._activate(command.version))

    # Turns

    def _submit(self, command: SubmitTurn) -> None:
        try:
            turn = EndpointTurn(command.name, list(unpack_tokens(command.context)), command.sampling, command.version)
        except RecordError as error:
            self._reports.send(TurnRejected(command.name, str(error)))
            return
        sentence = self._turn_error(turn)
        if sentence:
            self._reports.send(TurnRejected(command.name, sentence))
        else:
            self._waiting.append(turn)

    def _turn_error(self, turn: EndpointTurn) -> str | None:
        """Return why the turn cannot run; None if it can."""
        if turn.version != self._versions.version:
            return f"policy version {self._versions.version} serves, not {turn.version}"
        if turn.sampling.seed is not None:
            return "a seeded turn draws by position, which an endpoint does not"
        return turn_error(
            turn.context,
            turn.sampling,
            longest_tokens=self._config.max_model_len,
            vocabulary=self._vocabulary,
        )

    def _send_waiting(self) -> None:
        """Send waiting turns to the endpoint, up to the limit."""
        while self._waiting and len(self._running) < self._limit.limit:
            turn = self._waiting.popleft()
            self._share_seconds()
            turn.share_before, turn.sent_at = self._seconds_per_turn, time.time()
            self._running[turn.name] = turn
            turn.task = self._spawn(self._run_turn(turn))
        self._was_full |= 0 < self._limit.limit <= len(self._running)

    async def _run_turn(self, turn: EndpointTurn) -> None:
        room = self._config.max_model_len - len(turn.context)
        sampling = msgspec.structs.replace(turn.sampling, max_tokens=min(room, turn.sampling.max_tokens))
        ended = ""
        try:
            async for chunk in self._endpoint.stream_turn(turn.context, sampling, salt=self._versions.salt):
                self._on_chunk(turn, chunk)
                ended = chunk.finish_reason or ended
            if ended not in ("stop", "length"):
                message = f"{self._endpoint.url} broke a turn off: {ended or 'it fell silent'}"
                raise TurnLost(message, failed=ended != "abort")  # a pause of the server ends turns with "abort"
            if ended == "stop" and not set(turn.sampled.tokens[-1:]) & set(sampling.stop_token_ids):
                raise EngineRefusal(f"{self._endpoint.url} ended the turn at a token that is no stop token")
        except TurnLost as lost:
            await self._endpoint.check_unchanged()
            self._on_turn_lost(turn, lost)
        except EngineRefusal as refusal:
            self._remove(turn)
            self._reports.send(TurnRejected(turn.name, str(refusal)))
        else:
            self._fails = False
            self._remove(turn)
            self._reports.send(self._finished(turn, ended))
        self._send_waiting()

    def _on_turn_lost(self, turn: EndpointTurn, lost: TurnLost) -> None:
        """Return a lost turn with its tokens.

        A turn at which the endpoint failed before the first token is rejected, because the endpoint may fail again.
        """
        if not lost.failed or self._fails:  # the endpoint has no room, or fails at every turn
            self._ttft.append(inf)
        self._fails = lost.failed
        self._remove(turn)
        refused = lost.failed and not turn.sampled.tokens
        self._reports.send(TurnRejected(turn.name, str(lost)) if refused else self._finished(turn, ABORTED, str(lost)))

    def _on_chunk(self, turn: EndpointTurn, chunk: TurnChunk) -> None:
        turn.cached_tokens = max(chunk.cached_tokens, turn.cached_tokens)
        tokens, logprobs = chunk.tokens, chunk.logprobs
        if not tokens:
            return
        if len(tokens) != len(logprobs):
            raise EngineBroken(f"{self._endpoint.url} answered with {len(tokens)} tokens and {len(logprobs)} logprobs")
        if not all(0 <= token < self._vocabulary for token in tokens):
            raise EngineBroken(f"{self._endpoint.url} answered tokens outside the vocabulary of {self._vocabulary}")
        if impossible := logprob_error(np.array(logprobs)):
            raise EngineRefusal(f"{self._endpoint.url} answered with {impossible}")
        turn.last_token_at = time.time()
        if not turn.sampled.tokens:
            turn.first_token_at = turn.counted_at = turn.last_token_at
            turn.counted = turn.first_tokens = len(tokens)
            self._ttft.append(turn.first_token_at - turn.sent_at)
        turn.sampled.append(tokens, logprobs)

    def _abort_turn(self, turn: EndpointTurn, reason: str) -> None:
        """Abort a turn and return it with its tokens. `reason`: empty if the executor has aborted it."""
        if turn.task is not None:
            turn.task.cancel()  # closes the request, which ends the turn at the endpoint
        self._remove(turn)
        self._reports.send(self._finished(turn, ABORTED, reason))

    def _remove(self, turn: EndpointTurn) -> None:
        self._share_seconds()
        running = len(self._running)
        if self._running.pop(turn.name, None) is None:
            self._waiting.remove(turn)
            return
        if turn.first_token_at:
            self._rates.on_first_token(len(turn.context) - turn.cached_tokens, turn.first_token_at - turn.sent_at)
        if later := len(turn.sampled.tokens) - turn.first_tokens:
            self._rates.on_decoded((turn.last_token_at - turn.first_token_at) / later, running)

    def _finished(self, turn: EndpointTurn, finish_reason: str, reason: str = "") -> TurnFinished:
        times = TurnTimes(scheduled_at=turn.sent_at, first_token_at=turn.first_token_at, finished_at=time.time())
        finished = FinishedTurn(
            name=turn.name,
            sampled=turn.sampled.build(turn.version),
            finish_reason=finish_reason,
            context_tokens=len(turn.context),
            cached_tokens=turn.cached_tokens,
            times=times,
        )
        seconds = self._seconds_per_turn - turn.share_before if turn.sent_at else 0.0
        return TurnFinished(finished, device_seconds=seconds, reason=reason)

    def _share_seconds(self) -> None:
        """Divide the time since the last call among the lender's turns at the endpoint; other requests are unknown."""
        now = time.monotonic()
        self._seconds_per_turn += (now - self._shared_at) / max(1, len(self._running))
        self._shared_at = now

    # Versions

    async def _stage(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        try:
            await self._versions.stage(version, tensors)
        except SwapRefused as refusal:
            self._reports.send(WeightsRejected(version, str(refusal)))
        else:
            self._reports.send(WeightsStaged(version))

    async def _activate(self, version: int) -> None:
        """Activate the staged version. Raises EngineBroken if no proven version serves."""
        began = time.perf_counter()
        try:
            await self._versions.activate()
        except SwapRefused as refusal:
            self._reports.send(WeightsRejected(version, str(refusal)))
        else:
            self._reports.send(WeightsActivated(version, time.perf_counter() - began))

    # Status

    async def _report_forever(self) -> None:
        while True:
            loads = self._versions.loads
            try:
                if not loads % 2:
                    await self._endpoint.check_alive()
            except EngineBroken:
                if loads == self._versions.loads:  # otherwise a load began, during which the endpoint does not answer
                    raise
            self._reports.flush()
            self._reports.send(self._status())
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _adjust_limit(self) -> None:
        before, loads = await self._endpoint.histograms(), self._versions.loads
        while True:
            await asyncio.sleep(LATENCY_WINDOW_SECONDS)
            after = await self._endpoint.histograms()
            others_late = any(
                exceeds_budget(earlier, later, budget)
                for earlier, later, budget in zip(before, after, self._budgets, strict=True)
            )
            window = self._window(others_late)
            if loads == self._versions.loads and not loads % 2:  # latencies during a load say nothing about turns
                self._abort_above(self._limit.on_window(window, time.monotonic()))
            before, loads = after, self._versions.loads

    def _window(self, others_late: bool) -> LatencyWindow:
        """Return the latencies since the window before. A token that has not come yet counts with its present delay."""
        now, ttft, tpot = time.time(), self._ttft, []
        for turn in self._running.values():
            if not turn.sampled.tokens:
                ttft.append(now - turn.sent_at)
                continue
            new = len(turn.sampled.tokens) - turn.counted
            tpot.append((turn.last_token_at - turn.counted_at) / new if new else now - turn.counted_at)
            if new:
                turn.counted, turn.counted_at = len(turn.sampled.tokens), turn.last_token_at
        full, self._was_full, self._ttft = self._was_full, False, []
        return LatencyWindow(ttft, tpot, full, others_late)

    def _abort_above(self, limit: int) -> None:
        """Return the turns above the limit, turns with the fewest tokens first."""
        running = sorted(self._running.values(), key=lambda turn: len(turn.sampled.tokens), reverse=True)
        surplus = [*running[limit:], *list(self._waiting)[max(0, limit - len(running)) :]]
        for turn in surplus:
            self._abort_turn(turn, KEEPS_LATENCY)
        if surplus:
            self._reports.send(self._status())  # reports the lower limit at once
        self._send_waiting()

    def _status(self) -> EngineStatus:
        turns = [*self._running.values(), *self._waiting]
        held = sum(len(turn.context) + len(turn.sampled.tokens) for turn in turns)
        return EngineStatus(
            version=self._versions.version,
            device=DEVICE,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_bytes_total=self._kv.bytes_total,
            kv_bytes_free=max(0, self._kv.bytes_total - held * self._kv.bytes_per_token),
            kv_bytes_per_token=self._kv.bytes_per_token,
            prefill_tokens_per_second=self._rates.prefill,
            decode_tokens_per_second=self._rates.decode(len(self._running)),
            steps=0,
            step_seconds=0.0,
            most_turns=self._limit.limit,
            seeded=False,
        )
