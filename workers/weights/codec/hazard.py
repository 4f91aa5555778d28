"""Estimates how likely a weight is to change, from the exponent of its old value.

Keeps true: encoder and decoder use the same integers; nothing depends on the rounding of a platform.

An optimizer moves all weights by similar amounts, and the distance of neighbouring values (one ULP) is proportional to
2^exponent, so the probability of a change halves with every exponent. Each exponent has a *hazard*, -ln(1 -
probability), in integer units of which CAP are half a nat. With the elements laid out on an axis of summed hazards, the
changes of a slice are the events of a Poisson process. Only the distance of each event from the one before it is coded,
and its distribution is the same everywhere.

Exponents are of three kinds. In *still* exponents nothing changed (hazard 0). *Light* exponents lie on the axis.
*Heavy* exponents have a hazard above LIGHT_MOST; their elements could cross boundaries of stretches and are coded
one by one.
"""

import numpy as np
from numpy.typing import NDArray

CAP_BITS = 20
CAP = 1 << CAP_BITS
"""Half a nat. The axis is coded in stretches of this length; a stretch contains an event with probability 1 -
exp(-1/2)."""

LIGHT_MOST = CAP // 8
"""The largest hazard of a light exponent: 1/16 nat, a probability of 6 %."""

HEAVY = np.uint64(1 << 60)
"""The table entry of a heavy exponent, larger than any distance, so that the comparison of a scan stops there."""

EXPONENTS = 256
"""Entries of a table; float16 uses 32 of them."""

STEPS_PER_OCTAVE = 8
STILL_CODE, HEAVY_CODE = 0, 255
_OCTAVE = (1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878)
"""round(1024 * 2^(i/8))."""


def hazard_of_code(code: int) -> int:
    """The hazard of a light exponent's code: 2^(code/8), rounded down."""
    octave, step = divmod(code - 1, STEPS_PER_OCTAVE)
    return (_OCTAVE[step] << octave) >> 10


LIGHT_CODES = next(code for code in range(1, 256) if hazard_of_code(code) > LIGHT_MOST)
"""Codes 1 to LIGHT_CODES - 1 are light exponents."""

HAZARDS = np.array([hazard_of_code(code) for code in range(1, LIGHT_CODES)], dtype=np.uint64)


def codes_of(changed: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The code of each exponent, from the number of its weights that changed and the estimated number of its weights.

    Both arrays are int64 [EXPONENTS].
    """
    chance = np.clip(changed / np.maximum(total, 1), 0.0, 1.0 - 1e-9)
    hazard = -np.log1p(-chance) * 2 * CAP
    nearest = np.searchsorted(HAZARDS[:-1] + np.diff(HAZARDS) / 2, np.minimum(hazard, LIGHT_MOST)) + 1
    codes = np.where(hazard > LIGHT_MOST, HEAVY_CODE, nearest)
    return np.where(changed == 0, STILL_CODE, codes).astype(np.uint8)


def table_of(codes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The hazard of each exponent, or HEAVY, as uint64 [EXPONENTS]. `codes` must be valid."""
    hazards = np.concatenate([np.zeros(1, dtype=np.uint64), HAZARDS])
    return np.where(codes == HEAVY_CODE, HEAVY, hazards[np.where(codes == HEAVY_CODE, 0, codes)])


def valid(codes: NDArray[np.uint8]) -> bool:
    """Whether every code is defined."""
    return bool(np.all((codes < LIGHT_CODES) | (codes == HEAVY_CODE)))
