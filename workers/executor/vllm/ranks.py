"""An engine on several ranks: its scheduler is in this process, each rank of the model in a process of its own.

Keeps true
- All ranks answer a call before the next call. A call that fails on one rank has failed.
- A version is activated in two phases: no rank serves it before all ranks have staged it. If a rank refuses in the
  second phase, all ranks serve the version before.
- A rank that fails in a step ends (`rank_worker`), and the engine's process ends with a rank.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig

from rose.schemas.errors import RoseError, describe_error
from rose.topics.processes import start_thread
from rose.workers.executor.ipc.engine_client import StagedTensors
from rose.workers.executor.ipc.messages import TensorLayout
from rose.workers.executor.ipc.rank_failures import record_failure, recorded_failures
from rose.workers.executor.vllm.engine_core import BackendWeights
from rose.workers.executor.vllm.model_runner import patch_runner
from rose.workers.executor.vllm.types import EngineBroken, EngineStartError, SwapRefused, block_bytes
from rose.workers.executor.vllm.weights import PolicyWeights, check_version, require_all_read

WORKER_CLASS = "rose.workers.executor.vllm.rank_worker.RankWorker"


class Answer(NamedTuple):
    """A rank's answer to a call."""

    succeeded: bool
    value: Any
    """The result, or the error text."""
    refused: bool = False
    """Whether the error is a SwapRefused: the rank serves the old version."""


class RankFailed(RoseError):
    """A call failed on at least one rank."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        """`refused`: whether every rank that failed has refused, and serves the old version."""
        super().__init__(message)
        self.refused = refused


class RankCalls(Protocol):
    """Calls methods on all ranks of one model."""

    def call(self, name: str, *arguments: Any) -> Sequence[Any]:
        """Call a method on each rank; return the results by rank. Raises RankFailed."""


def answer_to(call: Callable[..., Any], *arguments: Any) -> Answer:
    """Call a function on a rank. Raises nothing."""
    try:
        return Answer(True, call(*arguments))
    except RoseError as error:
        return Answer(False, str(error), isinstance(error, SwapRefused))
    except Exception as error:  # noqa: BLE001  the engine's process decides what an error ends
        return Answer(False, describe_error(error))


def require_success(answers: Sequence[Answer]) -> Sequence[Any]:
    """Return the results of a call, by rank. Raises RankFailed."""
    failed = {rank: str(answer.value) for rank, answer in enumerate(answers) if not answer.succeeded}
    if not failed:
        return [answer.value for answer in answers]
    if len(failed) > 1:  # a log line is cut after a first long sentence: every rank must come before that
        failed = {rank: text.partition(". ")[0] for rank, text in failed.items()}
    everywhere = len(failed) == len(answers) > 1 and len(set(failed.values())) == 1
    by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    raise RankFailed(
        f"every rank: {failed[0]}" if everywhere else by_rank,
        refused=all(answer.succeeded or answer.refused for answer in answers),
    )


class RankPolicy:
    """The policy on one rank: its shard of the serving version, and of the version that is staged."""

    def __init__(self, worker: Any, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Patch the loaded model of vLLM's `worker`. `shapes`: shapes of the whole model's tensors."""
        patch_runner(worker.model_runner)
        self._weights = PolicyWeights(worker, folder, shapes)
        self._version: dict[str, Tensor] = {}
        """The version that is being staged or is staged: views of the weight buffer."""
        self._pieces: Iterator[None] = iter(())
        """The pieces of staging `_version`."""

    def allocate_spare(self) -> dict[str, int]:
        """Allocate the memory in which a version is staged: see `PolicyWeights.prove_writer`."""
        return self._weights.prove_writer()

    def stage(self, file: str, layout: Sequence[TensorLayout], names: Sequence[str]) -> None:
        """Start to stage a version from the weight buffer at path `file`."""
        descriptor = os.open(file, os.O_RDWR)
        try:
            staged = self._weights.mapped(StagedTensors(descriptor, layout))
        finally:
            os.close(descriptor)
        self._version = {name: staged[name] for name in names}
        self._pieces = self._weights.stage(self._version)

    def continue_staging(self) -> bool:
        """Do one piece of staging. Return whether the version is staged. Raises SwapRefused."""
        return next(self._pieces, self) is self

    def activate(self) -> None:
        """Serve the staged version from the next step on."""
        version, self._version = self._version, {}
        self._weights.activate(version)

    def restore(self) -> None:
        """Serve the version before again, if this rank has activated the staged version. Raises EngineBroken."""
        self._weights.restore()


class RankWeights:
    """The weights of all ranks. See `engine_core.BackendWeights`."""

    def __init__(
        self, ranks: RankCalls, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """`shapes`: shapes of the whole model's tensors. `dtype`: the engine's element type."""
        self._ranks = ranks
        self._folder = folder
        self._shapes = shapes
        self._dtype = dtype
        self._source: StagedTensors | None = None

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> Generator[None, None, dict[str, Tensor]]:
        """Check a version in pieces; the generator returns its tensors. Raises SwapRefused."""
        if not isinstance(tensors, StagedTensors):
            raise SwapRefused("ranks take versions out of shared memory alone")
        self._source = tensors
        return check_version(tensors, self._shapes, self._dtype)

    def allocate_spare(self) -> None:
        """Have every rank allocate the memory in which a version is staged. Raises EngineStartError."""
        try:
            by_rank = self._ranks.call("allocate_spare")
        except RankFailed as failed:
            raise EngineStartError(str(failed)) from failed
        read: Counter[str] = Counter()
        for elements in by_rank:
            read.update(elements)
        if read:
            require_all_read(self._folder, self._shapes, read)

    def stage(self, version: dict[str, Tensor]) -> Iterator[None]:
        """Stage the version. A piece is one piece on each rank."""
        source = self._source
        assert source is not None
        try:
            buffer = f"/proc/{os.getpid()}/fd/{source.descriptor}"
            self._ranks.call("stage", buffer, list(source.layout), sorted(version))
            yield
            while not all(self._ranks.call("continue_staging")):
                yield
        except RankFailed as failed:
            raise SwapRefused(str(failed)) from failed

    def activate(self, version: dict[str, Tensor]) -> None:
        """Have every rank serve the staged version, or the version before again. Raises SwapRefused or EngineBroken."""
        try:
            self._ranks.call("activate")
        except RankFailed as failed:
            if not failed.refused:
                raise EngineBroken(str(failed)) from failed
            try:
                self._ranks.call("restore")
            except RankFailed as again:
                raise EngineBroken(f"{failed}, and a rank could not undo its swap: {again}") from again
            raise SwapRefused(str(failed)) from failed


class RanksBackend:
    """Processes of this engine, one for each rank. See `engine_core.ModelBackend`.

    Only for a process of its own: the process ends if a rank's process ends.
    """

    def __init__(self, ranks: int) -> None:
        """`ranks`: vLLM's tensor-parallel size, 2 or more."""
        self.ranks = ranks
        self.engine_arguments: Mapping[str, Any] = {
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "mp",
            "worker_cls": WORKER_CLASS,
        }
        self._executor: MultiprocExecutor | None = None

    def make_executor(self, config: VllmConfig) -> Executor:
        """Start the ranks, which load the model. Raises EngineStartError, and what vLLM raises."""
        try:
            executor = self._executor = MultiprocExecutor(config, monitor_workers=False)
        except Exception as error:
            if failures := recorded_failures(Path(tempfile.gettempdir()), os.getpid()):
                raise EngineStartError(f"vLLM does not start with {config.model_config.model}: {failures}") from error
            raise
        start_thread(partial(_end_with_a_rank, executor), name="rank-monitor")
        return executor

    def call(self, name: str, *arguments: Any) -> Sequence[Any]:
        """Call a method of `rank_worker.RankWorker` on each rank; return the results by rank. Raises RankFailed."""
        assert self._executor is not None
        return require_success(self._executor.collective_rpc("call", args=(name, *arguments)))

    def patch_model(self, core: EngineCore, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> BackendWeights:
        """Prepare the loaded model on every rank. Raises EngineStartError."""
        try:
            self.call("patch_model", folder, dict(shapes))
        except RankFailed as failed:
            raise EngineStartError(str(failed)) from failed
        return RankWeights(self, folder, shapes, core.vllm_config.model_config.dtype)

    def set_layer_hook(self, core: EngineCore, hook: Callable[[], None]) -> None:
        """Do nothing: the model computes in other processes."""

    def block_bytes(self, config: KVCacheConfig) -> int:
        """Return the bytes of one block of the KV cache, summed over the ranks."""
        return self.ranks * block_bytes(config)

    def release(self) -> None:
        """End the ranks."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def _end_with_a_rank(executor: MultiprocExecutor) -> None:
    """Wait for the end of a rank's process, and end this process, which may wait for the rank's answer."""
    ended = wait([worker.proc.sentinel for worker in executor.workers])
    if getattr(executor, "shutting_down", False):
        return
    for rank, worker in enumerate(executor.workers):
        if worker.proc.sentinel in ended:
            worker.proc.join()
            record_failure(os.getpid(), rank, f"its process has ended with status {worker.proc.exitcode}")
    os._exit(1)
