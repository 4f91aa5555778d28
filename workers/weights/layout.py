"""How a policy version lies on the log, and what a manifest must say to be believed.

Keeps true
- Chunks tile every tensor: each row lies in exactly one chunk, and no chunk is larger than a record may be.
- A manifest is believed about nothing that was not known before: names and shapes are the model's own, so what a
  receiver allocates is bounded by its model, never by a record.

Pure, and free of torch.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from math import prod
from pathlib import Path

from schemas.errors import UsageError
from schemas.limits import RECORD_BYTES
from schemas.weights import ChunkRef, TensorSpec, WeightChunk, WeightManifest
from schemas.wire import RECORD_OVERHEAD_BYTES

CHUNK_BYTES = RECORD_BYTES - RECORD_OVERHEAD_BYTES
"""Largest payload of a chunk: with names and ids it stays within a record's limit."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types that travel, and their size."""

DENSE = "dense"
"""The chunk's payload is the rows themselves, little-endian."""


class Refusal(Enum):
    """Why a receiver does not take a version."""

    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    BAD_SHAPE = "bad_shape"
    """Another shape or element type than the model's, or a tensor named twice."""
    BAD_TILING = "bad_tiling"
    """The chunks do not cover each row once, or their sizes do not follow from their rows."""
    UNSUPPORTED = "unsupported"
    """It builds on another version, or is encoded in a way that this receiver does not read."""
    MISSING_CHUNK = "missing_chunk"
    """The log does not hold it any more, or never did."""
    WRONG_CHUNK = "wrong_chunk"
    """What lies at the place is another chunk, or not of the size that the manifest says."""
    WRONG_DIGEST = "wrong_digest"


class VersionRefused(Exception):
    """A version that must not be taken; the one that serves, serves on."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal


class LayoutError(UsageError):
    """Tensors that cannot be published, or a model folder that does not say what its tensors are."""


def digest_of(data: bytes | memoryview) -> bytes:
    """The digest that records carry: BLAKE2b of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


class WholeDigest:
    """The digest of a whole version: of all tensors in the manifest's order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, data: memoryview) -> None:
        self._hash.update(name.encode())
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest()


def row_count(spec: TensorSpec) -> int:
    """Rows along the first axis; a tensor without axes is one row."""
    return spec.shape[0] if spec.shape else 1


def row_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape[1:]) * DTYPE_BYTES[spec.dtype]


def tensor_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def row_ranges(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """`(row_start, rows)` of each chunk of a tensor, in order; none for an empty one. Raises LayoutError."""
    if spec.dtype not in DTYPE_BYTES:
        raise LayoutError(f"{spec.name} is {spec.dtype}: only {', '.join(DTYPE_BYTES)} can be published")
    if tensor_bytes(spec) == 0:
        return
    rows = row_count(spec)
    step = CHUNK_BYTES // row_bytes(spec)
    if step == 0:
        raise LayoutError(f"{spec.name}: one row takes {row_bytes(spec)} bytes, a chunk holds {CHUNK_BYTES}")
    for start in range(0, rows, step):
        yield start, min(step, rows - start)


def check_manifest(manifest: WeightManifest, expected: Mapping[str, Sequence[int]]) -> None:
    """Believe a manifest, or raise VersionRefused. `expected` has the shape of every tensor of the model."""
    if manifest.base_version is not None:
        raise VersionRefused(Refusal.UNSUPPORTED, f"it builds on version {manifest.base_version}")
    for spec in manifest.tensors:
        _check_tensor(spec, expected)
    specs = {spec.name: spec for spec in manifest.tensors}
    if len(specs) < len(manifest.tensors):
        raise VersionRefused(Refusal.BAD_SHAPE, "a tensor is named twice")
    if missing := expected.keys() - specs.keys():
        raise VersionRefused(Refusal.MISSING_TENSOR, f"it lacks {min(missing)}")
    _check_tiling(manifest.chunks, specs)


def _check_tensor(spec: TensorSpec, expected: Mapping[str, Sequence[int]]) -> None:
    shape = expected.get(spec.name)
    if shape is None:
        raise VersionRefused(Refusal.UNKNOWN_TENSOR, f"the model has no tensor {spec.name}")
    if tuple(shape) != spec.shape:
        raise VersionRefused(Refusal.BAD_SHAPE, f"{spec.name} has shape {spec.shape}, the model's has {tuple(shape)}")
    if spec.dtype not in DTYPE_BYTES:
        raise VersionRefused(Refusal.BAD_SHAPE, f"{spec.name} has the element type {spec.dtype[:32]}")


def _check_tiling(chunks: Iterable[ChunkRef], specs: Mapping[str, TensorSpec]) -> None:
    chunks = tuple(chunks)
    if any(times > 1 for times in Counter((chunk.partition, chunk.offset) for chunk in chunks).values()):
        raise VersionRefused(Refusal.BAD_TILING, "two chunks lie in one place")
    covered = dict.fromkeys(specs, 0)
    for chunk in sorted(chunks, key=lambda chunk: chunk.row_start):
        spec = specs.get(chunk.tensor)
        if spec is None:
            raise VersionRefused(Refusal.UNKNOWN_TENSOR, f"a chunk is of tensor {chunk.tensor}")
        if chunk.row_start != covered[spec.name] or chunk.rows == 0:
            raise VersionRefused(Refusal.BAD_TILING, f"{spec.name}: row {covered[spec.name]} is not covered once")
        if chunk.bytes != chunk.rows * row_bytes(spec):
            raise VersionRefused(Refusal.BAD_TILING, f"{spec.name}: {chunk.rows} rows do not take {chunk.bytes} bytes")
        covered[spec.name] += chunk.rows
    for name, spec in specs.items():
        if covered[name] != (row_count(spec) if tensor_bytes(spec) else 0):
            raise VersionRefused(Refusal.BAD_TILING, f"{name}: {covered[name]} of {row_count(spec)} rows are covered")


def check_chunk(chunk: WeightChunk, ref: ChunkRef, manifest: WeightManifest) -> None:
    """Believe a chunk that was found at the place of `ref`, or raise VersionRefused."""
    found = (chunk.model_id, chunk.version, chunk.tensor, chunk.row_start, chunk.rows)
    if found != (manifest.model_id, manifest.version, ref.tensor, ref.row_start, ref.rows):
        raise VersionRefused(Refusal.WRONG_CHUNK, f"partition {ref.partition} offset {ref.offset} holds another chunk")
    if chunk.encoding != DENSE:
        raise VersionRefused(Refusal.UNSUPPORTED, f"a chunk of {ref.tensor} is encoded as {chunk.encoding[:32]}")
    if len(chunk.payload) != ref.bytes:
        what = f"a chunk of {ref.tensor} has {len(chunk.payload)} bytes instead of {ref.bytes}"
        raise VersionRefused(Refusal.WRONG_CHUNK, what)
    if digest_of(chunk.payload) != ref.digest:
        raise VersionRefused(Refusal.WRONG_DIGEST, f"a chunk of {ref.tensor} from row {ref.row_start} on is not intact")


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
