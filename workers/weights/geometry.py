"""How a tensor lies in slices: ranges of rows and columns, in Hugging Face's own coordinates.

Keeps true: slices tile every tensor, so each element lies in exactly one. Pure, and free of torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from schemas.errors import UsageError
from schemas.weights import SliceRef

SLICE_ELEMENTS = 1 << 20
"""Elements of a slice, where its rows are not longer: enough for the codec's statistics, few for a shard to fetch."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types that travel, and their size."""


class LayoutError(UsageError):
    """Tensors that cannot be published."""


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


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor's rows and columns."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    rows, columns = matrix(shape)
    return Box(0, rows, 0, columns)


def box_of(piece: SliceRef) -> Box:
    """The place of a slice in its tensor, seen as a matrix."""
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
