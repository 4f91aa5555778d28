"""Where an engine's model computes: in this process, or in those of a server's ranks.

Keeps true: the scheduler, and all that an engine keeps of its turns, is in this process in any case.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample.sampler import Sampler

from rose.workers.executor.vllm.cpu_runner import patch_cpu_runner
from rose.workers.executor.vllm.seeded_sampling import draw_by_position
from rose.workers.executor.vllm.weights import PolicyWeights


class BackendWeights(Protocol):
    """An engine's; `weights.PolicyWeights` says what each does."""

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> Generator[None, None, dict[str, Tensor]]: ...
    def allocate_spare(self) -> None: ...
    def stage(self, version: dict[str, Tensor]) -> Iterator[None]: ...
    def activate(self, version: dict[str, Tensor]) -> None: ...


class ModelBackend(Protocol):
    """Of one engine."""

    ranks: int
    """Processes, each of which holds an equal share of the KV cache."""
    engine_arguments: Mapping[str, Any]
    """Of `vllm.EngineArgs`: what tells vLLM of it."""

    def make_executor(self, config: VllmConfig) -> Executor:
        """What carries vLLM's calls there; it has loaded the model when it returns."""
        ...

    def patch_model(self, core: EngineCore, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> BackendWeights:
        """Make the model that was started ROSE's; who replaces its weights."""
        ...

    def set_layer_hook(self, core: EngineCore, hook: Callable[[], None]) -> None:
        """Have this called within each step: before each layer's attention, before the logits and before the sampling.
        Nowhere if the model is in other processes.
        """
        ...

    def cache_address(self, core: EngineCore) -> int | None:
        """The address of the KV cache; None where it is another process's."""
        ...

    def release(self) -> None:
        """Let go of the model and the KV cache, as far as there are any."""
        ...


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """The model runs in this process, by a name that vLLM does not know: a CPU would turn its own into a process."""


class InProcessBackend:
    """This process."""

    ranks = 1
    engine_arguments: Mapping[str, Any] = {"distributed_executor_backend": InProcessExecutor}

    def __init__(self) -> None:
        self._executor: InProcessExecutor | None = None

    def make_executor(self, config: VllmConfig) -> Executor:
        self._executor = InProcessExecutor(config)
        return self._executor

    def patch_model(self, core: EngineCore, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> BackendWeights:
        worker = in_process_worker(core)
        patch_runner(worker.model_runner)
        return PolicyWeights(worker, folder, shapes)

    def set_layer_hook(self, core: EngineCore, hook: Callable[[], None]) -> None:
        runner = in_process_worker(core).model_runner
        for module in (*runner.get_model().modules(), runner.sampler):
            if isinstance(module, Attention | LogitsProcessor | Sampler):
                module.register_forward_pre_hook(lambda *_: hook())

    def cache_address(self, core: EngineCore) -> int | None:
        return kv_cache_address(core)

    def release(self) -> None:
        if self._executor is not None:
            release_runner(self._executor.driver_worker.worker.model_runner)
            self._executor = None


def in_process_worker(core: EngineCore) -> Any:
    """The one worker, which lives in this process."""
    return core.model_executor.driver_worker.worker


def kv_cache_address(core: EngineCore) -> int:
    """Of the KV cache of a core whose one worker lives in this process."""
    address: int = in_process_worker(core).model_runner.kv_caches[0].untyped_storage().data_ptr()
    return address


def patch_runner(runner: Any) -> None:
    """Once its model is loaded."""
    patch_cpu_runner(runner)
    draw_by_position(runner)
    _request_amx_tiles()


def _request_amx_tiles() -> None:
    """vLLM's bfloat16 attention uses AMX tiles on a CPU that has them, but asks the kernel for them nowhere.

    A process that has not asked ends in an illegal instruction; torch asks in its larger products only, so what a short
    first turn did was chance.
    """
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def release_runner(runner: Any) -> None:
    """Of a runner's model and KV cache.

    Not vLLM's own shutdown: that also ends process groups, forgets workspaces and thaws the garbage collector's frozen
    heap, all of which another engine in the process may rely on.
    """
    layers = runner.compilation_config.static_forward_context
    for layer in layers.values():
        layer.kv_cache = None
    layers.clear()
    runner.kv_caches.clear()
    runner.attn_groups.clear()
    runner.model = None
