"""The policy as the trainer holds it: a causal model of transformers, loaded from its folder.

Keeps true
- Weights and arithmetic are float32: the engine's recorded logprobs and the trainer's agree to about 1e-6.
- The model is in evaluation mode, also for gradients: engines sample without dropout, layer dropping and router noise,
  so a policy with them would differ from the policy that sampled.
- Attention has every feature of the configuration, as in engines: kernels that omit a feature are not used. Layers that
  vLLM computes differently from transformers are replaced (`engine_layers`).
- A folder that does not load raises an error of one sentence, and no model is returned. Code in a folder is never run.
"""

from pathlib import Path
from typing import Any

import torch

from rose.schemas.errors import UsageError
from rose.workers.engine_layers import replace_unlike_layers
from rose.workers.model_config import CONFIG, SHORT_AND_LONG, match_engine_numerics
from rose.workers.tokenizer import check_reading
from rose.workers.trainer.logprobs import PROBED, produces_nonfinite
from rose.workers.weights.folder_names import refuse_untied
from rose.workers.weights.model_folder import (
    INDEX,
    FolderError,
    check_folder,
    folder_tensors,
    held_tensors,
)

REASON_CHARACTERS = 300
"""Most characters of a library's message that are passed on; some messages have pages."""

HEAD = "lm_head.weight"
"""Name of the tensor that a model with tied weights does not need."""


def load_policy(folder: Path) -> Any:
    """Load the folder's model in float32 and evaluation mode; a `transformers.PreTrainedModel`. Raises UsageError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        check_folder(folder)
        check_reading(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        match_engine_numerics(config)
        if (folder / INDEX).is_file():  # the index may name model.safetensors too, which transformers would load alone
            config.transformers_weights = INDEX
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # otherwise transformers raises an error that does not name the tensors
            output_loading_info=True,
        )
    except UsageError:
        raise
    except Exception as error:  # transformers, safetensors and json raise a dozen unrelated types for broken files
        if "padding_idx" in str(error).lower():
            raise FolderError(
                f"{folder}/config.json has a pad_token_id outside of its vocabulary: set it to a token, or take it out"
            ) from error
        raise FolderError(f"{folder} does not load as a causal language model: {_one_line(error)}") from error
    unlike = [
        f"{name} of shape {tuple(held)} instead of {tuple(expected)}"
        for name, held, expected in report["mismatched_keys"]
    ]
    if unfit := sorted([*report["missing_keys"], *unlike])[:3]:
        unknown = sorted(report["unexpected_keys"])[:1]
        held = f"; the files hold {unknown[0]}, which the model does not have" if unknown else ""
        if HEAD in report["missing_keys"]:
            held += "; add the tensor, or set tie_word_embeddings to true in config.json"
        raise FolderError(f"{folder}: the weights do not fit config.json, beginning with {', '.join(unfit)}{held}")
    _refuse_not_finite(model, folder)
    refuse_untied(model, folder)
    _refuse_whole_heads(model, folder)
    _keep_short_angles(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # contexts may hold the token, whose row would get no gradient
    replace_unlike_layers(model)
    model.eval()
    _probe_policy(model, folder)
    return model


def _refuse_not_finite(model: Any, folder: Path) -> None:
    """Refuse a model with values that are not finite. Raises FolderError.

    Call this before checks that compare values: NaN is unequal to every value.
    """
    if all(parameter.isfinite().all() for parameter in model.parameters()):
        return
    held = folder_tensors(folder)
    for name, tensor in held_tensors(folder, held, held):
        if not tensor.float().isfinite().all():
            raise FolderError(f"{folder}: {name} holds a value that is not finite: begin with another policy")


def _probe_policy(model: Any, folder: Path) -> None:
    """Compute a few tokens: some models load and cannot compute, or compute no finite logprobs. Raises FolderError."""
    tokens = torch.arange(min(PROBED, model.get_input_embeddings().num_embeddings))[None]
    try:
        nonfinite = produces_nonfinite(model, tokens)
    except Exception as error:  # as above
        raise FolderError(f"{folder} loads, and transformers cannot compute it: {_one_line(error)}") from error
    if nonfinite:
        raise FolderError(f"{folder}: the policy computes logprobs that are not finite, whatever the tokens")


def _one_line(error: Exception) -> str:
    """Return the text of a library's error, with the type if there is no text or only a key."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text[:REASON_CHARACTERS]


def _refuse_whole_heads(model: Any, folder: Path) -> None:
    """Refuse a partial rotary factor that transformers ignores for the model's type. Raises FolderError.

    Such a model rotates whole heads in transformers, and a part of each head in vLLM.
    """
    for module in model.modules():
        config, turned = getattr(module, "config", None), getattr(module, "inv_freq", None)
        angles = getattr(config, "rope_parameters", None)
        if config is None or turned is None or not angles or angles.get("rope_type") == "proportional":
            continue
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if (part := angles.get("partial_rotary_factor") or 1) != 1 and 2 * len(turned) != int(head * part):
            raise FolderError(
                f"{folder}/{CONFIG} has a partial_rotary_factor, which vLLM keeps to and transformers, for a "
                f"{config.model_type}, does not: begin with another model"
            )


def _keep_short_angles(model: Any) -> None:
    """Keep the angles of short contexts in models that have other angles for long contexts.

    Transformers would use the long angles for all rows of a pass with a long row, and vLLM for all turns of an engine
    that may have a long turn. No context is that long (`model_config.max_context_tokens`).
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in SHORT_AND_LONG:
            module.rope_type = "default"  # otherwise each pass chooses new angles
