"""Descriptions of ROSE's topics: AsyncAPI 3.1 of all topics, and JSON Schema of a prompt.

Keeps true
- Both are derived from `topics/catalog.py` and the record types; nothing is written down a second time. Bounds,
  patterns and defaults are those of the types; descriptions are the docstrings under the fields.
- Only keywords that draft-07 and 2020-12 have in common are used, and `items` of draft-07 for structs that are arrays,
  which no record in JSON has. Other arrays of fixed length have no schema, because they could not grow at their end.
- Byte strings are `{"type": "string", "format": "binary"}` with lengths in bytes; in MessagePack they are `bin`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

from rose.pipeline.config.load import Config
from rose.pipeline.config.settings import class_docstring, field_docs
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.weights import SIGNATURE_HEADER, WeightIndex, WeightManifest
from rose.schemas.wire import RECORDS, SCHEMA_HEADER, TRACE_HEADER
from rose.topics.admin import expected_settings
from rose.topics.catalog import CATALOG, DEAD_LETTERS, OUTCOMES, PROMPTS, RECORD_TOPICS, SAMPLES, Topic
from rose.topics.dead_letters import KEY, OFFSET, ORIGIN, PARTITION, REASON, SENT_BACK, TOPIC

Schema = dict[str, Any]

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
    TOPIC: "Topic of the message, with the namespace.",
    PARTITION: "Partition of the message, in decimal digits.",
    OFFSET: "Offset of the message, in decimal digits.",
    KEY: "Key of the message, if it had a key.",
    SENT_BACK: "Present once the dead letter was sent back; the value is empty.",
}
"""Headers of a dead letter, with their descriptions."""

WITHIN = (WeightIndex,)
"""Structs inside byte strings of records, which are no records; their docstrings say where they occur."""

OPERATIONS: dict[str, tuple[str, str, str]] = {
    "submitPrompt": ("receive", PROMPTS.name, "ROSE opens a group of trajectories for every prompt."),
    "finishSample": ("send", SAMPLES.name, "ROSE writes every trajectory that has ended, with all its tokens."),
    "settleSample": ("send", OUTCOMES.name, "ROSE writes one outcome for each trajectory."),
    "refusePrompt": (
        "send",
        PROMPTS.dead_letters,
        "ROSE returns an invalid prompt as it came, with the reason.",
    ),
}
"""The operations for other programs: action from the side of ROSE, topic, summary."""


def render_document(document: Schema) -> str:
    """Return the document as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def prompt_schema() -> Schema:
    """Return the JSON Schema of a prompt as JSON.

    `docs/guides/producers.md` has the rules that a schema cannot express.
    """
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
    names = [DEAD_LETTER] if topic.record is None else _messages(topic)
    return {
        "address": address,
        "summary": f"Key: {topic.key}."
        + (f" Of tombstones alone: {', '.join(topic.marker_keys)}." if topic.marker_keys else ""),
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
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


def _messages(topic: Topic) -> dict[str, Schema]:
    record = topic.record
    assert record is not None
    found = {record.__name__: _message(record, topic, MSGPACK)}
    if record is Prompt:
        found[f"{record.__name__}Json"] = _message(record, topic, JSON)
    return found


def _message(record: type[Record], topic: Topic, content: str) -> Schema:
    summary = class_docstring(record).partition("\n\n")[0]
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


END_OF_TEXT = r"\Z"
"""End of text in Python's patterns; JSON Schema uses `$`."""


def definitions(records: Iterable[type], *, ref: Callable[[str], str]) -> dict[str, Schema]:
    """Return the schemas of these structs, and of all structs and enumerations inside them, by name.

    `ref` makes a reference from a name. Raises TypeError for a field type without a schema.
    """
    found: dict[str, Schema] = {}
    waiting: list[types.Type] = [types.type_info(record) for record in records]
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, types.StructType | types.EnumType) and kind.cls.__name__ not in found:
            found[kind.cls.__name__] = _declared(kind, ref)
            if isinstance(kind, types.StructType):
                waiting += [field.type for field in kind.fields]
        waiting += _within(kind)
    return found


def _within(kind: types.Type) -> list[types.Type]:
    match kind:
        case types.Metadata():
            return [kind.type]
        case types.UnionType():
            return list(kind.types)
        case types.VarTupleType():
            return [kind.item_type]
        case types.DictType():
            return [kind.key_type, kind.value_type]
    return []


def _declared(kind: types.StructType | types.EnumType, ref: Callable[[str], str]) -> Schema:
    sentences = field_docs(kind.cls)
    named: Schema = {"title": kind.cls.__name__}
    if docstring := class_docstring(kind.cls):
        named["description"] = " ".join(docstring.split())
    if isinstance(kind, types.EnumType):
        members = " ".join(f"`{each.value}`: {sentences[each.name]}" for each in kind.cls if each.name in sentences)
        whole = " ".join(filter(None, (named.get("description"), members)))
        return named | ({"description": whole} if whole else {}) | {"enum": [each.value for each in kind.cls]}
    fields = {field.encode_name: _field(field, sentences.get(field.name, ""), ref) for field in kind.fields}
    required = [field.encode_name for field in kind.fields if field.required]
    if kind.array_like:
        places = [{"title": name, **schema} for name, schema in fields.items()]
        return named | {"type": "array", "items": places, "minItems": len(required)}
    return named | {"type": "object", "required": required, "properties": fields}


def _field(field: types.Field, sentence: str, ref: Callable[[str], str]) -> Schema:
    own = _schema(field.type, ref)
    schema: Schema = {}
    if text := " ".join(filter(None, (sentence, own.pop("description", "")))):
        schema["description"] = text
    for default in _default(field):
        schema["default"] = default
    if "$ref" in own and schema:  # keywords next to a reference are ignored
        return {"allOf": [own], **schema}
    return own | schema


def _default(field: types.Field) -> Iterator[Any]:
    """Yield the default of the field if it has one."""
    if field.default is not msgspec.NODEFAULT:
        yield msgspec.to_builtins(field.default)
    elif field.default_factory is not msgspec.NODEFAULT:
        yield msgspec.to_builtins(field.default_factory())


def _schema(kind: types.Type, ref: Callable[[str], str]) -> Schema:
    match kind:
        case types.Metadata(type=types.RawType(), extra={"record": str(name)}):
            return {"$ref": ref(name)}
        case types.Metadata():
            return _schema(kind.type, ref) | (kind.extra_json_schema or {})
        case types.IntType() | types.FloatType():
            named = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
            bounds = {word: getattr(kind, bound) for bound, word in named.items() if getattr(kind, bound) is not None}
            return {"type": "integer" if isinstance(kind, types.IntType) else "number", **bounds}
        case types.StrType():
            pattern = {} if kind.pattern is None else {"pattern": kind.pattern.replace(END_OF_TEXT, "$")}
            return {"type": "string", **pattern, **_length(kind, "Length")}
        case types.BytesType():
            return {"type": "string", "format": "binary", **_length(kind, "Length")}
        case types.BoolType():
            return {"type": "boolean"}
        case types.NoneType():
            return {"type": "null"}
        case types.AnyType():
            return {}
        case types.UnionType():
            return {"anyOf": [_schema(each, ref) for each in kind.types]}
        case types.VarTupleType():
            return {"type": "array", "items": _schema(kind.item_type, ref), **_length(kind, "Items")}
        case types.DictType():
            keys = _length(kind.key_type, "Length") if isinstance(kind.key_type, types.StrType) else {}
            values = _schema(kind.value_type, ref)
            names = ({"propertyNames": keys} if keys else {}) | ({"additionalProperties": values} if values else {})
            return {"type": "object", **names, **_length(kind, "Properties")}
        case types.StructType() | types.EnumType():
            return {"$ref": ref(kind.cls.__name__)}
    raise TypeError(f"a record has a field of {kind}, which has no schema here")


def _length(kind: Any, of: str) -> Schema:
    named = {f"min{of}": kind.min_length, f"max{of}": kind.max_length}
    return {word: bound for word, bound in named.items() if bound is not None}
