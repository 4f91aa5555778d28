"""A manifest says the same, whether its slices are in its record or in an index."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.limits import RECORD_BYTES
from schemas.weights import ChunkRef, SliceRef, TensorSpec, WeightChunk, WeightManifest
from schemas.wire import decode, encode
from tests.unit.weights_world import RUN, Shelf, random_tensors
from workers.weights import index, shelves
from workers.weights.digests import NO_BASE, digest_of
from workers.weights.index import INLINE_BYTES, opened, sealed
from workers.weights.refusals import Refusal, VersionRefused

SHAPES = {"embed": (70, 30), "norm": (16,), "scale": ()}
DIGEST = bytes(16)


def small() -> WeightManifest:
    return Shelf().store(random_tensors(SHAPES, torch.bfloat16, np.random.default_rng(0)), 1)


def large(slices: int) -> WeightManifest:
    """As of a model of experts: many tensors, a slice each."""
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


def said(manifest: WeightManifest) -> WeightManifest:
    return msgspec.structs.replace(manifest, index=(), first=())


@given(st.integers(40, 2000))
def test_what_was_sealed_is_opened(chunk_bytes: int) -> None:
    manifest, topic = small(), Shelf()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "INLINE_BYTES", 0)
        patch.setattr(shelves, "CHUNK_BYTES", chunk_bytes)
        written = sealed(manifest, topic)
    assert not written.slices
    assert not written.tensors
    assert said(opened(decode(WeightManifest, encode(written)), topic.fetch)) == said(manifest)


def test_what_fits_its_record_has_no_index() -> None:
    topic = Shelf()
    written = sealed(small(), topic)
    assert not topic.chunks
    assert said(written) == said(small())


def test_a_model_of_many_experts_fits_a_record() -> None:
    manifest, topic = large(30_000), Shelf()
    written = sealed(manifest, topic)
    assert len(encode(written)) < INLINE_BYTES
    assert all(len(chunk.payload) <= RECORD_BYTES for chunk in topic.chunks.values())
    assert said(opened(written, topic.fetch)) == said(manifest)


def test_it_says_where_what_it_needs_begins() -> None:
    manifest, topic = large(6), Shelf()
    assert sealed(manifest, topic).first == ((0, 100), (1, 100), (2, 100), (3, 100))
    in_store = msgspec.structs.replace(manifest, files=("anchor-m.1.0",))
    assert sealed(in_store, topic).first == ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "INLINE_BYTES", 0)
        assert sealed(in_store, topic).first == ((0, 0),), "the index is on the log all the same"


@pytest.mark.parametrize(
    ("harm", "refusal"),
    [
        ("gone", Refusal.MISSING_CHUNK),
        ("flipped", Refusal.WRONG_DIGEST),
        ("cut short", Refusal.WRONG_CHUNK),
        ("of another version", Refusal.WRONG_CHUNK),
        ("no index", Refusal.WRONG_CHUNK),
    ],
)
def test_a_broken_index_is_refused(harm: str, refusal: Refusal) -> None:
    topic = Shelf()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "INLINE_BYTES", 0)
        written = sealed(small(), topic)
    ((place, chunk),) = topic.chunks.items()
    match harm:
        case "gone":
            topic.chunks.clear()
        case "of another version":
            topic.chunks[place] = msgspec.structs.replace(chunk, version=2)
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
        opened(written, topic.fetch)
    assert refused.value.refusal is refusal


@given(st.binary(max_size=400))
def test_no_bytes_of_an_index_do_more_than_be_refused(payload: bytes) -> None:
    topic = Shelf()
    stored = topic.put(WeightChunk(model_id="m", version=1, tensor=":index", part=0, payload=payload))
    manifest = msgspec.structs.replace(small(), tensors=(), slices=(), index=(stored.ref(),))
    with pytest.raises(VersionRefused):
        opened(manifest, topic.fetch)
