"""A manifest that names more tensors and slices than a record holds has them in chunks on the log: its index.

Keeps true
- What a manifest says does not depend on where it says it: `opened` gives back what was given to `sealed`.
- The record names every chunk of its index by digest, so its signature speaks for the index too.
- An index that no reader would take is not put on the shelf, nor what is in tensors that none would: their publisher is
  told.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from schemas.limits import MAX_RECORD_BYTES
from schemas.weights import (
    MAX_INDEX_CHUNKS,
    MAX_SLICES,
    MAX_TENSORS,
    ChunkRef,
    FirstChunk,
    SliceRef,
    TensorSpec,
    WeightChunk,
    WeightIndex,
    WeightManifest,
)
from workers.weights.checks import check_chunk
from workers.weights.geometry import LayoutError
from workers.weights.refusals import Refusal, VersionRefused
from workers.weights.shelves import CHUNK_BYTES, Shelf, lowest_offsets, put_payload

INLINE_BYTES = MAX_RECORD_BYTES // 2
"""Of a record that has its tensors and slices itself, at most, beside `first`."""

INDEX_BYTES = MAX_INDEX_CHUNKS * CHUNK_BYTES
"""Of an index, at most."""

INDEX = ":index"
"""What the chunks of an index have for the name of a tensor."""

Fetch = Callable[[list[ChunkRef]], Iterable[tuple[ChunkRef, WeightChunk]]]
"""Hands out what lies at every reference, in no order. May raise VersionRefused."""

BATCH = 1_000
"""Tensors or slices read back at once: other threads run between two."""

_decoder = msgspec.msgpack.Decoder(WeightIndex)
_tensors = msgspec.msgpack.Decoder(tuple[TensorSpec, ...]).decode
_slices = msgspec.msgpack.Decoder(tuple[SliceRef, ...]).decode


def check_layout(tensors: Sequence[TensorSpec], slices: int) -> None:
    """Raises LayoutError for tensors that no receiver would take, or more of them or of slices than one would."""
    try:
        _check_readable(_tensors, tensors, MAX_TENSORS)
        if slices > MAX_SLICES:
            raise ValueError(f"{slices} slices, and {MAX_SLICES} are the most")
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"no receiver would take these tensors: {error}") from error


def sealed(manifest: WeightManifest, shelf: Shelf) -> WeightManifest:
    """The manifest as it is to be written, once its index is on the shelf. Raises BusError or LayoutError."""
    index = _index_of(manifest)
    bare = msgspec.structs.replace(manifest, tensors=(), slices=())
    if len(index) + len(msgspec.msgpack.encode(bare)) > INLINE_BYTES:
        stored = put_payload(shelf, index, model_id=manifest.model_id, version=manifest.version, tensor=INDEX)
        shelf.close()
        refs = tuple(chunk.ref() for chunk in stored)
        written = msgspec.structs.replace(bare, index=refs)
    else:
        written = manifest
    on_log = () if manifest.files else (chunk for piece in manifest.slices for chunk in piece.chunks)
    lowest = sorted(lowest_offsets(chain(on_log, written.index)).items())
    first = tuple(FirstChunk(partition=partition, offset=offset) for partition, offset in lowest)
    return msgspec.structs.replace(written, first=first)


def _index_of(manifest: WeightManifest) -> bytes:
    """What it says of tensors and slices. Raises LayoutError where no reader would take that."""
    try:
        index = msgspec.msgpack.encode(WeightIndex(tensors=manifest.tensors, slices=manifest.slices))
        if len(index) > INDEX_BYTES:
            raise ValueError(f"it takes {len(index)} bytes, and an index holds {INDEX_BYTES}")
        _check_readable(_tensors, manifest.tensors, MAX_TENSORS)
        _check_readable(_slices, manifest.slices, MAX_SLICES)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        what = f"no receiver would take what version {manifest.version} says of its tensors and slices"
        raise LayoutError(f"{what}: {error}") from error
    return index


def _check_readable(read: Callable[[bytes], object], values: Sequence[object], most: int) -> None:
    if len(values) > most:
        raise ValueError(f"there are {len(values)} of them, and {most} are the most")
    for at in range(0, len(values), BATCH):
        read(msgspec.msgpack.encode(values[at : at + BATCH]))


def opened(manifest: WeightManifest, fetch: Fetch) -> WeightManifest:
    """The manifest with all its tensors and slices. Raises VersionRefused, and what `fetch` raises."""
    if not manifest.index:
        return manifest
    part_at = {(ref.partition, ref.offset): part for part, ref in enumerate(manifest.index)}
    parts: dict[int, bytes] = {}
    for ref, found in fetch(list(manifest.index)):
        part = part_at[ref.partition, ref.offset]
        parts[part] = check_chunk(found, ref, manifest, tensor=INDEX, part=part)
    if len(parts) < len(manifest.index):
        raise VersionRefused(Refusal.MISSING_CHUNK, "its index did not come whole")
    try:
        index = _decoder.decode(b"".join(parts[part] for part in range(len(parts))))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise VersionRefused(Refusal.WRONG_CHUNK, f"its index cannot be read: {error}") from None
    return msgspec.structs.replace(manifest, tensors=index.tensors, slices=index.slices)
