"""A manifest has the same content with its slices in its record or in an index."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.limits import MAX_RECORD_BYTES
from rose.schemas.weights import (
    MAX_SLICES,
    MAX_TENSORS,
    ChunkRef,
    FirstChunk,
    SliceRef,
    TensorSpec,
    WeightChunk,
    WeightManifest,
)
from rose.schemas.wire import decode, encode
from rose.workers.weights import chunk_stores, manifests
from rose.workers.weights.checks import Refusal, VersionRefused
from rose.workers.weights.layout import NO_BASE, LayoutError, digest_of
from rose.workers.weights.manifests import INLINE_BYTES, check_layout, read_index, write_index
from tests.support.weights_fixtures import RUN, MemoryChunkSink, random_tensors

SHAPES = {"embed": (70, 30), "norm": (16,), "scale": ()}
DIGEST = bytes(16)


def small() -> WeightManifest:
    return MemoryChunkSink().store(random_tensors(SHAPES, torch.bfloat16, np.random.default_rng(0)), 1)


def large(slices: int) -> WeightManifest:
    """Return the manifest of an expert model: many tensors with one slice each."""
    tensors = tuple(
        TensorSpec(name=f"model.layers.{n // 384}.mlp.experts.{n % 384}.down_proj.weight", shape=(1,), dtype="bfloat16")
        for n in range(slices)
    )
    pieces = tuple(
        SliceRef(
            tensor=number,
            row_start=0,
            rows=1,
            column_start=0,
            columns=1,
            digest=DIGEST,
            base_digest=NO_BASE,
            chunks=(ChunkRef(partition=number % 4, offset=100 + number // 4, bytes=3, digest=DIGEST),),
        )
        for number in range(slices)
    )
    return WeightManifest(
        model_id="m",
        run=RUN,
        epoch=0,
        version=1,
        step=1,
        tensors=tensors,
        slices=pieces,
        digest=DIGEST,
        published_at=0.0,
    )


def contents_of(manifest: WeightManifest) -> WeightManifest:
    return msgspec.structs.replace(manifest, index=(), first=())


@given(st.integers(40, 2000))
def test_sealed_index_can_be_opened(chunk_bytes: int) -> None:
    manifest, topic = small(), MemoryChunkSink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "INLINE_BYTES", 0)
        patch.setattr(chunk_stores, "CHUNK_BYTES", chunk_bytes)
        written = write_index(manifest, topic)
    assert not written.slices
    assert not written.tensors
    assert contents_of(read_index(decode(WeightManifest, encode(written)), topic.fetch)) == contents_of(manifest)


def test_manifest_that_fits_a_record_has_no_index() -> None:
    topic = MemoryChunkSink()
    written = write_index(small(), topic)
    assert not topic.chunks
    assert contents_of(written) == contents_of(small())


def test_model_of_many_experts_fits_a_record() -> None:
    manifest, topic = large(30_000), MemoryChunkSink()
    written = write_index(manifest, topic)
    assert len(encode(written)) < INLINE_BYTES
    assert all(len(chunk.payload) <= MAX_RECORD_BYTES for chunk in topic.chunks.values())
    assert contents_of(read_index(written, topic.fetch)) == contents_of(manifest)


def test_model_of_a_trillion_parameters_fits_an_index() -> None:
    """A trillion parameters have 69,120 expert tensors."""
    manifest, topic = large(69_120), MemoryChunkSink()
    assert contents_of(read_index(write_index(manifest, topic), topic.fetch)) == contents_of(manifest)


def test_file_names_count_toward_the_record_size() -> None:
    """The largest number of ranks, each with a file, leaves no room for slices that would fit alone."""
    topic, alone = MemoryChunkSink(), large(2_500)
    manifest = msgspec.structs.replace(alone, files=("anchor-" + "f" * 190,) * 4096)
    assert not write_index(alone, topic).index
    written = write_index(manifest, topic)
    assert contents_of(read_index(decode(WeightManifest, encode(written)), topic.fetch)) == contents_of(manifest)


def with_first(manifest: WeightManifest, **change: object) -> WeightManifest:
    """Return the manifest with another first slice."""
    changed = msgspec.structs.replace(manifest.slices[0], **change)
    return msgspec.structs.replace(manifest, slices=(changed, *manifest.slices[1:]))


def with_tensors(manifest: WeightManifest, times: int, **change: object) -> WeightManifest:
    """Return the manifest with the changed first tensor, repeated."""
    changed = msgspec.structs.replace(manifest.tensors[0], **change)
    return msgspec.structs.replace(manifest, tensors=(changed,) * times)


BEYOND: dict[str, Callable[[WeightManifest], WeightManifest]] = {
    "tensors": lambda manifest: with_tensors(manifest, MAX_TENSORS + 1),
    "a name": lambda manifest: with_tensors(manifest, 1, name="t" * 513),
    "a place": lambda manifest: with_first(manifest, tensor=MAX_TENSORS),
    "chunks of a slice": lambda manifest: with_first(manifest, chunks=manifest.slices[0].chunks * 4097),
}


@pytest.mark.parametrize("beyond", BEYOND.values(), ids=BEYOND.keys())
@pytest.mark.parametrize("inline_bytes", [0, 2**40])
def test_index_refused_by_readers_is_not_stored(
    beyond: Callable[[WeightManifest], WeightManifest], inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "INLINE_BYTES", inline_bytes)
    topic = MemoryChunkSink()
    with pytest.raises(LayoutError, match=r"^no receiver would take what version 1 says of its tensors and slices: \S"):
        write_index(beyond(large(6)), topic)
    assert not topic.chunks


def test_index_with_too_many_chunks_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, topic = large(20_000), MemoryChunkSink()
    assert write_index(manifest, topic).index
    size = sum(len(chunk.payload) for chunk in topic.chunks.values())
    topic.chunks.clear()
    monkeypatch.setattr(manifests, "INDEX_BYTES", size - 1)
    with pytest.raises(LayoutError, match=f"it takes {size} bytes, and an index holds {size - 1}"):
        write_index(manifest, topic)
    assert not topic.chunks


def test_index_names_the_first_offset_that_it_needs() -> None:
    manifest, topic = large(6), MemoryChunkSink()
    assert write_index(manifest, topic).first == tuple(FirstChunk(partition=each, offset=100) for each in range(4))
    in_store = msgspec.structs.replace(manifest, files=("anchor-m.1.0",))
    assert write_index(in_store, topic).first == ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "INLINE_BYTES", 0)
        assert write_index(in_store, topic).first == (FirstChunk(partition=0, offset=0),), (
            "the index is on the log all the same"
        )


@pytest.mark.parametrize(
    ("harm", "refusal"),
    [
        ("gone", Refusal.MISSING_CHUNK),
        ("flipped", Refusal.WRONG_DIGEST),
        ("cut short", Refusal.WRONG_CHUNK),
        ("of another version", Refusal.WRONG_CHUNK),
        ("another part", Refusal.WRONG_CHUNK),
        ("no index", Refusal.WRONG_CHUNK),
    ],
)
def test_broken_index_is_refused(harm: str, refusal: Refusal) -> None:
    topic = MemoryChunkSink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "INLINE_BYTES", 0)
        written = write_index(small(), topic)
    ((place, chunk),) = topic.chunks.items()
    match harm:
        case "gone":
            topic.chunks.clear()
        case "of another version":
            topic.chunks[place] = msgspec.structs.replace(chunk, version=2)
        case "another part":
            topic.chunks[place] = msgspec.structs.replace(chunk, part=1)
        case "cut short":
            topic.chunks[place] = msgspec.structs.replace(chunk, payload=chunk.payload[:-1])
        case "flipped":
            topic.chunks[place] = msgspec.structs.replace(chunk, payload=b"\x00" + chunk.payload[1:])
        case "no index":
            forged = b"\xc1" * len(chunk.payload)
            topic.chunks[place] = msgspec.structs.replace(chunk, payload=forged)
            refs = (msgspec.structs.replace(written.index[0], digest=digest_of(forged)),)
            written = msgspec.structs.replace(written, index=refs)
    with pytest.raises(VersionRefused) as refused:
        read_index(written, topic.fetch)
    assert refused.value.refusal is refusal


@given(st.binary(max_size=400))
def test_index_of_random_bytes_is_refused(payload: bytes) -> None:
    topic = MemoryChunkSink()
    stored = topic.put(WeightChunk(model_id="m", version=1, tensor=":index", part=0, payload=payload))
    manifest = msgspec.structs.replace(small(), tensors=(), slices=(), index=(stored.ref(),))
    with pytest.raises(VersionRefused):
        read_index(manifest, topic.fetch)


@pytest.mark.parametrize(
    ("specs", "slices"),
    [
        ([TensorSpec(name="t" * 513, shape=(1,), dtype="float32")], 1),
        ([TensorSpec(name="t", shape=(1,) * 9, dtype="float32")], 1),
        ([TensorSpec(name="t", shape=(1,), dtype="float32")], MAX_SLICES + 1),
        ([TensorSpec(name="t", shape=(1,), dtype="float32")] * (MAX_TENSORS + 1), 1),
    ],
    ids=["name", "shape", "slices", "tensors"],
)
def test_tensors_refused_by_readers_are_refused_before_any_is_stored(specs: list[TensorSpec], slices: int) -> None:
    check_layout([TensorSpec(name="t", shape=(1,), dtype="float32")] * MAX_TENSORS, MAX_SLICES)
    with pytest.raises(LayoutError, match=r"^no receiver would take these tensors: \S"):
        check_layout(specs, slices)
