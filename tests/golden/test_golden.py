"""Bytes once shipped decode for ever, and any MessagePack implementation reads them."""

from pathlib import Path

import msgpack
import msgspec
import pytest

from schemas.contexts import context_digest
from schemas.record import Record
from schemas.wire import RECORDS, decode, encode
from tests.golden.examples import EXAMPLES, FOLDER, path_of
from workers.environments import trajectory
from workers.weights import digests

NAMES = [example.SCHEMA for example in EXAMPLES]


def test_every_record_has_an_example_and_its_bytes() -> None:
    assert {type(example) for example in EXAMPLES} == set(RECORDS)
    assert all(path_of(example).exists() for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_shipped_bytes_decode_to_what_was_written(example: Record) -> None:
    assert decode(type(example), path_of(example).read_bytes()) == example


OLDER = sorted(set(FOLDER.glob("*.msgpack")) - {path_of(example) for example in EXAMPLES})


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_shipped_bytes_of_an_older_version_decode_to_what_it_had(path: Path) -> None:
    name = path.stem.rpartition("-")[0]
    (record,) = [record for record in RECORDS if record.SCHEMA.partition("/")[0] == name]
    said = msgpack.unpackb(path.read_bytes())
    now = msgpack.unpackb(encode(decode(record, path.read_bytes())))
    assert said and {field: now[field] for field in said} == said


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_plain_msgpack_package_reads_the_same(example: Record) -> None:
    read = msgpack.unpackb(path_of(example).read_bytes())
    assert set(read) <= {field.encode_name for field in msgspec.structs.fields(example)}
    decoded_again = decode(type(example), msgpack.packb(read))
    assert decoded_again == example


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_a_field_from_the_future_is_ignored(example: Record) -> None:
    read = msgpack.unpackb(encode(example))
    read["field_from_the_future"] = [1, {"deep": b"bytes"}]
    assert decode(type(example), msgpack.packb(read)) == example


def test_digests_are_those_that_the_documents_name() -> None:
    of_weights = bytes.fromhex("6437b3ac38465133ffb63b75273a8db5")  # b3sum -l 16
    others = bytes.fromhex("cf4ab791c62b8d2b2109c90275287816")  # b2sum -l 128
    assert digests.digest_of(b"abc") == of_weights
    assert context_digest(b"abc") == trajectory.digest_of(b"abc") == others
