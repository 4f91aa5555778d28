"""Released bytes decode forever, with any MessagePack implementation."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from msgspec import inspect as types

from rose.schemas.prompts import Prompt, PromptSampling
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnRequest, context_digest
from rose.schemas.wire import RECORDS, decode, encode
from rose.workers.environments import trajectory
from rose.workers.weights import layout
from tests.golden.examples import EXAMPLES
from tests.golden.release import RELEASES, name_of

SCHEMA = attrgetter("SCHEMA")


def test_every_record_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(RECORDS)


@pytest.mark.parametrize(
    "path", sorted(RELEASES.glob("*/*.msgpack")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_bytes_of_a_release_decode_to_the_original_records(path: Path) -> None:
    (record,) = [record for record in RECORDS if name_of(record) == path.name]
    values = msgpack.unpackb(path.read_bytes())
    now = msgpack.unpackb(encode(decode(record, path.read_bytes())))
    assert values and {field: now[field] for field in values} == values


@pytest.mark.parametrize("example", EXAMPLES, ids=SCHEMA)
def test_plain_msgpack_package_reads_the_same_values(example: Record) -> None:
    read = msgpack.unpackb(encode(example))
    assert set(read) <= {field.encode_name for field in msgspec.structs.fields(example)}
    decoded_again = decode(type(example), msgpack.packb(read))
    assert decoded_again == example


def grown(kind: types.Type, value: Any) -> Any:
    """Return the value as the next release may write it: with an additional field in each map and an additional element
    in each list of the nested structs."""
    match kind:
        case types.Metadata():
            named = (kind.extra or {}).get("record")
            return grown(types.type_info(TurnRequest) if named else kind.type, value)
        case types.UnionType():
            fits = [each for each in kind.types if not isinstance(each, types.NoneType)]
            return value if value is None else grown(fits[0], value)
        case types.VarTupleType():
            return [grown(kind.item_type, each) for each in value]
        case types.StructType(array_like=True):
            return [*(grown(each.type, inner) for each, inner in zip(kind.fields, value, strict=True)), [1, b"future"]]
        case types.StructType():
            within = {each.encode_name: each.type for each in kind.fields}
            more = {} if kind.cls in (Prompt, PromptSampling) else {"from_the_future": [1, {"deep": b"bytes"}]}
            return {name: grown(within[name], inner) for name, inner in value.items()} | more
    return value


@pytest.mark.parametrize("example", EXAMPLES, ids=SCHEMA)
def test_unknown_struct_fields_are_ignored(example: Record) -> None:
    wire = msgpack.packb(grown(types.type_info(type(example)), msgpack.unpackb(encode(example))))
    assert (b"future" in wire) != isinstance(example, Prompt)
    read = decode(type(example), wire)
    if isinstance(example, TurnDispatch) and isinstance(read, TurnDispatch):
        assert read.request == example.request
        read = msgspec.structs.replace(read, request_wire=example.request_wire)
    assert read == example


def test_digests_match_the_documentation() -> None:
    of_weights = bytes.fromhex("6437b3ac38465133ffb63b75273a8db5")  # b3sum -l 16
    others = bytes.fromhex("cf4ab791c62b8d2b2109c90275287816")  # b2sum -l 128
    assert layout.digest_of(b"abc") == of_weights
    assert context_digest(b"abc") == trajectory.digest_of(b"abc") == others
