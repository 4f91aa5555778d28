"""What a manifest and its chunks must say to be believed.

Keeps true: a manifest is believed about nothing that was not known before. Names and shapes are the model's own, so
what a receiver allocates for weights is bounded by its model, never by a record; what a manifest says of them itself is
bounded by `MAX_INDEX_CHUNKS`, and takes some five times its bytes as objects. Pure, and free of torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from rose.schemas.weights import ChunkRef, SliceRef, TensorSpec, WeightChunk, WeightManifest
from rose.workers.weights.config import HOLDS
from rose.workers.weights.digests import digest_of, whole_digest
from rose.workers.weights.layout import DTYPE_BYTES, matrix


class Refusal(Enum):
    """Why a receiver does not take a version."""

    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    BAD_SHAPE = "bad_shape"
    """Another shape or element type than the model's, or a tensor named twice."""
    BAD_TILING = "bad_tiling"
    """The slices do not cover each element once, or their sizes do not follow from their coordinates."""
    WRONG_DTYPE = "wrong_dtype"
    """An element type that the receiver's engine cannot hold exactly."""
    UNSIGNED = "unsigned"
    """Signed by nobody, where a key is set: nothing is learned from it."""
    FORGED = "forged"
    """Signed by another key, or changed since: nothing is learned from it."""
    STRANGER = "stranger"
    """Of another run or namespace: nothing is learned from it."""
    WRONG_BASE = "wrong_base"
    """It builds on a version that is not on the log, or on other bytes than that version's."""
    MISSING_CHUNK = "missing_chunk"
    """The log does not hold it any more, or never did."""
    WRONG_CHUNK = "wrong_chunk"
    """What lies at the place is another chunk, or not of the size that the manifest says."""
    WRONG_DIGEST = "wrong_digest"
    """A chunk is not intact, or all slices together are not what the manifest says."""
    WRONG_RESULT = "wrong_result"
    """A slice does not decode to what was published."""
    NOT_FINITE = "not_finite"
    """A weight of it is no finite number."""
    UNREADABLE = "unreadable"
    """Reading it raised what nobody expects: see the log."""


BASE_REFUSALS = frozenset({Refusal.WRONG_BASE, Refusal.WRONG_RESULT})
"""Refusals that may be the fault of what a version was built upon."""


class VersionRefused(Exception):
    """A version that must not be taken; the one that serves, serves on."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal


PAYLOAD_HEAD_BYTES = 1
"""What a dense payload has before the elements."""


def check_manifest(
    manifest: WeightManifest, expected: Mapping[str, Sequence[int]], *, engine_dtype: str | None = None
) -> None:
    """Believe a manifest, or raise VersionRefused.

    `expected` has the shape of every tensor of the model. `engine_dtype`: what must hold its values exactly.
    """
    if manifest.base_version is not None and not 0 <= manifest.base_version < manifest.version:
        raise VersionRefused(Refusal.WRONG_BASE, f"it builds on version {manifest.base_version}")
    for spec in manifest.tensors:
        _check_tensor(spec, expected)
        if engine_dtype is not None and spec.dtype not in HOLDS.get(engine_dtype, DTYPE_BYTES):
            how = f"{spec.name} is {spec.dtype}, which an engine in {engine_dtype} cannot hold exactly"
            raise VersionRefused(Refusal.WRONG_DTYPE, f"{how}: set weights.dtype or executor.dtype")
    names = {spec.name for spec in manifest.tensors}
    if len(names) < len(manifest.tensors):
        raise VersionRefused(Refusal.BAD_SHAPE, "a tensor is named twice")
    if missing := expected.keys() - names:
        raise VersionRefused(Refusal.MISSING_TENSOR, f"it lacks {min(missing)}")
    _check_tiling(manifest)
    if whole_digest(manifest) != manifest.digest:
        raise VersionRefused(Refusal.WRONG_DIGEST, "the slices together are not what the manifest says")


def _check_tensor(spec: TensorSpec, expected: Mapping[str, Sequence[int]]) -> None:
    shape = expected.get(spec.name)
    if shape is None:
        raise VersionRefused(Refusal.UNKNOWN_TENSOR, f"the model has no tensor {spec.name}")
    if tuple(shape) != spec.shape:
        raise VersionRefused(Refusal.BAD_SHAPE, f"{spec.name} has shape {spec.shape}, the model's has {tuple(shape)}")
    if spec.dtype not in DTYPE_BYTES:
        raise VersionRefused(Refusal.BAD_SHAPE, f"{spec.name} has the element type {spec.dtype}")


def _check_tiling(manifest: WeightManifest) -> None:
    """Slices of one range of rows tile the columns; the ranges of rows tile the tensor."""
    places = Counter((chunk.partition, chunk.offset) for piece in manifest.slices for chunk in piece.chunks)
    if any(times > 1 for times in places.values()):
        raise VersionRefused(Refusal.BAD_TILING, "two chunks lie in one place")
    bands: dict[int, dict[tuple[int, int], list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for piece in manifest.slices:
        if piece.tensor >= len(manifest.tensors):
            raise VersionRefused(Refusal.UNKNOWN_TENSOR, f"a slice is of tensor {piece.tensor}, which is not named")
        _check_sizes(piece, manifest)
        bands[piece.tensor][piece.row_start, piece.rows].append((piece.column_start, piece.columns))
    for number, spec in enumerate(manifest.tensors):
        rows, columns = matrix(spec.shape)
        size = rows if rows * columns else 0
        if not _tiles(bands[number], size) or not all(_tiles(band, columns) for band in bands[number].values()):
            raise VersionRefused(Refusal.BAD_TILING, f"{spec.name}: not every element is covered once")


def _tiles(ranges: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether ranges (start, length) cover [0, size) once."""
    covered = 0
    for start, length in sorted(ranges):
        if start != covered or length == 0:
            return False
        covered += length
    return covered == size


def _check_sizes(piece: SliceRef, manifest: WeightManifest) -> None:
    spec = manifest.tensors[piece.tensor]
    dense = PAYLOAD_HEAD_BYTES + piece.rows * piece.columns * DTYPE_BYTES[spec.dtype]
    size = sum(chunk.bytes for chunk in piece.chunks)
    anchor = manifest.base_version is None
    if size > dense or (anchor and size != dense):
        raise VersionRefused(Refusal.BAD_TILING, f"{spec.name}: a slice of {dense} bytes has a payload of {size}")
    if not anchor and not piece.chunks and piece.digest != piece.base_digest:
        raise VersionRefused(Refusal.BAD_TILING, f"{spec.name}: a slice changed and has no payload")


def check_chunk(
    chunk: WeightChunk | bytes, ref: ChunkRef, manifest: WeightManifest, *, tensor: str, part: int
) -> bytes:
    """The payload of what was found at the place of `ref`, a record or bytes of a file; or raise VersionRefused."""
    expected = (manifest.model_id, manifest.version, tensor, part)
    if isinstance(chunk, bytes):
        payload = chunk
    elif (chunk.model_id, chunk.version, chunk.tensor, chunk.part) == expected:
        payload = chunk.payload
    else:
        raise VersionRefused(Refusal.WRONG_CHUNK, f"partition {ref.partition} offset {ref.offset} holds another chunk")
    if len(payload) != ref.bytes:
        what = f"a chunk of {tensor} has {len(payload)} bytes instead of {ref.bytes}"
        raise VersionRefused(Refusal.WRONG_CHUNK, what)
    if digest_of(payload) != ref.digest:
        raise VersionRefused(Refusal.WRONG_DIGEST, f"a chunk of {tensor} is not intact")
    return payload
