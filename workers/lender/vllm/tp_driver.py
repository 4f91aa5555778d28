"""Drives the guest of a tensor-parallel server: its scheduler is in this process, its ranks are in serving's workers.

Keeps true
- Only the loop's thread calls serving's workers, and only between two serving steps. The loop makes the calls of the
  build thread too, in bounded pieces.
- All ranks answer a call before the loop continues. A call that fails on one rank has failed.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig

from rose.workers.executor.vllm.engine_core import BackendWeights
from rose.workers.executor.vllm.ranks import Answer, RankFailed, RankWeights, require_success
from rose.workers.executor.vllm.types import EngineStartError
from rose.workers.lender.status_page import ProcessId
from rose.workers.lender.vllm.host_process import yield_slice
from rose.workers.lender.vllm.shared_cache import CacheLayout, SharedCacheExecutor
from rose.workers.lender.vllm.tp_worker import call_worker


@dataclass(slots=True)
class _PendingCall:
    """A call of the build thread, which the loop carries out."""

    name: str
    arguments: tuple[Any, ...]
    started: bool = False
    done: bool = False
    returned: Sequence[Any] = ()
    error: Exception | None = None


class TpDriver:
    """Calls the guest workers on all ranks of one server. Made on the loop's thread."""

    def __init__(self, executor: Executor, size: int) -> None:
        """`executor`: serving's executor, with `size` workers."""
        self.size = size
        self._executor = executor
        self._loop = threading.get_ident()
        self._pending: _PendingCall | None = None
        self._slices, self._longest_seconds = 0, 0.0

    def process_ids(self, *, watched: bool) -> Sequence[ProcessId]:
        """Return the processes of the ranks, which import their modules in this call.

        Call it once, before serving starts. `watched`: whether a watchdog may ask for the stacks of their threads.
        """
        return self._call_all("process_id", watched)

    def call(self, name: str, *arguments: Any) -> Sequence[Any]:
        """Call a method of `tp_worker.GuestWorker` on each rank; return the results by rank. Raises RankFailed."""
        if threading.get_ident() == self._loop:
            return self._call_all(name, *arguments)
        pending = self._pending = _PendingCall(name, arguments)
        while not pending.done:
            yield_slice()
        if pending.error is not None:
            raise pending.error
        return pending.returned

    def _call_all(self, name: str, *arguments: Any) -> Sequence[Any]:
        return require_success(self._executor.collective_rpc(call_worker, args=(name, *arguments)))

    @property
    def has_pending_call(self) -> bool:
        """Whether the build thread waits for a call."""
        return self._pending is not None

    def resume_pending(self, seconds: float) -> None:
        """Continue the pending call of the build thread for `seconds`."""
        pending, began = self._pending, perf_counter()
        assert pending is not None
        try:
            if not pending.started:
                pending.started = True
                self._call_all("begin", pending.name, *pending.arguments)
            answers = self._call_all("resume", seconds)
            pending.done = all(done for done, _, _ in answers)
            pending.returned = [value for _, _, value in answers]
            if pending.done:
                require_success([Answer(not error_text, error_text) for _, error_text, _ in answers])
        except Exception as error:  # noqa: BLE001  raised on the build thread
            pending.error, pending.done = error, True
        if pending.done:
            self._pending = None
        self._slices += 1
        self._longest_seconds = max(self._longest_seconds, perf_counter() - began)

    def take_timings(self) -> tuple[int, float]:
        """Return the number of pieces since the last call, and the longest time that the loop has waited for one."""
        timings = self._slices, self._longest_seconds
        self._slices, self._longest_seconds = 0, 0.0
        return timings


class TpExecutor(SharedCacheExecutor):
    """The executor of the guest's engine core, which calls the ranks."""

    def __init__(self, config: VllmConfig, layout: CacheLayout | None, driver: TpDriver) -> None:
        self.layout = layout
        self._driver = driver
        self._scheduled: SchedulerOutput | None = None
        super().__init__(config)

    def _init_executor(self) -> None:
        self._driver.call("join")
        self._driver.call("load", self.vllm_config)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a method of the guest on every rank, through serving's workers."""
        returned = self._driver.call("run", method, args, kwargs or {})
        return _completed_future(returned) if non_block else returned

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Return None if tokens are to be computed: `sample_tokens` then makes one call for both halves of a step."""
        if scheduler_output.total_num_scheduled_tokens:
            self._scheduled = scheduler_output
            output = None
        else:
            output = self._driver.call("step", scheduler_output, None)[0]
        return _completed_future(output) if non_block else output

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Run the scheduled step on every rank, and return the output of the first."""
        output = self._driver.call("step", self._scheduled, grammar_output)[0]
        return _completed_future(output) if non_block else output

    def share(self, block_tokens: int) -> None:
        """Have every rank make a view of serving's cache."""
        self._driver.call("share_cache", block_tokens)

    def check_health(self) -> None:
        """Do nothing: serving's own executor checks the processes."""


def _completed_future(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class TpBackend:
    """The workers of a tensor-parallel server. See `engine_core.ModelBackend`."""

    def __init__(self, layout: CacheLayout | None, driver: TpDriver, log: Logger) -> None:
        """`layout`: that of serving's cache on each rank."""
        self.ranks = driver.size
        self.engine_arguments: Mapping[str, Any] = {
            "tensor_parallel_size": driver.size,
            "distributed_executor_backend": "mp",
        }
        self._layout = layout
        self._driver = driver
        self._log = log
        self.executor: SharedCacheExecutor | None = None

    def make_executor(self, config: VllmConfig) -> Executor:
        """Return the executor that runs the model on serving's ranks."""
        self.executor = TpExecutor(config, self._layout, self._driver)
        return self.executor

    def patch_model(self, core: EngineCore, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> BackendWeights:
        """Prepare the loaded model on every rank. Raises EngineStartError."""
        try:
            held = self._driver.call("patch_model", folder, shapes)
        except RankFailed as failed:
            raise EngineStartError(str(failed)) from failed
        self._log.info("rose: guest_parameters_loaded rank_parameters=%s", ",".join(map(str, held)))
        return RankWeights(self._driver, folder, shapes, core.vllm_config.model_config.dtype)

    def set_layer_hook(self, core: EngineCore, hook: Callable[[], None]) -> None:
        """Do nothing: the model computes in other processes."""
        pass

    def block_bytes(self, config: KVCacheConfig) -> int:
        """Return the bytes of one block, summed over the ranks: those of serving's block, if the guest has a view."""
        assert self.executor is not None
        return self.ranks * self.executor.block_bytes(config)

    def release(self) -> None:
        """Free the model's memory on every rank."""
        self._driver.call("release")
