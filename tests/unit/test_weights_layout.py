"""Slices tile every tensor, and a tensor can be rebuilt from its slices."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rose.workers.weights import layout
from rose.workers.weights.checks import check_manifest
from rose.workers.weights.layout import (
    DTYPE_BYTES,
    SLICE_ELEMENTS,
    Box,
    LayoutError,
    digest_of,
    matrix,
    slices_of,
    whole,
)
from rose.workers.weights.model_folder import FolderError, folder_shapes
from rose.workers.weights.tensors import (
    TORCH_DTYPES,
    bits_of,
    empty_tensor,
    read_box,
    spec_of,
    to_wire_dtype,
    write_box,
)
from tests.support.weights_fixtures import MemoryChunkSink, covered, part, random_tensors, same_bits

SMALL_SLICE_ELEMENTS = 16
SHAPE = st.lists(st.integers(0, 12), max_size=3).map(tuple)
DTYPE = st.sampled_from(sorted(DTYPE_BYTES))


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SLICE_ELEMENTS", SMALL_SLICE_ELEMENTS)
        yield


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 9), st.integers(0, 60), st.integers(1, 70))
def test_slices_tile_a_box_in_order(row: int, rows: int, column: int, columns: int, parts: int) -> None:
    boxes = list(slices_of(Box(row, rows, column, columns), column_parts=parts))
    times = covered((row + rows + 2, column + columns + 2), boxes)
    assert (times[row : row + rows, column : column + columns] == 1).all()
    assert times.sum() == rows * columns
    assert boxes == sorted(boxes, key=lambda box: (box.row_start, box.column_start))
    assert all(box.elements <= SMALL_SLICE_ELEMENTS or box.rows == 1 for box in boxes)
    if rows > 1 and columns >= parts:
        assert len({(box.column_start, box.columns) for box in boxes}) == parts
    if rows == 1:
        assert len(boxes) == (columns > 0)


@pytest.mark.parametrize(
    ("shape", "parts", "slices"), [((49_152, 576), 1, 28), ((49_152, 576), 2, 28), ((576, 1536), 4, 4), ((576,), 4, 1)]
)
def test_real_tensors_are_cut_into_few_slices(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], parts: int, slices: int
) -> None:
    monkeypatch.setattr(layout, "SLICE_ELEMENTS", SLICE_ELEMENTS)
    assert len(list(slices_of(whole(shape), column_parts=parts))) == slices


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4), st.integers(1, 4), st.data())
def test_boxes_intersect_if_they_share_an_element(
    row: int, rows: int, column: int, columns: int, data: st.DataObject
) -> None:
    numbers = [data.draw(st.integers(low, 4)) for low in (0, 0, 0, 0)]
    one, other = Box(row, rows, column, columns), Box(*numbers)
    common = covered((10, 10), [one]) * covered((10, 10), [other])
    assert one.intersects(other) == other.intersects(one) == bool(common.any())


@given(SHAPE, DTYPE, st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_tensor_round_trips_as_slices(shape: tuple[int, ...], dtype: str, parts: int, seed: int) -> None:
    tensor = random_tensors({"t": shape}, TORCH_DTYPES[dtype], np.random.default_rng(seed))["t"]
    spec = spec_of("t", tensor)
    assert (spec.shape, spec.dtype) == (shape, dtype)
    copy = empty_tensor(spec)
    assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
    assert bits_of(tensor).shape == matrix(shape)
    assert bits_of(tensor).itemsize == DTYPE_BYTES[dtype]
    for box in slices_of(whole(shape), column_parts=parts):
        flat = part(tensor, box)
        assert flat.shape == (box.elements,)
        write_box(bits_of(copy), box, flat)
    assert same_bits({"t": copy}, {"t": tensor})


def test_words_share_the_tensor_memory_and_slices_match_their_box() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 2, 3).requires_grad_()
    words = bits_of(tensor)
    assert words.view(np.float32)[2].tolist() == [12, 13, 14, 15, 16, 17]
    assert read_box(words, Box(1, 2, 4, 2)).view(np.float32).tolist() == [10, 11, 16, 17]
    column = read_box(words, Box(0, 4, 5, 1))
    assert column.view(np.float32).tolist() == [5, 11, 17, 23]
    assert digest_of(column.data) == digest_of(column.tobytes())
    assert np.shares_memory(read_box(words, Box(1, 2, 0, 6)), words)
    write_box(words, Box(1, 2, 4, 2), np.zeros(4, dtype=np.uint32))
    assert tensor.detach().reshape(4, 6)[1].tolist() == [6, 7, 8, 9, 0, 0]


def test_non_contiguous_tensor_is_published_by_its_values() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    assert np.array_equal(bits_of(tensor), bits_of(tensor.contiguous()))


def test_unsupported_element_type_is_an_error() -> None:
    with pytest.raises(LayoutError, match="t is float64: only"):
        spec_of("t", torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("own", "engine", "travels"),
    [
        ("float32", None, "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "float16"),
    ],
)
def test_tensor_is_rounded_only_to_a_coarser_element_type(own: str, engine: str | None, travels: str) -> None:
    """Values that an engine holds exactly are published in its type: in half the bytes if it has half the bits."""
    tensor = torch.linspace(-1, 1, 9).to(TORCH_DTYPES[own])
    wired = to_wire_dtype(tensor, None if engine is None else TORCH_DTYPES[engine])
    assert wired.dtype == TORCH_DTYPES[travels]
    assert torch.equal(wired, tensor.to(TORCH_DTYPES[travels]))


def test_empty_tensor_has_no_slice() -> None:
    manifest = MemoryChunkSink().store({"a": torch.zeros(0, 3), "b": torch.zeros(2, 0), "c": torch.zeros(())}, 1)
    assert [piece.tensor for piece in manifest.slices] == [2]
    check_manifest(manifest, {spec.name: spec.shape for spec in manifest.tensors})


def test_shapes_of_a_model_folder_are_read(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="must say what its tensors are"):
        folder_shapes(tmp_path)
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(())}, tmp_path / "model.safetensors")
    assert folder_shapes(tmp_path) == {"a": (2, 3), "b": ()}
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(FolderError, match="no readable"):
        folder_shapes(tmp_path)
