"""No writer emits a record that a reader refuses: at every bound of every field a record passes or is refused."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from rose.schemas.arrays import pack_logprobs, pack_tokens
from rose.schemas.errors import RecordError
from rose.schemas.limits import (
    MAX_CONTEXT_TOKENS,
    MAX_GROUP_ID_CHARACTERS,
    MAX_GROUP_SIZE,
    MAX_INFO_BYTES,
    MAX_NESTING,
    MAX_SPANS,
    MAX_STOP_TOKENS,
    MAX_TURN_TOKENS,
    MAX_TURNS,
    RECORD_OVERHEAD_BYTES,
)
from rose.schemas.progress import Group
from rose.schemas.prompts import Prompt, Sampling, trajectory_id
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Sample, SampleTurn
from rose.schemas.turns import PlacementCost, TurnDispatch, TurnKey, TurnRequest, TurnResult, TurnTimes, context_fields
from rose.schemas.wire import RECORDS, decode, encode
from tests.golden.examples import EXAMPLES, PROMPT

MOST_ELEMENTS = 3
"""Number of elements of a drawn array or map; the largest records have their own tests."""


def around(least: float | None, most: float | None) -> list[int]:
    """Draw numbers at, just within and just beyond two bounds."""
    edges = [0, 1, -1, 2**53, 2**63 - 1, 2**63, 2**64, 2**70]
    for edge in (least, most):
        if edge is not None:
            edges += [int(edge) - 1, int(edge), int(edge) + 1]
    return edges


def drawn(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Draw values of a type and values that only look like it."""
    match kind:
        case inspect.Metadata():
            return drawn(kind.type)
        case inspect.IntType():
            return st.sampled_from(
                around(kind.ge if kind.gt is None else kind.gt, kind.le if kind.lt is None else kind.lt)
            )
        case inspect.FloatType():
            return st.sampled_from(
                [0.0, -0.0, 1.0, 1e308, float("nan"), float("inf"), -1.0, 1e-9, 60.0, 60.1, 2.0, 2.1]
            )
        case inspect.StrType():
            most = 128 if kind.max_length is None else kind.max_length
            sizes = st.sampled_from(
                [0, 1, MAX_GROUP_ID_CHARACTERS, MAX_GROUP_ID_CHARACTERS + 1, 127, 128, 129, most, most + 1]
            )
            return sizes.map(lambda size: "g" * size) | st.sampled_from(["\udc80", "no spaces", "a:1", "ä", "\0"])
        case inspect.BytesType():
            most = 64 if kind.max_length is None else kind.max_length
            return st.sampled_from([0, 1, 8, 16, 17, most, most + 1]).map(bytes)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.UnionType():
            return st.one_of([drawn(each) for each in kind.types])
        case inspect.VarTupleType() | inspect.ListType():
            return st.lists(drawn(kind.item_type), max_size=MOST_ELEMENTS).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(drawn, kind.item_types))
        case inspect.DictType():
            return st.dictionaries(drawn(kind.key_type), drawn(kind.value_type), max_size=MOST_ELEMENTS)
        case inspect.AnyType():
            odd = st.sampled_from([2**64, {1: 2}, {"a": [float("nan")]}, "\udc80", [[[]]], b"bytes", 1 << 80, object()])
            return odd | st.sampled_from([1, "text", None, {"n": 1}, [1, 2.5]])
        case inspect.StructType():
            return structs(kind.cls)
        case inspect.RawType():
            return st.builds(lambda: msgspec.Raw(encode(REQUEST)))
    raise AssertionError(f"a record has a field of {kind}, which this test cannot draw")


@cache
def fields_of(cls: type[Any]) -> Mapping[str, st.SearchStrategy[Any]]:
    """Return the strategy of each field of a type. The strategies are cached, because their construction is slow."""
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)
    return {field.name: drawn(field.type) for field in kind.fields}


def structs(cls: type[Any]) -> st.SearchStrategy[Any]:
    fields = fields_of(cls)  # type: ignore[arg-type]  # a class is hashable
    return st.fixed_dictionaries(dict(fields)).map(lambda all_: cls(**all_))


def examples_with_one_field_drawn() -> st.SearchStrategy[Record]:
    """Draw a valid record with one arbitrary field."""

    def changed(example: Record, field: str) -> st.SearchStrategy[Record]:
        return fields_of(type(example))[field].map(lambda value: msgspec.structs.replace(example, **{field: value}))

    return st.one_of([changed(example, field) for example in EXAMPLES for field in fields_of(type(example))])


def assert_written_is_read(record: Record) -> None:
    try:
        wire = encode(record)
    except RecordError:
        return
    again = encode(decode(type(record), wire))
    assert again == wire, "what was written is read, and written again it is the same"


@pytest.mark.slow
@settings(max_examples=600, print_blob=True)
@given(examples_with_one_field_drawn())
def test_record_with_a_field_at_or_beyond_its_bounds_is_readable_or_never_written(record: Record) -> None:
    assert_written_is_read(record)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(st.sampled_from(RECORDS).flatmap(structs))
def test_record_of_any_content_is_readable_or_never_written(record: Record) -> None:
    assert_written_is_read(record)


LONGEST_GROUP = "g" * MAX_GROUP_ID_CHARACTERS
LONGEST_WORKER = "w" * 128
TIMES = TurnTimes(**dict.fromkeys(TurnTimes.__struct_fields__, 1.7e9 + 0.123456789))
SAMPLING = Sampling(
    temperature=0.7, top_p=0.9, max_tokens=65_536, stop_token_ids=(2**31,) * MAX_STOP_TOKENS, seed=2**63 - 1
)
TOKENS = pack_tokens([2**32 - 1] * MAX_CONTEXT_TOKENS)
LOGPROBS = pack_logprobs([-1.5] * MAX_CONTEXT_TOKENS)
REQUEST = TurnRequest(
    trajectory_id=trajectory_id(LONGEST_GROUP, MAX_GROUP_SIZE - 1),
    group_id=LONGEST_GROUP,
    home=2**31 - 1,
    environment="calculator",
    turn=MAX_TURNS - 1,
    **context_fields(TOKENS),
    sampling=SAMPLING,
    requested_at=1.7e9,
    patience_seconds=300.0,
)


def largest_sample() -> Sample:
    turn = SampleTurn(
        turn=MAX_TURNS - 1,
        attempt=2**16 - 1,
        worker=LONGEST_WORKER,
        sampling=SAMPLING,
        start=MAX_CONTEXT_TOKENS,
        end=MAX_CONTEXT_TOKENS,
        cached_tokens=MAX_CONTEXT_TOKENS,
        times=TIMES,
        environment_seconds=0.1,
    )
    return Sample(
        trajectory_id=REQUEST.trajectory_id,
        group_id=LONGEST_GROUP,
        group_size=MAX_GROUP_SIZE,
        model_id="m" * 128,
        environment="e" * 256,
        seed=2**63 - 1,
        tokens=TOKENS,
        loss_mask=bytes([1]) * MAX_CONTEXT_TOKENS,
        logprobs=LOGPROBS,
        spans=(VersionSpan(MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS, 2**53),) * MAX_SPANS,
        turns=(turn,) * MAX_TURNS,
        reward=0.1,
        success=False,
        failure="f" * 4096,
        info={"log": "x" * (MAX_INFO_BYTES - 16)},
        device_seconds={f"class-{number}": 0.1 for number in range(8)},
        completed_at=1.7e9,
    )


def largest_result() -> TurnResult:
    return TurnResult(
        trajectory_id=REQUEST.trajectory_id,
        group_id=LONGEST_GROUP,
        home=2**31 - 1,
        turn=MAX_TURNS - 1,
        attempt=2**16 - 1,
        outcome="completed",  # type: ignore[arg-type]
        reason="r" * 4096,
        worker=LONGEST_WORKER,
        incarnation=2**53,
        tokens=TOKENS[: 4 * MAX_TURN_TOKENS],
        logprobs=LOGPROBS[: 4 * MAX_TURN_TOKENS],
        spans=(VersionSpan(MAX_TURN_TOKENS, MAX_TURN_TOKENS, 2**53),) * MAX_SPANS,
        times=TIMES,
    )


def largest_dispatch() -> TurnDispatch:
    cost = PlacementCost(
        wait_seconds=0.1, prefill_seconds=0.1, decode_seconds=0.1, passed_over=LONGEST_WORKER, passed_over_seconds=0.1
    )
    return TurnDispatch(
        request_wire=msgspec.Raw(encode(REQUEST)),
        home=2**31 - 1,
        offset=2**53,
        attempt=2**16 - 1,
        worker=LONGEST_WORKER,
        slot=2**31 - 1,
        incarnation=2**53,
        claim=2**53,
        failures=2**16 - 1,
        dispatched_at=1.7e9,
        cost=cost,
        partial=largest_result().part,
    )


@pytest.mark.parametrize(
    "record", [largest_sample(), largest_result(), REQUEST, largest_dispatch()], ids=lambda record: record.SCHEMA
)
def test_record_at_all_bounds_together_fits_one_message(record: Record) -> None:
    """The fields of a newer writer have room, too."""
    assert len(encode(record)) <= type(record).MAX_BYTES - RECORD_OVERHEAD_BYTES


def test_dispatch_of_the_largest_newer_request_fits_with_all_sampled_tokens() -> None:
    known_fields = msgspec.to_builtins(REQUEST, builtin_types=(bytes,))
    framed = len(msgpack.packb(known_fields | {"new": bytes(2**15)})) - 2**15
    wider = known_fields | {"new": bytes(TurnRequest.MAX_BYTES - framed)}
    wire = msgpack.packb(wider)
    assert len(wire) == TurnRequest.MAX_BYTES and decode(TurnRequest, wire) == REQUEST
    sent = encode(msgspec.structs.replace(largest_dispatch(), request_wire=msgspec.Raw(wire)))
    assert bytes(decode(TurnDispatch, sent).request_wire) == wire
    with pytest.raises(RecordError, match="over the limit"):
        decode(TurnRequest, msgpack.packb(wider | {"newer": 1}))


@pytest.mark.parametrize("request_bytes", [b"\xc0", b"\x80", encode(PROMPT)])
def test_dispatch_of_an_invalid_request_is_refused(request_bytes: bytes) -> None:
    fields = msgpack.unpackb(encode(largest_dispatch())) | {"request": msgpack.unpackb(request_bytes)}
    with pytest.raises(RecordError, match="the dispatched request is no turn-request"):
        decode(TurnDispatch, msgpack.packb(fields))


def test_every_trajectory_id_of_a_group_is_valid_in_every_record() -> None:
    key = TurnKey(trajectory_id(LONGEST_GROUP, MAX_GROUP_SIZE - 1), MAX_TURNS - 1, 2**16 - 1)
    assert decode(TurnDispatch, encode(largest_dispatch())).key == key


@pytest.mark.parametrize(
    "change",
    [
        {"group_id": "g" * (MAX_GROUP_ID_CHARACTERS + 1)},
        {"seed": 2**63},
        {"arguments": {"n": 2**64}},
        {"arguments": {"n": "\udc80"}},
        {"arguments": {"floats": [0.1] * 110_000}},
    ],
    ids=["group id", "seed", "number", "text", "size"],
)
def test_prompt_refused_by_readers_is_not_written(change: Mapping[str, Any]) -> None:
    with pytest.raises(RecordError):
        encode(msgspec.structs.replace(PROMPT, **change))


GROUP = next(example for example in EXAMPLES if isinstance(example, Group))
SAMPLE = next(example for example in EXAMPLES if isinstance(example, Sample))


def nested(levels: int) -> dict[str, Any]:
    """Return maps and lists nested to this depth."""
    found: Any = 1
    for level in range(levels - 1):
        found = [found] if level % 2 else {"n": found}
    return {"n": found}


LOOSE: list[Callable[[Any], Record]] = [
    lambda value: msgspec.structs.replace(PROMPT, arguments=value),
    lambda value: msgspec.structs.replace(GROUP, prompt=msgspec.structs.replace(PROMPT, arguments=value)),
    lambda value: msgspec.structs.replace(SAMPLE, info=value),
]


@pytest.mark.parametrize("holding", LOOSE, ids=["prompt", "group", "sample"])
@pytest.mark.parametrize("encoding", [msgspec.msgpack.encode, msgspec.json.encode], ids=["msgpack", "json"])
def test_nesting_limit_holds_for_reading_and_writing_at_any_stack_depth(
    holding: Callable[[Any], Record], encoding: Callable[[Record], bytes]
) -> None:
    """A prompt as deep as the stack was once opened, and its group could not be written a few calls deeper."""
    allowed, deeper = holding(nested(MAX_NESTING)), holding(nested(MAX_NESTING + 1))
    assert encode(decode(type(allowed), encode(allowed))) == encode(allowed)
    with pytest.raises(RecordError, match="within one another"):
        encode(deeper)
    if encoding is msgspec.msgpack.encode or isinstance(deeper, Prompt):
        with pytest.raises(RecordError, match="within one another"):
            decode(type(deeper), encoding(deeper))


@pytest.mark.parametrize("levels", [MAX_NESTING, MAX_NESTING + 1, 900])
def test_accepted_request_can_be_dispatched_with_any_unknown_fields(levels: int) -> None:
    """The request is forwarded unchanged; a request as deep as the stack ended every router that read it."""
    fields = msgspec.msgpack.decode(encode(REQUEST)) | {"of_the_future": nested(levels - 1)}
    wire = msgspec.msgpack.encode(fields)
    if levels > MAX_NESTING:
        with pytest.raises(RecordError, match="within one another"):
            decode(TurnRequest, wire)
        return
    assert decode(TurnRequest, wire) == REQUEST
    dispatch = msgspec.structs.replace(largest_dispatch(), request_wire=msgspec.Raw(wire))
    assert decode(TurnDispatch, encode(dispatch)).request == REQUEST


@pytest.mark.parametrize("within", [False, True], ids=["of the request", "of what it holds"])
@pytest.mark.parametrize("levels", [MAX_NESTING - 1, 900])
def test_values_of_duplicate_keys_count_toward_the_nesting_limit(levels: int, within: bool) -> None:
    """A reader keeps the last value of a key: nested values of earlier ones were once unchecked, and ended every
    router."""
    fields = msgspec.msgpack.decode(encode(REQUEST))
    known = b"".join(msgspec.msgpack.encode(each) for pair in fields.items() for each in pair)
    twice = b"\xa1x" + msgspec.msgpack.encode(nested(levels - 1 - within)) + b"\xa1x\x01"
    encoded = b"\xa1y\x82" + twice if within else twice
    wire = b"\xde" + (len(fields) + 2 - within).to_bytes(2, "big") + known + encoded
    assert msgspec.msgpack.decode(wire, type=TurnRequest) == REQUEST
    if levels > MAX_NESTING:
        with pytest.raises(RecordError, match="within one another"):
            decode(TurnRequest, wire)
    else:
        assert decode(TurnRequest, wire) == REQUEST


ODD = {
    "a map as a key": b"\xa1z\x82\x80\xc0\xc0\xc0",
    "text": b"\xa1z\xa4\xff\xff\xff\xff",
    "a name": b"\xa5" + b"\xff" * 5 + b"\0",
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_request_of_the_known_size_is_still_checked_for_unknown_fields(odd: bytes) -> None:
    """Fields in place of a default were once unchecked: routers accepted them, and ended when they left out the
    tokens."""
    fields = msgspec.msgpack.decode(encode(REQUEST))
    del fields["chain"]
    encoded_fields = b"".join(
        msgspec.msgpack.encode(name) + msgspec.msgpack.encode(value) for name, value in fields.items()
    )
    wire = bytes([0x80 + len(fields) + 1]) + encoded_fields + odd
    assert len(wire) == len(encode(REQUEST)) and msgspec.msgpack.decode(wire, type=TurnRequest) == REQUEST
    with pytest.raises(RecordError, match=TurnRequest.SCHEMA):
        decode(TurnRequest, wire)


def test_nested_list_keys_count_toward_the_nesting_limit() -> None:
    key: Any = ()
    for _ in range(MAX_NESTING):
        key = (key,)
    with pytest.raises(RecordError, match="within one another"):
        decode(Prompt, msgspec.msgpack.encode(msgspec.structs.replace(PROMPT, arguments={"n": {key: 1}})))


def test_values_of_any_type_occur_only_in_the_records_tested_here() -> None:
    def is_loose(kind: inspect.Type) -> bool:
        match kind:
            case inspect.AnyType():
                return True
            case inspect.StructType():
                return any(is_loose(field.type) for field in kind.fields)
            case inspect.DictType():
                return is_loose(kind.key_type) or is_loose(kind.value_type)
            case inspect.VarTupleType():
                return is_loose(kind.item_type)
            case inspect.UnionType():
                return any(map(is_loose, kind.types))
            case inspect.Metadata():
                return is_loose(kind.type)
        return False

    assert {record for record in RECORDS if is_loose(inspect.type_info(record))} == {
        type(holding({})) for holding in LOOSE
    }


def test_json_prompt_may_hold_a_seed_of_63_bits() -> None:
    wire = msgspec.json.encode(msgspec.structs.replace(PROMPT, seed=2**63 - 1))
    assert decode(Prompt, wire).seed == 2**63 - 1
