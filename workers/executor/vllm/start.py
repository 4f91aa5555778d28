"""Starting vLLM's engine core in this process.

Keeps true
- The core has no tokenizer, reads no pickle, and never runs ahead of the weights it reports: a step computes and
  samples before it returns.
- It runs in this process, whatever the environment says to vLLM.
"""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from workers.executor.vllm.cpu_runner import fit_cpu_runner
from workers.executor.vllm.seeds import draw_by_position
from workers.executor.vllm.types import EngineConfig, EngineStartError
from workers.executor.vllm.weights import plain_weights_kept


class StepScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which also remembers how many tokens it scheduled last."""

    scheduled_tokens = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        self.scheduled_tokens = output.total_num_scheduled_tokens
        return output


class InProcess(UniProcExecutor):  # type: ignore[misc]
    """The model runs in this process, by a name that vLLM does not know: a CPU would turn its own into a process."""


class _SeenModules:
    """`sys` as vLLM's search for kernels sees it."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if not name.startswith("llvmlite")}


@contextmanager
def llvmlite_unseen() -> Iterator[None]:
    """While vLLM starts: it asks every object of every module for its `__dict__`, and llvmlite's library handle, which
    answers to any name with a C function, would end it. The codec has llvmlite loaded, by way of numba.
    """
    dispatcher.sys = _SeenModules()
    try:
        yield
    finally:
        dispatcher.sys = sys


def start_core(config: EngineConfig) -> EngineCore:
    """A core that is ready to step. Raises EngineStartError."""
    if config.step_tokens < config.max_running:
        what = f"step_tokens ({config.step_tokens}) is less than max_running ({config.max_running})"
        raise EngineStartError(f"{what}: a step must hold one token of every running turn")
    try:
        with plain_weights_kept(), llvmlite_unseen():
            vllm_config = EngineArgs(**_arguments(config)).create_engine_config()
            core = EngineCore(vllm_config, InProcess, log_stats=False)
    except Exception as error:  # vLLM answers a model or a setting that it cannot take with any exception at all
        raise EngineStartError(f"vLLM does not start with {config.model_folder}: {_first_line(error)}") from error
    runner = worker_of(core).model_runner
    fit_cpu_runner(runner)
    draw_by_position(runner)
    _ask_for_tiles()
    return core


def _ask_for_tiles() -> None:
    """vLLM's bfloat16 attention uses AMX tiles on a CPU that has them, but asks the kernel for them nowhere.

    A process that has not asked ends in an illegal instruction; torch asks in its larger products only, so what a short
    first turn did was chance.
    """
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _first_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = ": ".join([*map(str, first["loc"]), first["msg"]])
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def worker_of(core: EngineCore) -> Any:
    """The one worker, which lives in this process."""
    return core.model_executor.driver_worker.worker


def release(core: EngineCore) -> None:
    """Let go of the model and the KV cache.

    Not vLLM's own shutdown: that also ends process groups, forgets workspaces and thaws the garbage collector's frozen
    heap, all of which another engine in the process may rely on.
    """
    runner = worker_of(core).model_runner
    layers = runner.compilation_config.static_forward_context
    for layer in layers.values():
        layer.kv_cache = None
    layers.clear()
    runner.kv_caches.clear()
    runner.attn_groups.clear()
    runner.model = None
    core.structured_output_manager.clear_backend()
    core.scheduler.shutdown()


def _arguments(config: EngineConfig) -> dict[str, Any]:
    return {
        "model": str(config.model_folder),
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": config.step_tokens,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "block_size": config.block_tokens,
        "seed": secrets.randbits(31) if config.seed is None else config.seed,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "scheduler_cls": StepScheduler,
        "async_scheduling": False,  # a step that runs ahead would sample with weights that were swapped meanwhile
        "distributed_executor_backend": InProcess,
        "disable_log_stats": True,
        **config.vllm_arguments,
    }
