"""Versions in host memory: exact over any chain, complete or absent, without unneeded fetches."""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.weights import ChunkRef, WeightChunk, WeightManifest
from rose.workers.weights import layout, slice_threads
from rose.workers.weights.assembly import Assembled, Assembly
from rose.workers.weights.checks import Refusal, VersionRefused, check_manifest
from rose.workers.weights.layout import Box, box_of, digest_of, matrix
from rose.workers.weights.tensors import TORCH_DTYPES
from tests.support.weights_fixtures import (
    MemoryChunkSink,
    Tensors,
    changed,
    part,
    random_tensors,
    same_bits,
    with_slice,
)

SHAPES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=3
)
DTYPE = st.sampled_from(sorted(TORCH_DTYPES))
SEED = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", autouse=True)
def _small_slices_on_several_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SLICE_ELEMENTS", 16)
        patch.setattr(slice_threads, "THREADS", 3)
        yield


def places(manifest: WeightManifest) -> list[tuple[int, int]]:
    return [(ref.partition, ref.offset) for piece in manifest.slices for ref in piece.chunks]


@given(SHAPES, DTYPE, SEED, st.data())
def test_versions_are_exact_over_any_chain_of_anchors_and_deltas(
    shapes: dict[str, tuple[int, ...]], dtype: str, seed: int, data: st.DataObject
) -> None:
    """A publisher may slice a version differently from the version before."""
    random = np.random.default_rng(seed)
    sink, assembly = MemoryChunkSink(), Assembly(None, None)
    tensors = random_tensors(shapes, TORCH_DTYPES[dtype], random)
    for version in range(data.draw(st.integers(1, 6))):
        new = changed(tensors, data.draw(st.sampled_from([0.0, 0.05, 1.0])), random)
        anchor = version == 0 or data.draw(st.booleans())
        manifest = sink.store(
            new,
            version,
            base=None if anchor else tensors,
            base_version=version - 1,
            column_parts=data.draw(st.integers(1, 3)),
            chunk_bytes=data.draw(st.sampled_from([7, 1000])),
        )
        check_manifest(manifest, shapes)
        assembly.add(manifest, sink.fetch)
        tensors = new
        assert same_bits(assembly.done.tensors, tensors)
        assert assembly.done.version == version
        assert assembly.done.digests.keys() == {
            (manifest.tensors[piece.tensor].name, box_of(piece)) for piece in manifest.slices
        }


@given(SHAPES, DTYPE, SEED, st.booleans())
def test_tensors_of_an_earlier_version_are_never_overwritten(
    shapes: dict[str, tuple[int, ...]], dtype: str, seed: int, anchor: bool
) -> None:
    random = np.random.default_rng(seed)
    sink = MemoryChunkSink()
    first = random_tensors(shapes, TORCH_DTYPES[dtype], random)
    assembly = Assembly(None, None)
    assembly.add(sink.store(first, 1), sink.fetch)
    served = assembly.done
    second, third = changed(first, 1.0, random), changed(first, 0.5, random)
    later = Assembly(served, None)
    later.add(sink.store(second, 2, base=None if anchor else first, base_version=1), sink.fetch)
    later.add(sink.store(third, 3, base=second, base_version=2), sink.fetch)
    assert served.version == 1
    assert same_bits(served.tensors, first)
    assert same_bits(later.done.tensors, third)
    assert set(served.digests.values()) == {piece.digest for piece in MemoryChunkSink().store(first, 1).slices}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("anchor", [True, False])
def test_version_with_a_non_finite_value_is_refused(dtype: str, value: float, *, anchor: bool) -> None:
    """The publisher does not matter: an engine with such a version would have NaN in its cache."""
    random = np.random.default_rng(4)
    sink, assembly = MemoryChunkSink(), Assembly(None, None)
    tensors = random_tensors({"a": (8, 8), "b": (5,)}, TORCH_DTYPES[dtype], random)
    assembly.add(sink.store(tensors, 1), sink.fetch)
    spoiled = {name: tensor.clone() for name, tensor in tensors.items()}
    spoiled["b"][3] = value
    manifest = sink.store(spoiled, 2, base=None if anchor else tensors, base_version=1)
    with pytest.raises(VersionRefused, match="b holds a value that is not finite") as refused:
        assembly.add(manifest, sink.fetch)
    assert refused.value.refusal is Refusal.NOT_FINITE
    assert assembly.done.version == 1 and same_bits(assembly.done.tensors, tensors)


@pytest.mark.parametrize("repeat", [1, 3])
def test_duplicate_or_reordered_chunks_change_nothing(repeat: int) -> None:
    random = np.random.default_rng(4)
    sink = MemoryChunkSink()
    tensors = random_tensors({"a": (8, 8), "b": (5,)}, torch.bfloat16, random)
    manifest = sink.store(tensors, 1, chunk_bytes=10)
    assembly = Assembly(None, None)
    assembly.add(manifest, lambda refs: reversed(list(sink.fetch(refs)) * repeat))
    assert same_bits(assembly.done.tensors, tensors)


class VersionFixture:
    """Version 1, and a version 2 of many chunks that is an anchor or a delta on 1; a receiver that has version 1."""

    def __init__(self, *, anchor: bool) -> None:
        random = np.random.default_rng(9)
        self.sink = MemoryChunkSink()
        self.first = random_tensors({"a": (6, 16), "b": (3, 7)}, torch.bfloat16, random)
        self.second = changed(self.first, 1.0, random)
        one = self.sink.store(self.first, 1)
        base = None if anchor else self.first
        self.manifest = self.sink.store(self.second, 2, base=base, base_version=1, chunk_bytes=12)
        assert all(len(piece.chunks) > 1 for piece in self.manifest.slices)
        self.assembly = Assembly(None, None)
        self.assembly.add(one, self.sink.fetch)

    def payload(self, number: int, payload: bytes, *, announced: bool) -> WeightManifest:
        """Replace the payload of one chunk. If `announced`, the manifest matches it."""
        place = places(self.manifest)[number]
        self.sink.chunks[place] = msgspec.structs.replace(self.sink.chunks[place], payload=payload)
        if not announced:
            return self.manifest
        first, *rest = self.manifest.slices[0].chunks
        ref = msgspec.structs.replace(first, bytes=len(payload), digest=digest_of(payload))
        return with_slice(self.manifest, 0, chunks=(ref, *rest))

    def chunk(self, number: int) -> WeightChunk:
        return self.sink.chunks[places(self.manifest)[number]]

    def put(self, number: int, chunk: WeightChunk) -> WeightManifest:
        self.sink.chunks[places(self.manifest)[number]] = chunk
        return self.manifest


def wrong_base_version(fixture: VersionFixture) -> WeightManifest:
    return msgspec.structs.replace(fixture.manifest, base_version=0)


def other_base(fixture: VersionFixture) -> WeightManifest:
    return with_slice(fixture.manifest, 1, base_digest=bytes(15) + b"x")


def flipped_bit(fixture: VersionFixture) -> WeightManifest:
    payload = bytearray(fixture.chunk(2).payload)
    payload[3] ^= 16
    return fixture.payload(2, bytes(payload), announced=False)


def truncated(fixture: VersionFixture) -> WeightManifest:
    return fixture.payload(1, fixture.chunk(1).payload[:-1], announced=False)


def lengthened(fixture: VersionFixture) -> WeightManifest:
    return fixture.payload(1, fixture.chunk(1).payload + b"x", announced=False)


def swapped_chunks(fixture: VersionFixture) -> WeightManifest:
    one, other = fixture.chunk(0), fixture.chunk(1)
    fixture.put(0, other)
    return fixture.put(1, one)


def swapped_references(fixture: VersionFixture) -> WeightManifest:
    """Swap references: every chunk matches its reference, in the wrong order."""
    first, second, *rest = fixture.manifest.slices[0].chunks
    return with_slice(fixture.manifest, 0, chunks=(second, first, *rest))


def swapped_slices(fixture: VersionFixture) -> WeightManifest:
    one, other = fixture.manifest.slices[0], fixture.manifest.slices[1]
    return with_slice(with_slice(fixture.manifest, 0, chunks=other.chunks), 1, chunks=one.chunks)


def duplicated_chunk(fixture: VersionFixture) -> WeightManifest:
    return fixture.put(1, fixture.chunk(0))


def of_another_tensor(fixture: VersionFixture) -> WeightManifest:
    return fixture.put(0, fixture.chunk(-1))


def of_another_version(fixture: VersionFixture) -> WeightManifest:
    return fixture.put(0, msgspec.structs.replace(fixture.chunk(0), version=1))


def of_another_model(fixture: VersionFixture) -> WeightManifest:
    return fixture.put(0, msgspec.structs.replace(fixture.chunk(0), model_id="other"))


def no_payload_of_the_codec(fixture: VersionFixture) -> WeightManifest:
    return fixture.payload(0, b"\x07" + fixture.chunk(0).payload[1:], announced=True)


def dense_of_the_wrong_size(fixture: VersionFixture) -> WeightManifest:
    return fixture.payload(0, b"\x00" + fixture.chunk(0).payload[1:-1], announced=True)


def other_words(fixture: VersionFixture) -> WeightManifest:
    """Encode other words: the payload is valid, and the slice differs from its announced words."""
    return with_slice(fixture.manifest, 0, digest=bytes(16))


def last_slice_is_other_words(fixture: VersionFixture) -> WeightManifest:
    return with_slice(fixture.manifest, len(fixture.manifest.slices) - 1, digest=bytes(16))


REFUSED: list[tuple[Callable[[VersionFixture], WeightManifest], set[Refusal]]] = [
    (wrong_base_version, {Refusal.WRONG_BASE}),
    (other_base, {Refusal.WRONG_BASE}),
    (flipped_bit, {Refusal.WRONG_DIGEST}),
    (truncated, {Refusal.WRONG_CHUNK}),
    (lengthened, {Refusal.WRONG_CHUNK}),
    (swapped_chunks, {Refusal.WRONG_CHUNK, Refusal.WRONG_DIGEST}),
    (swapped_references, {Refusal.WRONG_CHUNK}),
    (swapped_slices, {Refusal.WRONG_RESULT, Refusal.WRONG_CHUNK, Refusal.WRONG_DIGEST}),
    (duplicated_chunk, {Refusal.WRONG_CHUNK, Refusal.WRONG_DIGEST}),
    (of_another_tensor, {Refusal.WRONG_CHUNK}),
    (of_another_version, {Refusal.WRONG_CHUNK}),
    (of_another_model, {Refusal.WRONG_CHUNK}),
    (no_payload_of_the_codec, {Refusal.WRONG_RESULT}),
    (dense_of_the_wrong_size, {Refusal.WRONG_RESULT}),
    (other_words, {Refusal.WRONG_RESULT}),
    (last_slice_is_other_words, {Refusal.WRONG_RESULT}),
]
OF_DELTAS = {wrong_base_version, other_base}
"""Faults that an anchor does not check."""


def assert_as_it_was(fixture: VersionFixture, before: Assembled, digests: dict[tuple[str, Box], bytes]) -> None:
    done = fixture.assembly.done
    assert done is before
    assert same_bits(done.tensors, fixture.first)
    assert (done.version, done.digests) == (1, digests)


@pytest.mark.parametrize(
    ("tamper", "refusals", "anchor"),
    [
        pytest.param(tamper, refusals, anchor, id=f"{tamper.__name__}, {'anchor' if anchor else 'delta'}")
        for tamper, refusals in REFUSED
        for anchor in (False, True)
        if not (anchor and tamper in OF_DELTAS)
    ],
)
def test_refused_version_leaves_the_finished_tensors_unchanged(
    tamper: Callable[[VersionFixture], WeightManifest], refusals: set[Refusal], anchor: bool
) -> None:
    fixture = VersionFixture(anchor=anchor)
    before, digests = fixture.assembly.done, dict(fixture.assembly.done.digests)
    chunks = dict(fixture.sink.chunks)
    with pytest.raises(VersionRefused) as refused:
        fixture.assembly.add(tamper(fixture), fixture.sink.fetch)
    assert refused.value.refusal in refusals
    assert_as_it_was(fixture, before, digests)
    fixture.sink.chunks = chunks
    fixture.assembly.add(fixture.manifest, fixture.sink.fetch)
    assert same_bits(fixture.assembly.done.tensors, fixture.second)


@given(SEED, st.booleans(), st.data())
def test_version_with_several_faults_is_refused_for_the_reason_of_one_thread(
    seed: int, anchor: bool, data: st.DataObject
) -> None:
    """Some payloads do not decode, some slices are not as announced, and one chunk may be missing."""
    random = np.random.default_rng(seed)
    sink, first = MemoryChunkSink(), random_tensors({"a": (12, 16), "b": (9,)}, torch.bfloat16, random)
    second = changed(first, 1.0, random)
    one, two = sink.store(first, 1), sink.store(second, 2, base=None if anchor else first, base_version=1)
    numbers = st.integers(0, len(two.slices) - 1)
    for number in data.draw(st.lists(numbers, max_size=3)):
        two = with_slice(two, number, digest=bytes(16))
    for number in data.draw(st.lists(numbers, max_size=3)):
        (place,) = [(ref.partition, ref.offset) for ref in two.slices[number].chunks]
        payload = b"\x07" + sink.chunks[place].payload[1:]
        sink.chunks[place] = msgspec.structs.replace(sink.chunks[place], payload=payload)
        ref = msgspec.structs.replace(two.slices[number].chunks[0], digest=digest_of(payload))
        two = with_slice(two, number, chunks=(ref,))
    if data.draw(st.booleans()):
        del sink.chunks[data.draw(st.sampled_from(places(two)))]

    def outcome(threads: int) -> tuple[str, bool]:
        assembly, refused = Assembly(None, None), ""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slice_threads, "THREADS", threads)
            assembly.add(one, sink.fetch)
            try:
                assembly.add(two, sink.fetch)
            except VersionRefused as why:
                refused = f"{why.refusal}: {why}"
        return refused, same_bits(assembly.done.tensors, first if refused else second)

    assert outcome(4) == outcome(1)
    assert outcome(4)[1]


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("says", [True, False])
def test_version_with_missing_chunks_leaves_the_finished_tensors_unchanged(
    anchor: bool, share: float, says: bool
) -> None:
    """The fetch reports the missing chunk, or just ends."""
    fixture = VersionFixture(anchor=anchor)
    before, digests = fixture.assembly.done, dict(fixture.assembly.done.digests)

    def fetch(refs: list[ChunkRef]) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        there = list(fixture.sink.fetch(refs))
        yield from there[: int(share * len(there))]
        if says:
            raise VersionRefused(Refusal.MISSING_CHUNK, "some")

    with pytest.raises(VersionRefused) as refused:
        fixture.assembly.add(fixture.manifest, fetch)
    assert refused.value.refusal is Refusal.MISSING_CHUNK
    assert_as_it_was(fixture, before, digests)


class LinkDown(Exception):
    """An exception of a fetch."""


@pytest.mark.parametrize("anchor", [False, True])
def test_fetch_error_propagates_and_leaves_the_finished_tensors_unchanged(anchor: bool) -> None:
    fixture = VersionFixture(anchor=anchor)
    before, digests = fixture.assembly.done, dict(fixture.assembly.done.digests)

    def fetch(refs: list[ChunkRef]) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        yield from list(fixture.sink.fetch(refs))[:5]
        raise LinkDown

    with pytest.raises(LinkDown):
        fixture.assembly.add(fixture.manifest, fetch)
    assert_as_it_was(fixture, before, digests)


def test_delta_needs_its_base_version_and_base_bytes() -> None:
    fixture = VersionFixture(anchor=False)
    with pytest.raises(VersionRefused) as refused:
        Assembly(None, None).add(fixture.manifest, fixture.sink.fetch)
    assert refused.value.refusal is Refusal.WRONG_BASE
    other = Assembly(None, None)
    other.add(fixture.sink.store(fixture.second, 1), fixture.sink.fetch)
    with pytest.raises(VersionRefused) as refused:
        other.add(fixture.manifest, fixture.sink.fetch)
    assert refused.value.refusal is Refusal.WRONG_BASE
    assert same_bits(other.done.tensors, fixture.second)


def test_version_is_not_applied_twice() -> None:
    fixture = VersionFixture(anchor=False)
    fixture.assembly.add(fixture.manifest, fixture.sink.fetch)
    with pytest.raises(VersionRefused) as refused:
        fixture.assembly.add(fixture.manifest, fixture.sink.fetch)
    assert refused.value.refusal is Refusal.WRONG_BASE
    assert same_bits(fixture.assembly.done.tensors, fixture.second)


@given(SHAPES, DTYPE, SEED, st.data())
def test_shard_fetches_only_overlapping_slices_and_is_exact(
    shapes: dict[str, tuple[int, ...]], dtype: str, seed: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    parts = data.draw(st.integers(1, 4))
    wanted_boxes = {name: data.draw(boxes_in(shape)) for name, shape in shapes.items() if data.draw(st.booleans())}
    sink, assembly = MemoryChunkSink(), Assembly(None, wanted_boxes)
    tensors: Tensors = random_tensors(shapes, TORCH_DTYPES[dtype], random)
    for version in range(4):
        new = changed(tensors, data.draw(st.sampled_from([0.0, 0.05, 1.0])), random)
        base = tensors if version % 3 else None
        manifest = sink.store(new, version, base=base, base_version=version - 1, column_parts=parts, chunk_bytes=30)
        tensors = new
        sink.fetched = []
        assembly.add(manifest, sink.fetch)
        assert sorted((ref.partition, ref.offset) for ref in sink.fetched) == sorted(
            (ref.partition, ref.offset)
            for piece in manifest.slices
            for ref in piece.chunks
            if (box := wanted_boxes.get(manifest.tensors[piece.tensor].name)) is not None
            and box.intersects(box_of(piece))
        )
        assert assembly.done.tensors.keys() == wanted_boxes.keys()
        for name, box in wanted_boxes.items():
            assert assembly.done.tensors[name].shape == tensors[name].shape
            assert np.array_equal(part(assembly.done.tensors[name], box), part(tensors[name], box))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    rows, columns = matrix(shape)
    row, column = draw(st.integers(0, rows)), draw(st.integers(0, columns))
    return Box(row, draw(st.integers(0, rows - row)), column, draw(st.integers(0, columns - column)))


def test_unchanged_slices_cost_no_chunk() -> None:
    sink, assembly = MemoryChunkSink(), Assembly(None, None)
    tensors = random_tensors({"a": (8, 16), "b": (4, 16)}, torch.float32, np.random.default_rng(2))
    assembly.add(sink.store(tensors, 1), sink.fetch)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["a"][3, 5] = 1.0
    manifest = sink.store(new, 2, base=tensors, base_version=1)
    sink.fetched = []
    assembly.add(manifest, sink.fetch)
    (piece,) = [piece for piece in manifest.slices if piece.chunks]
    assert piece.row_start == 3
    assert len(manifest.slices) == 12
    assert sink.fetched == list(piece.chunks)
    assert same_bits(assembly.done.tensors, new)
    same = sink.store(new, 3, base=new, base_version=2)
    assert same.payload_bytes == 0
    assembly.add(same, sink.fetch)
    assert sink.fetched == list(piece.chunks)
    assert assembly.done.version == 3
