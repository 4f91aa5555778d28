"""The backend of an engine's model: in this process, or in the processes of a server's ranks.

Keeps true: the scheduler and the state of all turns are in this process in either case.
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
    """The weights of an engine. `weights.PolicyWeights` documents the methods."""

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> Generator[None, None, dict[str, Tensor]]:
        """Check a version in pieces; the generator returns its tensors. Raises SwapRefused."""

    def allocate_spare(self) -> None:
        """Allocate the memory in which a version is staged."""

    def stage(self, version: dict[str, Tensor]) -> Iterator[None]:
        """Prepare a checked version in pieces, while the old version serves."""

    def activate(self, version: dict[str, Tensor]) -> None:
        """Serve the staged version from the next step on."""


class ModelBackend(Protocol):
    """Place where the model of one engine runs."""

    ranks: int
    """Number of processes, each of which holds an equal share of the KV cache."""
    engine_arguments: Mapping[str, Any]
    """Arguments of `vllm.EngineArgs` that select the backend."""

    def make_executor(self, config: VllmConfig) -> Executor:
        """Return vLLM's executor for the backend, with the model loaded."""
        ...

    def patch_model(self, core: EngineCore, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> BackendWeights:
        """Patch the loaded model, and return the object that replaces its weights."""
        ...

    def set_layer_hook(self, core: EngineCore, hook: Callable[[], None]) -> None:
        """Call `hook` within each step: before each layer's attention, before the logits and before the sampling.

        Does nothing if the model is in other processes.
        """
        ...

    def cache_address(self, core: EngineCore) -> int | None:
        """Return the address of the KV cache; None if the cache is in another process."""
        ...

    def release(self) -> None:
        """Free the model and the KV cache, if they exist."""
        ...


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor in this process, as a class of its own: on a CPU vLLM replaces "uni" by a separate process."""


class InProcessBackend:
    """Runs the model in this process."""

    ranks = 1
    engine_arguments: Mapping[str, Any] = {"distributed_executor_backend": InProcessExecutor}

    def __init__(self) -> None:
        self._executor: InProcessExecutor | None = None

    def make_executor(self, config: VllmConfig) -> Executor:
        """Return vLLM's executor for the model. Called once, by the engine."""
        self._executor = InProcessExecutor(config)
        return self._executor

    def patch_model(self, core: EngineCore, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> BackendWeights:
        """Prepare the loaded model for changes of its weights; `shapes`: by Hugging Face name."""
        worker = in_process_worker(core)
        patch_runner(worker.model_runner)
        return PolicyWeights(worker, folder, shapes)

    def set_layer_hook(self, core: EngineCore, hook: Callable[[], None]) -> None:
        """Have `hook` called before each attention layer and before sampling."""
        runner = in_process_worker(core).model_runner
        for module in (*runner.get_model().modules(), runner.sampler):
            if isinstance(module, Attention | LogitsProcessor | Sampler):
                module.register_forward_pre_hook(lambda *_: hook())

    def cache_address(self, core: EngineCore) -> int | None:
        """Return the address of the KV cache in this process; None if it has none."""
        return kv_cache_address(core)

    def release(self) -> None:
        """Free the model's memory."""
        if self._executor is not None:
            release_runner(self._executor.driver_worker.worker.model_runner)
            self._executor = None


def in_process_worker(core: EngineCore) -> Any:
    """Return the only worker of a core whose model is in this process."""
    return core.model_executor.driver_worker.worker


def kv_cache_address(core: EngineCore) -> int:
    """Return the address of the KV cache of a core whose only worker is in this process."""
    address: int = in_process_worker(core).model_runner.kv_caches[0].untyped_storage().data_ptr()
    return address


def patch_runner(runner: Any) -> None:
    """Patch a model runner after its model is loaded."""
    patch_cpu_runner(runner)
    draw_by_position(runner)
    _request_amx_tiles()


def _request_amx_tiles() -> None:
    """Request AMX tiles from the operating system, if the CPU has them.

    vLLM's bfloat16 attention uses the tiles without a request, which ends the process with an illegal instruction.
    torch requests the tiles only in its larger products, so a short first turn would fail at random.
    """
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def release_runner(runner: Any) -> None:
    """Free a runner's model and KV cache.

    vLLM's own shutdown also destroys process groups, frees workspaces and unfreezes the garbage collector's heap, which
    another engine in the process may rely on.
    """
    layers = runner.compilation_config.static_forward_context
    for layer in layers.values():
        layer.kv_cache = None
    layers.clear()
    runner.kv_caches.clear()
    runner.attn_groups.clear()
    runner.model = None
