"""The engine's side of an executor: it is ticked, and does one bounded piece of work a tick.

Keeps true
- A tick takes orders in, does at most one piece of preparing a version and at most one engine step, and reports.
  Nothing else runs in this process: no bus, no records, no thread.
- A policy version is swapped in between two steps, whole or not at all.
- Reports never wait for their reader: what does not fit on the line is kept and sent later, in order.
- Ticks make the heartbeats: an engine that hangs says nothing.
"""

import mmap
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from schemas.arrays import pack_logprobs, pack_tokens, unpack_tokens
from schemas.errors import RecordError
from workers.executor.line import Line, LineFull
from workers.executor.step_cost import StepCost
from workers.executor.vllm.engine import Engine
from workers.executor.vllm.types import EngineRefusal, Finished, SwapRefused
from workers.executor.words import (
    ORDERS,
    Done,
    NotTaken,
    Prepare,
    Prepared,
    Refused,
    Report,
    Serve,
    Serving,
    Take,
    Tick,
    encode,
)


class EngineHost:
    """One engine with its two lines. Whoever owns the thread calls `tick`."""

    def __init__(
        self, engine: Engine, orders: Line, reports: Line, shelves: Sequence[int], *, tick_seconds: float
    ) -> None:
        """`shelves`: descriptors of the shared memory that versions lie in. `tick_seconds`: between two `Tick`s."""
        self._engine = engine
        self._orders = orders
        self._reports = reports
        self._shelves = shelves
        self._tick_seconds = tick_seconds
        self._unsent: deque[bytes] = deque()
        self._cost = StepCost(base_seconds=0.01, token_seconds=0.0001)
        self._share = 0.0
        """Running sum of seconds a turn."""
        self._share_before: dict[str, float] = {}
        self._preparing: tuple[int, Iterator[None]] | None = None
        self._prepare_seconds = 0.0
        self._swap_seconds = 0.0
        self._next_tick = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return bool(self._orders) or bool(self._unsent) or self._preparing is not None or len(self._engine) > 0

    def tick(self) -> None:
        """One bounded piece of work. Raises EngineBroken."""
        self._send_rest()
        for order in self._orders.read():
            self._obey(ORDERS.decode(order))
        if self._preparing is not None:
            self._prepare_on()
        if len(self._engine):
            self._step()
        self.beat()

    def beat(self) -> None:
        """Say how the engine stands, if it is time for that: all that may be done where a step may not."""
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + self._tick_seconds
            self._tell_load()

    def leave(self) -> None:
        """Whoever gave the orders is gone: let go of the turns; the engine may have another host."""
        for name in self._share_before:
            self._engine.abort(name)

    def _obey(self, order: Take | Prepare | Serve) -> None:
        match order:
            case Take():
                self._take(order)
            case Prepare():
                version = ((name, tensor) for name, tensor in self._tensors(order))
                self._preparing, self._prepare_seconds = (order.version, self._engine.preparing(version)), 0.0
            case Serve():
                self._serve(order.version)

    def _take(self, order: Take) -> None:
        try:
            context = unpack_tokens(order.context)
            self._engine.add(order.name, context, order.sampling, policy_version=order.version)
        except (EngineRefusal, RecordError) as refusal:
            self._tell(Refused(order.name, str(refusal)))
        else:
            self._share_before[order.name] = self._share

    def _tensors(self, order: Prepare) -> Iterator[tuple[str, Tensor]]:
        """Over the shelf's own memory, which stays as it is until another version is prepared there."""
        shelf = mmap.mmap(self._shelves[order.shelf], 0)
        for name, dtype, shape, begin in order.tensors:
            kind: torch.dtype = getattr(torch, dtype)
            elements = 1
            for size in shape:
                elements *= size
            yield name, torch.frombuffer(shelf, dtype=kind, count=elements, offset=begin).view(shape)

    def _prepare_on(self) -> None:
        assert self._preparing is not None
        version, pieces = self._preparing
        began = time.perf_counter()
        try:
            next(pieces)
        except StopIteration:
            self._preparing = None
            self._tell(Prepared(version))
        except SwapRefused as refusal:
            self._preparing = None
            self._tell(NotTaken(version, str(refusal)))
        self._prepare_seconds += time.perf_counter() - began

    def _serve(self, version: int) -> None:
        try:
            seconds = self._engine.serve_prepared(version)
        except SwapRefused as refusal:
            self._tell(NotTaken(version, str(refusal)))
        else:
            self._swap_seconds = self._prepare_seconds + seconds
            self._tell(Serving(version, self._swap_seconds))

    def _step(self) -> None:
        step = self._engine.step()
        self._share += step.seconds / max(1, len(self._share_before))
        if step.tokens:
            self._cost.observe(step.tokens, step.seconds)
        for finished in step.finished:
            self._tell(self._done(finished))

    def _done(self, finished: Finished) -> Done:
        return Done(
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
            device_seconds=self._share - self._share_before.pop(finished.key),
        )

    def _tell_load(self) -> None:
        load = self._engine.load()
        self._tell(
            Tick(
                version=self._engine.version,
                device=load.device,
                running=load.running,
                waiting=load.waiting,
                kv_bytes_total=load.kv_bytes_total,
                kv_bytes_free=load.kv_bytes_free,
                kv_bytes_per_token=load.kv_bytes_per_token,
                prefill_tokens_per_second=self._cost.prefill_tokens_per_second,
                decode_tokens_per_second=self._cost.decode_tokens_per_second(load.running),
                swap_seconds=self._swap_seconds,
            )
        )

    def _tell(self, report: Report) -> None:
        self._unsent.append(encode(report))
        self._send_rest()

    def _send_rest(self) -> None:
        while self._unsent:
            try:
                self._reports.write(self._unsent[0])
            except LineFull:
                return
            self._unsent.popleft()
