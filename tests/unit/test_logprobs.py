"""Logprobs that a trainer computes: those of the whole logits, without ever holding the whole logits."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rose.workers.trainer import logprobs
from rose.workers.trainer.logprobs import LogprobModule, head_of, token_logprobs

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gemma2": {"final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},  # its head has a bias
}
LIMIT = 61 * 4
"""Logits of four tokens."""


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the largest number of values that a tensor of logits has had; the weights of the head are not counted."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (61,) and tensor.shape != (32, 61):
                self.values = max(self.values, tensor.numel())
        return made


def model_of(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | OTHERS[kind])).eval()


def whole(model: Any, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits / temperatures[:, 1:, None]
    picked = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(picked, (1, 0))


@pytest.mark.parametrize("kind", OTHERS)
def test_logprobs_in_parts_and_their_gradients_are_those_of_the_whole_logits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    assert head_of(model) is not None
    tokens = torch.randint(2, 61, (3, 20), generator=torch.Generator().manual_seed(1))
    temperatures = torch.rand((3, 20), generator=torch.Generator().manual_seed(2)) + 0.5
    wanted = torch.rand((3, 20), generator=torch.Generator().manual_seed(3)) < 0.6
    expected = whole(model, tokens, temperatures) * wanted
    expected[:, 0] = 0.0
    slopes = torch.autograd.grad(expected.sum(), list(model.parameters()))
    monkeypatch.setattr(logprobs, "MOST_LOGITS", LIMIT)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        found = LogprobModule(model)(tokens, temperatures, wanted)
        own = torch.autograd.grad(found.sum(), list(model.parameters()))
    assert largest.values <= LIMIT < wanted.sum() * 61
    assert torch.allclose(found, expected, atol=2e-5)
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(own, slopes, strict=True))


def test_head_behind_which_a_model_computes_something_unknown_uses_the_whole_logits() -> None:
    model = model_of("llama")
    model.register_forward_hook(lambda _module, _inputs, output: setattr(output, "logits", output.logits**3))
    tokens = torch.arange(2, 22)[None]
    assert head_of(model) is None
    with torch.no_grad():
        assert torch.allclose(token_logprobs(model, tokens), whole(model, tokens, torch.ones(1, 20)), atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite"])
def test_head_found_with_weights_that_hide_what_is_behind_the_head_stays_right(kind: str) -> None:
    model = model_of(kind)
    tokens = torch.arange(2, 22)[None]
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        assert head_of(model) is not None
        model.get_output_embeddings().weight.normal_(0.0, 10.0)
        assert torch.allclose(token_logprobs(model, tokens), whole(model, tokens, torch.ones(1, 20)), atol=1e-4)
