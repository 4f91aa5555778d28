"""Servers that no guest was tried in.

Keeps true: a guest is refused, never serving; what is not known to work is not tried on somebody's server.
"""

from multiprocessing import current_process
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCoreProc

ALONE = "EngineCore"
"""vLLM's name for the process of an engine core that has no others beside it. By nothing else can those of a dense
model be told: each of several is made to believe that it is alone."""


def is_one_of_several(core: EngineCoreProc) -> bool:
    """Whether the server of this engine core has others."""
    return type(core) is not EngineCoreProc or current_process().name != ALONE


def why_not(core: Any) -> str:
    """Why no guest may enter the server of this engine core, in a sentence; empty if one may."""
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
    return f"no guest was tried beside {' or '.join(found)}" if found else ""
