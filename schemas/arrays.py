"""Token ids and logprobs as packed little-endian arrays.

Keeps true: what is packed unpacks to the same values, and a byte string that is no whole number of elements is refused.
Numpy is imported where an array is packed or unpacked, so a process that only inspects records does not load it.
Text is never re-tokenised: these arrays are the only form in which tokens travel.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rose.schemas.errors import RecordError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

U32 = "<u4"
F32 = "<f4"
ITEM_BYTES = 4
"""Bytes of one token id and of one logprob."""

MIN_LOGPROB = -87.0
"""Least logprob of a token that was drawn. Samplers draw from probabilities in float32, in which nothing is left of a
smaller one. Values by which engines say that they have no logprob, as -9999 or -100, are below it."""

MAX_LOGPROB = 1e-3
"""Largest logprob: a probability is at most 1, and more is rounding."""


def pack_tokens(tokens: "Sequence[int] | npt.NDArray[np.integer]") -> bytes:
    """Pack token ids, each in [0, 2**32), as little-endian u32."""
    import numpy as np

    return np.asarray(tokens, dtype=U32).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return token ids as Python ints. Raises RecordError if the bytes are no whole number of u32."""
    return [int(token) for token in _view(packed, U32).tolist()]


def pack_logprobs(logprobs: "Sequence[float] | npt.NDArray[np.floating]") -> bytes:
    """Pack logprobs as little-endian f32."""
    import numpy as np

    return np.asarray(logprobs, dtype=F32).tobytes()


def unpack_logprobs(packed: bytes) -> "npt.NDArray[np.float32]":
    """Return a read-only float32 array over the bytes. Raises RecordError if they are no whole number of f32."""
    return _view(packed, F32)


def logprob_error(logprobs: "npt.NDArray[np.floating]") -> str | None:
    """Return why one of these cannot be the logprob of a drawn token; None if each can."""
    possible = (logprobs >= MIN_LOGPROB) & (logprobs <= MAX_LOGPROB)
    if possible.all():
        return None
    worst = float(logprobs[~possible][0])
    return f"a logprob of {worst:g} is not that of a token that was drawn, which lies from {MIN_LOGPROB:g} to 0"


def count(packed: bytes) -> int:
    """Return the number of elements of a packed array, without unpacking it."""
    return len(packed) // ITEM_BYTES


def _view(packed: bytes, dtype: str) -> "npt.NDArray":  # type: ignore[type-arg]
    import numpy as np

    if len(packed) % ITEM_BYTES:
        raise RecordError(f"packed array of {len(packed)} bytes is no whole number of {ITEM_BYTES}-byte elements")
    return np.frombuffer(packed, dtype=dtype)
