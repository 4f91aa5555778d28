"""The codec's loops over elements, compiled by numba.

Keeps true
- Bits are handled as *ordered* integers: of two floats with the same sign, the larger float has the larger integer, and
  neighbours differ by 1 (one ULP). A step is a difference modulo the word size, so infinities and NaNs are not special.
- A value from a payload is compared with a bound before it indexes an array.

`old` and `new` are uint16 or uint32 [n]; `shift` and `mask` extract the exponent of an element; `top` is the sign bit.
"""

import numpy as np

from rose.workers.weights.codec.compiled import compiled
from rose.workers.weights.codec.hazard import CAP_BITS, HEAVY, LIGHT_MOST
from rose.workers.weights.codec.range_coder import (
    decode_bit,
    decode_uniform,
    encode_bit,
    encode_uniform,
    finish,
    narrow,
    overrun,
    start,
)

U64 = np.uint64
I64 = np.int64
ONE64 = U64(1)

MAGNITUDE_BITS = 33
"""Number of bit lengths of a step's magnitude; each has its own adaptive bits."""

LEADING = 16
"""Adaptive bits for the four bits after the leading bit of a magnitude."""

STEP_BITS = 1 + MAGNITUDE_BITS + MAGNITUDE_BITS * LEADING
"""Adaptive bits of one exponent: the sign, the unary bit length, and the leading bits for each length."""

STRETCH, FLAGS, STEPS = 0, 1, 257
"""Offsets of adaptive bits: for empty stretches, for heavy elements by exponent, and for steps by exponent from
`first`."""

DONE, BAD_POSITION, BAD_STEP, OVERRUN = 0, 1, 2, 3
"""Results of decoding."""


@compiled
def ordered(word, top):  # type: ignore[no-untyped-def]
    """The ordered integer (int64) of an element's bits."""
    return I64((top - ONE64) - (word & (top - ONE64))) if word & top else I64(word | top)


@compiled
def unordered(value, top):  # type: ignore[no-untyped-def]
    """The element's bits of an ordered integer."""
    value = U64(value)
    return value & (top - ONE64) if value & top else ((top - ONE64) - value) | top


@compiled
def wrapped(step, top):  # type: ignore[no-untyped-def]
    """A step modulo the word size, in [-top, top)."""
    size = I64(top) << I64(1)
    return ((step + I64(top)) & (size - I64(1))) - I64(top)


@compiled
def count_changed(old, new, shift, mask, changed):  # type: ignore[no-untyped-def]
    """Count the changed elements of every exponent into `changed`, int64 [256]; returns their total number."""
    count = 0
    for at in range(len(old)):
        if old[at] != new[at]:
            changed[(old[at] >> shift) & mask] += 1
            count += 1
    return count


@compiled
def extract(old, new, shift, mask, top, table, positions, exponents, steps, heavy_exponents, heavy_steps):  # type: ignore[no-untyped-def]
    """Collect what is to be coded; returns the numbers of events and of heavy elements.

    For each event: the position on the axis, which is the summed hazard of the unchanged light elements before the
    event (uint64), the exponent (uint8) and the step (int64). For each heavy element its exponent and step; the step is
    0 if the element did not change.
    """
    events = heavy = 0
    position = U64(0)
    for at in range(len(old)):
        exponent = (old[at] >> shift) & mask
        hazard = table[exponent]
        if old[at] == new[at] and hazard < HEAVY:
            position += hazard
            continue
        step = wrapped(ordered(U64(new[at]), top) - ordered(U64(old[at]), top), top)
        if hazard >= HEAVY:
            heavy_exponents[heavy] = exponent
            heavy_steps[heavy] = step
            heavy += 1
        else:
            positions[events], exponents[events], steps[events] = position, exponent, step
            events += 1
    return events, heavy


@compiled
def encode_events(state, out, bits, first, table, positions, exponents, steps, heavy_exponents, heavy_steps):  # type: ignore[no-untyped-def]
    """Encode what `extract` collected into `out`; returns the number of bytes."""
    cap = U64(1) << U64(CAP_BITS)
    before = U64(0)
    for event in range(len(positions)):
        begin = positions[event] - before
        end = begin + table[exponents[event]]
        before = positions[event]
        stretch = begin >> U64(CAP_BITS)
        mark = (stretch + U64(1)) * cap
        if end > mark:  # it spans a stretch boundary: the larger part is coded for it
            if end - mark > mark - begin:
                begin, stretch = mark, stretch + U64(1)
            else:
                end = mark
        for _ in range(stretch):
            encode_bit(state, out, bits, STRETCH, 0)
        encode_bit(state, out, bits, STRETCH, 1)
        encode_uniform(state, out, begin - stretch * cap, end - begin, CAP_BITS)
        _encode_step(state, out, bits, I64(exponents[event]) - first, steps[event])
    for at in range(len(heavy_exponents)):
        exponent, step = I64(heavy_exponents[at]), heavy_steps[at]
        encode_bit(state, out, bits, FLAGS + exponent, 1 if step != 0 else 0)
        if step != 0:
            _encode_step(state, out, bits, exponent - first, step)
    return finish(state, out)


@compiled
def _encode_step(state, out, bits, place, step):  # type: ignore[no-untyped-def]
    sign_at = STEPS + place * STEP_BITS
    lengths_at = sign_at + 1
    encode_bit(state, out, bits, sign_at, 1 if step < 0 else 0)
    magnitude = U64(abs(step))
    length = 0
    while magnitude >> U64(length + 1):
        length += 1
    for shorter in range(length):
        encode_bit(state, out, bits, lengths_at + shorter, 1)
    encode_bit(state, out, bits, lengths_at + length, 0)
    leading_at = lengths_at + MAGNITUDE_BITS + length * LEADING
    node = I64(1)
    for lower in range(length - 1, -1, -1):
        bit = I64((magnitude >> U64(lower)) & U64(1))
        if node < LEADING:
            encode_bit(state, out, bits, leading_at + node, bit)
            node = 2 * node + bit
        else:
            encode_uniform(state, out, bit, 1, 1)


@compiled
def decode_into(data, bits, first, old, new, shift, mask, top, table, events, state, heavy_at):  # type: ignore[no-untyped-def]
    """Decode a delta into `new`, a copy of `old`; returns DONE or an error.

    `heavy_at` is int64 scratch space for the positions of heavy elements, with one entry for each element of `old`.
    """
    start(state, data)
    size, heavy, at = len(old), 0, 0
    longest = U64(size) * U64(LIGHT_MOST) + (U64(1) << U64(CAP_BITS))
    for _ in range(events):
        target = U64(0)
        while decode_bit(state, data, bits, STRETCH) == 0:
            target += U64(1) << U64(CAP_BITS)
            if target > longest:
                return BAD_POSITION
        point = decode_uniform(state, data, CAP_BITS)
        stretch = target
        target += point
        gap = U64(0)
        while True:
            while at + 8 <= size:  # eight at once, while none of them is the event or heavy
                ahead = (
                    (table[(old[at] >> shift) & mask] + table[(old[at + 1] >> shift) & mask])
                    + (table[(old[at + 2] >> shift) & mask] + table[(old[at + 3] >> shift) & mask])
                ) + (
                    (table[(old[at + 4] >> shift) & mask] + table[(old[at + 5] >> shift) & mask])
                    + (table[(old[at + 6] >> shift) & mask] + table[(old[at + 7] >> shift) & mask])
                )
                if gap + ahead > target:
                    break
                gap += ahead
                at += 8
            if at >= size:
                return BAD_POSITION
            exponent = I64((old[at] >> shift) & mask)
            hazard = table[exponent]
            if hazard >= HEAVY:
                heavy_at[heavy] = at
                heavy += 1
            elif gap + hazard > target:
                break
            else:
                gap += hazard
            at += 1
        begin, end = max(gap, stretch), min(gap + hazard, stretch + (U64(1) << U64(CAP_BITS)))
        narrow(state, data, begin - stretch, end - begin, CAP_BITS)
        step = _decode_step(state, data, bits, exponent - first)
        if step == 0:
            return BAD_STEP
        new[at] = unordered(U64(wrapped(ordered(U64(old[at]), top) + step, top)) & ((top << ONE64) - ONE64), top)
        at += 1
    while at < size:
        if table[(old[at] >> shift) & mask] >= HEAVY:
            heavy_at[heavy] = at
            heavy += 1
        at += 1
    for index in range(heavy):
        at = heavy_at[index]
        exponent = I64((old[at] >> shift) & mask)
        if decode_bit(state, data, bits, FLAGS + exponent) == 1:
            step = _decode_step(state, data, bits, exponent - first)
            if step == 0:
                return BAD_STEP
            new[at] = unordered(U64(wrapped(ordered(U64(old[at]), top) + step, top)) & ((top << ONE64) - ONE64), top)
    return OVERRUN if overrun(state, data) else DONE


@compiled
def _decode_step(state, data, bits, place):  # type: ignore[no-untyped-def]
    """Decode a step; 0 if its magnitude is longer than any word."""
    sign_at = STEPS + place * STEP_BITS
    lengths_at = sign_at + 1
    negative = decode_bit(state, data, bits, sign_at)
    length = 0
    while decode_bit(state, data, bits, lengths_at + length) == 1:
        length += 1
        if length >= MAGNITUDE_BITS - 1:
            return I64(0)
    leading_at = lengths_at + MAGNITUDE_BITS + length * LEADING
    magnitude, node = I64(1), I64(1)
    for _ in range(length):
        if node < LEADING:
            bit = I64(decode_bit(state, data, bits, leading_at + node))
            node = 2 * node + bit
        else:
            bit = I64(decode_uniform(state, data, 1))
            narrow(state, data, U64(bit), U64(1), 1)
        magnitude = 2 * magnitude + bit
    return -magnitude if negative else magnitude
