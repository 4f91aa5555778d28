"""The private parts of vLLM that the lender relies on, and the check that the installed vLLM still has them.

Keeps true
- A guest is built in a server only if every part below has the source that the lender was written for.
- The check changes nothing in the process except for imports. vLLM's modules for CPUs replace names of torch at their
  import, such as `torch.cuda.Event`. Parts for CPUs are therefore checked only on a CPU, and an observed server is
  checked only for the parts that the observation uses.

The parts are the wrapped methods of the engine-core process, and the names that a guest has its own value of
(`host_process`). The parts of vLLM that the rollout engine itself uses are in `rose.workers.executor.vllm`, and are
covered by its tests.
"""

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from functools import reduce
from multiprocessing import current_process
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCoreProc
from vllm.version import __version_tuple__

LONE_CORE_NAME = "EngineCore"
"""vLLM's process name of an engine core that is the only one of its server. Only the name tells this for a dense model:
the configuration of each of several engine cores says that it is the only one."""


def is_one_of_several(core: EngineCoreProc) -> bool:
    """Whether the server of this engine core has several engine cores."""
    return type(core) is not EngineCoreProc or current_process().name != LONE_CORE_NAME


def guest_error(core: Any) -> str | None:
    """Return why the server of this engine core cannot have a guest; None if it can."""
    config = core.vllm_config
    parallel, model = config.parallel_config, config.model_config
    untried = {
        "a device that is not a CPU": not current_platform.is_cpu(),
        "data parallelism": is_one_of_several(core),
        "pipeline or context parallelism": (
            parallel.world_size != parallel.tensor_parallel_size or parallel.decode_context_parallel_size > 1
        ),
        "expert parallelism": parallel.enable_expert_parallel,
        "ranks on several hosts": parallel.nnodes > 1,
        f"the executor {parallel.distributed_executor_backend}": (
            parallel.distributed_executor_backend not in ("uni", "mp")
        ),
        "async scheduling (--no-async-scheduling turns it off)": config.scheduler_config.async_scheduling,
        "speculative decoding": config.speculative_config is not None,
        "a KV connector (prefill and decode apart)": config.kv_transfer_config is not None,
        "an encoder connector": config.ec_transfer_config is not None,
        "weight transfer": config.weight_transfer_config is not None,
        "LoRA": config.lora_config is not None,
        "sleep mode": model.enable_sleep_mode,
        "fault tolerance": parallel.enable_fault_tolerance,
        "elastic expert parallelism": parallel.enable_elastic_ep,
        "a KV cache of several kinds": len(core.scheduler.kv_cache_config.kv_cache_groups) > 1,
        "a model that does not generate": model.runner_type != "generate",
        "a multimodal model": model.is_multimodal_model,
        "prompts of embeddings": model.enable_prompt_embeds,
        "a diffusion model": model.is_diffusion,
    }
    found = [what for what, holds in untried.items() if holds]
    return f"no guest was tried beside {' or '.join(found)}" if found else None


VERSION = (0, 32)
"""Major and minor version of the supported vLLM."""

CORE = "vllm.v1.engine.core"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
GROUPS = "vllm.distributed.parallel_state"
POOL = "vllm.v1.core.block_pool"
MANAGER = "vllm.v1.core.kv_cache_manager"


@dataclass(frozen=True, slots=True)
class RequiredInternal:
    """One private part of vLLM that the lender relies on."""

    module: str
    name: str
    why: str
    digest: str = ""
    """Digest of the part's source; empty if only its existence matters."""
    observing: bool = False
    """Whether the observation of a server relies on the part too."""
    cpu: bool = False
    """Whether the part is only used on CPUs."""


REQUIRED_INTERNALS = (
    RequiredInternal(
        CORE, "EngineCore.__init__", "loads the plugin; what it sets in the process is kept apart", "a828c07af25a054a"
    ),
    RequiredInternal(
        CORE,
        "EngineCoreProc.run_busy_loop",
        "wrapped: the guest's thread begins, and ends, with the loop",
        "c1f483fe17861424",
        observing=True,
    ),
    RequiredInternal(
        CORE,
        "DPEngineCoreProc.run_busy_loop",
        "wrapped: one of several engine cores is known to the watchdog, and refused",
        "82005a0f8043e7be",
        observing=True,
    ),
    RequiredInternal(
        "vllm.v1.engine.utils",
        "CoreEngineProcManager.__init__",
        "gives an engine core that is alone its name",
        "e0e505ebaee2595c",
        observing=True,
    ),
    RequiredInternal(
        CORE,
        "EngineCoreProc._process_input_queue",
        "wrapped: it may not block while the guest wants to run",
        "215a7d373e636f98",
        observing=True,
    ),
    RequiredInternal(
        CORE,
        "EngineCoreProc._process_engine_step",
        "wrapped: the guest's turn comes after it",
        "b894c3b32cc020f7",
        observing=True,
    ),
    RequiredInternal(
        CORE,
        "EngineCoreProc._handle_client_request",
        "an empty WAKEUP on the input queue ends its wait",
        "b2026637e79970b6",
        observing=True,
    ),
    RequiredInternal(
        CORE, "EngineCoreProc.has_work", "whether another step moves what serving holds", "5c90a45c5b5b46c9"
    ),
    RequiredInternal(
        CORE, "EngineCoreProc.is_running", "no guest runs while the server shuts down", "25fdbecbf47bdd89"
    ),
    RequiredInternal(
        "vllm.v1.engine", "EngineCoreRequestType.WAKEUP", "put on the input queue by the guest's thread", observing=True
    ),
    RequiredInternal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.has_requests",
        "whether serving has anything to do",
        "6529a9d59f78d9c0",
        observing=True,
    ),
    RequiredInternal(
        CORE,
        "EngineCore.step",
        "each of serving's steps is measured, with what it was scheduled to do",
        "a02d17986fb72adb",
    ),
    RequiredInternal(
        "vllm.v1.core.sched.scheduler", "Scheduler.schedule", "wrapped: what it returns is read", "da4f2cf2fc39c39e"
    ),
    RequiredInternal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.get_request_counts",
        "what serving holds",
        "c901ce17db93c7dd",
        observing=True,
    ),
    RequiredInternal(
        "vllm.v1.core.kv_cache_utils",
        "init_none_hash",
        "the root of serving's block hashes is not replaced",
        "5113ef26e70d956b",
    ),
    RequiredInternal(POOL, "BlockPool.get_new_blocks", "withholds serving's blocks", "ab54592edae48a7c"),
    RequiredInternal(POOL, "BlockPool.free_blocks", "gives them back", "f12f94bc787cc15e"),
    RequiredInternal(POOL, "BlockPool.touch", "keeps the prefixes of turns that were cut", "08fcc52c2ec9e624"),
    RequiredInternal(POOL, "BlockPool.evict_blocks", "gives those up", "0aa2e3002a37acc9"),
    RequiredInternal(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.get_all_free_blocks",
        "in the order in which vLLM gives blocks up",
        "6a4bcea343d1e34f",
    ),
    RequiredInternal(
        POOL, "BlockPool.get_num_free_blocks", "what serving's requests leave", "c97ea366f52bf8fb", observing=True
    ),
    RequiredInternal(POOL, "BlockPool.get_usage", "swapped: what is withheld is not in use", "392c54386fddcb47"),
    RequiredInternal(POOL, "BlockPool.reset_prefix_cache", "wrapped: it wants every block free", "69bba8b575842446"),
    RequiredInternal(
        MANAGER,
        "KVCacheManager.record_prefix_cache_stats",
        "wrapped: what serving finds has a price",
        "dd3fc0110a76ccba",
    ),
    RequiredInternal(
        MANAGER, "KVCacheManager.allocate_slots", "the blocks that a step takes are foreseen", "8c60d937fd9eb0c8"
    ),
    RequiredInternal("vllm.v1.worker.utils", "allocate_kv_cache", "where a block's pages lie", "b1f3e24311485a09"),
    RequiredInternal(
        EXECUTOR,
        "MultiprocExecutor.collective_rpc",
        "has serving's ranks compute for the guest, between two steps",
        "936c16152d712061",
    ),
    RequiredInternal(
        EXECUTOR, "WorkerProc._execute_worker_rpc", "one call after another, on one thread", "4d7c21576f2670da"
    ),
    RequiredInternal(
        "vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", "makes a guest's worker", "f84f7abf9c0ead66"
    ),
    RequiredInternal(
        "vllm.v1.worker.gpu_worker",
        "init_worker_distributed_environment",
        "leaves groups that are there as they are",
        "b8ecedb6d9f6c47b",
    ),
    RequiredInternal(GROUPS, "ensure_model_parallel_initialized", "as above", "b253677203db0be1"),
    RequiredInternal(GROUPS, "GroupCoordinator.__init__", "the guest's group", "533e3f28f3dbfe4c"),
    RequiredInternal(GROUPS, "GroupCoordinator.destroy", "how a rank that failed leaves it", "c51952127d9f5095"),
    RequiredInternal(
        "vllm.distributed.device_communicators.cpu_communicator",
        "CpuCommunicator.__init__",
        "the guest's name must keep it from shared memory, where nobody can leave",
        "f2964a2a9f3379f0",
        cpu=True,
    ),
    RequiredInternal(GROUPS, "_TP", "kept apart, where serving has one"),
    RequiredInternal(GROUPS, "suppress_stdout", "kept from guests: amid it the process says nothing"),
    RequiredInternal(
        "vllm.forward_context", "override_forward_context", "none while a step stands still", "96a30187fd05b912"
    ),
    RequiredInternal("vllm.utils.gc_utils", "freeze_gc_heap", "not called for a guest", "68b68a7e135fe7f6"),
    RequiredInternal("vllm.config.vllm", "_current_vllm_config", "kept apart"),
    RequiredInternal("vllm.config.vllm", "_current_prefix", "kept apart"),
    RequiredInternal(
        "vllm.config.vllm", "get_cached_compilation_config.cache_clear", "forgotten when the config changes"
    ),
    RequiredInternal("vllm.v1.worker.workspace", "_manager", "kept apart"),
    RequiredInternal(
        "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "wrapped while a guest is built"
    ),
    RequiredInternal("vllm.triton_utils.dispatcher", "sys", "swapped while a guest is built"),
    RequiredInternal(
        "vllm.v1.worker.cpu_worker", "CPUWorker.__init__", "binds memory, not for a guest", "6a2c6b06d1a7f9d2", cpu=True
    ),
    RequiredInternal(CORE, "freeze_gc_heap", "swapped while a guest is built"),
    RequiredInternal(CORE, "init_none_hash", "swapped while a guest is built"),
    RequiredInternal("vllm.v1.worker.gpu_worker", "freeze_gc_heap", "swapped while a guest is built"),
)


def version_error() -> str | None:
    """Return why the installed vLLM is not supported; None if it is. Imports nothing."""
    if __version_tuple__[:2] == VERSION:
        return None
    installed, tried = (".".join(map(str, version[:2])) for version in (__version_tuple__, VERSION))
    return f"vLLM {installed} is installed, and guests were tried in {tried} alone"


def internals_error(*, observing: bool = False) -> str | None:
    """Return which part is missing or changed, in a sentence; None if none is. Imports the parts.

    `observing`: check only the parts that the observation of a server relies on.
    """
    for part in REQUIRED_INTERNALS:
        if (observing and not part.observing) or (part.cpu and not current_platform.is_cpu()):
            continue
        try:
            found = _resolve(part)
        except (ImportError, AttributeError):
            return f"this vLLM has no {part.module}.{part.name} ({part.why})"
        if part.digest and source_digest(found) != part.digest:
            return f"this vLLM has another {part.module}.{part.name} ({part.why})"
    return None


def _resolve(part: RequiredInternal) -> Any:
    return reduce(getattr, part.name.split("."), importlib.import_module(part.module))


def source_digest(function: Any) -> str:
    """Return a digest of the source of a function and of the functions that it decorates."""
    function = inspect.unwrap(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    sources = [inspect.getsource(one) for one in (function, *filter(inspect.isfunction, cells))]
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:16]
