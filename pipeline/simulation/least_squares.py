"""Least squares in which no figure is negative, for the fits of cost models.

Keeps true: the returned solution has the least sum of squares among the solutions with each choice of figures that are
0. With a few figures that is exact. Pure.
"""

import math
from collections.abc import Sequence
from itertools import chain, combinations

NEARLY_ZERO = 1e-300
"""A pivot below this says that the rows do not determine the figures."""


def nonnegative_least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the figures, one for each column of `rows`, whose weighted sums come closest to `wanted`.

    All figures are 0 if no choice of columns determines them.
    """
    width = len(rows[0])
    best, least = [0.0] * width, math.inf
    for free in chain.from_iterable(combinations(range(width), size) for size in range(width, 0, -1)):
        found = _least_squares([[row[place] for place in free] for row in rows], wanted)
        if found is None or min(found) < 0:
            continue
        solution = [0.0] * width
        for place, value in zip(free, found, strict=True):
            solution[place] = value
        missed = sum(
            (sum(a * b for a, b in zip(row, solution, strict=True)) - target) ** 2
            for row, target in zip(rows, wanted, strict=True)
        )
        if missed < least:
            best, least = solution, missed
    return best


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Return the solution of the normal equations, by Gauss-Jordan elimination; None if they have no single one."""
    width = len(rows[0])
    matrix = [
        [
            *(sum(row[i] * row[j] for row in rows) for j in range(width)),
            sum(r[i] * w for r, w in zip(rows, wanted, strict=True)),
        ]
        for i in range(width)
    ]
    for place in range(width):
        pivot = max(range(place, width), key=lambda row: abs(matrix[row][place]))
        if abs(matrix[pivot][place]) < NEARLY_ZERO:
            return None
        matrix[place], matrix[pivot] = matrix[pivot], matrix[place]
        for row in range(width):
            if row != place:
                factor = matrix[row][place] / matrix[place][place]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[place], strict=True)]
    return [matrix[place][width] / matrix[place][place] for place in range(width)]
