"""vLLM's model runner on a CPU, made cheaper for small models, and sound where one of its turns overflows.

Keeps true: the same functions of the same inputs, and for this model only; another engine in the process is untouched.

vLLM's own C++ kernels take the place of five torch calls each in eager mode: on 0.4M parameters a step of 1, 32 or 128
turns takes 0.75 of the time.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Element types that the C++ kernels take."""


def patch_cpu_runner(runner: Any) -> None:
    """Fit one model runner. Does nothing where vLLM does not run on a CPU."""
    if not current_platform.is_cpu():
        return
    if isinstance(runner.sampler, Sampler):
        runner.sampler.gather_logprobs = sampled_logprobs
    runner._zero_block_ids = partial(_zero_blocks, runner)
    for layer in runner.get_model().modules():
        if isinstance(layer, SiluAndMul):
            layer._forward_method = _silu_and_mul
        elif isinstance(layer, RMSNorm) and layer.has_weight and layer.variance_size_override is None:
            layer._forward_method = _norm_of(layer)


def sampled_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """The sampled tokens' logprobs alone: (rows, vocabulary) and (rows,) in.

    vLLM's own also ranks the tokens, in a function that the first step compiles with a C++ compiler (2 to 16 s).
    """
    assert num_logprobs == 0
    rows = token_ids.unsqueeze(-1)
    return LogprobsTensors(rows.to(torch.int32), logprobs.gather(-1, rows), torch.zeros_like(token_ids))


def zero_new_blocks(scheduler: Any) -> None:
    """Have its runners zero each block of the KV cache before a turn computes into it, as vLLM has it for some caches.

    The kernel of a CPU reads a block to its end and weighs what lies behind a turn's last token with 0: what is no
    number there, of a turn that overflowed, would make none of the sum. vLLM's for GPUs load zeros for it.
    """
    if current_platform.is_cpu():
        scheduler.needs_kv_cache_zeroing = True
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = isinstance(manager.kv_cache_spec, AttentionSpec)


def _zero_blocks(runner: Any, block_ids: Sequence[int]) -> None:
    """vLLM's own leaves out what attends to a window, and takes a call for each block of a layer."""
    blocks = torch.tensor(block_ids)
    for layer in runner.compilation_config.static_forward_context.values():
        if isinstance(cache := getattr(layer, "kv_cache", None), Tensor):
            cache.index_fill_(0, blocks, 0)


def _silu_and_mul(x: Tensor) -> Tensor:
    if x.dtype not in KERNEL_DTYPES:
        native: Tensor = SiluAndMul.forward_native(x)
        return native
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    torch.ops._C.silu_and_mul(out, x.contiguous())
    return out


def _norm_of(layer: Any) -> Any:
    def norm(x: Tensor, residual: Tensor | None = None) -> Any:
        if x.dtype not in KERNEL_DTYPES or layer.weight.dtype != x.dtype:
            return layer.forward_native(x, residual)
        if residual is not None:
            torch.ops._C.fused_add_rms_norm(x, residual, layer.weight.data, layer.variance_epsilon)
            return x, residual
        out = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(out, x.contiguous(), layer.weight.data, layer.variance_epsilon)
        return out

    return norm
