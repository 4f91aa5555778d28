"""Weights on the log: slices tile every tensor, and a manifest or chunk that says anything else is refused."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from schemas.errors import RecordError
from schemas.weights import ChunkRef, WeightChunk, WeightManifest
from schemas.wire import decode, encode
from tests.unit.weights_world import Shelf, Tensors, changed, covered, part, random_tensors, same_bits, with_slice
from workers.weights import layout
from workers.weights.layout import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    NO_BASE,
    SLICE_ELEMENTS,
    Box,
    LayoutError,
    Refusal,
    VersionRefused,
    box_of,
    check_chunk,
    check_manifest,
    cut,
    digest_of,
    folder_shapes,
    matrix,
    whole,
    whole_digest,
)
from workers.weights.tensors import TORCH_DTYPES, empty, put, spec_of, take, words_of

SMALL_SLICE_ELEMENTS = 16
SHAPE = st.lists(st.integers(0, 12), max_size=3).map(tuple)
SHAPES = st.dictionaries(st.sampled_from("abcdef"), SHAPE, min_size=1)
DTYPE = st.sampled_from(sorted(DTYPE_BYTES))


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SLICE_ELEMENTS", SMALL_SLICE_ELEMENTS)
        yield


def shapes_of(manifest: WeightManifest) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in manifest.tensors}


def refusal_of(manifest: WeightManifest, shapes: Mapping[str, tuple[int, ...]]) -> Refusal | None:
    try:
        check_manifest(manifest, shapes)
    except VersionRefused as refused:
        return refused.refusal
    return None


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 9), st.integers(0, 60), st.integers(1, 70))
def test_slices_tile_a_box_in_order(row: int, rows: int, column: int, columns: int, parts: int) -> None:
    boxes = list(cut(Box(row, rows, column, columns), column_parts=parts))
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
    assert len(list(cut(whole(shape), column_parts=parts))) == slices


def test_the_largest_chunk_with_the_longest_names_is_a_record() -> None:
    chunk = WeightChunk(model_id="m" * 128, version=2**53, tensor="t" * 512, part=2**53, payload=bytes(CHUNK_BYTES))
    assert decode(WeightChunk, encode(chunk)) == chunk


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4), st.integers(1, 4), st.data())
def test_boxes_meet_where_they_have_an_element_in_common(
    row: int, rows: int, column: int, columns: int, data: st.DataObject
) -> None:
    numbers = [data.draw(st.integers(low, 4)) for low in (0, 0, 0, 0)]
    one, other = Box(row, rows, column, columns), Box(*numbers)
    common = covered((10, 10), [one]) * covered((10, 10), [other])
    assert one.meets(other) == other.meets(one) == bool(common.any())


@settings(deadline=None)
@given(SHAPES, DTYPE, st.integers(1, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_what_is_published_is_believed(
    shapes: dict[str, tuple[int, ...]], dtype: str, parts: int, delta: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    shelf = Shelf()
    tensors = random_tensors(shapes, TORCH_DTYPES[dtype], random)
    manifest = shelf.store(tensors, 1, column_parts=parts)
    if delta:
        manifest = shelf.store(changed(tensors, 0.1, random), 2, base=tensors, base_version=1, column_parts=parts)
    check_manifest(decode(WeightManifest, encode(manifest)), shapes)
    assert manifest.digest == whole_digest(manifest)
    for number, spec in enumerate(manifest.tensors):
        boxes = [box_of(piece) for piece in manifest.slices if piece.tensor == number]
        assert (covered(spec.shape, boxes) == 1).all()
    for piece in manifest.slices:
        name = manifest.tensors[piece.tensor].name
        for ref in piece.chunks:
            check_chunk(shelf.chunks[ref.partition, ref.offset], ref, name, manifest)


@settings(deadline=None)
@given(SHAPES.filter(lambda shapes: any(np.prod(shape) > 0 for shape in shapes.values())), st.integers(1, 4), st.data())
def test_any_broken_tiling_is_refused(shapes: dict[str, tuple[int, ...]], parts: int, data: st.DataObject) -> None:
    """A slice moved, resized, left out, or put in twice; the manifest is whole in every other respect."""
    manifest = two_versions(shapes, parts)[1]
    number = data.draw(st.integers(0, len(manifest.slices) - 1))
    piece = manifest.slices[number]
    how = data.draw(st.sampled_from(["row_start", "rows", "column_start", "columns", "gone", "twice", "elsewhere"]))
    slices = list(manifest.slices)
    if how == "gone":
        del slices[number]
    elif how == "twice":
        slices.insert(number, msgspec.structs.replace(piece, chunks=()))
        slices[number] = msgspec.structs.replace(slices[number], digest=piece.base_digest)
    elif how == "elsewhere":
        others = [other for other in range(len(manifest.tensors)) if other != piece.tensor]
        if not others:
            return
        slices[number] = msgspec.structs.replace(piece, tensor=data.draw(st.sampled_from(others)))
    else:
        value = data.draw(
            st.one_of(st.integers(0, 14), st.just(2**53)).filter(lambda value: value != getattr(piece, how))
        )
        slices[number] = msgspec.structs.replace(piece, **{how: value})
    broken = msgspec.structs.replace(manifest, slices=tuple(slices))
    broken = msgspec.structs.replace(broken, digest=whole_digest(broken))
    assert refusal_of(broken, shapes) is Refusal.BAD_TILING


@pytest.mark.parametrize(
    ("parts", "change"),
    [(1, {"row_start": 1}), (1, {"row_start": 0}), (2, {"column_start": 0}), (2, {"column_start": 3})],
)
def test_an_overlap_does_not_make_up_for_a_hole(parts: int, change: dict[str, object]) -> None:
    manifest, _ = two_versions({"a": (4, 8)}, parts)
    assert len(manifest.slices) == 2
    assert refusal_of(with_slice(manifest, 1, **change), {"a": (4, 8)}) is Refusal.BAD_TILING


def two_versions(shapes: Mapping[str, tuple[int, ...]], parts: int = 1) -> tuple[WeightManifest, WeightManifest]:
    """An anchor and a delta in which every element changed."""
    random = np.random.default_rng(3)
    shelf = Shelf()
    base: Tensors = random_tensors(shapes, torch.float32, random)
    anchor = shelf.store(base, 1, column_parts=parts)
    new = changed(base, 1.0, random)
    return anchor, shelf.store(new, 2, base=base, base_version=1, column_parts=parts)


Change = Callable[[WeightManifest], WeightManifest]


def first_slice(**change: object) -> Change:
    return lambda manifest: with_slice(manifest, 0, **change)


def first_slice_of_tensor(number: int) -> Change:
    return lambda manifest: msgspec.structs.replace(
        manifest, slices=(msgspec.structs.replace(manifest.slices[0], tensor=number), *manifest.slices[1:])
    )


def first_chunk(**change: object) -> Change:
    def changes(manifest: WeightManifest) -> WeightManifest:
        first, *rest = manifest.slices[0].chunks
        return with_slice(manifest, 0, chunks=(msgspec.structs.replace(first, **change), *rest))

    return changes


def first_tensor(**change: object) -> Change:
    return lambda manifest: msgspec.structs.replace(
        manifest, tensors=(msgspec.structs.replace(manifest.tensors[0], **change), *manifest.tensors[1:])
    )


def manifest_with(**change: object) -> Change:
    return lambda manifest: msgspec.structs.replace(manifest, **change)


def without_first_tensor(manifest: WeightManifest) -> WeightManifest:
    """It is left out with its slices, and the others move up."""
    slices = tuple(
        msgspec.structs.replace(piece, tensor=piece.tensor - 1) for piece in manifest.slices if piece.tensor > 0
    )
    left = msgspec.structs.replace(manifest, tensors=manifest.tensors[1:], slices=slices)
    return msgspec.structs.replace(left, digest=whole_digest(left))


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda manifest: manifest, None),
        (first_slice_of_tensor(2), Refusal.UNKNOWN_TENSOR),
        (first_slice_of_tensor(65_535), Refusal.UNKNOWN_TENSOR),
        (first_slice(rows=2**53, columns=2**53, chunks=()), Refusal.BAD_TILING),
        (first_slice(row_start=2**53), Refusal.BAD_TILING),
        (first_slice(chunks=()), Refusal.BAD_TILING),
        (first_chunk(bytes=900 * 1024), Refusal.BAD_TILING),
        (first_chunk(partition=1, offset=0), Refusal.BAD_TILING),
        (first_tensor(shape=(2**53, 2**53)), Refusal.BAD_SHAPE),
        (first_tensor(shape=(8, 4)), Refusal.BAD_SHAPE),
        (first_tensor(shape=(32,)), Refusal.BAD_SHAPE),
        (first_tensor(dtype="float64"), Refusal.BAD_SHAPE),
        (first_tensor(dtype="bfloat16"), Refusal.BAD_TILING),
        (first_tensor(name="b"), Refusal.BAD_SHAPE),
        (first_tensor(name="x"), Refusal.UNKNOWN_TENSOR),
        (without_first_tensor, Refusal.MISSING_TENSOR),
        (manifest_with(tensors=(), slices=()), Refusal.MISSING_TENSOR),
        (manifest_with(slices=()), Refusal.BAD_TILING),
        (manifest_with(digest=bytes(16)), Refusal.WRONG_DIGEST),
        (
            lambda manifest: with_digest(with_slice(manifest, 0, digest=bytes(16)), manifest.digest),
            Refusal.WRONG_DIGEST,
        ),
        (manifest_with(base_version=1), None),
        (manifest_with(base_version=2), Refusal.WRONG_BASE),
        (manifest_with(base_version=3), Refusal.WRONG_BASE),
        (manifest_with(base_version=-1), Refusal.WRONG_BASE),
    ],
)
def test_a_manifest_that_does_not_fit_the_model_is_refused(change: Change, refusal: Refusal | None) -> None:
    shapes = {"a": (4, 8), "b": (4, 8)}
    anchor, delta = two_versions(shapes)
    assert [len(manifest.slices) for manifest in (anchor, delta)] == [4, 4]
    anchor = msgspec.structs.replace(anchor, version=2)
    assert refusal_of(change(anchor), shapes) is refusal


def with_digest(manifest: WeightManifest, digest: bytes) -> WeightManifest:
    return msgspec.structs.replace(manifest, digest=digest)


def test_a_payload_is_as_long_as_its_slice_allows() -> None:
    """That of an anchor is dense; that of a delta is no longer; without one, nothing changed."""
    shapes = {"a": (4, 8)}
    anchor, delta = two_versions(shapes)
    dense_bytes = 1 + 16 * 4

    def sized(manifest: WeightManifest, size: int) -> WeightManifest:
        ref = msgspec.structs.replace(manifest.slices[0].chunks[0], bytes=size)
        return with_slice(manifest, 0, chunks=(ref,))

    for size in (0, dense_bytes - 1, dense_bytes + 1):
        assert refusal_of(sized(anchor, size), shapes) is Refusal.BAD_TILING
    assert refusal_of(sized(anchor, dense_bytes), shapes) is None
    assert refusal_of(sized(delta, dense_bytes), shapes) is None
    assert refusal_of(sized(delta, dense_bytes + 1), shapes) is Refusal.BAD_TILING
    assert refusal_of(with_slice(delta, 0, chunks=()), shapes) is Refusal.BAD_TILING
    unchanged = with_slice(delta, 0, chunks=(), digest=delta.slices[0].base_digest)
    assert refusal_of(unchanged, shapes) is None


@pytest.mark.parametrize(
    "change",
    [
        {"row_start": -1},
        {"rows": 2**53 + 1},
        {"column_start": -1},
        {"columns": 2**53 + 1},
        {"tensor": -1},
        {"tensor": 65_536},
        {"digest": bytes(15)},
        {"base_digest": bytes(17)},
        {"chunks": (ChunkRef(partition=0, offset=-1, bytes=0, digest=NO_BASE),)},
        {"chunks": (ChunkRef(partition=-1, offset=0, bytes=0, digest=NO_BASE),)},
        {"chunks": (ChunkRef(partition=0, offset=0, bytes=900 * 1024 + 1, digest=NO_BASE),)},
        {"chunks": (ChunkRef(partition=0, offset=0, bytes=0, digest=bytes(15)),)},
        {"chunks": (ChunkRef(partition=0, offset=0, bytes=0, digest=NO_BASE),) * 4097},
    ],
)
def test_a_manifest_beyond_the_bounds_of_a_record_is_not_decoded(change: dict[str, object]) -> None:
    anchor, _ = two_versions({"a": (4, 8)})
    broken = msgspec.structs.replace(
        anchor, slices=(msgspec.structs.replace(anchor.slices[0], **change), *anchor.slices[1:])
    )
    with pytest.raises(RecordError):
        decode(WeightManifest, encode(broken))


def test_the_digest_of_a_version_tells_names_places_and_contents_apart() -> None:
    anchor, delta = two_versions({"a": (4, 8), "b": (4, 8)})
    others = [
        delta,
        first_tensor(name="c")(anchor),
        *(with_slice(anchor, 0, **{place: 7}) for place in ("row_start", "rows", "column_start", "columns")),
        with_slice(anchor, 0, tensor=1),
        with_slice(anchor, 1, digest=bytes(16)),
        msgspec.structs.replace(anchor, slices=anchor.slices[::-1]),
        msgspec.structs.replace(anchor, slices=anchor.slices[1:]),
    ]
    assert len({whole_digest(manifest) for manifest in (anchor, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"version": 2}, Refusal.WRONG_CHUNK),
        ({"model_id": "other"}, Refusal.WRONG_CHUNK),
        ({"tensor": "b"}, Refusal.WRONG_CHUNK),
        ({"payload": bytes(16)}, Refusal.WRONG_CHUNK),
        ({"payload": b""}, Refusal.WRONG_CHUNK),
        ({"payload": bytes(18)}, Refusal.WRONG_CHUNK),
        ({"payload": bytes(16) + b"x"}, Refusal.WRONG_DIGEST),
    ],
)
def test_a_chunk_is_what_the_manifest_says_or_refused(change: dict[str, object], refusal: Refusal | None) -> None:
    manifest = Shelf().store({"a": torch.zeros(4)}, 1)
    (ref,) = manifest.slices[0].chunks
    assert ref.digest == digest_of(bytes(17))
    chunk = WeightChunk(model_id="m", version=1, tensor="a", part=0, payload=bytes(17))
    if refusal is None:
        check_chunk(chunk, ref, "a", manifest)
        return
    with pytest.raises(VersionRefused) as refused:
        check_chunk(msgspec.structs.replace(chunk, **change), ref, "a", manifest)
    assert refused.value.refusal is refusal


@settings(deadline=None)
@given(SHAPE, DTYPE, st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_a_tensor_survives_as_slices(shape: tuple[int, ...], dtype: str, parts: int, seed: int) -> None:
    tensor = random_tensors({"t": shape}, TORCH_DTYPES[dtype], np.random.default_rng(seed))["t"]
    spec = spec_of("t", tensor)
    assert (spec.shape, spec.dtype) == (shape, dtype)
    copy = empty(spec)
    assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
    assert words_of(tensor).shape == matrix(shape)
    assert words_of(tensor).itemsize == DTYPE_BYTES[dtype]
    for box in cut(whole(shape), column_parts=parts):
        flat = part(tensor, box)
        assert flat.shape == (box.elements,)
        put(words_of(copy), box, flat)
    assert same_bits({"t": copy}, {"t": tensor})


def test_words_are_the_tensors_own_memory_and_slices_lie_where_their_box_says() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 2, 3).requires_grad_()
    words = words_of(tensor)
    assert words.view(np.float32)[2].tolist() == [12, 13, 14, 15, 16, 17]
    assert take(words, Box(1, 2, 4, 2)).view(np.float32).tolist() == [10, 11, 16, 17]
    column = take(words, Box(0, 4, 5, 1))
    assert column.view(np.float32).tolist() == [5, 11, 17, 23]
    assert digest_of(column.data) == digest_of(column.tobytes())
    assert np.shares_memory(take(words, Box(1, 2, 0, 6)), words)
    put(words, Box(1, 2, 4, 2), np.zeros(4, dtype=np.uint32))
    assert tensor.detach().reshape(4, 6)[1].tolist() == [6, 7, 8, 9, 0, 0]


def test_a_tensor_that_is_no_contiguous_block_is_published_as_it_reads() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    assert np.array_equal(words_of(tensor), words_of(tensor.contiguous()))


def test_an_element_type_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(LayoutError, match="t is float64: only"):
        spec_of("t", torch.zeros(1, dtype=torch.float64))


def test_a_tensor_without_elements_has_no_slice() -> None:
    manifest = Shelf().store({"a": torch.zeros(0, 3), "b": torch.zeros(2, 0), "c": torch.zeros(())}, 1)
    assert [piece.tensor for piece in manifest.slices] == [2]
    check_manifest(manifest, shapes_of(manifest))


def test_the_shapes_of_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="must say what its tensors are"):
        folder_shapes(tmp_path)
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(())}, tmp_path / "model.safetensors")
    assert folder_shapes(tmp_path) == {"a": (2, 3), "b": ()}
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(LayoutError, match="no readable"):
        folder_shapes(tmp_path)
