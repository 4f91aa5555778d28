"""Checks that transformers, which trains, and vLLM, which samples, read config.json in the same way.

Keeps true
- A configuration for which the two compute different logprobs is refused with one sentence.
- The longest context is one for which both compute the same, with any other sequences in the pass. Where vLLM applies a
  sliding window and transformers does not, the context stays within the window.
"""

import json
from collections.abc import Iterator, Mapping
from math import isclose, log, sqrt
from pathlib import Path
from typing import Any

from rose.schemas.errors import UsageError

CONFIG = "config.json"

LONGEST = ("max_position_embeddings", "n_positions")
"""Names of the field with the number of positions."""

OWN_LENGTH, OWN_LENGTH_TYPE = "model_max_length", "cohere"
"""Field that takes precedence over LONGEST, and the prefix of the model types that have it."""

ROTARY = ("rope_parameters", "rope_scaling")
"""Names of the field with the scaling of rotary angles: the newer and the older one."""

SHORT_AND_LONG = ("longrope", "su")
"""Values of rope_type with one set of angles for short contexts and another for long contexts."""

ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Model types with fixed dynamic angles, given by `alpha`, up to `max_position_embeddings`."""

WIDER_WINDOW = ("cohere2", "cohere2_moe", "qwen2_moe")
"""Model types for which vLLM's sliding window is wider than that of transformers: one token, or (qwen2_moe) no window
where only some layers have one.
"""

TYPED_BY_LAYERS = "mistral"
"""The model type that transformers reads as another one, which has LAYER_TYPES, if the configuration has them."""

BY_PATTERN = ("exaone4", "exaone_moe")
"""Model types for which transformers makes LAYER_TYPES from PATTERN, and fails where that is no number."""

EVEN_HEADS = (
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jamba", "olmoe", "qwen2", "qwen2_moe"),
)
"""Model types for which vLLM does not read HEAD_DIM and divides `hidden_size` by the number of heads."""

KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "su", "yarn")
"""Values of rope_type that transformers knows."""

WINDOW, LAYER_TYPES, PATTERN, HEAD_DIM = "sliding_window", "layer_types", "sliding_window_pattern", "head_dim"
SECTIONS, ATTENTION_BIAS, MLP_BIAS = "mrope_section", "attention_bias", "mlp_bias"

SILU = {"hidden_act": ("silu", "swish")}
NO_BIAS = {ATTENTION_BIAS: (False,)}

TAKEN_FOR_GRANTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "afmoe": NO_BIAS,
    "axk1": NO_BIAS | {"rope_interleave": (True,)},
    "cohere": SILU | NO_BIAS,
    "cohere2": SILU | NO_BIAS,
    "cohere2_moe": SILU | NO_BIAS,
    "deepseek_v2": NO_BIAS | {MLP_BIAS: (False,)},
    "deepseek_v3": NO_BIAS | {"rope_interleave": (True,)},
    "ernie4_5": {"use_bias": (False,)},
    "ernie4_5_moe": {"moe_norm_min": (1e-12,)},
    "falcon": {"activation": ("gelu",)},
    "falcon_h1": NO_BIAS | {MLP_BIAS: (False,)},
    "gemma": NO_BIAS | {"hidden_act": ("gelu_pytorch_tanh", "gelu")},
    "gemma3_text": {"attn_logit_softcapping": (None,)},
    "glm4_moe_lite": NO_BIAS | {"rope_interleave": (True,)},
    "gpt_oss": {ATTENTION_BIAS: (True,), "rms_norm_eps": (1e-5,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    "granitemoe": SILU | NO_BIAS,
    "granitemoe_swa": NO_BIAS,
    "granitemoeshared": NO_BIAS,
    "hy_v3": NO_BIAS | {MLP_BIAS: (False,)},
    "llama4_text": SILU | NO_BIAS,
    "longcat_flash": NO_BIAS,
    "minicpm3": NO_BIAS | {MLP_BIAS: (False,)},
    "minimax_m2": SILU,
    "mixtral": SILU,
    "olmo_hybrid": SILU | NO_BIAS,
    "olmoe": SILU | NO_BIAS | {"rms_norm_eps": (1e-5,), "norm_topk_prob": (False,), "clip_qkv": (None,)},
    "qwen2_moe": {"qkv_bias": (True,)},
    "qwen3": NO_BIAS,
    "qwen3_5_moe_text": NO_BIAS,
    "qwen3_5_text": NO_BIAS,
    "qwen3_moe": NO_BIAS,
    "qwen3_next": NO_BIAS,
    "stablelm": SILU | {"use_parallel_residual": (False,), "qk_layernorm": (False,)},
    "zamba2": {"use_long_context": (False,)},
}
"""Fields that vLLM does not read, with the values for which vLLM computes the same as transformers; by model type."""

ENGINE_ALONE: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v2": {"norm_topk_prob": (False, None), "scoring_func": ("softmax", None)},
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "gemma": {"hidden_activation": ("gelu_pytorch_tanh", None)},
}
"""Fields that transformers does not read, with the values for which vLLM computes the same; None: without the field."""

ENGINE_FIELDS = {
    **{"logit_scale": 1, ATTENTION_BIAS: False, MLP_BIAS: False, "bias": False, "qkv_bias": False, "qk_norm": False},
    **{"ada_rms_norm_t_cond": False, "attention_sinks": False, "dual_chunk_attention_config": None},
    **{"layer_rope_theta": None, "llama_4_scaling": None},
}
"""Fields that vLLM reads for many model types, with the value that has no effect. Transformers reads a field only for
the types whose configuration knows it."""

ROUNDED_SLOPES = "falcon"
"""The model type for which transformers computes ALiBi in bfloat16, whatever the type of the weights."""

OWN_SCALE = "phimoe"
"""The model type for which transformers reads `short_mscale`; vLLM reads the field for all types."""


class ConfigRefused(UsageError):
    """Trainer and engine would compute different logprobs from this configuration."""


def check_agreement(folder: Path, config: Mapping[str, Any]) -> None:
    """Check the content of a folder's config.json. Raises ConfigRefused if trainer and engine would not agree."""
    if config.get("auto_map") and not _type_known(config):
        raise ConfigRefused(
            f"{folder}/{CONFIG} asks for code of its own (auto_map), which is never run, and transformers does not "
            f"know the type {config.get('model_type')}: begin with a model of a type that transformers and vLLM know"
        )
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
        raise ConfigRefused(f"{folder}/{CONFIG} lets a token see what comes after it: such a model cannot be sampled")
    if config.get("scale_attn_weights") is False:
        raise ConfigRefused(f"{folder}/{CONFIG} has attention without a scale (scale_attn_weights), which vLLM ignores")
    if config.get("model_type") == ROUNDED_SLOPES and config.get("alibi"):
        raise ConfigRefused(
            f"{folder}/{CONFIG} has alibi, whose slopes and positions transformers rounds to bfloat16 and vLLM does "
            "not: begin with another model"
        )
    for name, known in TAKEN_FOR_GRANTED.get(str(config.get("model_type")), {}).items():
        value = config.get(name)
        if value is not None and value not in known:
            raise ConfigRefused(
                f"{folder}/{CONFIG} has {name} {value!r}, which vLLM takes for {known[0]!r} and transformers does not: "
                "begin with another model"
            )
    for name, known in ENGINE_ALONE.get(str(config.get("model_type")), {}).items():
        if (value := config.get(name)) not in known:
            raise ConfigRefused(
                f"{folder}/{CONFIG} has {name} {json.dumps(value)}, which vLLM reads and transformers, for a "
                f"{config['model_type']}, takes for {json.dumps(known[0])}: write {name} {json.dumps(known[0])}"
            )
    for name, none in ENGINE_FIELDS.items():
        if config.get(name) not in (None, none) and not _known(config, name):
            raise ConfigRefused(
                f"{folder}/{CONFIG} has {name} {json.dumps(config[name])}, which vLLM reads and transformers, for a "
                f"{config.get('model_type')}, does not: take it out"
            )
    _check_heads(folder, config)
    _check_layer_types(folder, config)
    _check_angles(folder, config)


def _check_heads(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigRefused if the configuration has heads of a size that vLLM does not read."""
    size, width, heads = (config.get(name) for name in (HEAD_DIM, "hidden_size", "num_attention_heads"))
    if config.get("model_type") in EVEN_HEADS and size and width and heads and size != width // heads:
        raise ConfigRefused(
            f"{folder}/{CONFIG} has {HEAD_DIM} {size}, which transformers reads and vLLM, for a "
            f"{config['model_type']}, takes for {width // heads} (hidden_size / num_attention_heads): begin with "
            "another model"
        )


def _check_layer_types(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigRefused if transformers ignores LAYER_TYPES, or cannot make them."""
    if _windows_all(config):
        raise ConfigRefused(
            f"{folder}/{CONFIG} has {LAYER_TYPES} beside a {WINDOW}, which vLLM keeps to and transformers, for a "
            f"{config.get('model_type')}, does not: take one of the two out"
        )
    window, pattern = config.get(WINDOW, 1), config.get(PATTERN, 1)
    if config.get("model_type") in BY_PATTERN and not (
        config.get(LAYER_TYPES) or (window and pattern and type(pattern) is int)
    ):
        raise ConfigRefused(
            f"{folder}/{CONFIG} has a {WINDOW} {window!r} and a {PATTERN} {pattern!r}, from which transformers makes "
            f"no {LAYER_TYPES}: write {LAYER_TYPES}, one for each layer"
        )


def _check_angles(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigRefused if transformers and vLLM compute rotary angles differently, or either cannot."""
    for angles in _angles(config):
        kind = _kind(angles)
        if SECTIONS in angles and not _has_sections(config):
            raise ConfigRefused(
                f"{folder}/{CONFIG} has angles of several dimensions, which a model of text alone has not: take "
                f"{SECTIONS} out of {' or '.join(name for name in ROTARY if config.get(name))}, and set its rope_type "
                "to default"
            )
        if kind not in KINDS:
            raise ConfigRefused(
                f"{folder}/{CONFIG} scales rotary angles by rope_type {kind}, which transformers does not know: take "
                "the scaling out, or write the rope_type as transformers does"
            )
        if kind == "linear" and not isinstance(angles.get("factor"), float):  # vLLM takes a list or a float
            raise ConfigRefused(
                f"{folder}/{CONFIG} has the factor {json.dumps(angles.get('factor'))} for rope_type linear: write it "
                "with a decimal point, such as 2.0"
            )
        if kind == "dynamic" and not (config.get("model_type") in ALPHA and angles.get("alpha")):
            raise ConfigRefused(
                f"{folder}/{CONFIG} scales rotary angles by rope_type dynamic, which transformers and vLLM compute "
                "differently: take the scaling out, and keep contexts within max_position_embeddings"
            )
        if kind == "proportional" and angles.get("factor") not in (None, 1):
            raise ConfigRefused(
                f"{folder}/{CONFIG} scales rotary angles by rope_type proportional with a factor, which vLLM ignores "
                "and transformers does not: take the factor out"
            )
        if kind in SHORT_AND_LONG and not _same_scale(config, angles):
            raise ConfigRefused(
                f"{folder}/{CONFIG} has a factor, attention_factor or short_mscale for rope_type longrope, which "
                "transformers and vLLM read differently: take it out"
            )


def max_context_tokens(config: Mapping[str, Any]) -> int | None:
    """The longest context for which trainer and engine agree, in tokens; None if the configuration sets no limit."""
    positions = _positions(config)
    if positions is None:
        return None
    reaches = [_reach(config, angles, positions) for angles in _angles(config)] or [positions]
    window = config.get(WINDOW)
    if (
        isinstance(window, int)
        and window > 0
        and (config.get("model_type") in WIDER_WINDOW or not _known(config, WINDOW))
    ):
        reaches.append(window)
    return min(reaches)


def max_context_tokens_of(folder: Path) -> int | None:
    """`max_context_tokens` of the folder's config.json; None if the file is unreadable, which other checks refuse."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return max_context_tokens(config) if isinstance(config, dict) else None


def check_context_length(folder: Path, tokens: int) -> None:
    """Check the longest context of an executor.

    Raises ConfigRefused if `tokens` exceeds `max_context_tokens_of` the folder.
    """
    most = max_context_tokens_of(folder)
    if most is not None and tokens > most:
        raise ConfigRefused(
            f"executor.max_model_len ({tokens}) is more than the {most} tokens of which trainer and engine compute the "
            f"same with {folder}: set it, and environment.max_context_tokens, to at most {most}"
        )


def match_engine_numerics(config: Any) -> None:
    """Make a transformers model compute what vLLM computes, and return its output in one form.

    `config` is changed in place.

    Raises ConfigRefused if a layer has sliding attention with a window of 0.
    """
    config.output_attentions = config.output_hidden_states = False
    config.return_dict = True
    config.slow_but_exact = False  # Bloom's other way of computing, which leaves biases out
    if getattr(config, WINDOW, None) == 0:  # 0 means no window, which vLLM knows; transformers would hide every token
        kinds = getattr(config, LAYER_TYPES, None)
        if kinds and "sliding_attention" in kinds:
            raise ConfigRefused(f"{CONFIG} has layers of sliding attention and a {WINDOW} of 0, which hides all")
        if not kinds:
            setattr(config, WINDOW, None)
    # torch's attention kernel has no cap on logits, and transformers then leaves the cap out without an error. None
    # lets transformers choose the implementation; it avoids the kernel for other features that the kernel lacks, as
    # sinks.
    config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else None


def _angles(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary settings: one mapping, or one for each layer type."""
    for name in ROTARY:
        angles = config.get(name)
        if isinstance(angles, Mapping):
            apart = [one for one in angles.values() if isinstance(one, Mapping)]
            yield from apart or [angles]


def _type_known(config: Mapping[str, Any]) -> bool:
    """Whether transformers knows the model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def _known(config: Mapping[str, Any], name: str) -> bool:
    """Whether transformers' configuration of this model type has the field.

    True if transformers does not know the type.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return not _type_known(config) or name in CONFIG_MAPPING[config["model_type"]]().to_dict()


def _windows_all(config: Mapping[str, Any]) -> bool:
    """Whether transformers applies the sliding window to all layers whatever LAYER_TYPES says."""
    if not (config.get(WINDOW) and config.get("use_sliding_window", True) and config.get(LAYER_TYPES)):
        return False
    return config.get("model_type") != TYPED_BY_LAYERS and _known(config, WINDOW) and not _known(config, LAYER_TYPES)


def _has_sections(config: Mapping[str, Any]) -> bool:
    """Whether transformers' models of this type split rotary angles by SECTIONS."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    known = getattr(CONFIG_MAPPING[kind], "ignore_keys_at_rope_validation", ()) if kind in CONFIG_MAPPING else ()
    return SECTIONS in (known or ())


def _kind(angles: Mapping[str, Any]) -> Any:
    return angles.get("rope_type") or angles.get("type") or "default"


def _positions(config: Mapping[str, Any]) -> int | None:
    longest = (OWN_LENGTH, *LONGEST) if str(config.get("model_type")).startswith(OWN_LENGTH_TYPE) else LONGEST
    return next((length for name in longest if isinstance(length := config.get(name), int)), None)


def _original(config: Mapping[str, Any], angles: Mapping[str, Any], positions: int) -> int:
    name = "original_max_position_embeddings"
    length = angles.get(name) or config.get(name)
    return length if isinstance(length, int) else positions


def _reach(config: Mapping[str, Any], angles: Mapping[str, Any], positions: int) -> int:
    """Number of positions for which transformers and vLLM compute the same angles."""
    kind, factor = _kind(angles), angles.get("factor")
    # vLLM uses the long angles for all turns of an engine whose context may be long, and omits the scaling that
    # sharpens attention in long contexts.
    if kind in SHORT_AND_LONG or angles.get("llama_4_scaling_beta"):
        return min(positions, _original(config, angles, positions))
    if not isinstance(factor, int | float):
        return positions
    if kind == "linear":
        return int(positions * factor)
    return min(positions, int(_original(config, angles, positions) * factor)) if kind == "yarn" else positions


def _same_scale(config: Mapping[str, Any], angles: Mapping[str, Any]) -> bool:
    """Whether transformers and vLLM scale attention in short contexts alike."""
    positions = _positions(config)
    if config.get("model_type") == OWN_SCALE or positions is None:
        return True
    original = _original(config, angles, positions)
    given = angles.get("attention_factor")
    trained = _scale(angles.get("factor") or positions / original, original) if given is None else given
    sampled = angles.get("short_mscale") or _scale(positions / original, original)
    return isclose(trained, sampled, rel_tol=1e-6)


def _scale(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
