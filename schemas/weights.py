"""A policy version on the log: chunks of slices of tensors, and the manifest that commits them.

A large anchor's chunks lie in files of a store instead; its manifest is on the log like any other. What a manifest of
a large model has to say of its slices lies in chunks too, on the log: its index.

Keeps true: no manifest, no version. Coordinates are Hugging Face's own: a tensor's name, a range of its rows (the first
axis) and of its columns (all other axes, flat).
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import MAX_RECORD_BYTES, Count, Digest, Id, Moment, Version
from rose.schemas.record import Record
from rose.schemas.turns import Partition

MAX_TENSORS = 2**20
"""Tensors of a model, at most: one of a trillion parameters names 69,120 of experts alone."""

MAX_SLICES = 2**24
"""Slices of a model, at most: of a trillion parameters there are a million, and more where ranks cut them. What they
take of a receiver's memory is bounded by the chunks that hold them."""

MAX_INDEX_CHUNKS = 256
"""Most chunks of an index."""

MAX_CHUNK_PARTITIONS = 4096
"""Most partitions of the chunks topic that the chunks of a version lie in."""

SIGNATURE_HEADER = "rose-signature"
"""Beside a manifest: an Ed25519 signature, 64 bytes."""

Order = tuple[int, int]
"""A version's epoch and number."""

TensorName = Annotated[str, Meta(min_length=1, max_length=512)]

FileName = Annotated[str, Meta(pattern=r"^anchor-[A-Za-z0-9._:-]{1,190}\Z")]
"""In the store that a receiver's own configuration names; never a path."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor of the model, whole."""

    name: TensorName
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    dtype: Annotated[str, Meta(max_length=32)]
    """`float32`, `bfloat16` or `float16`."""


class ChunkRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Where one chunk lies and what it must hold."""

    partition: Partition
    """Partition of the chunks topic; if the manifest has files, the number of one of them."""
    offset: Count
    """In the partition; in a file, in bytes."""
    bytes: Annotated[int, Meta(ge=1, le=MAX_RECORD_BYTES)]
    """Size of the chunk's payload."""
    digest: Digest
    """Digest of the payload."""


class FirstChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The first chunk that a version needs in one partition of the chunks topic."""

    partition: Partition
    offset: Count


class SliceRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One slice of a tensor: rows [row_start, row_start + rows), columns [column_start, column_start + columns)."""

    tensor: Annotated[int, Meta(ge=0, lt=MAX_TENSORS)]
    """Its place among the manifest's tensors."""
    row_start: Count
    rows: Count
    column_start: Count
    columns: Count
    digest: Digest
    """Digest of the slice's bytes in this version."""
    base_digest: Digest
    """Digest of the slice's bytes in the version that this one builds on; zeros in an anchor."""
    chunks: Annotated[tuple[ChunkRef, ...], Meta(max_length=4096)]
    """Its payload, cut up, in order; none if the slice is as it was."""


class WeightIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of tensors and slices, where that is too long for its record.

    One MessagePack map, cut into the payloads of the chunks that the manifest names as its `index`, in order.
    """

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    slices: Annotated[tuple[SliceRef, ...], Meta(max_length=MAX_SLICES)]


class WeightChunk(Record, frozen=True, kw_only=True):
    """A part of a slice's payload, which is a payload of the codec (`workers.weights.codec`), or of a `WeightIndex`."""

    SCHEMA: ClassVar[str] = "weight-chunk/2"

    model_id: Id
    version: Count
    tensor: TensorName
    """`:index` in the chunks of an index."""
    part: Count
    """The chunk's place in the payload."""
    payload: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class WeightManifest(Record, frozen=True, kw_only=True):
    """Commits one policy version: every tensor, every slice of it, and every chunk by its place in the log.

    A tensor's columns are the elements of one row, whatever its shape; a tensor of no axes is one row. Where keys are
    used, the header `SIGNATURE_HEADER` has the Ed25519 signature of the value's bytes as they travel.
    """

    SCHEMA: ClassVar[str] = "weight-manifest/4"

    model_id: Id
    run: Id
    """Whose versions these are; those of another run are strangers, whoever signed them."""
    epoch: Count
    """Rises when a run goes back: then the newest version is the newest of the highest epoch."""
    version: Count
    """Names one policy of the model for ever. It comes again only where the same policy is stored whole again."""
    base_version: Version | None = None
    """What the payloads build on, of the same run and epoch. None: nothing, the version is an anchor."""
    step: Count
    """Optimizer steps that made it; the version's number, unless the run went back."""
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    slices: Annotated[tuple[SliceRef, ...], Meta(max_length=MAX_SLICES)]
    index: Annotated[tuple[ChunkRef, ...], Meta(max_length=MAX_INDEX_CHUNKS)] = ()
    """Chunks of the log that hold tensors and slices, in order (`WeightIndex`); empty where the two are here."""
    digest: Digest
    """Digest of all slices in order. Hashed of each slice: the length of its tensor's name, row_start, rows,
    column_start and columns as little-endian u64, the name in UTF-8, and its digest."""
    files: Annotated[tuple[FileName, ...], Meta(max_length=4096)] = ()
    """Files of the anchor store, one for each rank that published, if the chunks lie there and not on the log."""
    first: Annotated[tuple[FirstChunk, ...], Meta(max_length=MAX_CHUNK_PARTITIONS)] = ()
    """Where what it needs of the chunks topic begins, partition by partition."""
    payload_bytes: Count = 0
    """Payload bytes of the chunks of all slices."""
    published_at: Moment

    @property
    def order(self) -> Order:
        """The order of versions: the newer one of two versions of a run has the higher value."""
        return self.epoch, self.version
