"""A policy version on the log: chunks of tensors, and the manifest that commits them.

Keeps true: no manifest, no version. Coordinates are Hugging Face's own: a tensor's name and a range of its rows (the
first axis; a tensor of no axes counts as one row).
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from schemas.limits import RECORD_BYTES, Count, Digest, Id, Version
from schemas.record import Record
from schemas.turns import Partition

TensorName = Annotated[str, Meta(min_length=1, max_length=512)]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the model, whole."""

    name: TensorName
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    dtype: str
    """`float32`, `bfloat16` or `float16`."""


class ChunkRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where one chunk lies and what it must hold."""

    tensor: TensorName
    row_start: Count
    rows: Count
    partition: Partition
    offset: Count
    bytes: Annotated[int, Meta(ge=0, le=RECORD_BYTES)]
    """Of the chunk's payload."""
    digest: Digest
    """Of the payload."""


class WeightChunk(Record, frozen=True, kw_only=True):
    """Rows [row_start, row_start + rows) of one tensor, little-endian."""

    SCHEMA: ClassVar[str] = "weight-chunk/1"

    model_id: Id
    version: Count
    tensor: TensorName
    row_start: Count
    rows: Count
    encoding: str = "dense"
    payload: Annotated[bytes, Meta(max_length=RECORD_BYTES)]


class WeightManifest(Record, frozen=True, kw_only=True):
    """Commits one policy version: every tensor, and every chunk by its place in the log."""

    SCHEMA: ClassVar[str] = "weight-manifest/1"

    model_id: Id
    version: Count
    base_version: Version | None = None
    """None: a full version, an anchor."""
    step: Count
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=65_536)]
    chunks: Annotated[tuple[ChunkRef, ...], Meta(max_length=65_536)]
    digest: Digest
    """Of all tensors in order: `name`, then the bytes, of each."""
    published_at: float
