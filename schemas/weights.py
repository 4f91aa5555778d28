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
"""Most tensors of a model: a model of a trillion parameters has 69,120 tensors of experts alone."""

MAX_SLICES = 2**24
"""Most slices of a model: a trillion parameters make a million, and more if ranks cut them. The chunks that hold slices
limit the memory that slices take in a receiver."""

MAX_INDEX_CHUNKS = 256
"""Most chunks of an index."""

MAX_CHUNK_PARTITIONS = 4096
"""Most partitions of the chunks topic that the chunks of a version lie in."""

SIGNATURE_HEADER = "rose-signature"
"""Header of a manifest: an Ed25519 signature, 64 bytes."""

Order = tuple[int, int]
"""A version's epoch and number."""

TensorName = Annotated[str, Meta(min_length=1, max_length=512)]

FileName = Annotated[str, Meta(pattern=r"^anchor-[A-Za-z0-9._:-]{1,190}\Z")]
"""Name of a file in the store that a receiver's own configuration names; never a path."""


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
    """Offset in the partition; in a file, in bytes."""
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
    """Number of the tensor in the manifest's list."""
    row_start: Count
    rows: Count
    column_start: Count
    columns: Count
    digest: Digest
    """Digest of the slice's bytes in this version."""
    base_digest: Digest
    """Digest of the slice's bytes in the version that this one builds on; zeros in an anchor."""
    chunks: Annotated[tuple[ChunkRef, ...], Meta(max_length=4096)]
    """Chunks of the payload, in order; none if the slice is unchanged."""


class WeightIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors and slices of a manifest that is too large for one record.

    One MessagePack map, cut into the payloads of the chunks that the manifest names as its `index`, in order.
    """

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    slices: Annotated[tuple[SliceRef, ...], Meta(max_length=MAX_SLICES)]


class WeightChunk(Record, frozen=True, kw_only=True):
    """A part of a payload: of a slice, encoded by `workers.weights.codec`, or of a `WeightIndex`."""

    SCHEMA: ClassVar[str] = "weight-chunk/2"

    model_id: Id
    version: Count
    tensor: TensorName
    """Name of the tensor; `:index` in the chunks of an index."""
    part: Count
    """Number of the chunk in the payload."""
    payload: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class WeightManifest(Record, frozen=True, kw_only=True):
    """Commits one policy version: every tensor, every slice, and the position of every chunk.

    A tensor's columns are the elements of one row, whatever its shape; a tensor of no axes is one row. Where keys are
    used, the header `SIGNATURE_HEADER` has the Ed25519 signature of the value's bytes as they travel.
    """

    SCHEMA: ClassVar[str] = "weight-manifest/4"

    model_id: Id
    run: Id
    """Name of the run. Versions of another run are ignored, whatever key signed them."""
    epoch: Count
    """Epoch, which grows when a run goes back. The newest version is the newest of the highest epoch."""
    version: Count
    """Number of one policy of the model. It is used again only if the same policy is stored whole again."""
    base_version: Version | None = None
    """Version that the payloads build on, of the same run and epoch. None: the version is an anchor."""
    step: Count
    """Number of optimizer steps; the version's number, unless the run went back."""
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    slices: Annotated[tuple[SliceRef, ...], Meta(max_length=MAX_SLICES)]
    index: Annotated[tuple[ChunkRef, ...], Meta(max_length=MAX_INDEX_CHUNKS)] = ()
    """Chunks on the log that hold tensors and slices, in order (`WeightIndex`); empty if the manifest holds them
    itself."""
    digest: Digest
    """Digest of all slices in order. Hashed of each slice: the length of its tensor's name, row_start, rows,
    column_start and columns as little-endian u64, the name in UTF-8, and its digest."""
    files: Annotated[tuple[FileName, ...], Meta(max_length=4096)] = ()
    """Files of the anchor store, one for each rank that published, if the chunks lie there and not on the log."""
    first: Annotated[tuple[FirstChunk, ...], Meta(max_length=MAX_CHUNK_PARTITIONS)] = ()
    """First chunk that the version needs, for each partition of the chunks topic."""
    payload_bytes: Count = 0
    """Payload bytes of the chunks of all slices."""
    published_at: Moment

    @property
    def order(self) -> Order:
        """The order of versions: the newer one of two versions of a run has the higher value."""
        return self.epoch, self.version
