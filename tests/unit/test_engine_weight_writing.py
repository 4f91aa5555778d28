"""Weights in pieces: every element once, and a layer in blocks computes what it computes whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.layers import utils as layer_utils

from rose.workers.executor.vllm import weights as engine_weights


@given(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 40))
def test_pieces_are_bounded_and_have_every_element_once(shape: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_weights, "PIECE_ELEMENTS", most)
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        seen = []
        for one, other in engine_weights.bounded_slices(whole, whole.clone()):
            assert one.numel() <= most and torch.equal(one, other)
            seen += one.flatten().tolist()
        assert seen == whole.flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_in_blocks_computes_what_it_computes_whole(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 1000, bias=bias).to(dtype).requires_grad_(False), torch.randn(8, 64).to(dtype)
    layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    expected = layer.cpu_linear(x, layer.weight, layer.bias)  # type: ignore[operator]
    monkeypatch.setattr(engine_weights, "PIECE_ELEMENTS", 200 * 64)
    pieces = sum(1 for _ in engine_weights._pack_pieces(layer))
    assert pieces == 6, "five of 192 rows, and one of 40"
    computed = layer.cpu_linear(x, layer.weight, layer.bias)  # type: ignore[operator]
    assert torch.allclose(computed.float(), expected.float(), rtol=0.01, atol=0.01 if dtype is torch.bfloat16 else 1e-6)
