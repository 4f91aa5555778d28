"""What a policy's config.json says that transformers, which trains it, and vLLM, which samples from it, could read in
different ways.

Keeps true
- A configuration by which the two compute different logprobs is refused in one sentence.
- A context is no longer than both compute alike, whatever comes beside it in a pass: within a sliding window, where
  vLLM keeps to one, as it does for every type of models, and transformers knows none.
"""

import json
from collections.abc import Iterator, Mapping
from math import isclose, log, sqrt
from pathlib import Path
from typing import Any

from rose.schemas.errors import UsageError

CONFIG = "config.json"

LONGEST = ("max_position_embeddings", "n_positions")
"""What configurations call the number of positions."""

OWN_LENGTH, OWN_LENGTH_TYPE = "model_max_length", "cohere"
"""What goes before them in one type of models."""

ROTARY = ("rope_parameters", "rope_scaling")
"""What they call the scaling of rotary angles, newer and older ones."""

SHORT_AND_LONG = ("longrope", "su")
"""Types with one set of angles for short contexts and another for long ones."""

ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Types of models whose dynamic angles are fixed, by an `alpha`, as far as `max_position_embeddings`."""

WIDER_WINDOW = ("cohere2", "cohere2_moe")
"""Types of models of which vLLM takes the sliding window for one token wider than transformers."""

WINDOW, LOGIT_SCALE, ATTENTION_BIAS = "sliding_window", "logit_scale", "attention_bias"

SILU = {"hidden_act": ("silu", "swish")}

TAKEN_FOR_GRANTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "cohere": SILU | {ATTENTION_BIAS: (False,)},
    "cohere2": SILU | {ATTENTION_BIAS: (False,)},
    "cohere2_moe": SILU | {ATTENTION_BIAS: (False,)},
    "falcon": {"activation": ("gelu",)},
    "qwen3": {ATTENTION_BIAS: (False,)},
    "qwen3_moe": {ATTENTION_BIAS: (False,)},
    "stablelm": SILU | {"use_parallel_residual": (False,)},
}
"""By type of models, fields that vLLM does not read, with the values of which it computes what transformers does."""

OWN_SCALE = "phimoe"
"""The type of model for which transformers reads `short_mscale`, as vLLM does for all."""


class ConfigRefused(UsageError):
    """A configuration that trainer and engine would not compute alike."""


def check_agreement(folder: Path, config: Mapping[str, Any]) -> None:
    """Of a folder's config.json. Raises ConfigRefused."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
        raise ConfigRefused(f"{folder}/{CONFIG} lets a token see what comes after it: such a model cannot be sampled")
    if config.get("scale_attn_weights") is False:
        raise ConfigRefused(f"{folder}/{CONFIG} has attention without a scale (scale_attn_weights), which vLLM ignores")
    for name, known in TAKEN_FOR_GRANTED.get(str(config.get("model_type")), {}).items():
        said = config.get(name)
        if said is not None and said not in known:
            raise ConfigRefused(
                f"{folder}/{CONFIG} has {name} {said!r}, which vLLM takes for {known[0]!r} and transformers does not: "
                "begin with another model"
            )
    if config.get(LOGIT_SCALE) not in (None, 1) and not _known(config, LOGIT_SCALE):
        raise ConfigRefused(
            f"{folder}/{CONFIG} has a {LOGIT_SCALE}, which vLLM reads and transformers, for a "
            f"{config.get('model_type')}, does not: take it out"
        )
    for angles in _angles(config):
        kind = _kind(angles)
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
    """Of a context; None if the configuration does not say."""
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
    """`most_tokens` of its config.json; a folder without a readable one is somebody else's to refuse."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return max_context_tokens(config) if isinstance(config, dict) else None


def check_context_length(folder: Path, tokens: int) -> None:
    """For an executor of this folder whose longest turn has so many tokens. Raises ConfigRefused."""
    most = max_context_tokens_of(folder)
    if most is not None and tokens > most:
        raise ConfigRefused(
            f"executor.max_model_len ({tokens}) is more than the {most} tokens of which trainer and engine compute the "
            f"same with {folder}: set it, and environment.max_context_tokens, to at most {most}"
        )


def match_engine_numerics(config: Any) -> None:
    """Have a model that transformers makes of its configuration compute all that engines compute, and give it in the
    one form, however the folder was used before. Raises ConfigRefused.
    """
    config.output_attentions = config.output_hidden_states = False
    config.return_dict = True
    if getattr(config, WINDOW, None) == 0:  # so folders say that there is none, and vLLM knows; else all is hidden
        kinds = getattr(config, "layer_types", None)
        if kinds and "sliding_attention" in kinds:
            raise ConfigRefused(f"{CONFIG} has layers of sliding attention and a {WINDOW} of 0, which hides all")
        if not kinds:
            setattr(config, WINDOW, None)
    # torch's own kernel has no cap on the logits of attention, and transformers leaves the cap out in silence. None
    # lets transformers choose: it keeps to its own code for what else the kernel has not, as sinks.
    config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else None


def _angles(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What it says of rotary angles: once, or once for each type of layer."""
    for name in ROTARY:
        angles = config.get(name)
        if isinstance(angles, Mapping):
            apart = [one for one in angles.values() if isinstance(one, Mapping)]
            yield from apart or [angles]


def _known(config: Mapping[str, Any], name: str) -> bool:
    """Whether transformers' models of this type read the field. Of a type that it has not nobody can say."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    return kind not in CONFIG_MAPPING or name in CONFIG_MAPPING[kind]().to_dict()


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
    """How many positions both have the same angles for."""
    kind, factor = _kind(angles), angles.get("factor")
    # vLLM takes long angles for all turns of an engine that may have long ones, and leaves out what makes attention
    # sharper in long contexts.
    if kind in SHORT_AND_LONG or angles.get("llama_4_scaling_beta"):
        return min(positions, _original(config, angles, positions))
    if not isinstance(factor, int | float):
        return positions
    if kind == "linear":
        return int(positions * factor)
    return min(positions, int(_original(config, angles, positions) * factor)) if kind == "yarn" else positions


def _same_scale(config: Mapping[str, Any], angles: Mapping[str, Any]) -> bool:
    """Whether short contexts have the same scale in both."""
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
