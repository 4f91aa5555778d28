"""Options of config.json that trainer and engine read differently: refused at the start, or kept within a safe
range."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rose.schemas.errors import UsageError
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.engine_process import EngineProcess
from rose.workers.model_config import check_agreement, check_context_length, max_context_tokens
from rose.workers.trainer.policy import load_policy
from rose.workers.weights.model_folder import check_folder

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
HEADS = {"hidden_size": 64, "num_attention_heads": 2}


def folder_of(place: Path, **settings: Any) -> Path:
    """Write a folder with this config.json and no other file."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 12}
    (place / "config.json").write_text(json.dumps(config | settings))
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, place / "model.safetensors")
    return place


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0}}, "rope_type dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "rope_type dynamic"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "take the factor out"),
        ({"max_position_embeddings": 64, "rope_scaling": LONGROPE | {"short_mscale": 1.2}}, "short_mscale"),
        (
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 32,
                "rope_scaling": LONGROPE | {"factor": 4.0},
            },
            "rope_type longrope",
        ),
        ({"is_causal": False}, "comes after it"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
            r"asks for code of its own .* the type own: begin",
        ),
        ({"use_bidirectional_attention": True}, "comes after it"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"model_type": "stablelm", "hidden_act": "gelu"}, "has hidden_act 'gelu', which vLLM takes for 'silu'"),
        ({"model_type": "stablelm", "use_parallel_residual": True}, "use_parallel_residual"),
        ({"model_type": "cohere2", "hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "falcon", "activation": "silu"}, "activation"),
        ({"model_type": "falcon", "alibi": True}, "has alibi, whose slopes .* rounds to bfloat16"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "logit_scale": 0.25}, "has logit_scale 0.25, which vLLM reads"),
        ({"model_type": "qwen2", **HEADS, "head_dim": 64}, "has head_dim 64, .* takes for 32"),
        ({"model_type": "qwen2_moe", **HEADS, "head_dim": 16}, "has head_dim 16, .* takes for 32"),
        ({"model_type": "phi3", "sliding_window": 8, "layer_types": ["full_attention"]}, "has layer_types beside a"),
        ({"model_type": "starcoder2", "sliding_window": 8, "layer_types": ["full_attention"]}, "has layer_types"),
        ({"model_type": "qwen2", "rope_scaling": {"mrope_section": [4, 6, 6]}}, "mrope_section out of rope_scaling"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}, "take mrope_section out"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type ntk, which transformers does not know"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0, which vLLM takes for None"),
        ({"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LG"}, "'LG', .* write layer_types"),
        ({"model_type": "exaone4", "sliding_window": None}, "write layer_types"),
        ({"model_type": "deepseek_v3", **SIGMOID, "rope_interleave": False}, "rope_interleave"),
        ({"model_type": "deepseek_v3", "topk_method": "noaux_tc"}, 'scoring_func null, .* takes for "sigmoid": write'),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob true, .* takes for false: write"),
        ({"model_type": "gemma", "attention_bias": True}, "attention_bias"),
        (
            {"model_type": "gemma", "hidden_activation": "gelu"},
            'hidden_activation "gelu", .* "gelu_pytorch_tanh": write',
        ),
        ({"model_type": "granitemoe", "hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm"),
        ({"model_type": "mistral", "attention_bias": True}, "has attention_bias true, .* mistral, does not: take it"),
        ({"model_type": "phi3", "mlp_bias": True}, "has mlp_bias true"),
        ({"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 8}}, "has dual_chunk_attention_config"),
    ],
)
def test_option_computed_differently_by_trainer_and_engine_is_refused_by_both(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, **settings)
    sentences = set()
    for start in (check_folder, load_policy):
        with pytest.raises(UsageError, match=reason) as caught:
            start(folder)
        sentences.add(str(caught.value))
    assert len(sentences) == 1 and "\n" not in sentences.pop()


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": None, "is_causal": True, "use_bidirectional_attention": False, "scale_attn_weights": True},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
        {"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
        {"max_position_embeddings": 64, "rope_scaling": LONGROPE | {"type": "su"}},
        {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
        {"model_type": "stablelm", "hidden_act": "silu", "use_parallel_residual": False},
        {"model_type": "qwen3", "attention_bias": False},
        {"model_type": "llama", "attention_bias": True, "hidden_act": "gelu"},
        {"model_type": "deepseek_v3", **SIGMOID},
        {"model_type": "deepseek_v2"},
        {"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
        {"model_type": "mistral", "attention_bias": False, "mlp_bias": None},
        {"model_type": "cohere", "logit_scale": 0.25, "attention_bias": None},
        {"model_type": "qwen2", **HEADS, "head_dim": 32},
        {"model_type": "qwen2", **HEADS, "head_dim": None},
        {"model_type": "mistral", **HEADS, "head_dim": 64, "sliding_window": 8, "layer_types": ["full_attention"]},
        {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 4},
        {
            "model_type": "exaone4",
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"],
        },
        {"model_type": "phi3", "sliding_window": None, "layer_types": ["full_attention"]},
        {"model_type": "qwen3", "sliding_window": 8, "layer_types": ["full_attention"]},
        {"model_type": "qwen3_5_text", "rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10]}},
    ],
)
def test_option_computed_alike_by_trainer_and_engine_is_accepted(settings: Mapping[str, Any], tmp_path: Path) -> None:
    check_agreement(tmp_path, settings)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "factor": 4.0}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 64),
        (
            {
                "max_position_embeddings": 256,
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            },
            128,
        ),
        ({"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE}, 32),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"full": {"rope_type": "linear", "factor": 4.0}, "window": {"rope_type": "default"}},
            },
            64,
        ),
        (
            {
                "max_position_embeddings": 256,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            64,
        ),
        ({"model_type": "cohere", "max_position_embeddings": 64, "model_max_length": 256}, 256),
        ({"model_type": "cohere2", "max_position_embeddings": 256, "sliding_window": 64}, 64),
        ({"model_type": "qwen2_moe", "max_position_embeddings": 256, "sliding_window": 64}, 64),
        ({"model_type": "mistral", "max_position_embeddings": 256, "sliding_window": 64}, 256),
        ({"model_type": "llama", "max_position_embeddings": 256, "sliding_window": 64}, 64),
        ({"model_type": "llama", "max_position_embeddings": 256, "sliding_window": None}, 256),
        ({"model_type": "of-nobody", "max_position_embeddings": 256, "sliding_window": 64}, 256),
    ],
)
def test_context_limit_is_the_longest_that_both_compute_alike(settings: Mapping[str, Any], most: int | None) -> None:
    assert max_context_tokens(settings) == most


def test_executor_with_longer_turns_is_refused_before_its_engine_is_built(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_position_embeddings=64, original_max_position_embeddings=32, rope_scaling=LONGROPE)
    check_context_length(folder, 32)
    config = ExecutorConfig(model_folder=folder, name="executor", max_model_len=33)
    with pytest.raises(UsageError, match=r"executor\.max_model_len \(33\) is more than the 32 tokens .* at most 32$"):
        EngineProcess(config)
