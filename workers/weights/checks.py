"""Checks of manifests and chunks before they are used.

Keeps true: what a receiver allocates for weights is bounded by its own model, never by a record: names and shapes must
be those of the model. What the manifest itself says is bounded by `MAX_INDEX_CHUNKS` and takes about five times its
bytes as objects. Pure; does not import torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from rose.schemas.weights import ChunkRef, SliceRef, TensorSpec, WeightChunk, WeightManifest
from rose.workers.weights.config import HOLDS
from rose.workers.weights.layout import DTYPE_BYTES, digest_of, matrix, whole_digest


class Refusal(Enum):
    """Why a receiver refuses a version."""

    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    BAD_SHAPE = "bad_shape"
    """A shape other than the model's, an element type that cannot travel, or a tensor named twice."""
    BAD_TILING = "bad_tiling"
    """The slices do not cover each element exactly once, or their sizes do not follow from their coordinates."""
    WRONG_DTYPE = "wrong_dtype"
    """An element type whose values the receiver's engine cannot hold exactly."""
    UNSIGNED = "unsigned"
    """The manifest has no signature although a key is set. Nothing is learned from the manifest."""
    FORGED = "forged"
    """The manifest was signed with another key or changed afterwards. Nothing is learned from the manifest."""
    STRANGER = "stranger"
    """The manifest is another run's or namespace's. Nothing is learned from the manifest."""
    WRONG_BASE = "wrong_base"
    """The version builds on a version that is not on the log, or on other bytes than that version's."""
    MISSING_CHUNK = "missing_chunk"
    """A chunk is not on the log, or was deleted."""
    WRONG_CHUNK = "wrong_chunk"
    """The record at a chunk's position is another chunk, or has another size than the manifest says."""
    WRONG_DIGEST = "wrong_digest"
    """The digest of a chunk, or of all slices together, is not the manifest's."""
    WRONG_RESULT = "wrong_result"
    """A slice does not decode to the published bytes."""
    NOT_FINITE = "not_finite"
    """A weight is not finite."""
    UNREADABLE = "unreadable"
    """Reading the version raised an unexpected exception, which the log shows."""


BASE_REFUSALS = frozenset({Refusal.WRONG_BASE, Refusal.WRONG_RESULT})
"""Refusals that may be caused by the version that this one builds on."""


class VersionRefused(Exception):
    """A version is refused; the current version is served on."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal


PAYLOAD_HEAD_BYTES = 1
"""Bytes of a dense payload before its elements."""


def check_manifest(
    manifest: WeightManifest, expected: Mapping[str, Sequence[int]], *, engine_dtype: str | None = None
) -> None:
    """Raises VersionRefused if a manifest does not fit the model.

    `expected`: the shape of every tensor of the model. `engine_dtype`: the element type that must hold all values
    exactly; None skips this check.
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
    """Check that the slices of each range of rows tile the columns and that the ranges of rows tile the tensor."""
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
    """Whether the ranges (start, length) cover [0, size) exactly once."""
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
    """The payload of a fetched chunk, which is a record or the bytes of a file.

    Raises VersionRefused if it is not the chunk of `ref`.
    """
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
