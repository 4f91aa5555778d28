"""The range coder: coded symbols round-trip bit for bit, and a read past the end is detected."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rose.workers.weights.codec import range_coder as coder

CONTEXTS = 3
BIT = st.tuples(st.just(0), st.integers(0, CONTEXTS - 1), st.integers(0, 1))


@st.composite
def uniform_parts(draw: st.DrawFn) -> tuple[int, int, int]:
    bits = draw(st.integers(1, 20))
    start = draw(st.one_of(st.just(0), st.just(2**bits - 1), st.integers(0, 2**bits - 1)))
    return bits, start, draw(st.integers(1, 2**bits - start))


def coded(symbols: list[tuple[int, int, int]]) -> bytes:
    """Encode symbols: (0, context, bit) is an adaptive bit, (bits, start, width) a part of 2^bits."""
    state, bits = coder.encoder(), coder.fresh_bits(CONTEXTS)
    out = np.empty(64 + 8 * len(symbols), dtype=np.uint8)
    for total, first, second in symbols:
        if total == 0:
            coder.encode_bit(state, out, bits, first, second)
        else:
            coder.encode_uniform(state, out, first, second, total)
    return out[: int(coder.finish(state, out))].tobytes()


def decodes_to(data: bytes, symbols: list[tuple[int, int, int]]) -> bool:
    state, bits = coder.encoder(), coder.fresh_bits(CONTEXTS)
    stream = np.frombuffer(data, dtype=np.uint8)
    coder.start(state, stream)
    for total, first, second in symbols:
        if total == 0:
            if coder.decode_bit(state, stream, bits, first) != second:
                return False
        else:
            if not first <= coder.decode_uniform(state, stream, total) < first + second:
                return False
            coder.narrow(state, stream, first, second, total)
    return not coder.overrun(state, stream)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.one_of(BIT, uniform_parts()), max_size=200))
def test_any_mix_of_bits_and_symbols_round_trips(symbols: list[tuple[int, int, int]]) -> None:
    assert decodes_to(coded(symbols), symbols)


@settings(max_examples=100)
@given(st.lists(uniform_parts(), max_size=5), st.sampled_from([(0, 0, 0), (20, 0, 1), (8, 0, 3)]), st.integers(0, 3000))
def test_output_that_ends_in_zero_bytes_round_trips(
    symbols: list[tuple[int, int, int]], last: tuple[int, int, int], times: int
) -> None:
    symbols = symbols + [last] * times
    assert decodes_to(coded(symbols), symbols)


@pytest.mark.parametrize("bit", [0, 1])
def test_adaptive_bit_model_learns(bit: int) -> None:
    assert len(coded([(0, 0, bit)] * 20_000)) < 64


@settings(max_examples=40)
@given(st.integers(1, 60), st.booleans(), st.lists(uniform_parts(), max_size=10))
def test_carry_propagates_through_any_number_of_pending_bytes(
    symbols_before: int, carries: bool, after: list[tuple[int, int, int]]
) -> None:
    """Each part leaves open whether the bytes so far end in 7F FF FF ... or in 80 00 00 ..."""
    state, out = coder.encoder(), np.empty(1000, dtype=np.uint8)
    symbols = [(20, 2**19 - 1, 2)]
    coder.encode_uniform(state, out, 2**19 - 1, 2, 20)
    for _ in range(symbols_before):
        middle = _middle(state)
        symbols.append((20, middle - 1, 2))
        coder.encode_uniform(state, out, middle - 1, 2, 20)
    assert int(state[coder.CACHED]) > symbols_before
    symbols.append((20, _middle(state) + 1 if carries else 0, 1))
    symbols += after
    data = coded(symbols)
    assert data[0] == (0x80 if carries else 0x7F)
    run = bytes([0x00 if carries else 0xFF]) * symbols_before
    assert (data + bytes(coder.TAIL_BYTES))[1:].startswith(run) or data[1:].rstrip(b"\x00") == b""
    assert decodes_to(data, symbols)


def _middle(state: NDArray[np.uint64]) -> int:
    """Return the part of 2^20 in which a carry would begin."""
    return int((coder.TOP - state[coder.LOW]) // (state[coder.RANGE] >> np.uint64(20)))


def test_reading_past_the_end_is_detected() -> None:
    symbols = [(8, 77, 1)] * 50
    zeros = [(20, 0, 1)]
    assert decodes_to(coded(symbols), symbols + zeros * 2)  # the window was read ahead: so far there is no error
    assert not decodes_to(coded(symbols), symbols + zeros * 20)
