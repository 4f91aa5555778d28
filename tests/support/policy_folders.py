"""Small random policies as model folders, and their logprobs in transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 48


def new_policy(seed: int, *, tied: bool) -> Any:
    """Return a Qwen3 model of 0.45M parameters in 4 layers, with distributions far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).float().eval()


def new_mixture(seed: int) -> Any:
    """Return a Qwen3 mixture of experts with one layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    return Qwen3MoeForCausalLM(config).float().eval()


def save_policy(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the tensors, which later changes of the model do not affect."""
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@torch.no_grad()
def logprobs_of(model: Any, context: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs of transformers for each of `tokens` after `context`."""
    ids = torch.tensor([[*context, *tokens]])
    logits = model(input_ids=ids).logits[0, len(context) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(context) :, None])[:, 0]
