"""vLLM's engine core: its start, and the backend where its model runs (this process, or the ranks of a server).

Keeps true
- The core has no tokenizer, runs no code of a model folder, and reads no pickle but those of its own ranks.
- The core never runs ahead of the weights that it reports: a step computes and samples before it returns.
- The core, with its scheduler and the state of all turns, runs in this process, whatever the environment sets for vLLM.
"""

import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from pydantic import ValidationError
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import CompilationMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.sampler import Sampler

from rose.workers.executor.vllm.model_runner import patch_runner, release_runner
from rose.workers.executor.vllm.types import EngineConfig, EngineStartError, block_bytes, first_line
from rose.workers.executor.vllm.weights import PolicyWeights, keep_unpacked_weights

DIVERGENT_ARCHITECTURES = frozenset({"Gemma3nForCausalLM", "Lfm2ForCausalLM"})
"""Architectures for which logprobs of transformers and of vLLM on a CPU differ by hundredths of a nat or more."""

TRIED_ON_TRANSFORMERS = frozenset(
    {"biogpt", "ctrl", "gemma4_unified_text", "helium", "ministral", "nanochat", "persimmon"}
)
"""Model types that vLLM does not know, for which logprobs agree. vLLM runs these types on the classes of transformers
with an attention of its own, which ignores masks that a class computes."""

PATTERN = "*?["
"""Characters with a special meaning in Python's glob."""

BIDIRECTIONAL_ARCHITECTURES = frozenset({"HrmTextForCausalLM"})
"""Architectures for which vLLM, on any device, lets the tokens of one step attend to each other in both directions
(`PrefillPrefixLMAttention`). Sampled tokens then depend on how steps and prefix cache split the context."""


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

    def block_bytes(self, config: KVCacheConfig) -> int:
        """Return the bytes of one block of the KV cache, summed over the ranks."""
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
    registers_buffers = True
    """Whether weight buffers are registered with CUDA (`weight_mappings`)."""

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
        return PolicyWeights(worker, folder, shapes, registers=self.registers_buffers)

    def set_layer_hook(self, core: EngineCore, hook: Callable[[], None]) -> None:
        """Call `hook` before each attention layer, before the logits and before the sampling."""
        runner = in_process_worker(core).model_runner
        for module in (*runner.get_model().modules(), runner.sampler):
            if isinstance(module, Attention | LogitsProcessor | Sampler):
                module.register_forward_pre_hook(lambda *_: hook())

    def block_bytes(self, config: KVCacheConfig) -> int:
        """Return the bytes of one block of the KV cache."""
        return block_bytes(config)

    def release(self) -> None:
        """Free the model's memory."""
        if self._executor is not None:
            release_runner(self._executor.driver_worker.worker.model_runner)
            self._executor = None


def in_process_worker(core: EngineCore) -> Any:
    """Return the only worker of a core whose model is in this process."""
    return core.model_executor.driver_worker.worker


class StepScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which also records the number of tokens of the newest step."""

    scheduled_tokens = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, and note how many tokens it has."""
        output = super().schedule(throttle_prefills)
        self.scheduled_tokens = output.total_num_scheduled_tokens
        return output


class QuietCore(EngineCore):  # type: ignore[misc]
    """vLLM's core without its long log message for a failed step, which the caller reports.

    In the log of a lending server the message would look like a failure of serving.
    """

    def log_error_detail(self, scheduler_output: SchedulerOutput) -> AbstractContextManager[None]:
        """Log no details of a failed step: they contain prompts."""
        return nullcontext()


class _SeenModules:
    """Stands in for `sys` in vLLM's search for kernels: shows all modules but llvmlite's."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if not name.startswith("llvmlite")}


@contextmanager
def hide_llvmlite() -> Iterator[None]:
    """Hide llvmlite's modules from vLLM while it starts.

    vLLM reads `__dict__` of every object of every module. llvmlite's library handle returns a C function for any name,
    which would crash vLLM. The codec imports llvmlite through numba.
    """
    dispatcher.sys = _SeenModules()
    try:
        yield
    finally:
        dispatcher.sys = sys


def start_core(config: EngineConfig, backend: ModelBackend) -> EngineCore:
    """Return a core that is ready to step. Raises EngineStartError."""
    if config.step_tokens < config.max_running:
        what = f"executor.step_tokens ({config.step_tokens}) is less than executor.max_turns ({config.max_running})"
        raise EngineStartError(f"{what}: a step must hold one token of every running turn")
    if any(letter in PATTERN for letter in str(config.model_folder)):
        what = f"its path has one of the letters {PATTERN}, and vLLM takes it for a pattern"
        raise EngineStartError(f"vLLM finds no weights in {config.model_folder}: {what}: move the folder")
    try:
        with keep_unpacked_weights(), hide_llvmlite():
            vllm_config = EngineArgs(**_arguments(config, backend)).create_engine_config()
            _refuse_bidirectional(vllm_config)
            _refuse_other_class(vllm_config)
            _refuse_untried(vllm_config)
            _refuse_ranks(vllm_config)
            if current_platform.is_cpu():
                _refuse_compilation(vllm_config)
                _refuse_divergent(vllm_config)
                _refuse_heads(vllm_config)
            return QuietCore(vllm_config, backend.make_executor, log_stats=False)
    except EngineStartError:
        backend.release()
        raise
    except Exception as error:  # vLLM raises any type of exception for an unsupported model or setting
        backend.release()
        fix = ""
        if any(text in str(error) for text in ("KV cache", "cache blocks")) and config.kv_cache_bytes is not None:
            fix = f"; executor.kv_cache_bytes is {config.kv_cache_bytes}: raise it, or lower executor.max_model_len"
        raise EngineStartError(f"vLLM does not start with {config.model_folder}: {_error_text(error)}{fix}") from error


def _refuse_bidirectional(config: VllmConfig) -> None:
    model = config.model_config
    if found := BIDIRECTIONAL_ARCHITECTURES.intersection(model.architectures):
        what = f"vLLM lets tokens of a context see later ones for {min(found)}, and a trainer does not"
        raise EngineStartError(f"{model.model} cannot be trained on what vLLM samples: {what}")


def _refuse_other_class(config: VllmConfig) -> None:
    """Refuse a model folder for which vLLM and transformers choose different classes.

    vLLM uses `architectures` of config.json, transformers `model_type`. Raises EngineStartError.
    """
    model = config.model_config
    kind = model.hf_config.model_type
    trained = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if trained not in ModelRegistry.get_supported_archs():
        return
    ours, theirs = (ModelRegistry.resolve_model_cls(each, model)[0] for each in (model.architectures, [trained]))
    if not (issubclass(ours, theirs) or issubclass(theirs, ours)):
        what = f"its config.json names the class {model.architectures[0]} and the type {kind}, which is {trained}'s"
        raise EngineStartError(f"{model.model} cannot be trained on what vLLM samples: {what}: correct one of them")


def _refuse_untried(config: VllmConfig) -> None:
    """Refuse a model type that vLLM does not know, unless the type was tried. Raises EngineStartError.

    The class is that of the trainer. A folder may name another class in `architectures`.
    """
    model, kind = config.model_config, config.model_config.hf_config.model_type
    trained = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, model.architectures[0])
    if trained not in ModelRegistry.get_supported_archs() and not (
        kind in TRIED_ON_TRANSFORMERS and model.architectures == [trained]
    ):
        known = ", ".join(sorted(TRIED_ON_TRANSFORMERS))
        what = f"vLLM does not know {kind}, and its replacement may compute other logprobs than transformers"
        raise EngineStartError(f"{model.model} cannot be trained on what vLLM samples: {what} (tried: {known})")


def _refuse_ranks(config: VllmConfig) -> None:
    """Refuse what several ranks would compute otherwise than one. Raises EngineStartError."""
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return
    # Without a plan every rank holds all heads, and writes past the end of a cache that has room for its share.
    native = set(model.architectures) <= set(ModelRegistry.get_supported_archs())
    if not native and not getattr(model.hf_text_config, "base_model_tp_plan", None):
        what = f"transformers has no plan that divides {model.hf_config.model_type} over ranks"
        raise EngineStartError(f"{model.model} runs on one rank only: {what}: leave tensor_parallel_size out")
    if current_platform.is_cpu() and config.cache_config.kv_cache_memory_bytes is None:
        what = "on a CPU each rank would take gpu_memory_utilization of the memory"
        raise EngineStartError(f"{what}: leave gpu_memory_utilization out of executor.vllm, or take one rank")


def _refuse_compilation(config: VllmConfig) -> None:
    """Refuse compilation on a CPU: compiled code keeps the packed weights of its version. Raises EngineStartError."""
    if config.compilation_config.mode is not CompilationMode.NONE:
        what = "an engine on a CPU takes new weights only without compilation"
        raise EngineStartError(f"{what}: leave enforce_eager out of executor.vllm, or set it to true")


def _refuse_divergent(config: VllmConfig) -> None:
    model = config.model_config
    if unlike := DIVERGENT_ARCHITECTURES.intersection(model.architectures):
        what = f"vLLM computes other logprobs than transformers for {min(unlike)}"
        raise EngineStartError(f"{model.model} cannot be trained on what an engine on a CPU samples: {what}")


def _refuse_heads(config: VllmConfig) -> None:
    """Refuse an unsupported head size, for which vLLM on a CPU would raise only in the first step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, sizes = config.model_config, CPUAttentionBackend.get_supported_head_sizes()
    if not (model.is_attention_free or model.use_mla or model.get_head_size() in sizes):
        known = ", ".join(map(str, sizes))
        what = f"{model.model} has attention heads of {model.get_head_size()} elements"
        raise EngineStartError(f"{what}: on a CPU vLLM computes heads of {known}")


def _error_text(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        error = ValueError(": ".join([*map(str, first["loc"]), first["msg"]]))
    return first_line(error)


def _arguments(config: EngineConfig, backend: ModelBackend) -> dict[str, Any]:
    return {
        "model": str(config.model_folder),
        "config_format": "hf",  # the default prefers params.json, which the trainer and the checks do not read
        "runner": "generate",
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": config.step_tokens,
        "kv_cache_memory_bytes": None if config.kv_cache_bytes is None else config.kv_cache_bytes // backend.ranks,
        "block_size": config.block_tokens,
        "seed": secrets.randbits(31) if config.seed is None else config.seed,
        "enforce_eager": current_platform.is_cpu(),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "scheduler_cls": StepScheduler,
        "async_scheduling": False,  # a step that runs ahead would sample with weights that have been replaced
        "disable_log_stats": True,
        **backend.engine_arguments,
        **config.vllm_arguments,
        "trust_remote_code": False,
    }
