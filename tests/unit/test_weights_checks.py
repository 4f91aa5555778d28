"""A manifest or chunk that contradicts the model or its publisher is refused."""

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.errors import RecordError
from rose.schemas.limits import MAX_RECORD_BYTES
from rose.schemas.weights import (
    MAX_CHUNK_PARTITIONS,
    MAX_INDEX_CHUNKS,
    MAX_TENSORS,
    ChunkRef,
    FirstChunk,
    WeightChunk,
    WeightManifest,
)
from rose.schemas.wire import decode, encode
from rose.workers.weights import layout
from rose.workers.weights.checks import Refusal, VersionRefused, check_chunk, check_manifest
from rose.workers.weights.chunk_stores import CHUNK_BYTES
from rose.workers.weights.layout import DTYPE_BYTES, NO_BASE, box_of, digest_of, whole_digest
from rose.workers.weights.tensors import TORCH_DTYPES
from tests.support.weights_fixtures import MemoryChunkSink, Tensors, bare, changed, covered, random_tensors, with_slice

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


def test_largest_chunk_with_the_longest_names_fits_a_record() -> None:
    chunk = WeightChunk(model_id="m" * 128, version=2**53, tensor="t" * 512, part=2**53, payload=bytes(CHUNK_BYTES))
    assert decode(WeightChunk, encode(chunk)) == chunk


def test_largest_manifest_with_an_index_fits_a_record() -> None:
    chunk = ChunkRef(partition=2**31 - 1, offset=2**53, bytes=MAX_RECORD_BYTES, digest=NO_BASE)
    first = FirstChunk(partition=2**31 - 1, offset=2**53)
    manifest = bare(
        2**53,
        2**53,
        model_id="m" * 128,
        run="r" * 128,
        epoch=2**53,
        index=(chunk,) * MAX_INDEX_CHUNKS,
        files=("anchor-" + "f" * 190,) * 4096,
        first=(first,) * MAX_CHUNK_PARTITIONS,
        payload_bytes=2**53,
    )
    assert len(encode(manifest)) <= MAX_RECORD_BYTES


@given(SHAPES, DTYPE, st.integers(1, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_published_version_is_accepted(
    shapes: dict[str, tuple[int, ...]], dtype: str, parts: int, delta: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    sink = MemoryChunkSink()
    tensors = random_tensors(shapes, TORCH_DTYPES[dtype], random)
    manifest = sink.store(tensors, 1, column_parts=parts)
    if delta:
        manifest = sink.store(changed(tensors, 0.1, random), 2, base=tensors, base_version=1, column_parts=parts)
    check_manifest(decode(WeightManifest, encode(manifest)), shapes)
    assert manifest.digest == whole_digest(manifest)
    for number, spec in enumerate(manifest.tensors):
        boxes = [box_of(piece) for piece in manifest.slices if piece.tensor == number]
        assert (covered(spec.shape, boxes) == 1).all()
    for piece in manifest.slices:
        name = manifest.tensors[piece.tensor].name
        for part, ref in enumerate(piece.chunks):
            check_chunk(sink.chunks[ref.partition, ref.offset], ref, manifest, tensor=name, part=part)


@given(SHAPES.filter(lambda shapes: any(np.prod(shape) > 0 for shape in shapes.values())), st.integers(1, 4), st.data())
def test_every_broken_tiling_is_refused(shapes: dict[str, tuple[int, ...]], parts: int, data: st.DataObject) -> None:
    """A slice is moved, resized, left out or duplicated; the manifest is valid in every other respect."""
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
def test_overlap_does_not_compensate_for_a_gap(parts: int, change: dict[str, object]) -> None:
    manifest, _ = two_versions({"a": (4, 8)}, parts)
    assert len(manifest.slices) == 2
    assert refusal_of(with_slice(manifest, 1, **change), {"a": (4, 8)}) is Refusal.BAD_TILING


def two_versions(shapes: Mapping[str, tuple[int, ...]], parts: int = 1) -> tuple[WeightManifest, WeightManifest]:
    """Return an anchor and a delta in which every element changed."""
    random = np.random.default_rng(3)
    sink = MemoryChunkSink()
    base: Tensors = random_tensors(shapes, torch.float32, random)
    anchor = sink.store(base, 1, column_parts=parts)
    new = changed(base, 1.0, random)
    return anchor, sink.store(new, 2, base=base, base_version=1, column_parts=parts)


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
    """Remove the first tensor with its slices; the others move up."""
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
def test_manifest_unlike_the_model_is_refused(change: Change, refusal: Refusal | None) -> None:
    shapes = {"a": (4, 8), "b": (4, 8)}
    anchor, delta = two_versions(shapes)
    assert [len(manifest.slices) for manifest in (anchor, delta)] == [4, 4]
    anchor = msgspec.structs.replace(anchor, version=2)
    assert refusal_of(change(anchor), shapes) is refusal


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "t" * 513), ("shape", (1,) * 9), ("dtype", "t" * 33)],
    ids=lambda value: str(value)[:8],
)
def test_tensor_beyond_the_record_bounds_is_not_decoded(field: str, value: object) -> None:
    anchor, _ = two_versions({"a": (4, 8)})
    with pytest.raises(RecordError):
        decode(WeightManifest, msgspec.msgpack.encode(first_tensor(**{field: value})(anchor)))


def with_digest(manifest: WeightManifest, digest: bytes) -> WeightManifest:
    return msgspec.structs.replace(manifest, digest=digest)


def test_payload_is_no_longer_than_its_slice_allows() -> None:
    """The payload of an anchor is dense, that of a delta is no longer, and a missing payload means no change."""
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
        {"tensor": MAX_TENSORS},
        {"digest": bytes(15)},
        {"base_digest": bytes(17)},
        {"chunks": (ChunkRef(partition=0, offset=-1, bytes=0, digest=NO_BASE),)},
        {"chunks": (ChunkRef(partition=-1, offset=0, bytes=0, digest=NO_BASE),)},
        {"chunks": (ChunkRef(partition=0, offset=0, bytes=900 * 1024 + 1, digest=NO_BASE),)},
        {"chunks": (ChunkRef(partition=0, offset=0, bytes=0, digest=bytes(15)),)},
        {"chunks": (ChunkRef(partition=0, offset=0, bytes=0, digest=NO_BASE),) * 4097},
    ],
)
def test_manifest_beyond_the_record_bounds_is_not_decoded(change: dict[str, object]) -> None:
    anchor, _ = two_versions({"a": (4, 8)})
    broken = msgspec.structs.replace(
        anchor, slices=(msgspec.structs.replace(anchor.slices[0], **change), *anchor.slices[1:])
    )
    with pytest.raises(RecordError):
        decode(WeightManifest, msgspec.msgpack.encode(broken))


def test_version_digest_depends_on_names_locations_and_contents() -> None:
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
        ({"part": 1}, Refusal.WRONG_CHUNK),
        ({"payload": bytes(16)}, Refusal.WRONG_CHUNK),
        ({"payload": b""}, Refusal.WRONG_CHUNK),
        ({"payload": bytes(18)}, Refusal.WRONG_CHUNK),
        ({"payload": bytes(16) + b"x"}, Refusal.WRONG_DIGEST),
    ],
)
def test_chunk_unlike_its_manifest_is_refused(change: dict[str, object], refusal: Refusal | None) -> None:
    manifest = MemoryChunkSink().store({"a": torch.zeros(4)}, 1)
    (ref,) = manifest.slices[0].chunks
    assert ref.digest == digest_of(bytes(17))
    chunk = WeightChunk(model_id="m", version=1, tensor="a", part=0, payload=bytes(17))
    if refusal is None:
        check_chunk(chunk, ref, manifest, tensor="a", part=0)
        return
    with pytest.raises(VersionRefused) as refused:
        check_chunk(msgspec.structs.replace(chunk, **change), ref, manifest, tensor="a", part=0)
    assert refused.value.refusal is refusal


@pytest.mark.parametrize(
    ("wire", "engine", "held"),
    [
        ("float32", "float32", True),
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("bfloat16", "bfloat16", True),
        ("float32", None, True),
        ("float32", "auto", True),
    ],
)
def test_version_unfit_for_the_engine_is_refused_before_any_fetch(wire: str, engine: str | None, held: bool) -> None:
    """The type `auto` is accepted, because only the engine can resolve it."""
    manifest = MemoryChunkSink().store({"a": torch.zeros(4, dtype=TORCH_DTYPES[wire])}, 1)
    if held:
        check_manifest(manifest, {"a": (4,)}, engine_dtype=engine)
        return
    with pytest.raises(
        VersionRefused, match=f"a is {wire}, which an engine in {engine} cannot hold exactly"
    ) as refused:
        check_manifest(manifest, {"a": (4,)}, engine_dtype=engine)
    assert refused.value.refusal is Refusal.WRONG_DTYPE
