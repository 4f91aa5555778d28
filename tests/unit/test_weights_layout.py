"""Weights on the log: chunks tile every tensor, and a manifest that says anything else is refused."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from schemas.weights import ChunkRef, TensorSpec, WeightChunk, WeightManifest
from schemas.wire import encode
from workers.weights.layout import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    LayoutError,
    Refusal,
    VersionRefused,
    check_chunk,
    check_manifest,
    digest_of,
    folder_shapes,
    row_bytes,
    row_count,
    row_ranges,
    tensor_bytes,
)
from workers.weights.tensors import bytes_of, empty, spec_of

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
SPECS = st.lists(
    st.builds(TensorSpec, name=st.sampled_from("abcdef"), shape=SHAPES, dtype=st.sampled_from(sorted(DTYPE_BYTES))),
    unique_by=lambda spec: spec.name,
    min_size=1,
)


def manifest_of(specs: list[TensorSpec]) -> WeightManifest:
    """A true manifest: every chunk in a place of its own."""
    refs = [
        ChunkRef(
            tensor=spec.name,
            row_start=start,
            rows=rows,
            partition=0,
            offset=0,
            bytes=rows * row_bytes(spec),
            digest=bytes(16),
        )
        for spec in specs
        for start, rows in row_ranges(spec)
    ]
    placed = tuple(msgspec.structs.replace(ref, offset=offset) for offset, ref in enumerate(refs))
    return WeightManifest(
        model_id="m", version=1, step=1, tensors=tuple(specs), chunks=placed, digest=bytes(16), published_at=0.0
    )


def shapes_of(specs: list[TensorSpec]) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in specs}


@given(SPECS)
def test_chunks_tile_every_tensor_and_the_manifest_is_believed(specs: list[TensorSpec]) -> None:
    check_manifest(manifest_of(specs), shapes_of(specs))


@given(st.integers(1, 70_000), st.integers(1, 60_000), st.sampled_from(sorted(DTYPE_BYTES)))
def test_no_chunk_is_larger_than_a_record_may_be(rows: int, columns: int, dtype: str) -> None:
    spec = TensorSpec(name="t", shape=(rows, columns), dtype=dtype)
    ranges = list(row_ranges(spec))
    assert sum(count for _, count in ranges) == rows
    assert max(count for _, count in ranges) * row_bytes(spec) <= CHUNK_BYTES


def test_the_largest_chunk_with_the_longest_names_is_a_record() -> None:
    chunk = WeightChunk(
        model_id="m" * 128, version=2**53, tensor="t" * 512, row_start=2**53, rows=2**53, payload=bytes(CHUNK_BYTES)
    )
    assert len(encode(chunk)) > CHUNK_BYTES


Change = Callable[[WeightManifest], WeightManifest]


def first_chunk(**change: object) -> Change:
    return lambda manifest: msgspec.structs.replace(
        manifest, chunks=(msgspec.structs.replace(manifest.chunks[0], **change), *manifest.chunks[1:])
    )


def first_tensor(**change: object) -> Change:
    return lambda manifest: msgspec.structs.replace(
        manifest, tensors=(msgspec.structs.replace(manifest.tensors[0], **change), *manifest.tensors[1:])
    )


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (first_chunk(row_start=1), Refusal.BAD_TILING),
        (first_chunk(rows=0), Refusal.BAD_TILING),
        (first_chunk(rows=2**53, bytes=0), Refusal.BAD_TILING),
        (first_chunk(bytes=899_999), Refusal.BAD_TILING),
        (first_chunk(offset=1), Refusal.BAD_TILING),
        (first_chunk(tensor="c"), Refusal.UNKNOWN_TENSOR),
        (lambda manifest: msgspec.structs.replace(manifest, chunks=manifest.chunks[1:]), Refusal.BAD_TILING),
        (lambda manifest: msgspec.structs.replace(manifest, chunks=manifest.chunks[:-1]), Refusal.BAD_TILING),
        (first_tensor(shape=(2**53, 2**53)), Refusal.BAD_SHAPE),
        (first_tensor(dtype="float64"), Refusal.BAD_SHAPE),
        (first_tensor(name="b"), Refusal.BAD_SHAPE),
        (first_tensor(name="x"), Refusal.UNKNOWN_TENSOR),
        (lambda manifest: msgspec.structs.replace(manifest, tensors=manifest.tensors[1:]), Refusal.MISSING_TENSOR),
        (lambda manifest: msgspec.structs.replace(manifest, base_version=0), Refusal.UNSUPPORTED),
    ],
)
def test_a_manifest_that_does_not_fit_the_model_is_refused(change: Change, refusal: Refusal) -> None:
    specs = [TensorSpec(name=name, shape=(400, 1000), dtype="float32") for name in "ab"]
    manifest = manifest_of(specs)
    assert len(manifest.chunks) == 4
    with pytest.raises(VersionRefused) as refused:
        check_manifest(change(manifest), shapes_of(specs))
    assert refused.value.refusal is refusal


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"version": 2}, Refusal.WRONG_CHUNK),
        ({"model_id": "other"}, Refusal.WRONG_CHUNK),
        ({"tensor": "b"}, Refusal.WRONG_CHUNK),
        ({"row_start": 1}, Refusal.WRONG_CHUNK),
        ({"encoding": "sparse"}, Refusal.UNSUPPORTED),
        ({"payload": bytes(15)}, Refusal.WRONG_CHUNK),
        ({"payload": bytes(15) + b"x"}, Refusal.WRONG_DIGEST),
    ],
)
def test_a_chunk_is_what_the_manifest_says_or_refused(change: dict[str, object], refusal: Refusal | None) -> None:
    manifest = manifest_of([TensorSpec(name="a", shape=(4,), dtype="float32")])
    ref = msgspec.structs.replace(manifest.chunks[0], digest=digest_of(bytes(16)))
    chunk = WeightChunk(model_id="m", version=1, tensor="a", row_start=0, rows=4, payload=bytes(16))
    if refusal is None:
        check_chunk(chunk, ref, manifest)
        return
    with pytest.raises(VersionRefused) as refused:
        check_chunk(msgspec.structs.replace(chunk, **change), ref, manifest)
    assert refused.value.refusal is refusal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (2, 3, 4)])
def test_a_tensor_survives_as_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    spec = spec_of("t", tensor)
    copy = empty(spec)
    bytes_of(copy)[:] = bytes(bytes_of(tensor))
    assert torch.equal(copy, tensor)
    assert len(bytes_of(tensor)) == tensor_bytes(spec)
    assert row_count(spec) * row_bytes(spec) == tensor_bytes(spec)


def test_a_tensor_that_is_no_contiguous_block_is_published_as_it_reads() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    assert bytes(bytes_of(tensor)) == bytes(bytes_of(tensor.contiguous()))


def test_a_row_or_element_type_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(LayoutError, match="one row takes"):
        list(row_ranges(TensorSpec(name="t", shape=(1, 10**6), dtype="float32")))
    with pytest.raises(LayoutError, match="float64"):
        list(row_ranges(TensorSpec(name="t", shape=(1,), dtype="float64")))


def test_the_shapes_of_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="must say what its tensors are"):
        folder_shapes(tmp_path)
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(())}, tmp_path / "model.safetensors")
    assert folder_shapes(tmp_path) == {"a": (2, 3), "b": ()}
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(LayoutError, match="no readable"):
        folder_shapes(tmp_path)
