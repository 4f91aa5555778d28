"""The weight codec: encodes the changes between two versions of a slice in a few bits for each changed weight.

Keeps true
- The codec is lossless for every bit pattern of float32, bfloat16 and float16.
- For any bytes, `decode` returns an array of the size of `old` or raises CodecError. Its memory is proportional to
  `old`, and it never changes `old`.

A payload begins with `kind` (1 byte). In a dense payload the values follow, little-endian. In a delta follow `events`
(uint32), the first exponent, the number of exponents minus one, a hazard code for each exponent (`hazard.py`), and the
bytes of the range coder: the events in order, each with its step, then the heavy elements.
"""

import struct
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.schemas.errors import RoseError
from rose.workers.weights.codec import kernels
from rose.workers.weights.codec.hazard import CAP_BITS, EXPONENTS, HEAVY_CODE, LIGHT_MOST, codes_of, table_of, valid
from rose.workers.weights.codec.range_coder import encoder, fresh_bits

Words = NDArray[Any]
"""The bits of weights as a flat array: uint16 or uint32 [n]."""

DENSE, DELTA = 0, 1
_HEAD = struct.Struct("<BIBB")

SAMPLING = 8
"""Every so many-th element is counted to estimate the number of weights of each exponent."""

BYTES_AN_ELEMENT = 13
"""Upper bound of coded bytes per element: the end of a stretch, a point and a step of a whole word."""

BYTES_A_STRETCH = 2
"""Upper bound of coded bytes per empty stretch. A few events may lie behind many stretches where the elements that are
counted (SAMPLING) are not like the others."""


class CodecError(RoseError):
    """The payload is malformed or does not fit these weights."""


@dataclass(frozen=True, slots=True)
class Format:
    """Bit layout of an element type."""

    word: type[np.uint16] | type[np.uint32]
    mantissa_bits: int
    exponent_mask: int

    @property
    def top(self) -> np.uint64:
        """The sign bit."""
        return np.uint64(1 << (8 * np.dtype(self.word).itemsize - 1))


FORMATS = {
    "bfloat16": Format(np.uint16, 7, 0xFF),
    "float16": Format(np.uint16, 10, 0x1F),
    "float32": Format(np.uint32, 23, 0xFF),
}
"""Formats by torch's name of the element type."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The input of the range coder for one slice.

    An event is a changed element of a light exponent. Steps are signed numbers of ULPs, in any signed integer type.
    """

    codes: NDArray[np.uint8]
    """Hazard code of each exponent, [EXPONENTS]."""
    positions: NDArray[np.uint64]
    """Summed hazard of the unchanged light elements before each event."""
    exponents: NDArray[np.uint8]
    """Exponent of the old value, of each event."""
    steps: NDArray[np.signedinteger[Any]]
    """Step of each event."""
    heavy_exponents: NDArray[np.uint8]
    """Exponent of the old value, of each heavy element."""
    heavy_steps: NDArray[np.signedinteger[Any]]
    """Step of each heavy element; 0 for an unchanged element."""

    def is_encodable(self, size: int) -> bool:
        """Whether `encode_delta` stays within its arrays: it checks nothing, and a GPU may have collected nonsense.

        `size`: elements of the slice.
        """
        event_codes = self.codes[self.exponents]
        return bool(
            len(self.positions) + len(self.heavy_steps) <= size
            and (self.positions <= size * LIGHT_MOST).all()
            and (self.steps != 0).all()
            and ((event_codes > 0) & (event_codes != HEAVY_CODE)).all()
            and (self.codes[self.heavy_exponents] == HEAVY_CODE).all()
            and (self.positions[1:] >= self.positions[:-1]).all()
        )

    def equals(self, other: "Changes") -> bool:
        """Whether all values are equal; steps may have different types."""
        return all(np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))


def encode(old: Words, new: Words, dtype: str) -> bytes:
    """The payload that turns `old` into `new`: a delta, or dense if that is smaller.

    Both arrays are flat and of one size.
    """
    return encode_changes(collect(old, new, FORMATS[dtype]), new)


def encode_changes(changes: Changes, new: Words) -> bytes:
    """The payload of collected changes, which lead to `new`: a delta, or dense if that is smaller."""
    delta = encode_delta(changes)
    return delta if len(delta) <= new.nbytes else dense(new)


def dense(new: Words) -> bytes:
    """The dense payload of `new`, which decodes with any `old`."""
    return bytes([DENSE]) + new.tobytes()


def warm_up() -> None:
    """Compile the loops, or load them from numba's cache, before the first payload."""
    for dtype, form in FORMATS.items():
        old: Words = np.arange(64, dtype=form.word)
        decode(old, encode_delta(collect(old, old[::-1].copy(), form)), dtype)


def decode(old: Words, payload: bytes, dtype: str) -> Words:
    """Decode a payload against the `old` that it was encoded against; returns a new array. Raises CodecError."""
    form = FORMATS[dtype]
    kind = payload[0] if payload else None
    if kind == DENSE:
        if len(payload) != 1 + old.nbytes:
            raise CodecError(f"{len(payload) - 1} dense bytes for a slice of {old.nbytes}")
        return np.frombuffer(payload, dtype=form.word, offset=1).copy()
    if kind != DELTA or len(payload) < _HEAD.size:
        raise CodecError("neither a dense slice nor a delta")
    _, events, first, more = _HEAD.unpack_from(payload)
    begin = _HEAD.size + more + 1
    if events > len(old) or first + more > form.exponent_mask or len(payload) < begin:
        raise CodecError("a delta with an impossible head")
    codes = np.zeros(EXPONENTS, dtype=np.uint8)
    codes[first : first + more + 1] = np.frombuffer(payload, dtype=np.uint8, count=more + 1, offset=_HEAD.size)
    if not valid(codes):
        raise CodecError("a delta with an unknown hazard code")
    new = old.copy()
    ended = kernels.decode_into(
        np.frombuffer(payload, dtype=np.uint8, offset=begin),
        fresh_bits(kernels.STEPS + (more + 1) * kernels.STEP_BITS),
        first,
        old,
        new,
        form.word(form.mantissa_bits),
        form.word(form.exponent_mask),
        form.top,
        table_of(codes),
        events,
        encoder(),
        np.empty(len(old) if HEAVY_CODE in codes else 0, dtype=np.int64),
    )
    if ended != kernels.DONE:
        raise CodecError("a delta that does not fit these weights")
    return new


def codes_for(changed: NDArray[np.int64], sampled: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The hazard code of each exponent.

    `changed`: the number of changed elements of each exponent. `sampled`: the number of elements of each exponent among
    every SAMPLING-th element. Both are int64 [EXPONENTS].
    """
    return codes_of(changed, np.maximum(sampled * SAMPLING, changed))


def collect(old: Words, new: Words, form: Format) -> Changes:
    """The changes from `old` to `new`."""
    shift, mask = form.word(form.mantissa_bits), form.word(form.exponent_mask)
    changed = np.zeros(EXPONENTS, dtype=np.int64)
    count = kernels.count_changed(old, new, shift, mask, changed)
    codes = codes_for(changed, np.bincount((old[::SAMPLING] >> shift) & mask, minlength=EXPONENTS))
    heavy_most = len(old) if HEAVY_CODE in codes else 0
    positions = np.empty(count, dtype=np.uint64)
    exponents, steps = np.empty(count, dtype=np.uint8), np.empty(count, dtype=np.int64)
    heavy_exponents, heavy_steps = np.empty(heavy_most, dtype=np.uint8), np.empty(heavy_most, dtype=np.int64)
    events, heavy = kernels.extract(
        old, new, shift, mask, form.top, table_of(codes), positions, exponents, steps, heavy_exponents, heavy_steps
    )
    return Changes(
        codes, positions[:events], exponents[:events], steps[:events], heavy_exponents[:heavy], heavy_steps[:heavy]
    )


def encode_delta(changes: Changes) -> bytes:
    """The delta of collected changes, which may be larger than the dense payload."""
    codes, events, heavy = changes.codes, len(changes.positions), len(changes.heavy_steps)
    stretches = int(changes.positions[-1]) >> CAP_BITS if events else 0
    out = np.empty(64 + BYTES_AN_ELEMENT * (events + heavy) + BYTES_A_STRETCH * stretches, dtype=np.uint8)
    present = np.flatnonzero(codes)
    first, last = (int(present[0]), int(present[-1])) if len(present) else (0, 0)
    length = kernels.encode_events(
        encoder(),
        out,
        fresh_bits(kernels.STEPS + (last - first + 1) * kernels.STEP_BITS),
        first,
        table_of(codes),
        changes.positions,
        changes.exponents,
        changes.steps.astype(np.int64, copy=False),
        changes.heavy_exponents,
        changes.heavy_steps.astype(np.int64, copy=False),
    )
    return _HEAD.pack(DELTA, events, first, last - first) + codes[first : last + 1].tobytes() + out[:length].tobytes()
