"""Weights written in pieces: every element once, and a layer in blocks equals the whole layer."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from rose.workers.executor.vllm import spare_weights
from rose.workers.executor.vllm.loader_copies import bounded_slices
from rose.workers.executor.vllm.types import EngineBroken, EngineStartError, SwapRefused
from rose.workers.executor.vllm.weights import PolicyWeights


@given(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 40))
def test_pieces_are_bounded_and_cover_every_element_once(shape: list[int], most: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    seen = []
    for one, other in bounded_slices(whole, whole.clone(), most=most):
        assert one.numel() <= most and torch.equal(one, other)
        seen += one.flatten().tolist()
    assert seen == whole.flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_written_in_blocks_equals_the_whole_layer(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 1000, bias=bias).to(dtype).requires_grad_(False), torch.randn(8, 64).to(dtype)
    layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    expected = layer.cpu_linear(x, layer.weight, layer.bias)  # type: ignore[operator]
    monkeypatch.setattr(spare_weights, "PIECE_ELEMENTS", 200 * 64)
    pieces = sum(1 for _ in spare_weights._pack_pieces(layer))
    assert pieces == 6, "five of 192 rows, and one of 40"
    computed = layer.cpu_linear(x, layer.weight, layer.bias)  # type: ignore[operator]
    assert torch.allclose(computed.float(), expected.float(), rtol=0.01, atol=0.01 if dtype is torch.bfloat16 else 1e-6)


class Narrowing(nn.Module):
    """A model whose loader reads only the first rows of a tensor, by one of the ways of vLLM's loaders."""

    def __init__(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4, bias=False)
        self._cut = cut

    def load_weights(self, version: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in version:
            self.inner.weight.data.copy_(self._cut(tensor))


def folder_of(place: Path, rows: int) -> Path:
    save_file({"inner.weight": torch.arange(3.0 * rows).reshape(rows, 3)}, place / "model.safetensors")
    return place


CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "narrow": lambda tensor: tensor.narrow(0, 0, 4),
    "slice": lambda tensor: tensor.t().contiguous().t()[:4],
    "parts": lambda tensor: tensor.double().tensor_split([4])[0],
}


@pytest.mark.parametrize("rows", [4, 6])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_tensor_that_a_loader_reads_in_part_is_refused(
    cut: Callable[[torch.Tensor], torch.Tensor], rows: int, tmp_path: Path
) -> None:
    folder, model = folder_of(tmp_path, rows), Narrowing(cut)
    model.load_weights(load_file(folder / "model.safetensors").items())
    worker = SimpleNamespace(
        get_model=lambda: model,
        model_config=SimpleNamespace(dtype=torch.float32),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    weights = PolicyWeights(worker, folder, {"inner.weight": (rows, 3)})
    if rows == 4:
        weights.allocate_spare()
        return
    with pytest.raises(EngineStartError, match=r"reads only a part of inner\.weight \(12 of 18 elements\)"):
        weights.allocate_spare()


def test_engine_without_room_for_staging_is_refused_with_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = Narrowing(CUTS["narrow"])
    worker = SimpleNamespace(get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32))
    weights = PolicyWeights(worker, folder_of(tmp_path, 4), {"inner.weight": (4, 3)})
    monkeypatch.setattr(torch, "empty", no_room)
    with pytest.raises(EngineStartError, match="lower gpu_memory_utilization"):
        weights.allocate_spare()


class Transformed(QuantizeMethodBase):  # type: ignore[misc]
    """A method whose layers vLLM may transform after loading."""

    def create_weights(self, layer: nn.Module, *_: object, **__: object) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, *_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError


def reloading(folder: Path, reload: Callable[[torch.Tensor], torch.Tensor]) -> tuple[PolicyWeights, nn.Module]:
    """Return the weights of a worker whose `reload_weights` loads `reload` of a tensor, and the worker's model."""
    model = Narrowing(lambda tensor: tensor)
    model.inner.quant_method = Transformed()
    model.load_weights(load_file(folder / "model.safetensors").items())

    def reload_weights(weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.load_weights((name, reload(tensor)) for name, tensor in weights_iterator)

    worker = SimpleNamespace(
        get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32), reload_weights=reload_weights
    )
    return PolicyWeights(worker, folder, {"inner.weight": (4, 3)}), model.inner


def test_layer_that_vllm_may_transform_is_reloaded_and_a_failed_reload_undone(tmp_path: Path) -> None:
    def fails_at_13(tensor: torch.Tensor) -> torch.Tensor:
        if bool((tensor == 13).any()):
            raise RuntimeError("no such kernel")
        return tensor

    weights, layer = reloading(folder_of(tmp_path, 4), fails_at_13)
    folder = layer.weight.clone()  # type: ignore[operator]
    weights.allocate_spare()
    for value in (2.0, 13.0):
        version = {"inner.weight": torch.full((4, 3), value)}
        list(weights.stage(version))
        if value != 13:
            weights.activate(version)
            assert torch.equal(layer.weight, version["inner.weight"])  # type: ignore[arg-type]
            weights.restore()
            assert torch.equal(layer.weight, folder)  # type: ignore[arg-type]
        else:
            with pytest.raises(SwapRefused, match="no such kernel"):
                weights.activate(version)
            assert torch.equal(layer.weight, folder)  # type: ignore[arg-type]


def test_model_that_a_reload_of_the_same_weights_changes_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 4)
    changed = r"inner\.weight is another after vLLM has loaded the same weights again"
    with pytest.raises(EngineStartError, match=changed):
        reloading(folder, lambda tensor: tensor.roll(1, 0))[0].allocate_spare()
    with pytest.raises(EngineBroken, match=changed):
        list(reloading(folder, lambda tensor: tensor.roll(1, 0))[0].stage({"inner.weight": torch.ones(4, 3)}))
