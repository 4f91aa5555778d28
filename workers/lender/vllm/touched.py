"""What of vLLM's private parts the lender relies on, and whether the vLLM that is installed still has it.

Keeps true
- A guest enters a server only where every part below is as it was when the lender was written.
- The look changes nothing in the process. It imports modules, and vLLM's modules for CPUs replace names of torch when
  they are imported, `torch.cuda.Event` among them. So parts for CPUs are looked at on a CPU alone, and a server that is
  only observed is looked at in the parts that observing uses.

The wrapped methods of the engine-core process, and the names that a guest has its own value of (`apart`); what the
rollout engine itself uses of vLLM is in `workers.executor.vllm`, and its tests tell.
"""

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from functools import reduce
from typing import Any

from vllm.platforms import current_platform
from vllm.version import __version_tuple__

VERSION = (0, 32)
"""Of vLLM, major and minor."""

CORE = "vllm.v1.engine.core"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
GROUPS = "vllm.distributed.parallel_state"
POOL = "vllm.v1.core.block_pool"
MANAGER = "vllm.v1.core.kv_cache_manager"


@dataclass(frozen=True, slots=True)
class Touched:
    """One part of vLLM."""

    module: str
    name: str
    why: str
    digest: str = ""
    """Of its source; empty where only its being there matters."""
    observing: bool = False
    """An observed server relies on the part, too."""
    cpu: bool = False
    """The part is for CPUs alone."""


TOUCHED = (
    Touched(
        CORE, "EngineCore.__init__", "loads the plugin; what it sets in the process is kept apart", "a828c07af25a054a"
    ),
    Touched(
        CORE,
        "EngineCoreProc.run_busy_loop",
        "wrapped: the guest's thread begins, and ends, with the loop",
        "c1f483fe17861424",
        observing=True,
    ),
    Touched(
        CORE,
        "DPEngineCoreProc.run_busy_loop",
        "wrapped: one of several engine cores is known to the keeper, and refused",
        "82005a0f8043e7be",
        observing=True,
    ),
    Touched(
        "vllm.v1.engine.utils",
        "CoreEngineProcManager.__init__",
        "gives an engine core that is alone its name",
        "e0e505ebaee2595c",
        observing=True,
    ),
    Touched(
        CORE,
        "EngineCoreProc._process_input_queue",
        "wrapped: it may not block while the guest wants to run",
        "215a7d373e636f98",
        observing=True,
    ),
    Touched(
        CORE,
        "EngineCoreProc._process_engine_step",
        "wrapped: the guest's turn comes after it",
        "b894c3b32cc020f7",
        observing=True,
    ),
    Touched(
        CORE,
        "EngineCoreProc._handle_client_request",
        "an empty WAKEUP on the input queue ends its wait",
        "b2026637e79970b6",
        observing=True,
    ),
    Touched(CORE, "EngineCoreProc.has_work", "whether another step moves what serving holds", "5c90a45c5b5b46c9"),
    Touched(CORE, "EngineCoreProc.is_running", "no guest runs while the server shuts down", "25fdbecbf47bdd89"),
    Touched(
        "vllm.v1.engine", "EngineCoreRequestType.WAKEUP", "put on the input queue by the guest's thread", observing=True
    ),
    Touched(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.has_requests",
        "whether serving has anything to do",
        "6529a9d59f78d9c0",
        observing=True,
    ),
    Touched(
        CORE,
        "EngineCore.step",
        "each of serving's steps is measured, with what it was scheduled to do",
        "a02d17986fb72adb",
    ),
    Touched(
        "vllm.v1.core.sched.scheduler", "Scheduler.schedule", "wrapped: what it returns is read", "da4f2cf2fc39c39e"
    ),
    Touched(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.get_request_counts",
        "what serving holds",
        "c901ce17db93c7dd",
        observing=True,
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils",
        "init_none_hash",
        "the root of serving's block hashes is not replaced",
        "5113ef26e70d956b",
    ),
    Touched(POOL, "BlockPool.get_new_blocks", "withholds serving's blocks", "ab54592edae48a7c"),
    Touched(POOL, "BlockPool.free_blocks", "gives them back", "f12f94bc787cc15e"),
    Touched(POOL, "BlockPool.touch", "keeps the prefixes of turns that were cut", "08fcc52c2ec9e624"),
    Touched(POOL, "BlockPool.evict_blocks", "gives those up", "0aa2e3002a37acc9"),
    Touched(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.get_all_free_blocks",
        "in the order in which vLLM gives blocks up",
        "6a4bcea343d1e34f",
    ),
    Touched(POOL, "BlockPool.get_num_free_blocks", "what serving's requests leave", "c97ea366f52bf8fb", observing=True),
    Touched(POOL, "BlockPool.get_usage", "swapped: what is withheld is not in use", "392c54386fddcb47"),
    Touched(POOL, "BlockPool.reset_prefix_cache", "wrapped: it wants every block free", "69bba8b575842446"),
    Touched(
        MANAGER,
        "KVCacheManager.record_prefix_cache_stats",
        "wrapped: what serving finds has a price",
        "dd3fc0110a76ccba",
    ),
    Touched(MANAGER, "KVCacheManager.allocate_slots", "the blocks that a step takes are foreseen", "8c60d937fd9eb0c8"),
    Touched("vllm.v1.worker.utils", "allocate_kv_cache", "where a block's pages lie", "b1f3e24311485a09"),
    Touched(
        EXECUTOR,
        "MultiprocExecutor.collective_rpc",
        "has serving's ranks compute for the guest, between two steps",
        "936c16152d712061",
    ),
    Touched(EXECUTOR, "WorkerProc._execute_worker_rpc", "one call after another, on one thread", "4d7c21576f2670da"),
    Touched(
        "vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", "makes a guest's worker", "f84f7abf9c0ead66"
    ),
    Touched(
        "vllm.v1.worker.gpu_worker",
        "init_worker_distributed_environment",
        "leaves groups that are there as they are",
        "b8ecedb6d9f6c47b",
    ),
    Touched(GROUPS, "ensure_model_parallel_initialized", "as above", "b253677203db0be1"),
    Touched(GROUPS, "GroupCoordinator.__init__", "the guest's group", "533e3f28f3dbfe4c"),
    Touched(GROUPS, "GroupCoordinator.destroy", "how a rank that failed leaves it", "c51952127d9f5095"),
    Touched(
        "vllm.distributed.device_communicators.cpu_communicator",
        "CpuCommunicator.__init__",
        "the guest's name must keep it from shared memory, where nobody can leave",
        "f2964a2a9f3379f0",
        cpu=True,
    ),
    Touched(GROUPS, "_TP", "kept apart, where serving has one"),
    Touched(GROUPS, "suppress_stdout", "kept from guests: amid it the process says nothing"),
    Touched("vllm.forward_context", "override_forward_context", "none while a step stands still", "96a30187fd05b912"),
    Touched("vllm.utils.gc_utils", "freeze_gc_heap", "not called for a guest", "68b68a7e135fe7f6"),
    Touched("vllm.config.vllm", "_current_vllm_config", "kept apart"),
    Touched("vllm.config.vllm", "_current_prefix", "kept apart"),
    Touched("vllm.config.vllm", "get_cached_compilation_config.cache_clear", "forgotten when the config changes"),
    Touched("vllm.v1.worker.workspace", "_manager", "kept apart"),
    Touched("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "wrapped while a guest is built"),
    Touched("vllm.triton_utils.dispatcher", "sys", "swapped while a guest is built"),
    Touched(
        "vllm.v1.worker.cpu_worker", "CPUWorker.__init__", "binds memory, not for a guest", "6a2c6b06d1a7f9d2", cpu=True
    ),
    Touched(CORE, "freeze_gc_heap", "swapped while a guest is built"),
    Touched(CORE, "init_none_hash", "swapped while a guest is built"),
    Touched("vllm.v1.worker.gpu_worker", "freeze_gc_heap", "swapped while a guest is built"),
)


def another_version() -> str:
    """Name the installed vLLM in a sentence if no guest was tried in it; empty otherwise. Imports nothing."""
    if __version_tuple__[:2] == VERSION:
        return ""
    installed, tried = (".".join(map(str, version[:2])) for version in (__version_tuple__, VERSION))
    return f"vLLM {installed} is installed, and guests were tried in {tried} alone"


def moved(*, observing: bool = False) -> str:
    """Name the first part that is not as it was, in a sentence; empty if there is none. Imports the parts.

    `observing`: look only at the parts that an observed server relies on.
    """
    for part in TOUCHED:
        if (observing and not part.observing) or (part.cpu and not current_platform.is_cpu()):
            continue
        try:
            found = _found(part)
        except (ImportError, AttributeError):
            return f"this vLLM has no {part.module}.{part.name} ({part.why})"
        if part.digest and digest(found) != part.digest:
            return f"this vLLM has another {part.module}.{part.name} ({part.why})"
    return ""


def _found(part: Touched) -> Any:
    return reduce(getattr, part.name.split("."), importlib.import_module(part.module))


def digest(function: Any) -> str:
    """Of a function's source, and of what it decorates."""
    function = inspect.unwrap(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    sources = [inspect.getsource(one) for one in (function, *filter(inspect.isfunction, cells))]
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:16]
