"""The guest of a tensor-parallel server, as the serving loop drives it: its scheduler here, its ranks in the workers.

Keeps true
- Only the loop's thread speaks to serving's workers, and only between two steps of serving. What the thread on which a
  guest is built asks of them is asked by the loop, in bounded pieces.
- Every call is answered by all ranks before the loop goes on. What fails on one of them has failed.
- A version is served in two phases: none of the ranks serves it before all of them have prepared it.
"""

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from schemas.errors import RoseError
from workers.executor.slabs import Lying
from workers.executor.vllm.place import Weights
from workers.executor.vllm.types import EngineBroken, EngineStartError, SwapRefused
from workers.executor.vllm.weights import checking
from workers.lender.identity import Identity
from workers.lender.vllm.pieces import rest
from workers.lender.vllm.rank import call


class RankFailed(RoseError):
    """At least one rank did not do what it was asked for."""


@dataclass(slots=True)
class _Asked:
    """By the thread on which a guest is built."""

    name: str
    arguments: tuple[Any, ...]
    begun: bool = False
    over: bool = False
    returned: Sequence[Any] = ()
    error: Exception | None = None


class Ranks:
    """All of one server's. Made, and for the most part used, by the loop's thread."""

    def __init__(self, executor: Executor, size: int) -> None:
        """`executor` is serving's, with so many workers."""
        self.size = size
        self._executor = executor
        self._loop = threading.get_ident()
        self._asked: _Asked | None = None
        self._pieces, self._longest_seconds = 0, 0.0

    def processes(self, *, watched: bool) -> Sequence[Identity]:
        """Asked once, before serving begins: it has each import what it may need. `watched`: by a keeper."""
        return self._ask("process", watched)

    def ask(self, name: str, *arguments: Any) -> Sequence[Any]:
        """Have each do what `rank.Rank` calls so; what they returned, in order. Raises RankFailed."""
        if threading.get_ident() == self._loop:
            return self._ask(name, *arguments)
        asked = self._asked = _Asked(name, arguments)
        while not asked.over:
            rest()
        if asked.error is not None:
            raise asked.error
        return asked.returned

    def _ask(self, name: str, *arguments: Any) -> Sequence[Any]:
        answers = self._executor.collective_rpc(call, args=(name, *arguments))
        _check(["" if well else value for well, value in answers])
        return [value for _, value in answers]

    @property
    def asked(self) -> bool:
        """Whether the thread on which a guest is built waits for them."""
        return self._asked is not None

    def go_on(self, seconds: float) -> None:
        """Go on for so long with what it waits for."""
        asked, began = self._asked, perf_counter()
        assert asked is not None
        try:
            if not asked.begun:
                asked.begun = True
                self._ask("begin", asked.name, *asked.arguments)
            answers = self._ask("go_on", seconds)
            asked.over = all(done for done, _, _ in answers)
            asked.returned = [value for _, _, value in answers]
            if asked.over:
                _check([wrong for _, wrong, _ in answers])
        except Exception as error:  # noqa: BLE001  it is that thread's to know
            asked.error, asked.over = error, True
        if asked.over:
            self._asked = None
        self._pieces += 1
        self._longest_seconds = max(self._longest_seconds, perf_counter() - began)

    def told(self) -> tuple[int, float]:
        """Pieces since this was asked last, and the longest of them, as the loop waited for it."""
        told = self._pieces, self._longest_seconds
        self._pieces, self._longest_seconds = 0, 0.0
        return told


def _check(wrong: Sequence[str]) -> None:
    """What went wrong on each rank, if something did."""
    failed = [f"rank {rank}: {what}" for rank, what in enumerate(wrong) if what]
    if failed:
        raise RankFailed("; ".join(failed))


class RankExecutor(Executor):  # type: ignore[misc]
    """What vLLM's engine core of the guest takes for its executor."""

    def __init__(self, config: VllmConfig, ranks: Ranks) -> None:
        self._ranks = ranks
        self._scheduled: SchedulerOutput | None = None
        super().__init__(config)

    def _init_executor(self) -> None:
        self._ranks.ask("join")
        self._ranks.ask("load", self.vllm_config)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        returned = self._ranks.ask("run", method, args, kwargs or {})
        return _over(returned) if non_block else returned

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Nothing yet where tokens are to be computed: both halves of a step are one call."""
        if scheduler_output.total_num_scheduled_tokens:
            self._scheduled = scheduler_output
            output = None
        else:
            output = self._ranks.ask("step", scheduler_output, None)[0]
        return _over(output) if non_block else output

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        output = self._ranks.ask("step", self._scheduled, grammar_output)[0]
        return _over(output) if non_block else output

    def check_health(self) -> None:
        """Serving's own executor looks after the processes."""


def _over(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class RankWeights:
    """The weights of all ranks. See `place.Weights`."""

    def __init__(self, ranks: Ranks, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._ranks = ranks
        self._shapes = shapes
        self._dtype = dtype
        self._source: Lying | None = None

    def checking(self, tensors: Iterable[tuple[str, Tensor]]) -> Generator[None, None, dict[str, Tensor]]:
        if not isinstance(tensors, Lying):
            raise SwapRefused("ranks take versions out of shared memory alone")
        self._source = tensors
        return checking(tensors, self._shapes, self._dtype)

    def hold_spare(self) -> None:
        self._ranks.ask("hold_spare")

    def preparing(self, version: dict[str, Tensor]) -> Iterator[None]:
        """A piece of it is one on each rank."""
        source = self._source
        assert source is not None
        try:
            slab = f"/proc/{os.getpid()}/fd/{source.slab}"
            self._ranks.ask("prepare", slab, list(source.layout), sorted(version))
            yield
            while not all(self._ranks.ask("prepare_on")):
                yield
        except RankFailed as failed:
            raise SwapRefused(str(failed)) from failed

    def apply(self, version: dict[str, Tensor]) -> None:
        try:
            self._ranks.ask("apply")
        except RankFailed as failed:  # some may serve it, and others not
            raise EngineBroken(str(failed)) from failed


class OnRanks:
    """All of a server's workers. See `place.Place`."""

    def __init__(self, ranks: Ranks, log: Logger) -> None:
        self.ranks = ranks.size
        self.arguments: Mapping[str, Any] = {"tensor_parallel_size": ranks.size, "distributed_executor_backend": "mp"}
        self._ranks = ranks
        self._log = log

    def executor(self, config: VllmConfig) -> Executor:
        return RankExecutor(config, self._ranks)

    def fit(self, core: EngineCore, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
        try:
            held = self._ranks.ask("fit", folder, shapes)
        except RankFailed as failed:
            raise EngineStartError(str(failed)) from failed
        self._log.info("rose: the guest's parameters by rank: %s", ", ".join(map(str, held)))
        return RankWeights(self._ranks, shapes, core.vllm_config.model_config.dtype)

    def between_layers(self, core: EngineCore, call: Callable[[], None]) -> None:
        pass

    def cache_begins(self, core: EngineCore) -> None:
        return None

    def release(self) -> None:
        self._ranks.ask("release")
