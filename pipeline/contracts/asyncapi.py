"""Descriptions of ROSE's topics: AsyncAPI 3.1 of all topics, and JSON Schema of a prompt.

Keeps true: both are derived from `topics/catalog.py` and `schemas/`; nothing is written down a second time.
"""

import inspect
import sys
from typing import Any

import msgspec

from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common
from rose.pipeline.contracts.json_schema import Schema, definitions
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.weights import SIGNATURE_HEADER, WeightIndex, WeightManifest
from rose.schemas.wire import RECORDS, SCHEMA_HEADER, TRACE_HEADER
from rose.topics.admin import expected_settings
from rose.topics.catalog import CATALOG, DEAD_LETTERS, OUTCOMES, PROMPTS, RECORD_TOPICS, SAMPLES, Topic
from rose.topics.dead_letter_headers import KEY, OFFSET, ORIGIN, PARTITION, REASON, SENT_BACK, TOPIC

JSON, MSGPACK = "application/json", "application/msgpack"

DIALECT = "https://json-schema.org/draft/2020-12/schema"

BINDING = {"bindingVersion": "0.5.0"}
"""Version of AsyncAPI's bindings for Kafka."""

NUMBERS = frozenset({"retention.ms", "retention.bytes", "max.message.bytes", "segment.ms"})
"""Topic settings whose values the document gives as numbers."""

ABOUT = """The topics of ROSE and the records on them. Who produces prompts, or reads samples and outcomes, needs the
operations below; all other topics are ROSE's own, listed so that a log can be read. A value is one MessagePack map of
field names to values (a prompt may be JSON), a byte string is MessagePack's `bin`, and fields that a reader does not
know are to be ignored: they are only ever added, with defaults. (Those of a prompt ROSE refuses.) Records are written
in transactions, so read with isolation.level=read_committed. Of a key, `{field}` is what the record has there, and of
`[a|b]` there is one or none. Topics are created by `rose topics create` alone."""

TRACEPARENT = (
    "W3C trace context, on records of a trajectory. The trace is the trajectory: BLAKE2b of its id with a digest of 16 "
    "bytes, which is not the beginning of a longer digest."
)

DEAD_LETTER = "DeadLetter"

HEADERS = {
    REASON: "Why it could not be used.",
    TOPIC: "Where it lay, with the namespace.",
    PARTITION: "Its partition there, in decimal digits.",
    OFFSET: "Its offset there, in decimal digits.",
    KEY: "The key that it had there, if it had one.",
    SENT_BACK: "There once it was sent back; its value is nothing.",
}
"""Headers of a dead letter, with their descriptions."""

WITHIN = (WeightIndex,)
"""Structs inside byte strings of records, which are no records; their docstrings say where they occur."""

OPERATIONS: dict[str, tuple[str, str, str]] = {
    "submitPrompt": ("receive", PROMPTS.name, "ROSE opens a group of trajectories for every prompt."),
    "finishSample": ("send", SAMPLES.name, "ROSE tells of a trajectory that has ended, with all its tokens."),
    "settleSample": ("send", OUTCOMES.name, "ROSE says once of each trajectory what became of it."),
    "refusePrompt": ("send", PROMPTS.dead_letters, "ROSE gives back what was no prompt, as it came, with the reason."),
}
"""The operations for other programs: action from the side of ROSE, topic, summary."""


def print_asyncapi(common: Common) -> None:
    """`rose topics asyncapi`: prints the AsyncAPI document."""
    sys.stdout.write(render_document(asyncapi(load(common))))


def print_prompt_schema() -> None:
    """`rose topics prompt-schema`: prints the JSON Schema of a prompt."""
    sys.stdout.write(render_document(prompt_schema()))


def render_document(document: Schema) -> str:
    """Return the document as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def prompt_schema() -> Schema:
    """Return the JSON Schema of a prompt as JSON. `docs/producers.md` has the rules that a schema cannot express."""
    found = definitions([Prompt], ref=lambda name: f"#/$defs/{name}")
    for schema in found.values():
        schema["additionalProperties"] = False  # for producers; a prompt in a group's record may have more
    return {"$schema": DIALECT, **found.pop(Prompt.__name__), "$defs": found}


def asyncapi(config: Config) -> Schema:
    """Return the AsyncAPI document for this configuration: namespace, partitions, retention and replication factor."""
    kinds = definitions((*RECORDS, *WITHIN), ref=lambda name: f"#/components/schemas/{name}")
    return {
        "asyncapi": "3.1.0",
        "info": {"title": "ROSE", "version": "1", "description": " ".join(ABOUT.split())},
        "defaultContentType": MSGPACK,
        "channels": {topic.name: _channel(topic, config) for topic in CATALOG},
        "operations": {
            name: {"action": action, "channel": {"$ref": f"#/channels/{topic}"}, "summary": summary}
            for name, (action, topic, summary) in OPERATIONS.items()
        },
        "components": {
            "messages": {name: message for topic in RECORD_TOPICS for name, message in _messages(topic).items()}
            | {DEAD_LETTER: _dead_letter()},
            "schemas": dict(sorted(kinds.items())),
        },
    }


def _channel(topic: Topic, config: Config) -> Schema:
    settings = {
        name: int(value) if name in NUMBERS else value.split(",") if name == "cleanup.policy" else value
        for name, value in expected_settings(topic, config.retention).items()
    }
    address = f"{config.settings.broker.namespace}{topic.name}"
    return {
        "address": address,
        "summary": f"Key: {topic.key}."
        + (f" Of tombstones alone: {', '.join(topic.marker_keys)}." if topic.marker_keys else ""),
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in _names(topic)},
        "bindings": {
            "kafka": {
                "topic": address,
                "partitions": config.partitions.count_of(topic.partition_setting),
                "replicas": config.settings.topics.replication_factor,
                "topicConfiguration": settings,
                **BINDING,
            }
        },
    }


def _names(topic: Topic) -> list[str]:
    return [DEAD_LETTER] if topic.record is None else list(_messages(topic))


def _messages(topic: Topic) -> dict[str, Schema]:
    record = topic.record
    assert record is not None
    found = {record.__name__: _message(record, topic, MSGPACK)}
    if record is Prompt:
        found[f"{record.__name__}Json"] = _message(record, topic, JSON)
    return found


def _message(record: type[Record], topic: Topic, content: str) -> Schema:
    summary = inspect.cleandoc(record.__doc__ or "").partition("\n\n")[0]
    headers: dict[str, Any] = {
        SCHEMA_HEADER: {"type": "string", "default": record.SCHEMA, "pattern": f"^{record.SCHEMA.partition('/')[0]}/"},
        TRACE_HEADER: {"type": "string", "description": TRACEPARENT},
    }
    if record is WeightManifest:
        headers[SIGNATURE_HEADER] = {
            "type": "string",
            "format": "binary",
            "description": "Ed25519 signature of the value's bytes, where keys are used: 64 bytes.",
        }
    return {
        "name": record.SCHEMA,
        "summary": " ".join(summary.split()),
        "contentType": content,
        "headers": {"type": "object", "properties": headers},
        "payload": {"$ref": f"#/components/schemas/{record.__name__}"},
        "bindings": {"kafka": {"key": {"type": "string", "description": topic.key}, **BINDING}},
    }


def _dead_letter() -> Schema:
    return {
        "name": "dead-letter",
        "summary": "A message that could not be used, as it came: its bytes and its own headers, with why and where.",
        "contentType": "application/octet-stream",
        "headers": {
            "type": "object",
            "required": list(ORIGIN),
            "properties": {name: {"type": "string", "description": text} for name, text in HEADERS.items()},
        },
        "payload": {"type": "string", "format": "binary"},
        "bindings": {"kafka": {"key": {"type": "string", "description": DEAD_LETTERS[0].key}, **BINDING}},
    }
