"""An engine played over HTTP: the words of an executor's wires become requests to an endpoint, and back.

Keeps true
- To the executor it is an engine like any other: turns in, tokens and logprobs out, versions prepared and served.
- Reports of how it stands come only from an endpoint that has just answered: one that hangs is a silent executor.
- A turn that the endpoint breaks off, or that is one too many, is told with all that came of it before.
- Trouble with one turn is that turn's: only an endpoint that is away by then, or another, is begun anew.
- No turn of its own is at the endpoint while a version is loaded; the version is told as served once it is proven.
  One that is not is followed by the weights before it, which are proven too, or nothing is lent any more.

It runs on a thread of its own, in the process of the bus: what it does is wait.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from schemas.arrays import impossible_logprob, pack_logprobs, pack_tokens, unpack_tokens
from schemas.errors import RecordError
from schemas.prompts import LEAST_TEMPERATURE
from schemas.turns import VersionSpan
from workers.executor.config import ExecutorConfig
from workers.executor.line import Line
from workers.executor.slabs import Lying
from workers.executor.vllm.types import EngineBroken, EngineRefusal, SwapRefused
from workers.executor.wires import Wires
from workers.executor.words import (
    ABORTED,
    ORDERS,
    Done,
    GiveUp,
    NotTaken,
    Order,
    Outbox,
    Prepare,
    Prepared,
    Refused,
    Serve,
    Serving,
    Take,
    Tick,
)
from workers.lender.endpoint.api import TPOT, TTFT, Endpoint
from workers.lender.endpoint.config import EndpointConfig
from workers.lender.endpoint.pace import Pace, Rates, Window, late
from workers.lender.endpoint.turn import Turn, TurnLost
from workers.lender.endpoint.versions import Versions

WINDOW_SECONDS = 1.0
"""Between two looks at the pace."""

DEVICE = "request-level"
"""What the heartbeat says of the hardware."""

KEEPS_LATENCY = "the endpoint keeps its latency"
"""Why turns go back that are too many."""


@dataclass(frozen=True, slots=True)
class Cache:
    """What turns may take of the endpoint's KV cache."""

    bytes_total: int
    bytes_per_token: int


class Player:
    """Plays one engine for one start of an executor."""

    def __init__(
        self,
        api: Endpoint,
        versions: Versions,
        wires: Wires,
        config: ExecutorConfig,
        endpoint: EndpointConfig,
        *,
        vocabulary: int,
        kv: Cache,
    ) -> None:
        """`vocabulary`: of the policy. Call it within a running event loop."""
        self._api = api
        self._versions = versions
        self._wires = wires
        self._config = config
        self._vocabulary = vocabulary
        self._kv = kv
        self._orders = Line(wires.orders)
        self._reports = Outbox(Line(wires.reports))
        self._budgets = {TTFT: endpoint.ttft_seconds, TPOT: endpoint.tpot_seconds}
        self._pace = Pace(ttft_seconds=endpoint.ttft_seconds, tpot_seconds=endpoint.tpot_seconds, most=config.max_turns)
        self._rates = Rates()
        self._waiting: deque[Turn] = deque()
        self._running: dict[str, Turn] = {}
        self._was_full = False
        """Since the window before."""
        self._ttft: list[float] = []
        """Since the window before."""
        self._fails = False
        """Whether the endpoint failed at the turn that ended last."""
        self._share, self._shared_at = 0.0, time.monotonic()
        """Running sum of seconds a turn."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def play(self) -> None:
        """Until the endpoint breaks, or whoever waits for this is cancelled. Raises EngineBroken."""
        self._do(self._beat())
        self._do(self._keep_pace())
        loop = asyncio.get_running_loop()
        loop.add_reader(self._wires.bell, self._heed)
        try:
            await self._broken
        finally:
            loop.remove_reader(self._wires.bell)
            for turn in [*self._running.values(), *self._waiting]:
                self._give_back(turn, f"{self._api.url} is away")
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, duty: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Carry on beside all else; an error that nobody else takes breaks the endpoint."""
        task = asyncio.create_task(duty)
        self._tasks.add(task)
        task.add_done_callback(self._done_with)
        return task

    def _done_with(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _heed(self) -> None:
        os.eventfd_read(self._wires.bell)
        for order in self._orders.read():
            self._obey(ORDERS.decode(order))
        self._send()

    def _obey(self, order: Order) -> None:
        match order:
            case Take():
                self._take(order)
            case GiveUp():
                turn = self._running.get(order.name) or next((t for t in self._waiting if t.name == order.name), None)
                if turn is not None:
                    self._give_back(turn, "")
            case Prepare():
                tensors = dict(Lying(self._wires.slabs[order.slab], order.layout))
                self._do(self._prepare(order.version, tensors))
            case Serve():
                self._do(self._serve(order.version))

    # Turns

    def _take(self, order: Take) -> None:
        try:
            turn = Turn(order.name, list(unpack_tokens(order.context)), order.sampling, order.version)
        except RecordError as error:
            self._reports.say(Refused(order.name, str(error)))
            return
        sentence = self._refusal(turn)
        if sentence:
            self._reports.say(Refused(order.name, sentence))
        else:
            self._waiting.append(turn)

    def _refusal(self, turn: Turn) -> str:
        """Why the turn cannot be run; vLLM ends at a token that its model has not."""
        sampling, most = turn.sampling, self._config.max_model_len
        outside = [t for t in (*turn.context, *sampling.stop_token_ids) if not 0 <= t < self._vocabulary]
        if turn.version != self._versions.version:
            return f"policy version {self._versions.version} serves, not {turn.version}"
        if not 0 < len(turn.context) < most:
            return f"a context of {len(turn.context)} tokens: 1 to {most - 1} can be run"
        if outside:
            return f"token id {outside[0]} is outside the vocabulary of {self._vocabulary}"
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            return f"temperature {sampling.temperature} is neither 0 nor at least {LEAST_TEMPERATURE}"
        if sampling.seed is not None:
            return "a seeded turn draws by position, which an endpoint does not"
        return ""

    def _send(self) -> None:
        """Ask for as many turns as the pace allows."""
        while self._waiting and len(self._running) < self._pace.limit:
            turn = self._waiting.popleft()
            self._pass_time()
            turn.share_before, turn.sent_at = self._share, time.time()
            self._running[turn.name] = turn
            turn.task = self._do(self._run(turn))
        self._was_full |= 0 < self._pace.limit <= len(self._running)

    async def _run(self, turn: Turn) -> None:
        room = self._config.max_model_len - len(turn.context)
        sampling = msgspec.structs.replace(turn.sampling, max_tokens=min(room, turn.sampling.max_tokens))
        ended = ""
        try:
            async for cached, tokens, logprobs, reason in self._api.turn(
                turn.context, sampling, salt=self._versions.salt
            ):
                self._hear(turn, tokens, logprobs)
                turn.cached_tokens = max(cached, turn.cached_tokens)
                ended = reason or ended
            if ended not in ("stop", "length"):
                said = f"{self._api.url} broke a turn off: {ended or 'it fell silent'}"
                raise TurnLost(said, failed=ended != "abort")  # as who pauses the server has it
            if ended == "stop" and not set(turn.tokens[-1:]) & set(sampling.stop_token_ids):
                raise EngineRefusal(f"{self._api.url} ended it at a token that nobody asked for")
        except TurnLost as lost:
            await self._api.stays()
            self._lose(turn, lost)
        except EngineRefusal as refusal:
            self._forget(turn)
            self._reports.say(Refused(turn.name, str(refusal)))
        else:
            self._fails = False
            self._forget(turn)
            self._reports.say(self._told(turn, ended))
        self._send()

    def _lose(self, turn: Turn, lost: TurnLost) -> None:
        """What came of it goes back. One that the endpoint failed at before anything came is refused: it may again."""
        if not lost.failed or self._fails:  # it has no room, or fails at every turn
            self._ttft.append(inf)
        self._fails = lost.failed
        self._forget(turn)
        refused = lost.failed and not turn.tokens
        self._reports.say(Refused(turn.name, str(lost)) if refused else self._told(turn, ABORTED, str(lost)))

    def _hear(self, turn: Turn, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if not tokens:
            return
        if len(tokens) != len(logprobs):
            raise EngineBroken(f"{self._api.url} told {len(tokens)} tokens with {len(logprobs)} logprobs")
        if not all(0 <= token < self._vocabulary for token in tokens):
            raise EngineBroken(f"{self._api.url} told tokens outside the vocabulary of {self._vocabulary}")
        if impossible := impossible_logprob(np.array(logprobs)):
            raise EngineRefusal(f"{self._api.url} answered with {impossible}")
        turn.last_token_at = time.time()
        if not turn.tokens:
            turn.first_token_at = turn.counted_at = turn.last_token_at
            turn.counted = turn.first_tokens = len(tokens)
            self._ttft.append(turn.first_token_at - turn.sent_at)
        turn.tokens += tokens
        turn.logprobs += logprobs

    def _give_back(self, turn: Turn, reason: str) -> None:
        """A turn goes back with what came of it, for a reason of the endpoint's if there is one."""
        if turn.task is not None:
            turn.task.cancel()  # which ends the request, and so the turn at the endpoint
        self._forget(turn)
        self._reports.say(self._told(turn, ABORTED, reason))

    def _forget(self, turn: Turn) -> None:
        self._pass_time()
        running = len(self._running)
        if self._running.pop(turn.name, None) is None:
            self._waiting.remove(turn)
            return
        if turn.first_token_at:
            self._rates.first_token(len(turn.context) - turn.cached_tokens, turn.first_token_at - turn.sent_at)
        if later := len(turn.tokens) - turn.first_tokens:
            self._rates.decoded((turn.last_token_at - turn.first_token_at) / later, running)

    def _told(self, turn: Turn, finish_reason: str, reason: str = "") -> Done:
        spans = (VersionSpan(0, len(turn.tokens), turn.version),) if turn.tokens else ()
        return Done(
            name=turn.name,
            tokens=pack_tokens(turn.tokens),
            logprobs=pack_logprobs(turn.logprobs),
            finish_reason=finish_reason,
            spans=spans,
            context_tokens=len(turn.context),
            cached_tokens=turn.cached_tokens,
            scheduled_at=turn.sent_at,
            first_token_at=turn.first_token_at,
            finished_at=time.time(),
            device_seconds=self._share - turn.share_before if turn.sent_at else 0.0,
            reason=reason,
        )

    def _pass_time(self) -> None:
        """Seconds are shared by the turns that were at the endpoint then; who else was there is not known."""
        now = time.monotonic()
        self._share += (now - self._shared_at) / max(1, len(self._running))
        self._shared_at = now

    # Versions

    async def _prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        try:
            await self._versions.prepare(version, tensors)
        except SwapRefused as refusal:
            self._reports.say(NotTaken(version, str(refusal)))
        else:
            self._reports.say(Prepared(version))

    async def _serve(self, version: int) -> None:
        """Raises EngineBroken when nothing proven serves."""
        began = time.perf_counter()
        try:
            await self._versions.serve()
        except SwapRefused as refusal:
            self._reports.say(NotTaken(version, str(refusal)))
        else:
            self._reports.say(Serving(version, time.perf_counter() - began))

    # How it stands

    async def _beat(self) -> None:
        while True:
            loads = self._versions.loads
            try:
                if not loads % 2:
                    await self._api.alive()
            except EngineBroken:
                if loads == self._versions.loads:  # else it was loading, and answered nobody
                    raise
            self._reports.flush()
            self._reports.say(self._tick())
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _keep_pace(self) -> None:
        before, loads = await self._api.histograms(), self._versions.loads
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            after = await self._api.histograms()
            others_late = any(
                late(before.get(kind, {}), after[kind], budget)
                for kind, budget in self._budgets.items()
                if kind in after
            )
            window = self._window(others_late)
            if loads == self._versions.loads and not loads % 2:  # what waited for a load says nothing of turns
                self._hold_to(self._pace.see(window, time.monotonic()))
            before, loads = after, self._versions.loads

    def _window(self, others_late: bool) -> Window:
        """What was seen since the window before; a token that has not come yet is as late as it is now."""
        now, ttft, tpot = time.time(), self._ttft, []
        for turn in self._running.values():
            if not turn.tokens:
                ttft.append(now - turn.sent_at)
                continue
            new = len(turn.tokens) - turn.counted
            tpot.append((turn.last_token_at - turn.counted_at) / new if new else now - turn.counted_at)
            if new:
                turn.counted, turn.counted_at = len(turn.tokens), turn.last_token_at
        full, self._was_full, self._ttft = self._was_full, False, []
        return Window(ttft, tpot, full, others_late)

    def _hold_to(self, limit: int) -> None:
        """Turns beyond the limit go back, those with the least progress first."""
        running = sorted(self._running.values(), key=lambda turn: len(turn.tokens), reverse=True)
        surplus = [*running[limit:], *list(self._waiting)[max(0, limit - len(running)) :]]
        for turn in surplus:
            self._give_back(turn, KEEPS_LATENCY)
        if surplus:
            self._reports.say(self._tick())  # that is told at once
        self._send()

    def _tick(self) -> Tick:
        turns = [*self._running.values(), *self._waiting]
        held = sum(len(turn.context) + len(turn.tokens) for turn in turns)
        return Tick(
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
            most_turns=self._pace.limit,
            seeded=False,
        )
