"""The wire format: records round-trip, and invalid bytes are refused."""

import codecs
import contextlib
import math
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.arrays import count, pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from rose.schemas.errors import RecordError
from rose.schemas.limits import MAX_RECORD_BYTES, RECORD_OVERHEAD_BYTES
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnRequest
from rose.schemas.weights import WeightChunk
from rose.schemas.wire import RECORDS, SCHEMA_HEADER, decode, encode, headers_of
from tests.golden.examples import EXAMPLES, PROMPT, REQUEST


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert unpack_tokens(packed) == tokens
    assert count(packed) == len(tokens)


@given(st.lists(st.floats(width=32)))
def test_logprobs_survive_packing_to_the_bit(logprobs: list[float]) -> None:
    packed = pack_logprobs(logprobs)
    unpacked = unpack_logprobs(packed)
    assert unpacked.tobytes() == packed
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(unpacked.tolist(), logprobs, strict=True))


@given(st.binary().filter(lambda packed: len(packed) % 4))
def test_truncated_array_is_refused(packed: bytes) -> None:
    with pytest.raises(RecordError):
        unpack_tokens(packed)
    with pytest.raises(RecordError):
        unpack_logprobs(packed)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_beyond_its_integer_type_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.SCHEMA)
def test_records_round_trip(example: Record) -> None:
    assert decode(type(example), encode(example), headers_of(example)) == example


@given(st.sampled_from(RECORDS), st.binary(max_size=200))
def test_bytes_from_anywhere_are_a_record_or_a_record_error(record: type[Record], wire: bytes) -> None:
    with contextlib.suppress(RecordError):
        assert isinstance(decode(record, wire), record)


@given(st.data())
def test_damaged_record_is_a_record_or_a_record_error(data: st.DataObject) -> None:
    example = data.draw(st.sampled_from(EXAMPLES))
    wire = bytearray(encode(example))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RecordError):
        assert isinstance(decode(type(example), bytes(wire)), type(example))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_id", "no spaces please"),
        ("group_id", ""),
        ("group_size", 0),
        ("group_size", 10**9),
        ("seed", -1),
        ("max_turns", 0),
        ("environment", ""),
        ("arguments", [1]),
    ],
)
def test_prompt_out_of_bounds_is_refused_and_the_field_is_named(field: str, value: Any) -> None:
    raw = msgspec.to_builtins(PROMPT) | {field: value}
    for wire in (msgpack.packb(raw), msgspec.json.encode(raw)):
        with pytest.raises(RecordError, match=field):
            decode(Prompt, wire)


def test_prompt_may_be_json_and_no_other_record_may() -> None:
    assert decode(Prompt, msgspec.json.encode(PROMPT)) == PROMPT
    with pytest.raises(RecordError):
        decode(TurnRequest, msgspec.json.encode(REQUEST))


LINE = msgspec.json.encode(PROMPT)


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (codecs.BOM_UTF8 + LINE, "is one JSON object$"),
        (b"  " + LINE, "is one JSON object$"),
        (b"[" + LINE + b"]", "is one JSON object$"),
        (msgspec.json.encode(LINE.decode()), "is one JSON object$"),
        (LINE.decode().encode("utf-16"), "is one JSON object$"),
        (b'  "group_id": "g",', "is one JSON object$"),
        (b"", "is one JSON object$"),
        (b"\0\0\0\0\1" + LINE, "first byte 00 is the framing of a schema registry's serializer"),
    ],
)
def test_prompt_in_a_wrapping_is_refused_with_what_a_prompt_is(wire: bytes, says: str) -> None:
    with pytest.raises(RecordError, match=r"not a prompt/\d+: it does not begin with \{.*" + says):
        decode(Prompt, wire)


def test_header_that_names_another_record_is_refused() -> None:
    with pytest.raises(RecordError, match="turn-request/1"):
        decode(Prompt, encode(PROMPT), [(SCHEMA_HEADER, b"turn-request/1")])
    for number in ("3", "1", "99"):
        assert decode(Prompt, encode(PROMPT), [(SCHEMA_HEADER, f"prompt/{number}")]) == PROMPT


@pytest.mark.parametrize("value", [None, b"", ""])
def test_empty_header_of_the_record_is_refused_as_empty(value: Any) -> None:
    with pytest.raises(RecordError, match=r"^header rose-schema is empty, the topic holds prompt/"):
        decode(Prompt, encode(PROMPT), [(SCHEMA_HEADER, value)])


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_turn", {"max_turn": 3}),
        ("top_k`, only temperature, top_p, max_tokens, stop_token_ids, seed", {"sampling": {"top_k": 5}}),
        ("x" * 64 + "`", {"x" * 100_000: 1}),
    ],
)
def test_prompt_with_an_unknown_field_is_refused(field: str, fields: dict[str, Any]) -> None:
    raw = msgpack.unpackb(encode(PROMPT)) | fields
    for wire in (msgpack.packb(raw), msgspec.json.encode(raw)):
        with pytest.raises(RecordError, match=f"no field `{field}"):
            decode(Prompt, wire)


PAIRS = '"group_id":"a","group_size":2,"environment":"calculator"'


@pytest.mark.parametrize(
    ("key", "wire"),
    [
        ("seed", f'{{{PAIRS},"seed":1,"seed":2}}'.encode()),
        ("group_id", f'{{{PAIRS},"group\\u005fid":"b"}}'.encode()),
        ("temperature", f'{{{PAIRS},"sampling":{{"temperature":1.0,"temperature":0.5}}}}'.encode()),
        ("deep", f'{{{PAIRS},"arguments":{{"list":[{{"deep":1,"deep":1}}]}}}}'.encode()),
        ("environment", b"\x84\xa8group_id\xa1a\xaagroup_size\x02" + 2 * b"\xabenvironment\xaacalculator"),
    ],
)
def test_prompt_with_a_duplicate_key_is_refused(key: str, wire: bytes) -> None:
    with pytest.raises(RecordError, match=f"`{key}` is there twice"):
        decode(Prompt, wire)


def test_prompt_with_defaults_is_short() -> None:
    short = Prompt(group_id="gsm8k/train/17", group_size=2, environment="calculator")
    assert msgpack.unpackb(encode(short)) == {
        "group_id": "gsm8k/train/17",
        "group_size": 2,
        "environment": "calculator",
    }
    assert decode(Prompt, encode(short)) == short


def test_record_over_the_limit_is_neither_written_nor_read() -> None:
    chunk = WeightChunk(
        model_id="m", version=1, tensor="t", part=0, payload=bytes(MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES)
    )
    with pytest.raises(RecordError, match="limit"):
        encode(chunk)
    with pytest.raises(RecordError, match="limit"):
        decode(WeightChunk, bytes(MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES + 1))


def test_dispatch_without_a_readable_request_is_not_written() -> None:
    dispatch = next(each for each in EXAMPLES if isinstance(each, TurnDispatch))
    packed: Any = encode(REQUEST)  # bytes within bytes, where a request is expected
    with pytest.raises(RecordError):
        encode(msgspec.structs.replace(dispatch, request_wire=packed))


def test_unpacked_array_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        unpack_logprobs(pack_logprobs([1.0]))[0] = np.float32(2.0)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e18])
def test_impossible_timestamp_is_refused(seconds: float) -> None:
    raw = msgpack.unpackb(encode(REQUEST)) | {"requested_at": seconds}
    with pytest.raises(RecordError, match="requested_at"):
        decode(TurnRequest, msgpack.packb(raw))
