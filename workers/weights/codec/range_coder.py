"""A binary and a uniform range coder with adaptive bits, compiled by numba.

Keeps true
- Encoder and decoder do the same integer arithmetic, so the same bytes come back on every platform.
- A decoder never reads past its bytes: it sees zeros there, and `overrun` says so.

A coder is a small array of u64 (its state) beside a byte buffer, because numba inlines functions over arrays best. The
scheme is the carry-propagating one of Martin (1979) as LZMA has it, with a window of 56 bits instead of 32: a symbol of
20 bits then loses no measurable precision.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

U64 = np.uint64
State = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint32]
"""Adaptive bits: the probability of a zero in units of 2^-16, and in the upper half how often it was updated."""

LOW, RANGE, CACHE, CACHED, AT = 0, 1, 2, 3, 4
CODE = 0
"""The decoder keeps its code where the encoder keeps its low end."""

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
"""An adaptive bit moves by at least 1/2^6 of the way: 64 symbols of memory."""

TAIL_BYTES = WINDOW_BITS // 8 + 1
"""Written by `finish`."""


def fresh_bits(*shape: int) -> Bits:
    """Adaptive bits that expect nothing."""
    return np.full(shape, EVEN, dtype=np.uint32)


def encoder() -> State:
    """One that has coded nothing: five words, at LOW, RANGE, CACHE, CACHED and AT."""
    return np.array([0, (1 << WINDOW_BITS) - 1, 0, 0, 0], dtype=np.uint64)


@njit(cache=True, nogil=True)
def _shift(state, out):  # type: ignore[no-untyped-def]
    """Move the topmost byte of the low end out, with a carry through the bytes that wait for one."""
    low = state[LOW]
    head = low >> HEAD_SHIFT
    if head != BYTE:  # below: no carry can reach what waits; above: it has come
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


@njit(cache=True, nogil=True)
def encode_bit(state, out, bits, at, bit):  # type: ignore[no-untyped-def]
    """Code one bit with the adaptive bit `bits[at]`, which learns from it."""
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


@njit(cache=True, nogil=True)
def encode_uniform(state, out, start, width, total_bits):  # type: ignore[no-untyped-def]
    """Code the part [start, start + width) of 2^total_bits."""
    unit = state[RANGE] >> U64(total_bits)
    state[LOW] += unit * U64(start)
    state[RANGE] = unit * U64(width)
    while state[RANGE] < RENORM:
        _shift(state, out)
        state[RANGE] <<= EIGHT


@njit(cache=True, nogil=True)
def finish(state, out):  # type: ignore[no-untyped-def]
    """Write what is left; returns the number of bytes."""
    for _ in range(TAIL_BYTES):
        _shift(state, out)
    length = state[AT]
    for _ in range(TAIL_BYTES):  # a decoder reads zeros past the end, but no more of them (see `overrun`)
        if length == ZERO or out[length - ONE] != 0:
            break
        length -= ONE
    return length


@njit(cache=True, nogil=True)
def start(state, data):  # type: ignore[no-untyped-def]
    """Begin to decode."""
    state[RANGE] = FULL
    state[CODE] = ZERO
    state[AT] = ZERO
    for _ in range(WINDOW_BITS // 8):
        state[CODE] = (state[CODE] << EIGHT) | _next(state, data)


@njit(cache=True, nogil=True)
def decode_bit(state, data, bits, at):  # type: ignore[no-untyped-def]
    """One bit by the adaptive bit `bits[at]`, which learns from it."""
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


@njit(cache=True, nogil=True)
def decode_uniform(state, data, total_bits):  # type: ignore[no-untyped-def]
    """A point of the part that was coded, in [0, 2^total_bits); then tell `narrow` which part that was."""
    return min(state[CODE] // (state[RANGE] >> U64(total_bits)), (ONE << U64(total_bits)) - ONE)


@njit(cache=True, nogil=True)
def narrow(state, data, start, width, total_bits):  # type: ignore[no-untyped-def]
    """Go on within the part [start, start + width) of 2^total_bits, in which the point that was read lies."""
    unit = state[RANGE] >> U64(total_bits)
    state[CODE] -= unit * U64(start)
    state[RANGE] = unit * U64(width)
    while state[RANGE] < RENORM:
        state[RANGE] <<= EIGHT
        state[CODE] = (state[CODE] << EIGHT) | _next(state, data)


@njit(cache=True, nogil=True)
def overrun(state, data):  # type: ignore[no-untyped-def]
    """Whether more was decoded than was coded. The window is read ahead, so its length is no sign of that."""
    return state[AT] > U64(len(data)) + U64(WINDOW_BITS // 8 + 1)


@njit(cache=True, nogil=True)
def _next(state, data):  # type: ignore[no-untyped-def]
    at = state[AT]
    state[AT] = at + ONE
    return U64(data[at]) if at < U64(len(data)) else ZERO


@njit(cache=True, nogil=True)
def _learnt(entry, bit):  # type: ignore[no-untyped-def]
    """An adaptive bit after one more symbol: it learns fast at first."""
    probability, seen = entry & np.uint32(0xFFFF), entry >> np.uint32(16)
    rate = np.uint32(min(seen + np.uint32(1), np.uint32(SLOWEST)))
    if bit == 0:
        probability += (np.uint32(0xFFFF) - probability) >> rate
    else:
        probability -= probability >> rate
    probability = min(max(probability, np.uint32(32)), np.uint32(0xFFFF - 32))
    return np.uint32(min(seen + np.uint32(1), np.uint32(255)) << np.uint32(16) | probability)
