"""Payloads of chunks: an index and slices of weights.

The slices are drawn from SHAKE-256, which no library release draws differently.
"""

from collections.abc import Iterator
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rose.schemas.weights import ChunkRef, SliceRef, TensorSpec, WeightIndex
from rose.workers.weights import codec
from rose.workers.weights.codec import FORMATS

ELEMENTS = 2048

CHANCES = np.array([0, 8, 8, 128])
"""Chance of 256 that a weight changes, by the last two bits of its exponent: still, light, light, heavy
(`codec.hazard`)."""

INDEX = WeightIndex(
    tensors=(
        TensorSpec(name="model.embed_tokens.weight", shape=(32, 64), dtype="bfloat16"),
        TensorSpec(name="scale", shape=(), dtype="float32"),
    ),
    slices=(
        SliceRef(
            tensor=0,
            row_start=16,
            rows=16,
            column_start=32,
            columns=32,
            digest=bytes(range(16)),
            base_digest=bytes(range(16, 32)),
            chunks=(
                ChunkRef(partition=1, offset=77, bytes=900, digest=bytes(range(32, 48))),
                ChunkRef(partition=2, offset=2**40, bytes=300, digest=bytes(range(48, 64))),
            ),
        ),
        SliceRef(
            tensor=1,
            row_start=0,
            rows=1,
            column_start=0,
            columns=1,
            digest=bytes(range(16)),
            base_digest=bytes(range(16)),
            chunks=(),
        ),
    ),
)


class Piece(NamedTuple):
    """A slice: the base words of its receiver, and the new words."""

    name: str
    dtype: str
    old: NDArray[Any]
    new: NDArray[Any]


def pieces() -> Iterator[Piece]:
    """Return an anchor and a delta on the anchor, for each element type."""
    for dtype, form in FORMATS.items():
        old = weights(dtype)
        yield Piece(f"{dtype}-anchor", dtype, np.zeros(ELEMENTS, dtype=form.word), old)
        yield Piece(f"{dtype}-delta", dtype, old, moved(old, dtype))


def weights(dtype: str) -> NDArray[Any]:
    """Return weights of twelve exponents around one, after zeros, subnormals, infinities and NaNs of both signs."""
    form = FORMATS[dtype]
    bits, drawn = form.mantissa_bits, noise(f"weights of {dtype}", form.word)
    exponents = (form.exponent_mask >> 1) - 8 + noise(f"exponents of {dtype}", np.uint8) % 12
    words = drawn & form.word(~(form.exponent_mask << bits) & (2 * int(form.top) - 1))
    words |= (exponents.astype(np.int64) << bits).astype(form.word)
    infinity = form.exponent_mask << bits
    odd = [0, 1, infinity - 1, infinity, infinity + 1]
    words[: 2 * len(odd)] = [*odd, *(word | int(form.top) for word in odd)]
    return words


def moved(old: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return the words with some moved by one to three, or anywhere."""
    form = FORMATS[dtype]
    exponents = (old >> form.word(form.mantissa_bits)) & form.word(form.exponent_mask)
    changes = noise(f"changes of {dtype}", np.uint8) < CHANCES[exponents % 4]
    steps = noise(f"steps of {dtype}", np.uint8).astype(np.int64) % 7 - 3
    steps = np.where(steps == 0, noise(f"leaps of {dtype}", form.word), steps)
    return np.where(changes, old + steps.astype(form.word), old).astype(form.word)


def noise(seed: str, word: Any) -> NDArray[Any]:
    """Return words of any bits, determined by the seed."""
    drawn = shake_256(seed.encode()).digest(ELEMENTS * np.dtype(word).itemsize)
    return np.frombuffer(drawn, dtype=np.dtype(word).newbyteorder("<")).astype(word)


def payload_of(piece: Piece) -> bytes:
    """Return the payload as this code writes it."""
    return codec.encode(piece.old, piece.new, piece.dtype) if piece.old.any() else codec.dense(piece.new)
