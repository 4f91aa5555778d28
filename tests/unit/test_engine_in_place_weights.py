"""Versions written in place equal versions that are loaded, for any loader; undo restores every bit."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rose.workers.executor.vllm import in_place_weights
from rose.workers.executor.vllm.in_place_weights import InPlaceWeights
from rose.workers.executor.vllm.loader_copies import NOT_WRITTEN, OTHERWISE
from tests.support.unpacked_engines import failing_write

SHUFFLES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "permuted": lambda tensor: tensor.reshape(2, -1, tensor.shape[1]).transpose(0, 1).reshape(tensor.shape),
    "every second row": lambda tensor: tensor[::2],
    "shard of the columns": lambda tensor: tensor.narrow(1, 0, tensor.shape[1] // 2),
}
"""Changes that a loader makes to a tensor before it copies the tensor: views, and a copy in another order."""


@dataclass(frozen=True)
class Part:
    """A tensor of a version, and how the loader puts the tensor into its parameter."""

    rows: int
    columns: int
    shuffle: str

    def shuffled(self, tensor: Tensor) -> Tensor:
        return SHUFFLES[self.shuffle](tensor)


@dataclass(frozen=True)
class Fused:
    """A parameter of several tensors, one after another along a dimension, with padding behind them."""

    parts: tuple[Part, ...]
    dimension: int
    padding: int
    dtype: torch.dtype


class FusedModel(nn.Module):
    """A model with a loader like vLLM's."""

    def __init__(self, layout: tuple[Fused, ...], tied: bool) -> None:
        super().__init__()
        self.layout = layout
        for number, fused in enumerate(layout):
            shapes = [part.shuffled(torch.empty(part.rows, part.columns)).shape for part in fused.parts]
            across = max(shape[1 - fused.dimension] for shape in shapes)
            along = sum(shape[fused.dimension] for shape in shapes) + fused.padding
            size = (along, across) if fused.dimension == 0 else (across, along)
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(size, dtype=fused.dtype), False))
        if tied:
            self.head = nn.Module()
            self.head.weight = self.w0

    def load_weights(self, version: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in version:
            number, index = map(int, name.split("."))
            fused, parameter = self.layout[number], self.get_parameter(f"w{number}").data
            sizes = [part.shuffled(torch.empty(part.rows, part.columns)).shape[fused.dimension] for part in fused.parts]
            loaded = fused.parts[index].shuffled(tensor)
            target = parameter.narrow(fused.dimension, sum(sizes[:index]), sizes[index])
            across = target.shape[1 - fused.dimension]
            target.narrow(1 - fused.dimension, 0, loaded.shape[1 - fused.dimension]).copy_(loaded)
            target.narrow(
                1 - fused.dimension, loaded.shape[1 - fused.dimension], across - loaded.shape[1 - fused.dimension]
            ).zero_()
            if index == 0 and fused.padding:
                parameter.narrow(fused.dimension, sum(sizes), fused.padding).fill_(0)


PARTS = st.builds(Part, st.sampled_from([2, 4, 6, 20]), st.sampled_from([2, 4, 30]), st.sampled_from(list(SHUFFLES)))
FUSED = st.builds(
    Fused,
    st.lists(PARTS, min_size=1, max_size=3).map(tuple),
    st.integers(0, 1),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
LAYOUTS = st.lists(FUSED, min_size=1, max_size=3).map(tuple)


def first_version(layout: tuple[Fused, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Return a random version in bfloat16, which every parameter holds exactly."""
    return {
        f"{number}.{index}": torch.randn(part.rows, part.columns, generator=generator).bfloat16()
        for number, fused in enumerate(layout)
        for index, part in enumerate(fused.parts)
    }


def changed(version: Mapping[str, Tensor], share: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a version in which about this share of the elements is another; some become a negative zero."""
    new = {}
    for name, tensor in version.items():
        there = torch.rand(tensor.shape, generator=generator) < share
        new[name] = torch.where(there, torch.where(tensor > 1, -0.0, tensor * 1.5 + 1), tensor)
    return new


def bits_of(model: nn.Module) -> list[Tensor]:
    return [
        parameter.detach().view(torch.int32 if parameter.itemsize == 4 else torch.int16).clone()
        for parameter in model.parameters()
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def loaded(layout: tuple[Fused, ...], version: Mapping[str, Tensor], tied: bool = False) -> FusedModel:
    model = FusedModel(layout, tied)
    model.load_weights(version.items())
    return model


@settings(deadline=None, max_examples=60)
@given(
    layout=LAYOUTS,
    tied=st.booleans(),
    shares=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=1, max_size=3),
    piece=st.sampled_from([4, 40, 10_000]),
    memory_part=st.sampled_from([1, 4, 100]),
    seed=st.integers(0, 1000),
)
def test_version_in_place_equals_a_loaded_version_and_undo_restores_the_version_before(
    layout: tuple[Fused, ...], tied: bool, shares: list[float], piece: int, memory_part: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    version = first_version(layout, generator)
    model = loaded(layout, version, tied)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place_weights, "PIECE_BYTES", piece)
        patch.setattr(in_place_weights, "MEMORY_PART", memory_part)
        weights = InPlaceWeights(model)
        read: dict[str, int] = {}
        assert weights.prove(version, read) == "" and read.keys() == version.keys()
        for share in shares:
            before, new = bits_of(model), changed(version, share, generator)
            for _ in weights.stage(new):
                pass
            assert same(bits_of(model), before), "staging changes nothing"
            size = sum(parameter.nbytes for parameter in model.parameters())
            assert weights.staged_bytes.staged <= size // memory_part
            weights.activate()
            after = bits_of(loaded(layout, new))
            assert same(bits_of(model), after)
            weights.undo(partial(dict, version))
            assert same(bits_of(model), before)
            for _ in weights.stage(new):
                pass
            weights.activate()
            assert same(bits_of(model), after)
            version = new
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


WIDE = (Fused((Part(20, 30, "as it is"), Part(20, 30, "permuted")), 0, 3, torch.bfloat16),) * 3


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("memory_part", [1, 20])
def test_write_that_fails_half_way_is_undone(after: int, memory_part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place_weights, "MEMORY_PART", memory_part)
    generator = torch.Generator().manual_seed(after)
    version = first_version(WIDE, generator)
    model = loaded(WIDE, version)
    weights, before = InPlaceWeights(model), bits_of(model)
    for _ in weights.stage(changed(version, 0.1, generator)):
        pass
    assert bool(weights.staged_bytes.left) == (memory_part == 20)
    with pytest.raises(RuntimeError, match="a write has failed"), failing_write(after):
        weights.activate()
    weights.undo(lambda: version)
    assert same(bits_of(model), before)


def test_staging_writes_the_changes_and_reads_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    version = first_version(WIDE, generator)
    model = loaded(WIDE, version)
    monkeypatch.setattr(in_place_weights, "PIECE_BYTES", 300)
    weights = InPlaceWeights(model)
    new = dict(version)
    new["1.0"] = version["1.0"].clone()
    new["1.0"][3, 5] += 1
    size = sum(parameter.nbytes for parameter in model.parameters())
    pieces = sum(1 for _ in weights.stage(new))
    assert pieces >= size // 300
    found = weights.staged_bytes
    assert found.written == 2 and found.left == 0 and found.staged <= 2 * in_place_weights.ALIGNMENT


def writes_items(model: FusedModel, version: Mapping[str, Tensor]) -> None:
    for name, tensor in version.items():
        model.get_parameter(name).data[:] = tensor


def writes_twice(model: FusedModel, version: Mapping[str, Tensor]) -> None:
    for name, tensor in version.items():
        model.get_parameter(name).data.copy_(tensor)
        model.get_parameter(name).data[:1].copy_(tensor[:1])


def scales(model: FusedModel, version: Mapping[str, Tensor]) -> None:
    for name, tensor in version.items():
        model.get_parameter(name).data.copy_(tensor)
        model.get_parameter(name).data.mul_(2)


@pytest.mark.parametrize(
    ("load", "wrong"), [(writes_items, NOT_WRITTEN), (writes_twice, NOT_WRITTEN), (scales, OTHERWISE)]
)
def test_loader_whose_copies_are_not_what_the_model_holds_is_refused(
    load: Callable[[FusedModel, Mapping[str, Tensor]], None], wrong: str
) -> None:
    class Loading(FusedModel):
        def load_weights(self, version: Iterable[tuple[str, Tensor]]) -> None:
            load(self, dict(version))

    model, version = Loading((Fused((Part(4, 4, "as it is"),), 0, 0, torch.float32),), False), {"w0": torch.randn(4, 4)}
    model.load_weights(version.items())
    assert InPlaceWeights(model).prove(version, {}) == f"w0 {wrong}"


def test_parameter_that_was_transformed_after_loading_is_refused() -> None:
    version = first_version(WIDE, torch.Generator().manual_seed(0))
    model = loaded(WIDE, version)
    model.get_parameter("w1").data = model.get_parameter("w1").data.roll(1, 0)
    assert InPlaceWeights(model).prove(version, {}) == f"w1 {OTHERWISE}"
