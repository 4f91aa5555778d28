"""Patches of one model runner of vLLM: seeded sampling by position and, on a CPU, faster and safer steps.

Keeps true
- Only the one runner is patched; another engine in the process is not changed.
- Except for seeded sampling, patched functions compute the same as before.
- The token that a seeded turn samples depends on its seed, the position of the token in the whole sequence and the
  distribution, and on no earlier draw. A turn that is aborted and resumed by another executor therefore samples the
  same tokens as an uninterrupted turn.
- A turn whose prefill is not complete draws nothing from its generator. vLLM would draw, discard the token and set the
  generator back by an offset, which a CPU generator does not support: one chunked prefill would end the engine.

vLLM gives a seeded turn one generator, which advances by the size of the vocabulary with every token. An advance to
token k costs k vocabularies; a new seed for each token costs about a microsecond.

In eager mode on a CPU, each of vLLM's C++ kernels replaces five torch calls: with 0.4M parameters a step of 1, 32 or
128 turns takes 0.75 of the time.
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
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Element types that the C++ kernels support."""

MASK = 2**64 - 1


def patch_runner(runner: Any) -> None:
    """Patch a model runner after its model is loaded."""
    _patch_cpu_runner(runner)
    _draw_by_position(runner)
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
    vars(runner).clear()  # whatever still holds the runner: a worker, a function that was patched, a workspace


def _patch_cpu_runner(runner: Any) -> None:
    """Patch one model runner. Does nothing if vLLM does not run on a CPU."""
    if not current_platform.is_cpu():
        return
    if isinstance(runner.sampler, Sampler):
        runner.sampler.gather_logprobs = sampled_logprobs
    runner._zero_block_ids = partial(zero_blocks, runner)
    for layer in runner.get_model().modules():
        if isinstance(layer, SiluAndMul):
            layer._forward_method = _silu_and_mul
        elif isinstance(layer, RMSNorm) and layer.has_weight and layer.variance_size_override is None:
            layer._forward_method = _norm_of(layer)


def sampled_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Return only the sampled tokens' logprobs. `logprobs`: (rows, vocabulary). `token_ids`: (rows,).

    vLLM's function also ranks the tokens, which the first step compiles with a C++ compiler (2 to 16 s).
    """
    assert num_logprobs == 0
    rows = token_ids.unsqueeze(-1)
    return LogprobsTensors(rows.to(torch.int32), logprobs.gather(-1, rows), torch.zeros_like(token_ids))


def zero_new_blocks(scheduler: Any) -> None:
    """Make the scheduler's runners zero each block of the KV cache before a turn uses it, as vLLM does for some caches.

    The CPU kernel reads a whole block and weights the entries behind a turn's last token with 0. A NaN there, from a
    turn that overflowed, would make the sum NaN.
    """
    if current_platform.is_cpu():
        scheduler.needs_kv_cache_zeroing = True
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = isinstance(manager.kv_cache_spec, AttentionSpec)


def zero_blocks(runner: Any, block_ids: Sequence[int]) -> None:
    """Zero blocks in all layers. vLLM's function omits layers with window attention, and makes a call per block."""
    blocks = torch.tensor(block_ids)
    for layer in runner.compilation_config.static_forward_context.values():
        if isinstance(cache := getattr(layer, "kv_cache", None), Tensor) and cache.numel():
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


def seed_at(seed: int, position: int) -> int:
    """Return the seed of one draw: output number `position` of SplitMix64 with the start value `seed`."""
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
    return mixed ^ (mixed >> 31)


def _draw_by_position(runner: Any) -> None:
    """Patch one model runner to sample seeded turns by position; another engine in the process is not changed.

    Does nothing to vLLM's second model runner (GPUs with Triton), which hashes seed and position by itself.
    """
    if not isinstance(runner, GPUModelRunner):
        return
    sample_tokens = runner.sample_tokens

    def sample(grammar_output: Any) -> Any:
        batch = runner.input_batch
        unfinished = runner.discard_request_mask.np[: batch.num_reqs]
        spared = {row: batch.generators.pop(row) for row in list(batch.generators) if unfinished[row]}
        for row, generator in batch.generators.items():
            seed = runner.requests[batch.req_ids[row]].sampling_params.seed
            generator.manual_seed(seed_at(seed, int(batch.num_tokens_no_spec[row])))
        try:
            return sample_tokens(grammar_output)
        finally:
            batch.generators.update(spared)

    runner.sample_tokens = sample
