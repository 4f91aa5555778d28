"""How a policy version lies on the log, and what a manifest must say to be believed.

Keeps true
- Slices tile every tensor: each element lies in exactly one, and no record is larger than a record may be.
- A manifest is believed about nothing that was not known before: names and shapes are the model's own, so what a
  receiver allocates is bounded by its model, never by a record.

Pure, and free of torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import prod
from pathlib import Path

from blake3 import blake3

from schemas.errors import UsageError
from schemas.limits import RECORD_BYTES
from schemas.weights import ChunkRef, SliceRef, TensorSpec, WeightChunk, WeightManifest
from schemas.wire import RECORD_OVERHEAD_BYTES

CHUNK_BYTES = RECORD_BYTES - RECORD_OVERHEAD_BYTES
"""Largest payload of a chunk: with names and ids it stays within a record's limit."""

SLICE_ELEMENTS = 1 << 20
"""Elements of a slice, where its rows are not longer: enough for the codec's statistics, few for a shard to fetch."""

PAYLOAD_HEAD_BYTES = 1
"""What a dense payload has before the elements."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types that travel, and their size."""

DIGEST_BYTES = 16

NO_BASE = bytes(DIGEST_BYTES)
"""The base digest of a slice that builds on nothing."""


class Refusal(Enum):
    """Why a receiver does not take a version."""

    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    BAD_SHAPE = "bad_shape"
    """Another shape or element type than the model's, or a tensor named twice."""
    BAD_TILING = "bad_tiling"
    """The slices do not cover each element once, or their sizes do not follow from their coordinates."""
    BAD_SIGNATURE = "bad_signature"
    """Not signed by a key that this receiver trusts."""
    WRONG_BASE = "wrong_base"
    """It builds on a version that is not on the log, or on other bytes than that version's."""
    MISSING_CHUNK = "missing_chunk"
    """The log does not hold it any more, or never did."""
    WRONG_CHUNK = "wrong_chunk"
    """What lies at the place is another chunk, not of the size that the manifest says, or no payload of the codec."""
    WRONG_DIGEST = "wrong_digest"


class VersionRefused(Exception):
    """A version that must not be taken; the one that serves, serves on."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal


class LayoutError(UsageError):
    """Tensors that cannot be published, or a model folder that does not say what its tensors are."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A range of rows and of columns."""

    row_start: int
    rows: int
    column_start: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def meets(self, other: "Box") -> bool:
        """Whether they have an element in common."""
        return (
            max(self.row_start, other.row_start) < min(self.row_start + self.rows, other.row_start + other.rows)
        ) and (
            max(self.column_start, other.column_start)
            < min(self.column_start + self.columns, other.column_start + other.columns)
        )


def digest_of(data: bytes | memoryview) -> bytes:
    """The digest that records carry: the first 16 bytes of BLAKE3 (six times as fast as BLAKE2b)."""
    return blake3(memoryview(data).cast("B")).digest(length=DIGEST_BYTES)


class WholeDigest:
    """The digest of a version: of the coordinates and digests of all its slices, in the manifest's order."""

    def __init__(self) -> None:
        self._hash = blake3()

    def add(self, name: str, box: Box, digest: bytes) -> None:
        place = (len(name), box.row_start, box.rows, box.column_start, box.columns)
        self._hash.update(b"".join(number.to_bytes(8, "little") for number in place) + name.encode() + digest)

    def digest(self) -> bytes:
        return self._hash.digest(length=DIGEST_BYTES)


def whole_digest(manifest: WeightManifest) -> bytes:
    """What the manifest must say as its digest."""
    digest = WholeDigest()
    for piece in manifest.slices:
        digest.add(manifest.tensors[piece.tensor].name, box_of(piece), piece.digest)
    return digest.digest()


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor's rows and columns."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    rows, columns = matrix(shape)
    return Box(0, rows, 0, columns)


def box_of(piece: SliceRef) -> Box:
    return Box(piece.row_start, piece.rows, piece.column_start, piece.columns)


def cut(box: Box, *, column_parts: int = 1) -> Iterator[Box]:
    """The slices of a box of a tensor, in order; none if it is empty.

    `column_parts`: matrices are also cut into so many ranges of columns, so that a receiver which is sharded along the
    columns need not fetch all.
    """
    if box.elements == 0:
        return
    parts = min(column_parts, box.columns) if box.rows > 1 else 1
    edges = [box.columns * part // parts for part in range(parts + 1)]
    step = max(1, SLICE_ELEMENTS // max(right - left for left, right in pairwise(edges)))
    for start in range(0, box.rows, step):
        for left, right in pairwise(edges):
            yield Box(box.row_start + start, min(step, box.rows - start), box.column_start + left, right - left)


def lowest_offsets(places: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Of (partition, offset) pairs the lowest offset of each partition."""
    lowest: dict[int, int] = {}
    for partition, offset in places:
        lowest[partition] = min(offset, lowest.get(partition, offset))
    return lowest


def check_manifest(manifest: WeightManifest, expected: Mapping[str, Sequence[int]]) -> None:
    """Believe a manifest, or raise VersionRefused. `expected` has the shape of every tensor of the model."""
    if manifest.base_version is not None and not 0 <= manifest.base_version < manifest.version:
        raise VersionRefused(Refusal.WRONG_BASE, f"it builds on version {manifest.base_version}")
    for spec in manifest.tensors:
        _check_tensor(spec, expected)
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
        raise VersionRefused(Refusal.BAD_SHAPE, f"{spec.name} has the element type {spec.dtype[:32]}")


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


def check_chunk(found: WeightChunk | bytes, ref: ChunkRef, tensor: str, manifest: WeightManifest) -> bytes:
    """The payload of what was found at the place of `ref`, a record or bytes of a file; or raise VersionRefused."""
    if isinstance(found, bytes):
        payload = found
    elif (found.model_id, found.version, found.tensor) == (manifest.model_id, manifest.version, tensor):
        payload = found.payload
    else:
        raise VersionRefused(Refusal.WRONG_CHUNK, f"partition {ref.partition} offset {ref.offset} holds another chunk")
    if len(payload) != ref.bytes:
        what = f"a chunk of {tensor} has {len(payload)} bytes instead of {ref.bytes}"
        raise VersionRefused(Refusal.WRONG_CHUNK, what)
    if digest_of(payload) != ref.digest:
        raise VersionRefused(Refusal.WRONG_DIGEST, f"a chunk of {tensor} is not intact")
    return payload


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model folder, from the headers of its safetensors files. Raises LayoutError."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LayoutError(f"{folder} holds no *.safetensors: a model folder must say what its tensors are")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise LayoutError(f"{file} is no readable safetensors file: {error}") from None
    return shapes
