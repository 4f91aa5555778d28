"""How tensors are cut into slices, which part of a model a rank of an engine needs, and the digests of slices.

Keeps true
- Slices tile every tensor, so each element is in exactly one slice. The layout is Hugging Face's.
- Versions with the same digest have the same names, slices and bits.

Pure; does not import torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from blake3 import blake3

from rose.schemas.errors import UsageError
from rose.schemas.weights import SliceRef, WeightManifest

VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it over ranks."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ROWS = re.compile(r"\.(q_proj|gate_proj|up_proj)\.(weight|bias)$")
_KEY_VALUE = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.weight$")
_EMBEDDING = re.compile(r"embed_tokens\.weight$")
_HEAD = re.compile(r"lm_head\.weight$")
_LAST_NORM = re.compile(r"(^|\.)model\.norm\.weight$")


SLICE_ELEMENTS = 1 << 20
"""Elements of a slice, unless one row is longer: enough for the codec's statistics, few enough for a shard to fetch."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types that can travel, with their sizes in bytes."""


DIGEST_BYTES = 16

NO_BASE = bytes(DIGEST_BYTES)
"""Base digest of a slice of an anchor."""


class LayoutError(UsageError):
    """Tensors cannot be published."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A range of rows and columns of a tensor, seen as a matrix."""

    row_start: int
    rows: int
    column_start: int
    columns: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def intersects(self, other: "Box") -> bool:
        """Whether the boxes share an element."""
        return (
            max(self.row_start, other.row_start) < min(self.row_start + self.rows, other.row_start + other.rows)
        ) and (
            max(self.column_start, other.column_start)
            < min(self.column_start + self.columns, other.column_start + other.columns)
        )


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix: the first axis, and the product of the others."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    rows, columns = matrix(shape)
    return Box(0, rows, 0, columns)


def box_of(piece: SliceRef) -> Box:
    """The box of a slice."""
    return Box(piece.row_start, piece.rows, piece.column_start, piece.columns)


def slices_of(box: Box, *, column_parts: int = 1) -> Iterator[Box]:
    """The slices of a box, in order; none if the box is empty.

    `column_parts`: number of ranges into which the columns are also cut, so that a receiver that is sharded along the
    columns does not fetch all.
    """
    if box.elements == 0:
        return
    parts = min(column_parts, box.columns) if box.rows > 1 else 1
    edges = [box.columns * part // parts for part in range(parts + 1)]
    step = max(1, SLICE_ELEMENTS // max(right - left for left, right in pairwise(edges)))
    for start in range(0, box.rows, step):
        for left, right in pairwise(edges):
            yield Box(box.row_start + start, min(step, box.rows - start), box.column_start + left, right - left)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRank:
    """One worker of an engine, with the parts of the model's configuration that determine its shard."""

    tensor_parallel_rank: int
    tensor_parallel_size: int
    layers: range
    """Decoder layers of the rank's pipeline stage."""
    all_layers: int
    key_value_heads: int
    tied_embeddings: bool = False


def shard_of(rank: ShardRank, shapes: Mapping[str, Sequence[int]]) -> dict[str, Box]:
    """The box of each tensor that the rank needs; tensors that the rank does not need are left out."""
    boxes = {name: _share(name, shape, rank) for name, shape in shapes.items() if _in_stage(name, rank)}
    return {name: box for name, box in boxes.items() if box.elements}


def _in_stage(name: str, rank: ShardRank) -> bool:
    layer = _LAYER.search(name)
    if layer:
        return int(layer[1]) in rank.layers
    last = rank.all_layers - 1 in rank.layers
    if _EMBEDDING.search(name):
        return 0 in rank.layers or (last and rank.tied_embeddings)
    return last if _HEAD.search(name) or _LAST_NORM.search(name) else True


def _share(name: str, shape: Sequence[int], rank: ShardRank) -> Box:
    rows, columns = matrix(shape)
    size, number = rank.tensor_parallel_size, rank.tensor_parallel_rank
    if _EMBEDDING.search(name) or _HEAD.search(name):
        padded = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
        start, stop = (min(rows, -(-padded // size) * edge) for edge in (number, number + 1))
        return Box(start, stop - start, 0, columns)
    if _KEY_VALUE.search(name) and rank.key_value_heads < size:  # several ranks share a key-value head
        head = rows // rank.key_value_heads
        return Box(number * rank.key_value_heads // size * head, head, 0, columns)
    if _ROWS.search(name) or _KEY_VALUE.search(name):
        start, stop = rows * number // size, rows * (number + 1) // size
        return Box(start, stop - start, 0, columns)
    if _COLUMNS.search(name):
        start, stop = columns * number // size, columns * (number + 1) // size
        return Box(0, rows, start, stop - start)
    return whole(shape)


def digest_of(data: bytes | memoryview) -> bytes:
    """The digest that records carry: the first 16 bytes of BLAKE3 (six times as fast as BLAKE2b)."""
    return blake3(memoryview(data).cast("B")).digest(length=DIGEST_BYTES)


class WholeDigest:
    """The digest of a version, over the coordinates and digests of all slices in the manifest's order."""

    def __init__(self) -> None:
        self._hash = blake3()

    def add(self, name: str, box: Box, digest: bytes) -> None:
        """Add a slice: its tensor's name, its box and its digest."""
        place = (len(name), box.row_start, box.rows, box.column_start, box.columns)
        self._hash.update(b"".join(number.to_bytes(8, "little") for number in place) + name.encode() + digest)

    def digest(self) -> bytes:
        """The digest of all slices that were added."""
        return self._hash.digest(length=DIGEST_BYTES)


def whole_digest(manifest: WeightManifest) -> bytes:
    """The digest that the manifest must have, computed from its slices."""
    digest = WholeDigest()
    for piece in manifest.slices:
        digest.add(manifest.tensors[piece.tensor].name, box_of(piece), piece.digest)
    return digest.digest()
