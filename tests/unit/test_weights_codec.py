"""The weight codec: bit-exact for any bits, never larger than dense, and only CodecError for any bytes."""

import secrets
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rose.workers.weights import codec
from rose.workers.weights.codec import (
    BYTES_AN_ELEMENT,
    FORMATS,
    SAMPLING,
    CodecError,
    collect,
    decode,
    dense,
    encode,
    encode_delta,
    hazard,
)
from rose.workers.weights.codec import range_coder as coder
from rose.workers.weights.codec.kernels import STEP_BITS, STEPS

Words = NDArray[Any]
DTYPES = sorted(FORMATS)

FIXED_BYTES = 4 * (STEPS + 256 * STEP_BITS) + 64 * 1024
"""Memory that decoding takes at any size: adaptive bits and tables."""

DECODE_BYTES_AN_ELEMENT = 12
"""Memory for the new words and the positions of heavy elements."""

FUZZED = 24_000
FUZZ_ROUND = 200


def special_words(dtype: str) -> list[int]:
    """Return zeros, subnormals, ones, largest numbers, infinities and NaNs of both signs."""
    form = FORMATS[dtype]
    infinity = form.exponent_mask << form.mantissa_bits
    one = (form.exponent_mask >> 1) << form.mantissa_bits
    positive = [0, 1, (1 << form.mantissa_bits) - 1, one, infinity - 1, infinity, infinity + 1, int(form.top) - 1]
    return [*positive, *(word | int(form.top) for word in positive)]


def old_words(kind: str, dtype: str, size: int, random: np.random.Generator) -> Words:
    form = FORMATS[dtype]
    bits = 8 * np.dtype(form.word).itemsize
    noise = random.integers(0, 1 << bits, size, dtype=form.word)
    if kind == "noise":
        return noise
    if kind == "specials":
        return random.choice(np.array(special_words(dtype), dtype=form.word), size)
    mantissas = noise & form.word((1 << form.mantissa_bits) - 1)
    if kind == "one exponent":
        return mantissas | form.word((form.exponent_mask >> 1) << form.mantissa_bits)
    if kind == "stripes":  # the sample from which the codec learns exponents does not represent the slice
        exponents: Words = (np.arange(size) % codec.SAMPLING + 3) << form.mantissa_bits
        striped: Words = mantissas | exponents.astype(form.word)
        return striped
    weights = (random.standard_normal(size) * 0.02).astype(np.float16 if dtype == "float16" else np.float32)
    words: Words = weights.view(np.uint32) >> np.uint32(16) if dtype == "bfloat16" else weights.view(form.word)
    return words.astype(form.word)


def new_words(old: Words, where: str, how: str, dtype: str, random: np.random.Generator) -> Words:
    form = FORMATS[dtype]
    size = len(old)
    at = {
        "nowhere": np.zeros(size, dtype=bool),
        "in few places": random.random(size) < 0.01,
        "here and there": random.random(size) < 0.2,
        "everywhere": np.ones(size, dtype=bool),
        "in front": np.arange(size) < size // 4,
        "at the end": np.arange(size) >= size - 2,
    }[where]
    new = old.copy()
    count = int(at.sum())
    if how == "by an ulp":
        new[at] += random.choice(np.array([1, np.iinfo(form.word).max], dtype=form.word), count)
    elif how == "to noise":
        new[at] = random.integers(0, np.iinfo(form.word).max, count, dtype=form.word, endpoint=True)
    elif how == "to specials":
        new[at] = random.choice(np.array(special_words(dtype), dtype=form.word), count)
    else:
        new[at] ^= form.word(form.top)
    return new


PAIRS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES),
        "kind": st.sampled_from(["noise", "specials", "one exponent", "stripes", "weights"]),
        "where": st.sampled_from(
            ["nowhere", "in few places", "here and there", "everywhere", "in front", "at the end"]
        ),
        "how": st.sampled_from(["by an ulp", "to noise", "to specials", "to the other sign"]),
        "size": st.one_of(st.integers(0, 20), st.integers(0, 5000)),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def pair_of(drawn: dict[str, Any]) -> tuple[Words, Words, str]:
    random = np.random.default_rng(drawn["seed"])
    old = old_words(drawn["kind"], drawn["dtype"], drawn["size"], random)
    return old, new_words(old, drawn["where"], drawn["how"], drawn["dtype"], random), drawn["dtype"]


@pytest.mark.slow
@settings(max_examples=400)
@given(PAIRS)
def test_payload_round_trips_bit_for_bit_and_is_never_larger_than_dense(drawn: dict[str, Any]) -> None:
    old, new, dtype = pair_of(drawn)
    olds, news = old.tobytes(), new.tobytes()
    payload = encode(old, new, dtype)
    assert len(payload) <= len(dense(new)) == 1 + new.nbytes
    back = decode(old, payload, dtype)
    assert back.dtype == old.dtype
    assert back.tobytes() == news == new.tobytes()
    assert old.tobytes() == olds
    assert not np.shares_memory(back, old)


@settings(max_examples=300)
@given(PAIRS)
def test_delta_larger_than_dense_is_exact_and_fits_its_buffer(drawn: dict[str, Any]) -> None:
    old, new, dtype = pair_of(drawn)
    form = FORMATS[dtype]
    payload = encode_delta(collect(old, new, form))
    assert decode(old, payload, dtype).tobytes() == new.tobytes()
    _, _, first, more = codec._HEAD.unpack_from(payload)
    codes = np.zeros(hazard.EXPONENTS, dtype=np.uint8)
    head = codec._HEAD.size + more + 1
    codes[first : first + more + 1] = np.frombuffer(payload[codec._HEAD.size : head], dtype=np.uint8)
    exponents = (old >> form.word(form.mantissa_bits)) & form.word(form.exponent_mask)
    coded = int(((codes[exponents] == hazard.HEAVY_CODE) | (old != new)).sum())
    assert len(payload) - head <= 64 + BYTES_AN_ELEMENT * coded


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)), max_size=40), st.data())
def test_any_few_words_round_trip(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["bfloat16", "float16"]))
    old = np.array([pair[0] for pair in pairs], dtype=np.uint16)
    new = np.array([pair[1] for pair in pairs], dtype=np.uint16)
    assert decode(old, encode_delta(collect(old, new, FORMATS[dtype])), dtype).tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_class_can_change_to_every_other(dtype: str) -> None:
    words = np.array(special_words(dtype), dtype=FORMATS[dtype].word)
    old, new = np.repeat(words, len(words)), np.tile(words, len(words))
    assert decode(old, encode(old, new, dtype), dtype).tobytes() == new.tobytes()
    assert decode(old, encode_delta(collect(old, new, FORMATS[dtype])), dtype).tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changed", [slice(0, 3000), slice(-3000, None), slice(400_000, 400_001)])
def test_long_unchanged_range_is_exact_and_nearly_free(dtype: str, changed: slice) -> None:
    """All weights have one exponent, and the changes are adjacent: the rest is coded to zero bytes."""
    old = old_words("one exponent", dtype, 1_000_000, np.random.default_rng(1))
    for more in (0, 100_000):
        new = old.copy()
        new[changed] += FORMATS[dtype].word(1)
        new[:more] += FORMATS[dtype].word(1)
        payload = encode(old, new, dtype)
        assert decode(old, payload, dtype).tobytes() == new.tobytes()
        assert len(payload) < 6000


def test_event_behind_many_stretches_fits_its_buffer() -> None:
    """A row of experts may have so many elements. Of those that did not change almost none is counted."""
    old = old_words("one exponent", "bfloat16", 1 << 23, np.random.default_rng(1))
    old[3 * SAMPLING :: SAMPLING] = 0
    new = old.copy()
    new[-1] += np.uint16(1)
    payload = encode(old, new, "bfloat16")
    assert len(payload) > 64 + BYTES_AN_ELEMENT
    assert decode(old, payload, "bfloat16").tobytes() == new.tobytes()


@pytest.mark.parametrize("share", [0.0003, 0.003, 0.03])
def test_few_changes_cost_about_their_entropy(share: float) -> None:
    random = np.random.default_rng(5)
    old = old_words("weights", "bfloat16", 1 << 19, random)
    new = old.copy()
    at = np.flatnonzero(random.random(len(old)) < share)
    new[at] += random.choice(np.array([1, 0xFFFF], dtype=np.uint16), len(at))
    chance = len(at) / len(old)
    places = -len(old) * (chance * np.log2(chance) + (1 - chance) * np.log2(1 - chance))
    floor_bytes = (places + len(at)) / 8
    payload = encode(old, new, "bfloat16")
    assert decode(old, payload, "bfloat16").tobytes() == new.tobytes()
    assert len(payload) <= 1.15 * floor_bytes + 64


def test_unchanged_slice_costs_only_its_header() -> None:
    old = old_words("weights", "bfloat16", 100_000, np.random.default_rng(5))
    assert len(encode(old, old, "bfloat16")) < 16


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"\x00" + bytes(7),
        b"\x00" + bytes(9),
        b"\x01",
        b"\x01" + bytes(6),
        b"\x02" + bytes(8),
        codec._HEAD.pack(codec.DELTA, 5, 0, 0) + b"\xff",
        codec._HEAD.pack(codec.DELTA, 2**32 - 1, 0, 0) + b"\xff",
        codec._HEAD.pack(codec.DELTA, 0, 1, 255) + bytes(256),
        codec._HEAD.pack(codec.DELTA, 0, 255, 1) + bytes(2),
        codec._HEAD.pack(codec.DELTA, 0, 0, 9) + bytes(9),
        codec._HEAD.pack(codec.DELTA, 0, 0, 0) + b"\xfe",
        codec._HEAD.pack(codec.DELTA, 1, 0, 0) + b"\x00",
    ],
)
def test_invalid_payload_raises_a_codec_error(payload: bytes) -> None:
    old = np.arange(4, dtype=np.uint16)
    with pytest.raises(CodecError):
        decode(old, payload, "bfloat16")
    assert old.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["weights", "one exponent", "noise"])
def test_truncated_payload_is_refused_or_decodes_differently(kind: str, dtype: str) -> None:
    random = np.random.default_rng(3)
    old = old_words(kind, dtype, 4000, random)
    new = new_words(old, "here and there", "by an ulp", dtype, random)
    payload = encode(old, new, dtype)
    for length in range(0, len(payload) - 2 * coder.TAIL_BYTES, 7):
        with suppress(CodecError):
            assert decode(old, payload[:length], dtype).tobytes() != new.tobytes()


def true_payload(random: np.random.Generator) -> tuple[Words, bytes, str]:
    dtype = str(random.choice(DTYPES))
    kind = str(random.choice(["noise", "specials", "one exponent", "stripes", "weights"]))
    old = old_words(kind, dtype, int(random.integers(0, 3000)), random)
    where = str(random.choice(["in few places", "here and there", "everywhere", "in front"]))
    new = new_words(old, where, str(random.choice(["by an ulp", "to noise"])), dtype, random)
    form = FORMATS[dtype]
    return old, dense(new) if random.random() < 0.05 else encode_delta(collect(old, new, form)), dtype


def malformed(payload: bytes, other: bytes, random: np.random.Generator) -> Iterator[bytes]:
    """Yield endless damaged payloads, as a log, an attacker or a bug may produce."""
    head = codec._HEAD.size
    while True:
        way = random.integers(8)
        length = int(random.integers(0, len(payload) + 1))
        if way == 0:
            yield random.bytes(int(random.integers(0, 400)))
        elif way == 1:
            yield payload[:length]
        elif way == 2:
            flipped = bytearray(payload)
            for _ in range(int(random.integers(1, 4))):
                flipped[int(random.integers(len(flipped)))] ^= 1 << int(random.integers(8))
            yield bytes(flipped)
        elif way == 3:
            yield other[: head + int(random.integers(60))] + payload[length:]
        elif way == 4:  # any number of events, any exponents
            counts = [0, 1, 3000, 2**16, 2**31, 2**32 - 1, int(random.integers(3000))]
            first, more = int(random.integers(256)), int(random.integers(256))
            yield codec._HEAD.pack(codec.DELTA, int(random.choice(counts)), first, more) + payload[head:]
        elif way == 5:  # valid codes, and noise or one repeated byte as the coder's bytes
            more = int(random.integers(256))
            codes = random.choice(np.array([0, 1, 60, hazard.LIGHT_CODES - 1, 255], dtype=np.uint8), more + 1)
            stream = random.bytes(200) if random.random() < 0.5 else bytes([int(random.choice([0, 1, 254, 255]))]) * 200
            yield codec._HEAD.pack(codec.DELTA, int(random.integers(3000)), 0, more) + codes.tobytes() + stream
        elif way == 6:
            yield payload[:length] + random.bytes(int(random.integers(1, 50))) + payload[length:]
        else:
            yield payload[: len(payload) - length] + bytes(length)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_decoding_of_any_bytes_is_bounded_and_leaves_the_base_words_unchanged() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    codec.warm_up()
    refused = taken = 0
    other = true_payload(random)[1]
    tracemalloc.start()
    try:
        for _ in range(FUZZED // FUZZ_ROUND):
            old, payload, dtype = true_payload(random)
            before = old.tobytes()
            bound = FIXED_BYTES + DECODE_BYTES_AN_ELEMENT * len(old)
            forms = malformed(payload, other, random)
            for _ in range(FUZZ_ROUND):
                bad = next(forms)
                tracemalloc.reset_peak()
                start, _ = tracemalloc.get_traced_memory()
                try:
                    new = decode(old, bad, dtype)
                    taken += 1
                    assert (new.shape, new.dtype) == (old.shape, old.dtype)
                    del new
                except CodecError:
                    refused += 1
                _, peak = tracemalloc.get_traced_memory()
                assert peak - start <= bound, f"{peak - start} bytes for {len(old)} words: {bad.hex()}"
            assert old.tobytes() == before
            other = payload
    finally:
        tracemalloc.stop()
    print(f"{refused} refused, {taken} decoded to something")
    assert refused + taken == FUZZED
    assert min(refused, taken) > FUZZED // 20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("code", [1, 60, hazard.LIGHT_CODES - 1, hazard.HEAVY_CODE])
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7F, 0xFF])
def test_decoding_of_a_million_declared_events_ends_soon(code: int, byte: int) -> None:
    """Work proportional to words times events would take hours."""
    old = np.full(1_000_000, 0x3F80, dtype=np.uint16)
    for events in (1, len(old) // 2, len(old)):
        payload = codec._HEAD.pack(codec.DELTA, events, 0x7F, 0) + bytes([code]) + bytes([byte]) * 100_000
        with suppress(CodecError):
            assert len(decode(old, payload, "bfloat16")) == len(old)
    assert (old == 0x3F80).all()
