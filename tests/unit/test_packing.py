"""Packed passes: logprobs and gradients of padded passes, without padding, for models whose masks are causal alone."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.logprobs import LogprobModule, pad_rows, token_logprobs
from rose.workers.trainer.packing import MOST_PADDED, is_packed, pack_passes, packed_batches
from rose.workers.trainer.ranks import Ranks
from rose.workers.trainer.replica import Replica, recompute_layers

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
}
PACKED: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "cohere": {"logit_scale": 0.25},
}
PADDED: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": ({"sliding_window": 4096}, "masks"),
    "gemma2": ({}, "type sliding_attention"),
    "llama4_text": ({"attention_chunk_size": 256}, "type chunked_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "type conv"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "type hybrid"),
    "stablelm": ({}, "depend"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "attention is eager"),
}
CALCULATOR = Path(__file__).parents[2] / "workers" / "models" / "calculator"
LENGTHS = 5, 31, 2, 90, 17


def model_of(kind: str, **settings: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SIZES | {"initializer_range": 0.2} | settings)
    return AutoModelForCausalLM.from_config(config).eval()


def rows_of(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens and temperatures, and about half of the tokens as wanted, of shape (rows, tokens)."""
    generator = torch.Generator().manual_seed(sum(lengths))
    shape = len(lengths), max(lengths)
    inside = pad_rows([[1] * length for length in lengths], dtype=torch.bool)
    wanted = (torch.rand(shape, generator=generator) < 0.5) & inside
    return (
        torch.randint(2, 61, shape, generator=generator) * inside,
        torch.rand(shape, generator=generator) + 0.5,
        wanted,
    )


def gradients(model: Any, found: torch.Tensor) -> list[torch.Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = torch.autograd.grad(found.square().sum(), parameters, allow_unused=True)
    return [torch.zeros_like(one) if slope is None else slope for one, slope in zip(parameters, made, strict=True)]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_pass_has_the_logprobs_and_gradients_of_a_padded_pass(kind: str, recomputed: bool) -> None:
    padded = model_of(kind, **PACKED[kind])
    packed = copy.deepcopy(padded)
    assert pack_passes(packed) is None
    if recomputed:
        recompute_layers(packed)
    tokens, temperatures, wanted = rows_of(LENGTHS)
    expected = token_logprobs(padded, tokens, temperatures, wanted)
    found = LogprobModule(packed)(tokens, temperatures, wanted, LENGTHS)
    assert is_packed(packed) and is_packed(LogprobModule(packed)) and not is_packed(padded)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for one, other in zip(gradients(packed, found), gradients(padded, expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scale", [0.2, 0.002])
@pytest.mark.parametrize("kind", PADDED)
def test_model_that_a_packed_pass_would_change_keeps_its_padded_passes(kind: str, scale: float) -> None:
    """A dependence on the other sequence is below the tolerance of logprobs if weights are small."""
    settings, reason = PADDED[kind]
    model = model_of(kind, **settings, initializer_range=scale)
    tokens, temperatures, wanted = rows_of(LENGTHS)
    with torch.no_grad():
        before = token_logprobs(model, tokens, temperatures, wanted)
        assert reason in (pack_passes(model) or "")
        assert not is_packed(model)
        assert torch.equal(token_logprobs(model, tokens, temperatures, wanted), before)


def test_packed_pass_of_unwanted_tokens_has_a_gradient() -> None:
    """A rank computes such a pass to take part in a collective call."""
    model = model_of("qwen3")
    assert pack_passes(model) is None
    found = token_logprobs(model, torch.zeros((1, 2), dtype=torch.long)) * 0.0
    assert all(not slope.any() for slope in gradients(model, found))


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the largest number of values that a tensor has had."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.values = max(self.values, tensor.numel())
        return made


def test_packed_pass_builds_no_mask() -> None:
    model = model_of("qwen3")
    assert pack_passes(model) is None
    lengths = [2] * 600
    tokens, temperatures, wanted = rows_of(lengths)
    with torch.no_grad(), LargestTensor() as largest:  # type: ignore[no-untyped-call]
        token_logprobs(model, tokens, temperatures, wanted, lengths)
    assert largest.values <= 600 * 64


def batches_of(lengths: list[int], budget: int) -> Iterator[list[int]]:
    batches = list(packed_batches(lengths, tokens=budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    yield from batches


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
def test_packed_batches_hold_every_sample_once_within_their_budget(lengths: list[int], budget: int) -> None:
    for batch in batches_of(lengths, budget):
        own = [lengths[index] for index in batch]
        assert len(batch) == 1 or (sum(own) <= budget and max(own) * len(own) <= MOST_PADDED * budget)


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(300, 1000))
def test_packed_batches_are_half_full_but_for_one(lengths: list[int], budget: int) -> None:
    """The second of two batches that fit together would not have been opened."""
    used = sorted(sum(lengths[index] for index in batch) for batch in batches_of(lengths, budget))
    assert all(2 * tokens > budget for tokens in used[1:])


class AnotherRank(Ranks):
    """Ranks of which another one cannot pack."""

    def all_true(self, own: bool) -> bool:
        return False


def test_ranks_pack_together_or_not_at_all(tmp_path: Path) -> None:
    """Otherwise the samples of a pass would differ between ranks."""
    config = TrainerConfig(model_folder=CALCULATOR, run_folder=tmp_path)
    assert is_packed(Replica(config).model)
    assert not is_packed(Replica(config, AnotherRank("cpu")).model)
