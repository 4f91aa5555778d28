"""Bytes once shipped decode for ever, and any MessagePack implementation reads them."""

from operator import attrgetter
from pathlib import Path

import msgpack
import msgspec
import pytest

from schemas.contexts import context_digest
from schemas.prompts import Prompt
from schemas.record import Record
from schemas.wire import RECORDS, decode, encode
from tests.golden.examples import EXAMPLES
from tests.golden.release import RELEASES, name_of
from workers.environments import trajectory
from workers.weights import digests

SCHEMA = attrgetter("SCHEMA")


def test_every_record_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(RECORDS)


@pytest.mark.parametrize(
    "path", sorted(RELEASES.glob("*/*.msgpack")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_bytes_of_a_release_decode_to_what_they_held(path: Path) -> None:
    (record,) = [record for record in RECORDS if name_of(record) == path.name]
    said = msgpack.unpackb(path.read_bytes())
    now = msgpack.unpackb(encode(decode(record, path.read_bytes())))
    assert said and {field: now[field] for field in said} == said


@pytest.mark.parametrize("example", EXAMPLES, ids=SCHEMA)
def test_the_plain_msgpack_package_reads_the_same(example: Record) -> None:
    read = msgpack.unpackb(encode(example))
    assert set(read) <= {field.encode_name for field in msgspec.structs.fields(example)}
    decoded_again = decode(type(example), msgpack.packb(read))
    assert decoded_again == example


@pytest.mark.parametrize("example", [each for each in EXAMPLES if not isinstance(each, Prompt)], ids=SCHEMA)
def test_a_field_from_the_future_is_ignored(example: Record) -> None:
    read = msgpack.unpackb(encode(example))
    read["field_from_the_future"] = [1, {"deep": b"bytes"}]
    assert decode(type(example), msgpack.packb(read)) == example


def test_digests_are_those_that_the_documents_name() -> None:
    of_weights = bytes.fromhex("6437b3ac38465133ffb63b75273a8db5")  # b3sum -l 16
    others = bytes.fromhex("cf4ab791c62b8d2b2109c90275287816")  # b2sum -l 128
    assert digests.digest_of(b"abc") == of_weights
    assert context_digest(b"abc") == trajectory.digest_of(b"abc") == others
