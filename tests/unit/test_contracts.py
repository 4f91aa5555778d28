"""Published contracts match the code: the checked-in files, the records and the prompt decoder."""

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.asyncapi import asyncapi, prompt_schema, render_document
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.schemas.errors import RecordError
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.weights import WeightChunk, WeightIndex
from rose.schemas.wire import RECORDS, decode, encode
from rose.topics.catalog import CATALOG, Partitions
from tests.golden.examples import EXAMPLES, PROMPT
from tests.golden.payloads import INDEX

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = json.loads((DOCS / "asyncapi.json").read_text())
PROMPT_SCHEMA = json.loads((DOCS / "prompt.schema.json").read_text())
ASYNCAPI_SCHEMAS = "@asyncapi/specs@6.11.1"


def test_checked_in_document_equals_the_generated_document() -> None:
    assert (DOCS / "asyncapi.json").read_text() == render_document(asyncapi(load(Common())))


def test_checked_in_prompt_schema_equals_the_generated_schema() -> None:
    assert (DOCS / "prompt.schema.json").read_text() == render_document(prompt_schema())


def test_document_follows_the_settings_of_the_cluster() -> None:
    own = Common(namespace="team.", settings=["topics.home_partitions=16", "topics.replication_factor=3"])
    channel = asyncapi(load(own))["channels"]["rose.prompts.submitted.v1"]
    assert channel["address"] == channel["bindings"]["kafka"]["topic"] == "team.rose.prompts.submitted.v1"
    assert (channel["bindings"]["kafka"]["partitions"], channel["bindings"]["kafka"]["replicas"]) == (16, 3)


def test_document_has_every_topic_with_partitions_and_retention() -> None:
    channels = DOCUMENT["channels"]
    assert list(channels) == [topic.name for topic in CATALOG]
    for topic in CATALOG:
        kafka = channels[topic.name]["bindings"]["kafka"]
        assert kafka["partitions"] == Partitions().count_of(topic.partition_setting)
        configured = kafka["topicConfiguration"]
        assert {name: str(configured[name]) for name in topic.config if name != "cleanup.policy"} == {
            name: value for name, value in topic.config.items() if name != "cleanup.policy"
        }
        assert configured["cleanup.policy"] == topic.config["cleanup.policy"].split(",")


def within(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from within(inner)


def test_every_reference_resolves_and_every_record_is_referenced() -> None:
    references = {each["$ref"] for each in within(DOCUMENT) if isinstance(each, dict) and "$ref" in each}
    for reference in references:
        found: Any = DOCUMENT
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
    assert {f"#/components/schemas/{record.__name__}" for record in RECORDS} <= references


@pytest.mark.long
def test_document_is_valid_by_the_asyncapi_schema(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not there: AsyncAPI publishes its JSON Schema as an npm package")
    packed = subprocess.run([npm, "pack", ASYNCAPI_SCHEMAS], cwd=tmp_path, capture_output=True, text=True)
    assert packed.returncode == 0, packed.stderr
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as files:
        held = files.extractfile("package/schemas/3.1.0.json")
        assert held is not None
        theirs = jsonschema.Draft7Validator(json.load(held))
    theirs.validate(DOCUMENT)
    assert not theirs.is_valid(DOCUMENT | {"channels": {"a": {"address": 1}}})


def as_json(value: Any) -> Any:
    """Return a MessagePack value as the document's schemas see it: each byte of a byte string is a character."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {name: as_json(inner) for name, inner in value.items()}
    return [as_json(inner) for inner in value] if isinstance(value, list) else value


def whole(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Return `pattern` as JSON Schema reads it: `$` is the very end, where Python's `$` also matches before a final
    newline."""
    if isinstance(value, str) and not re.search(pattern.replace("$", r"\Z"), value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern}")


def is_whole_number(_checker: Any, value: Any) -> bool:
    """Whether the number is written without a point: 1.0 is an integer to JSON Schema, and to none of the decoders."""
    return isinstance(value, int) and not isinstance(value, bool)


def strict(validator: Any) -> Any:
    types = validator.TYPE_CHECKER.redefine("integer", is_whole_number)
    return jsonschema.validators.extend(validator, {"pattern": whole}, type_checker=types)


RECORDS_BY = strict(jsonschema.Draft7Validator)
PROMPTS_BY = strict(jsonschema.Draft202012Validator)(PROMPT_SCHEMA)


def of_record(record: type[msgspec.Struct]) -> Any:
    whole_document = {"$ref": f"#/components/schemas/{record.__name__}", "components": DOCUMENT["components"]}
    return RECORDS_BY(whole_document)


@pytest.mark.parametrize("schema", DOCUMENT["components"]["schemas"].values(), ids=lambda schema: schema["title"])
def test_every_schema_is_a_valid_json_schema(schema: Mapping[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(schema)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.SCHEMA)
def test_document_and_decoder_accept_and_refuse_the_same_records(example: Record) -> None:
    wire = msgspec.msgpack.decode(encode(example))
    validator = of_record(type(example))
    validator.validate(as_json(wire))
    odd: tuple[Any, ...] = (
        -2,
        2**60,
        "",
        "ä" * 5_000,
        None,
        [],
        {},
        0.5,
    )  # text and bytes differ only on the wire
    changes = [{**wire, name: each} for name, value in wire.items() if not isinstance(value, bytes) for each in odd]
    changes += [{name: value for name, value in wire.items() if name != left_out} for left_out in wire]
    for change in changes:
        assert validator.is_valid(as_json(change)) == taken(type(example), msgspec.msgpack.encode(change)), change


def test_weight_index_is_valid_by_the_document() -> None:
    wire = as_json(msgspec.msgpack.decode(msgspec.msgpack.encode(INDEX)))
    of_record(WeightIndex).validate(wire)
    for name in wire:
        assert not of_record(WeightIndex).is_valid({other: value for other, value in wire.items() if other != name})
    assert f"`{WeightIndex.__name__}`" in DOCUMENT["components"]["schemas"][WeightChunk.__name__]["description"]


def taken(record: type[Record], wire: bytes) -> bool:
    """Whether the decoder accepts the value."""
    try:
        decode(record, wire)
    except RecordError:
        return False
    return True


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
EDGES = [-1, 0, 1, 2, 16, 17, 512, 513, 4096, 4097, 65_536, 65_537, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 0.01, 1.5, 2.5]
NAMES = st.sampled_from(
    ["a", "g-1", "g\n", "", "g" * 120, "g" * 121, "n" * 256, "n" * 257, "ä", "ä" * 4096, "ä" * 4097]
)
ODD = JSON | st.sampled_from(EDGES) | NAMES
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": ODD | st.floats(0, 2),
        "top_p": ODD | st.floats(0, 1),
        "max_tokens": ODD | st.integers(1, 65_536),
        "stop_token_ids": ODD | st.lists(st.integers(0, 2**32 - 1), max_size=17) | st.lists(ODD, max_size=2),
        "seed": ODD | st.integers(0, 2**63 - 1),
        "of_the_future": JSON,
    },
)
GOOD: dict[str, Any] = json.loads(msgspec.json.encode(PROMPT))
PROMPTS = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.just(value) for name, value in GOOD.items()},
        "of_the_future": JSON,
    },
).flatmap(
    lambda some: (
        st.sampled_from(sorted(GOOD)).flatmap(
            lambda name: (SAMPLING if name == "sampling" else ODD).map(lambda odd: {**GOOD, **some, name: odd})
        )
        | st.just(some)
    )
)


@pytest.mark.slow
@settings(max_examples=400, print_blob=True)
@given(PROMPTS | SAMPLING.map(lambda odd: {**GOOD, "sampling": odd}) | JSON)
def test_prompt_schema_accepts_the_prompts_that_the_decoder_accepts(value: Any) -> None:
    assert PROMPTS_BY.is_valid(value) == taken(Prompt, json.dumps(value).encode())


def test_documented_prompt_is_a_valid_prompt() -> None:
    page = (DOCS / "getting-started" / "installation.md").read_text()
    (line,) = re.findall(r"^```json\n(.*)\n```$", page, re.MULTILINE)
    PROMPTS_BY.validate(json.loads(line))
    assert decode(Prompt, line.encode())
