"""A range coder for adaptive bits and uniform intervals, compiled by numba.

Keeps true
- Encoder and decoder use the same integer arithmetic, so the bytes decode alike on every platform.
- A decoder never reads past its bytes: it reads zeros there, and `overrun` reports it.

The state of a coder is a small uint64 array apart from the byte buffer, because numba inlines functions over arrays
best. The scheme is the carry-propagating range coder of Martin (1979), as in LZMA, with a window of 56 bits instead of
32, so that a symbol of 20 bits loses no measurable precision.
"""

import numpy as np
from numpy.typing import NDArray

from rose.workers.weights.codec.compiled import compiled

U64 = np.uint64
State = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint32]
"""Adaptive bits: in the lower half the probability of a zero in units of 2^-16, in the upper half the number of
updates."""

LOW, RANGE, CACHE, CACHED, AT = 0, 1, 2, 3, 4
CODE = 0
"""The decoder keeps its code where the encoder keeps the low end of its interval."""

WINDOW_BITS = 56
TOP = U64(1 << WINDOW_BITS)
FULL = U64((1 << WINDOW_BITS) - 1)
RENORM = U64(1 << (WINDOW_BITS - 8))
HEAD_SHIFT = U64(WINDOW_BITS - 8)
EIGHT = U64(8)
BYTE = U64(0xFF)
ZERO, ONE = U64(0), U64(1)

PROBABILITY_BITS = U64(16)
EVEN = np.uint32(1 << 15)
SLOWEST = 6
"""Each update moves an adaptive bit by at least 1/2^6 of the distance: a memory of 64 symbols."""

TAIL_BYTES = WINDOW_BITS // 8 + 1
"""Number of bytes that `finish` writes."""


def fresh_bits(*shape: int) -> Bits:
    """New adaptive bits, with even probabilities."""
    return np.full(shape, EVEN, dtype=np.uint32)


def encoder() -> State:
    """The state of a new coder: five values, at LOW, RANGE, CACHE, CACHED and AT."""
    return np.array([0, (1 << WINDOW_BITS) - 1, 0, 0, 0], dtype=np.uint64)


@compiled
def _shift(state, out):  # type: ignore[no-untyped-def]
    """Output the top byte of the low end, with a carry through the pending bytes."""
    low = state[LOW]
    head = low >> HEAD_SHIFT
    if head != BYTE:  # below: no carry can reach the pending bytes; above: the carry has come
        carry = head >> EIGHT
        at = state[AT]
        if state[CACHED] > ZERO:
            out[at] = (state[CACHE] + carry) & BYTE
            at += ONE
            for _ in range(state[CACHED] - ONE):
                out[at] = (BYTE + carry) & BYTE
                at += ONE
        state[AT] = at
        state[CACHE] = head & BYTE
        state[CACHED] = ONE
    else:
        if state[CACHED] == ZERO:
            state[CACHE] = BYTE
        state[CACHED] += ONE
    state[LOW] = (low & (RENORM - ONE)) << EIGHT


@compiled
def encode_bit(state, out, bits, at, bit):  # type: ignore[no-untyped-def]
    """Encode one bit with the adaptive bit `bits[at]` and update the latter."""
    entry = bits[at]
    bound = (state[RANGE] >> PROBABILITY_BITS) * U64(entry & np.uint32(0xFFFF))
    if bit == 0:
        state[RANGE] = bound
    else:
        state[LOW] += bound
        state[RANGE] -= bound
    bits[at] = _learnt(entry, bit)
    while state[RANGE] < RENORM:
        _shift(state, out)
        state[RANGE] <<= EIGHT


@compiled
def encode_uniform(state, out, start, width, total_bits):  # type: ignore[no-untyped-def]
    """Encode the interval [start, start + width) of 2^total_bits."""
    unit = state[RANGE] >> U64(total_bits)
    state[LOW] += unit * U64(start)
    state[RANGE] = unit * U64(width)
    while state[RANGE] < RENORM:
        _shift(state, out)
        state[RANGE] <<= EIGHT


@compiled
def finish(state, out):  # type: ignore[no-untyped-def]
    """Flush the coder; returns the number of bytes."""
    for _ in range(TAIL_BYTES):
        _shift(state, out)
    length = state[AT]
    for _ in range(TAIL_BYTES):  # trailing zeros are dropped: a decoder reads zeros past the end (see `overrun`)
        if length == ZERO or out[length - ONE] != 0:
            break
        length -= ONE
    return length


@compiled
def start(state, data):  # type: ignore[no-untyped-def]
    """Initialise the state for decoding."""
    state[RANGE] = FULL
    state[CODE] = ZERO
    state[AT] = ZERO
    for _ in range(WINDOW_BITS // 8):
        state[CODE] = (state[CODE] << EIGHT) | _next(state, data)


@compiled
def decode_bit(state, data, bits, at):  # type: ignore[no-untyped-def]
    """Decode one bit with the adaptive bit `bits[at]` and update the latter."""
    entry = bits[at]
    bound = (state[RANGE] >> PROBABILITY_BITS) * U64(entry & np.uint32(0xFFFF))
    if state[CODE] < bound:
        bit = 0
        state[RANGE] = bound
    else:
        bit = 1
        state[CODE] -= bound
        state[RANGE] -= bound
    bits[at] = _learnt(entry, bit)
    while state[RANGE] < RENORM:
        state[RANGE] <<= EIGHT
        state[CODE] = (state[CODE] << EIGHT) | _next(state, data)
    return bit


@compiled
def decode_uniform(state, data, total_bits):  # type: ignore[no-untyped-def]
    """A point of the coded interval, in [0, 2^total_bits). The caller then passes the interval to `narrow`."""
    return min(state[CODE] // (state[RANGE] >> U64(total_bits)), (ONE << U64(total_bits)) - ONE)


@compiled
def narrow(state, data, start, width, total_bits):  # type: ignore[no-untyped-def]
    """Continue decoding within the interval [start, start + width) of 2^total_bits.

    The interval contains the point that was read.
    """
    unit = state[RANGE] >> U64(total_bits)
    state[CODE] -= unit * U64(start)
    state[RANGE] = unit * U64(width)
    while state[RANGE] < RENORM:
        state[RANGE] <<= EIGHT
        state[CODE] = (state[CODE] << EIGHT) | _next(state, data)


@compiled
def overrun(state, data):  # type: ignore[no-untyped-def]
    """Whether more symbols were decoded than encoded.

    The window is read ahead, so reading past the end alone is no error.
    """
    return state[AT] > U64(len(data)) + U64(WINDOW_BITS // 8 + 1)


@compiled
def _next(state, data):  # type: ignore[no-untyped-def]
    at = state[AT]
    state[AT] = at + ONE
    return U64(data[at]) if at < U64(len(data)) else ZERO


@compiled
def _learnt(entry, bit):  # type: ignore[no-untyped-def]
    """An adaptive bit after one more symbol. The first updates are the largest."""
    probability, seen = entry & np.uint32(0xFFFF), entry >> np.uint32(16)
    rate = np.uint32(min(seen + np.uint32(1), np.uint32(SLOWEST)))
    if bit == 0:
        probability += (np.uint32(0xFFFF) - probability) >> rate
    else:
        probability -= probability >> rate
    probability = min(max(probability, np.uint32(32)), np.uint32(0xFFFF - 32))
    return np.uint32(min(seen + np.uint32(1), np.uint32(255)) << np.uint32(16) | probability)
