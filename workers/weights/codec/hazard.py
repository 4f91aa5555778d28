"""How likely each weight is to change, told by the exponent of its old value.

Keeps true: encoder and decoder hold the same integers; nothing depends on how a platform rounds.

An optimizer moves all weights by about as much, and one ULP is 2^exponent wide, so the chance of a change falls by half
with every exponent. Each exponent has a *hazard*, -ln(1 - chance), in integer units of which CAP make half a nat. The
changes of a slice are then the events of a Poisson process on the line of summed hazards: the distance from one to the
next is all there is to code, and its distribution is the same everywhere.

Three kinds of exponents: *still* ones, of which nothing changed (hazard 0); *light* ones, which lie on the line;
*heavy* ones, likelier to change than LIGHT_MOST allows, which would straddle the line's marks: they are coded one by
one.
"""

import numpy as np
from numpy.typing import NDArray

CAP_BITS = 20
CAP = 1 << CAP_BITS
"""Half a nat: the line is walked in stretches of so much; an event is in each with chance 1 - exp(-1/2)."""

LIGHT_MOST = CAP // 8
"""The largest hazard on the line: 1/16 nat, a chance of 6 %."""

HEAVY = np.uint64(1 << 60)
"""The table entry of a heavy exponent: larger than any distance, so that the one comparison of a scan stops at it."""

EXPONENTS = 256
"""Entries of a table; float16 uses 32 of them."""

STEPS_PER_OCTAVE = 8
STILL_CODE, HEAVY_CODE = 0, 255
_OCTAVE = (1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878)
"""round(1024 * 2^(i/8))."""


def hazard_of_code(code: int) -> int:
    """The hazard that a header byte stands for: 2^(code/8), rounded down; for light exponents only."""
    octave, step = divmod(code - 1, STEPS_PER_OCTAVE)
    return (_OCTAVE[step] << octave) >> 10


LIGHT_CODES = next(code for code in range(1, 256) if hazard_of_code(code) > LIGHT_MOST)
"""Codes 1 ... LIGHT_CODES - 1 are those of light exponents."""

HAZARDS = np.array([hazard_of_code(code) for code in range(1, LIGHT_CODES)], dtype=np.uint64)


def codes_of(changed: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.uint8]:
    """A header byte for each exponent, from how many of its weights changed and (about) how many it has.

    Both int64 [EXPONENTS].
    """
    chance = np.clip(changed / np.maximum(total, 1), 0.0, 1.0 - 1e-9)
    hazard = -np.log1p(-chance) * 2 * CAP
    nearest = np.searchsorted(HAZARDS[:-1] + np.diff(HAZARDS) / 2, np.minimum(hazard, LIGHT_MOST)) + 1
    codes = np.where(hazard > LIGHT_MOST, HEAVY_CODE, nearest)
    return np.where(changed == 0, STILL_CODE, codes).astype(np.uint8)


def table_of(codes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """uint64 [EXPONENTS]: hazards, or HEAVY. `codes` are valid (see `valid`)."""
    hazards = np.concatenate([np.zeros(1, dtype=np.uint64), HAZARDS])
    return np.where(codes == HEAVY_CODE, HEAVY, hazards[np.where(codes == HEAVY_CODE, 0, codes)])


def valid(codes: NDArray[np.uint8]) -> bool:
    """Whether every byte has a meaning."""
    return bool(np.all((codes < LIGHT_CODES) | (codes == HEAVY_CODE)))
