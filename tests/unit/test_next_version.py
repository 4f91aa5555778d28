"""This version beside the next version: each reads the records of the other, and additions pass unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest

from rose.pipeline.cli.dead_letters import edited_message, show_value
from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.errors import RecordError
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnRequest
from rose.schemas.wire import RECORDS, decode, encode
from rose.topics.catalog import RECORD_TOPICS
from rose.topics.dead_letters import DeadLetter
from rose.topics.records import RawMessage
from tests.golden.examples import EXAMPLES
from tests.support.routing_fixtures import CONFIG, heartbeat
from tests.upgrade.next_version import FIELD, VALUE, make_next

EXAMPLES_OF = ("tests/__init__.py", "tests/golden/examples.py")

WRITE = """
import sys
from pathlib import Path
from rose.schemas.wire import encode
from tests.golden.examples import EXAMPLES
for example in EXAMPLES:
    (Path(sys.argv[1]) / type(example).__name__).write_bytes(encode(example))
"""
READ = """
import sys
from pathlib import Path
from rose.schemas.wire import RECORDS, decode
for record in RECORDS:
    assert decode(record, (Path(sys.argv[1]) / record.__name__).read_bytes()).{field} == ""
"""
"""Program of the next version."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next") / "sources"
    make_next(folder, more=EXAMPLES_OF)
    return folder


def run(sources: Path, program: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    subprocess.run([sys.executable, "-P", "-c", program, str(folder)], env=environment, check=True)


@pytest.fixture(scope="module")
def newer(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[type[Record], bytes]:
    """Return the example of each record as the next version writes it."""
    folder = tmp_path_factory.mktemp("newer")
    run(sources, WRITE, folder)
    return {record: (folder / record.__name__).read_bytes() for record in RECORDS}


def test_next_version_records_with_the_new_field_are_read_by_this_version(
    newer: dict[type[Record], bytes],
) -> None:
    for example in EXAMPLES:
        wire = newer[type(example)]
        assert msgpack.unpackb(wire)[FIELD] == VALUE
        if isinstance(example, Prompt):
            continue
        assert decode(type(example), wire) == _with_nested(example, wire)


def test_prompt_with_a_feature_of_the_next_version_is_refused(newer: dict[type[Record], bytes]) -> None:
    with pytest.raises(RecordError, match=f"no field `{FIELD}`"):
        decode(Prompt, newer[Prompt])
    values = msgpack.unpackb(newer[Prompt])
    del values[FIELD], values["sampling"][FIELD]
    assert decode(Prompt, msgpack.packb(values)) in EXAMPLES


def _with_nested(example: Record, wire: bytes) -> Record:
    """Return the example; a dispatch holds its request as bytes, which are compared."""
    if isinstance(example, TurnDispatch):
        return msgspec.structs.replace(example, request_wire=decode(TurnDispatch, wire).request_wire)
    return example


def test_next_version_reads_every_record_of_this_one(sources: Path, tmp_path: Path) -> None:
    for example in EXAMPLES:
        (tmp_path / type(example).__name__).write_bytes(encode(example))
    run(sources, READ.format(field=FIELD), tmp_path)


def test_unknown_request_field_passes_this_router(newer: dict[type[Record], bytes]) -> None:
    wire = newer[TurnRequest]
    router = Router(CONFIG)
    router.on_heartbeat(heartbeat(0, state=ExecutorState.READY), 0.0)
    [dispatch] = router.on_request(ReceivedRequest(decode(TurnRequest, wire), wire, 0), 0.0)
    sent = msgpack.unpackb(encode(dispatch))
    assert sent["request"] == msgpack.unpackb(wire)
    assert sent["request"][FIELD] == sent["request"]["sampling"][FIELD] == VALUE


@pytest.mark.parametrize("record", [each for each in RECORDS if each is not Prompt], ids=lambda record: record.__name__)
def test_edited_dead_letter_keeps_fields_of_the_next_version(
    newer: dict[type[Record], bytes], record: type[Record], tmp_path: Path
) -> None:
    """The message is resent from the file of `rose dlq show` with one more field set; bytes stay bytes."""
    [topic] = [topic for topic in RECORD_TOPICS if topic.record is record]
    raw = RawMessage(b"key", newer[record])
    dead_letter = DeadLetter(topic=topic, partition=0, offset=0, key=b"key", reason="", dead_lettered_at=0.0, raw=raw)
    file = tmp_path / "letter.json"
    file.write_text(show_value(dead_letter))
    sent = edited_message(dead_letter, file, [f'{name_of(record)}="again"']).value
    assert sent is not None
    assert msgpack.unpackb(sent) == msgpack.unpackb(newer[record]) | {name_of(record): "again"}


def name_of(record: type[Record]) -> str:
    """Return the name of some field of the record."""
    return msgspec.structs.fields(record)[0].encode_name
