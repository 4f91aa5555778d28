"""A tiny random policy of every architecture that transformers and vLLM share, and an engine that runs the policy."""

import inspect
import json
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.schemas.errors import UsageError
from rose.workers.weights.assembly import Assembly
from rose.workers.weights.checks import check_manifest
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.model_folder import folder_shapes
from tests.support.weights_fixtures import MemoryChunkSink

Turn = tuple[list[int], list[float]]
"""Sampled tokens and their logprobs."""

CONTEXT = tuple(range(5, 90, 2))

TINY = {
    ("vocab_size", "vocab_size_per_layer_input"): 96,
    ("hidden_size", "n_embd", "d_model"): 64,
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"): 128,
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers"): 2,
    ("num_attention_heads", "n_head", "n_heads"): 2,
    ("num_key_value_heads",): 2,
    ("head_dim",): 32,
    ("max_position_embeddings", "n_positions"): 256,
    ("sliding_window",): 16,  # shorter than CONTEXT
    ("use_sliding_window",): True,
    ("max_window_layers",): 0,
    ("num_experts", "num_local_experts", "n_routed_experts"): 4,
    ("num_experts_per_tok",): 2,
    ("moe_intermediate_size", "shared_expert_intermediate_size"): 64,
    ("bos_token_id", "eos_token_id", "pad_token_id"): 1,
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"): 1e-3,
}
"""Small values for size fields under all their names. The epsilon of norms is large, so that an engine with another
epsilon than config.json gives different logprobs."""

LATENT = {"qk_rope_head_dim": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
"""Latent attention with a rotary part of `head_dim`, and experts in one group after one dense layer."""

OWN: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 160},  # contexts stay within the window here and in the next two
    "cohere2_moe": {"sliding_window": 160},
    "qwen2_moe": {"sliding_window": 160},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 256},
    "smollm3": {"no_rope_layers": [1, 0]},  # the second layer has a window
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 16},
    "mamba2": {"num_heads": 4, "state_size": 16, "n_groups": 1},
    "axk1": LATENT,
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "longcat_flash": {"qk_rope_head_dim": 32},
    "mimo_v2_flash": {"num_key_value_heads": 1},  # layers with a window have twice as many heads
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "gpt_oss": {"rms_norm_eps": 1e-5},  # vLLM supports only this value, here and in olmoe
    "olmoe": {"rms_norm_eps": 1e-5},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "lfm2": {"block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 32, "conv_dim": 64, "conv_bias": False},
    "glm4_moe": {"head_dim": 32},
    "gemma3n_text": {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "global_head_dim": 32, "num_experts": None},
}
"""Additional fields of single architectures."""


def tiny_policy(kind: str, folder: Path, **own: Any) -> Any:
    """Save a model of this type in the folder as transformers saves it. Its distributions are far from uniform."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    configuration = CONFIG_MAPPING[kind]
    known = set(inspect.signature(configuration.__init__).parameters) | set(configuration().to_dict())
    small = {name: value for names, value in TINY.items() for name in names if name in known}
    config = configuration(**(small | OWN.get(kind, {}) | own))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _disturb(model, lambda parameter: parameter + (0.1 if parameter.ndim > 1 else 0.02) * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def train(model: Any) -> None:
    """Change the weights of the model."""
    torch.manual_seed(1)
    _disturb(model, lambda parameter: parameter * (1 + 0.3 * torch.randn_like(parameter)))


@torch.no_grad()
def _disturb(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for parameter in model.parameters():
        parameter.copy_(change(parameter))


def sent(folder: Path, versions: Sequence[FolderTensors]) -> dict[str, Tensor]:
    """Return the last of these versions as received by a receiver that knows the folder: first an anchor, then
    deltas."""
    sink, assembly, shapes = MemoryChunkSink(), Assembly(None, None), folder_shapes(folder)
    before = None
    for version, tensors in enumerate(versions):
        now = {name: tensor.detach().clone() for name, tensor in tensors}
        manifest = sink.store(now, version, base=before, base_version=version - 1, chunk_bytes=1 << 16)
        check_manifest(manifest, shapes, engine_dtype="float32")
        assembly.add(manifest, sink.fetch)
        before = now
    return assembly.done.tensors


def run_turns(folder: Path, version: dict[str, Tensor]) -> tuple[Turn, Turn]:
    """Run a turn with the weights of the folder and a turn with the weights of the version.

    The turns run in another process, because vLLM changes the transformers classes that it uses. Raises UsageError.
    """
    answer = _forked(lambda: _play(folder, version))
    if "refused" in answer:
        raise UsageError(answer["refused"])
    first, second = answer["turns"]
    return first, second


def _play(folder: Path, version: dict[str, Tensor]) -> list[Turn]:
    from rose.schemas.arrays import unpack_logprobs, unpack_tokens
    from rose.schemas.prompts import Sampling
    from rose.workers.executor.vllm.engine import Engine
    from rose.workers.executor.vllm.types import EngineConfig

    config = EngineConfig(
        model_folder=folder, max_model_len=128, max_running=8, step_tokens=128, kv_cache_bytes=16 << 20, seed=1
    )
    with closing(Engine(config)) as engine:
        engine.allocate_spare()
        engine.self_test()

        def turn() -> Turn:
            engine.add("turn", CONTEXT, Sampling(max_tokens=12), policy_version=engine.version)
            while True:
                for done in engine.step().finished:
                    return unpack_tokens(done.sampled.tokens), unpack_logprobs(done.sampled.logprobs).tolist()

        turns = [turn()]
        engine.swap(1, version.items())
        return [*turns, turn()]


def _forked(call: Callable[[], list[Turn]]) -> Any:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer: dict[str, Any] = {"turns": call()}
        except UsageError as error:
            answer = {"refused": str(error)}
        except BaseException:  # noqa: BLE001 - whatever it is, the test tells
            answer = {"failed": traceback.format_exc()}
        with os.fdopen(write, "w") as line:
            json.dump(answer, line)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as line:
        text = line.read()
    os.waitpid(child, 0)
    answer = json.loads(text or '{"failed": "the engine died"}')
    assert "failed" not in answer, answer["failed"]
    return answer
