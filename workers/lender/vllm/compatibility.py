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
from collections.abc import Iterator
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


REFUSED = {
    "a device that is not a CPU": "no guest has run on such a device",
    "a model on a GPU in another process": "if a rank of the guest fails, nothing ends the kernels that wait for it",
    "data parallelism": "all engine cores of the server would wait for a sidecar on the same socket",
    "pipeline or context parallelism": "a rank of the guest has a part of every layer, and computes every context",
    "expert parallelism": "of vLLM's process groups only the tensor-parallel group is exchanged with the guest's",
    "ranks on several hosts": "the sidecar hands weights over in the memory of one host",
    "an executor other than uni and mp": "the guest is driven through the workers of these two",
    "vLLM's second model runner": "the guest's cache and the zeroing of blocks are attached to the first",
    "an encoder connector": "the guest's runner would use the connector of serving",
    "offloaded weights": "no guest was tried beside them",
    "sleep mode": "the guest would write to a KV cache whose memory a sleeping server has given back",
    "weight transfer": "nothing was tried while such a server replaces its weights",
    "fault tolerance": "serving's ranks are replaced while the server runs, and the guest's are not",
    "elastic expert parallelism": "serving's ranks are replaced while the server runs, and the guest's are not",
    "other layers in a KV cache of several kinds": "full, sliding-window and recurrent layers were tried",
    "a KV cache of several kinds on several ranks": "no guest was tried beside one",
    "a multimodal model on several ranks": "no guest was tried beside one",
    "a model that does not generate": "no guest was tried beside one",
    "a diffusion model": "no guest was tried beside one",
}
"""Kinds of servers beside which no guest runs, with the reason, as in the table of docs/guides/lend-a-server.md."""

REFUSED_ABOVE_STRICT = {
    "async scheduling": "the times of overlapping steps are not known; --no-async-scheduling turns it off",
    "speculative decoding": "the number of tokens in the next step of a request is not known",
    "LoRA": "serving stops while it loads an adapter, for a time that is not known",
    "a KV connector": "a block that looks free while serving computes may still be read for an ended request",
    "prompts of embeddings": "their cost was not measured",
    "a KV cache of several kinds": "the times of such a model were not measured",
    "a multimodal model": "the time of an image's encoder is not predicted",
}
"""Kinds of servers beside which no guest with a dial above 0 runs, with the reason."""


TRIED_LAYERS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "MambaSpec"})
"""vLLM's kinds of layers that a KV cache of several kinds may have."""


def guest_error(core: Any, *, strict: bool, untried_devices: bool = False) -> str | None:
    """Return why the server of this engine core cannot have a guest; None if it can.

    `strict`: the policy. `untried_devices`: whether the device may be a CUDA GPU.
    """
    kinds = [kind for kind, holds in _kinds(core, untried_devices=untried_devices).items() if holds]
    found = [f"no guest runs beside {kind}: {REFUSED[kind]}" for kind in kinds if kind in REFUSED]
    if not strict:
        found += [
            f"no guest with a dial above 0 runs beside {kind}: {REFUSED_ABOVE_STRICT[kind]}"
            for kind in kinds
            if kind in REFUSED_ABOVE_STRICT
        ]
    return "; ".join(found) if found else None


def _kinds(core: Any, *, untried_devices: bool) -> dict[str, bool]:
    """Return whether the server of this engine core is of each kind."""
    gpu = not current_platform.is_cpu()
    allowed = untried_devices and current_platform.is_cuda()
    config = core.vllm_config
    parallel, model, offload = config.parallel_config, config.model_config, config.offload_config
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    several_kinds, several_ranks = len(groups) > 1, parallel.world_size > 1
    layers = {type(group.kv_cache_spec).__name__ for group in groups}
    return {
        "a device that is not a CPU": gpu and not allowed,
        "a model on a GPU in another process": gpu
        and (several_ranks or parallel.distributed_executor_backend != "uni"),
        "data parallelism": is_one_of_several(core),
        "pipeline or context parallelism": (
            parallel.world_size != parallel.tensor_parallel_size or parallel.decode_context_parallel_size > 1
        ),
        "expert parallelism": parallel.enable_expert_parallel,
        "ranks on several hosts": parallel.nnodes > 1,
        "an executor other than uni and mp": parallel.distributed_executor_backend not in ("uni", "mp"),
        "vLLM's second model runner": config.use_v2_model_runner and not allowed,
        "async scheduling": config.scheduler_config.async_scheduling,
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "prompts of embeddings": model.enable_prompt_embeds,
        "an encoder connector": config.ec_transfer_config is not None,
        "offloaded weights": (
            offload.offload_backend != "auto"
            or offload.prefetch.offload_group_size > 0
            or offload.uva.cpu_offload_gb > 0
        ),
        "sleep mode": model.enable_sleep_mode,
        "weight transfer": config.weight_transfer_config is not None,
        "fault tolerance": parallel.enable_fault_tolerance,
        "elastic expert parallelism": parallel.enable_elastic_ep,
        "a KV cache of several kinds": several_kinds,
        "a KV cache of several kinds on several ranks": several_kinds and several_ranks,
        "other layers in a KV cache of several kinds": several_kinds and not layers <= TRIED_LAYERS,
        "a model that does not generate": model.runner_type != "generate",
        "a multimodal model": model.is_multimodal_model,
        "a multimodal model on several ranks": model.is_multimodal_model and several_ranks,
        "a diffusion model": model.is_diffusion,
    }


VERSION = (0, 32)
"""Major and minor version of the supported vLLM."""


@dataclass(frozen=True, slots=True)
class RequiredInternal:
    """One private part of vLLM that the lender relies on."""

    module: str
    name: str
    why: str
    digest: str
    """Digest of the part's source; empty if only its existence matters."""
    observing: bool
    """Whether the observation of a server relies on the part too."""
    cpu: bool
    """Whether the part is only used on CPUs."""


INTERNALS_TABLE = """
vllm.config.vllm
    -                guest   _current_vllm_config: exchanged between host and guest
    -                guest   _current_prefix: exchanged between host and guest
    -                guest   get_cached_compilation_config.cache_clear: called when the configuration is exchanged
vllm.distributed.device_communicators.cpu_communicator
    f2964a2a9f3379f0 cpu     CpuCommunicator.__init__: the guest's group has a name for which no memory is shared
vllm.distributed.kv_transfer.kv_transfer_state
    -                guest   _KV_CONNECTOR_AGENT: exchanged between host and guest, which has no connector
    fea7014629e94c4a guest   ensure_kv_transfer_initialized: makes no connector for a guest
    1fc0e9f28034a9dc guest   has_kv_transfer_group: tells a runner whether it has a connector
vllm.distributed.parallel_state
    b253677203db0be1 guest   ensure_model_parallel_initialized: leaves groups that exist as they are
    533e3f28f3dbfe4c guest   GroupCoordinator.__init__: makes the guest's group
    c51952127d9f5095 guest   GroupCoordinator.destroy: a rank that failed leaves the group
    -                guest   _TP: exchanged between host and guest, if serving has a group
    -                guest   suppress_stdout: replaced for a guest, because it silences the whole process
vllm.engine.arg_utils
    -                guest   configure_logging_if_needed: replaced, because it would reset the log of the server
vllm.forward_context
    96a30187fd05b912 guest   override_forward_context: unset while a guest step is paused
vllm.ir.op
    -                guest   _ENABLE_TORCH_WRAP: exchanged between host and guest
    -                guest   IrOp.registry: has each operator; what an operator calls is exchanged
    c8e749dab38d4c52 guest   IrOp.set_default: sets what an operator calls
vllm.model_executor.layers.rotary_embedding
    -                guest   _ROPE_DICT: exchanged between host and guest
vllm.model_executor.layers.utils
    -                guest   dispatch_cpu_unquantized_gemm: wrapped while a guest is built
vllm.model_executor.layers.mamba.ops.ssu_dispatch
    53ad3ae84c39a0eb guest   initialize_mamba_ssu_backend: a guest without recurrent states leaves serving's backend
vllm.model_executor.offloader.base
    -                guest   _instance: exchanged between host and guest
vllm.triton_utils.dispatcher
    -                guest   sys: replaced while a guest is built
    -                guest   _registry: has the kernels that serving has registered
    -                guest   register_kernels: replaces kernels of serving by wrappers of them
vllm.utils.gc_utils
    68b68a7e135fe7f6 guest   freeze_gc_heap: not called for a guest
vllm.utils.jit_monitor
    6b09ab0af448af7e guest   _handle_jit_event: replaced for a guest, whose kernels are compiled while it is built
vllm.utils.torch_utils
    8e7fa6f927864cfa guest   _patched_set_stream: records the stream of a thread
    3f3ff9cd84b6af66 guest   current_stream: reads the record, which is None before a stream is set
    -                guest   _current_stream_tls: the record is put back when serving's thread goes back to serving
vllm.v1.core.block_pool
    ab54592edae48a7c guest   BlockPool.get_new_blocks: withholds blocks of serving
    f12f94bc787cc15e guest   BlockPool.free_blocks: gives withheld blocks back
    08fcc52c2ec9e624 guest   BlockPool.touch: keeps the prefixes of turns that were cut
    0aa2e3002a37acc9 guest   BlockPool.evict_blocks: gives kept prefixes up
    c97ea366f52bf8fb observe BlockPool.get_num_free_blocks: tells what the requests of serving leave
    392c54386fddcb47 guest   BlockPool.get_usage: replaced, because withheld blocks are not in use
    69bba8b575842446 guest   BlockPool.reset_prefix_cache: wrapped, because it needs every block to be free
vllm.v1.core.kv_cache_coordinator
    db53dbf1b7f337e6 guest   KVCacheCoordinator.__init__: makes one pool of blocks for all groups of layers
    4500949e3f03d550 guest   KVCacheCoordinator.get_num_blocks_to_allocate: a step takes blocks in each group
vllm.v1.core.kv_cache_manager
    dd3fc0110a76ccba guest   KVCacheManager.record_prefix_cache_stats: wrapped, to count what serving finds
    815f946ccf479927 cpu     KVCacheManager.take_new_block_ids: wrapped, to zero the blocks that a guest had
    8c60d937fd9eb0c8 guest   KVCacheManager.allocate_slots: takes as many blocks in a step as are foreseen
vllm.v1.core.kv_cache_utils
    5113ef26e70d956b guest   init_none_hash: the root of serving's block hashes is not replaced
    6954cbfecb1bfc13 guest   get_kv_cache_config_from_groups: all groups have their blocks in the same bytes
    6a4bcea343d1e34f guest   FreeKVCacheBlockQueue.get_all_free_blocks: has the order in which vLLM evicts blocks
vllm.v1.core.single_type_kv_cache_manager
    f50d7c5b545195c3 guest   SingleTypeKVCacheManager.get_num_blocks_to_allocate: takes as many blocks as are foreseen
    b8edfbf2e1667228 cpu     SingleTypeKVCacheManager.allocate_new_blocks: notes the blocks that a request gets
    f5419c71108416dd cpu     SingleTypeKVCacheManager.allocate_external_computed_blocks: a received block is not zeroed
vllm.v1.core.sched.async_scheduler
    138d47daea23cdfd guest   AsyncScheduler._update_after_schedule: counts the tokens of batches in flight
vllm.v1.core.sched.output
    -                guest   NewRequestData.prompt_len: counts a prompt of tokens or embeddings
vllm.v1.core.sched.scheduler
    6529a9d59f78d9c0 observe Scheduler.has_requests: tells whether serving has work
    04a60b57ba72f965 guest   Scheduler.has_finished_requests: counts ended requests whose blocks are being sent
    4fb86dcf349be3cf guest   Scheduler._holds_kv_blocks: tells which waiting requests are in `kv_holding_waiting`
    019e3f62696c8913 guest   Scheduler._request_remaining_blocks: reserves as many blocks as are foreseen
    da4f2cf2fc39c39e guest   Scheduler.schedule: wrapped, to read what it returns
    c901ce17db93c7dd observe Scheduler.get_request_counts: tells what serving holds
    fb239c609e3dd0ec cpu     Scheduler._get_new_block_ids_to_zero: names the blocks that the runner zeroes
vllm.v1.engine
    -                observe EngineCoreRequestType.WAKEUP: put on the input queue by the thread of the sidecar link
vllm.v1.engine.core
    a828c07af25a054a guest   EngineCore.__init__: loads the plugin; what it sets in the process is exchanged
    a02d17986fb72adb guest   EngineCore.step: each step of serving is measured, with what was scheduled
    a905a2e1c4452aff guest   EngineCore.step_with_batch_queue: the queue holds every batch in flight
    c1f483fe17861424 observe EngineCoreProc.run_busy_loop: wrapped: the lender attaches when the loop starts
    215a7d373e636f98 observe EngineCoreProc._process_input_queue: wrapped: does not block while a guest has work
    b894c3b32cc020f7 observe EngineCoreProc._process_engine_step: wrapped: a guest piece follows each step
    b2026637e79970b6 observe EngineCoreProc._handle_client_request: an empty WAKEUP ends the wait for input
    5c90a45c5b5b46c9 guest   EngineCoreProc.has_work: tells whether a further step advances a request
    25fdbecbf47bdd89 guest   EngineCoreProc.is_running: no guest runs while the server shuts down
    82005a0f8043e7be observe DPEngineCoreProc.run_busy_loop: wrapped: one of several engine cores is refused
    -                guest   freeze_gc_heap: replaced while a guest is built
    -                guest   init_none_hash: replaced while a guest is built
vllm.v1.engine.utils
    e0e505ebaee2595c observe CoreEngineProcManager.__init__: names the only engine core of a server
vllm.v1.executor.multiproc_executor
    936c16152d712061 guest   MultiprocExecutor.collective_rpc: has ranks compute for the guest between two steps
    4d7c21576f2670da guest   WorkerProc._execute_worker_rpc: makes one call after another, on one thread
vllm.v1.kv_cache_interface
    3626347655c8c6f6 guest   create_kv_cache_views: places the guest's layers in serving's cache
    -                guest   KVCacheConfig.has_mamba_layers: tells whether a cache has recurrent states
    -                guest   KVCacheTensor: says where the blocks of a cache are
vllm.v1.sample.ops.topk_topp_triton
    -                guest   _TRITON_BUFFER_CACHE: exchanged between host and guest
    -                guest   _TRITON_SPLIT_CACHE: exchanged between host and guest
    -                guest   _TRITON_TABLE_CACHE: exchanged between host and guest
vllm.v1.worker.cpu_worker
    6a2c6b06d1a7f9d2 cpu     CPUWorker.__init__: binds memory, but not for a guest
vllm.v1.worker.gpu.attn_utils
    955e085944fa68e8 guest   init_kv_cache: makes the cache of a guest of the second model runner
vllm.v1.worker.gpu.block_table
    93b3f2aae948e7f8 guest   BlockTables.append_block_ids: writes to block 0 only while a guest is built
    -                guest   BlockTables.redirect_writes_to_null_block: exchanged between host and guest
vllm.v1.worker.gpu.warmup
    ac83e86438da1a4e guest   _warmup_kernels: takes blocks that serving uses, unless writes are redirected
vllm.v1.worker.gpu_model_runner
    81dd948e771ce8a5 guest   GPUModelRunner.initialize_kv_cache_tensors: makes the cache of a guest
    326599f31b273b94 cpu     GPUModelRunner._update_states: has the runner zero blocks before a step
vllm.v1.worker.gpu_worker
    b8ecedb6d9f6c47b guest   init_worker_distributed_environment: leaves groups that exist as they are
    -                guest   freeze_gc_heap: replaced while a guest is built
    -                guest   report_usage_stats: replaced while a guest is built
    7bec4e41b49aad74 guest   Worker._scoped_allocator_max_split: sets the allocator by a name that is replaced
    4cc9795229ca9497 guest   Worker.compile_or_warm_up_model: warms up kernels on the thread of the build
vllm.v1.worker.utils
    e004ea68b5e96869 guest   request_memory: needs a share of the GPU to be free
    b1f3e24311485a09 guest   allocate_kv_cache: replaced while a guest is built, which has a view of serving's cache
vllm.v1.worker.worker_base
    f84f7abf9c0ead66 guest   WorkerWrapperBase.init_worker: makes a guest's worker
    8666a1f994a23789 guest   WorkerBase.__init__: sets the operators of the process
vllm.v1.worker.workspace
    -                guest   _manager: exchanged between host and guest
"""
"""The parts by module: digest of the source (- if only the existence matters), use, name, and what it is needed for.

Use: `guest` for a guest, `cpu` for a guest on CPUs, `observe` for the observation of a server too.
"""


def _parse_table(table: str) -> Iterator[RequiredInternal]:
    module = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            module = line
            continue
        digest, use, part = line.split(maxsplit=2)
        name, _, why = part.partition(": ")
        yield RequiredInternal(module, name, why, digest.strip("-"), observing=use == "observe", cpu=use == "cpu")


REQUIRED_INTERNALS = tuple(_parse_table(INTERNALS_TABLE))


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
