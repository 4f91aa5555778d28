"""Records to bytes and back.

Keeps true
- The wire is plain MessagePack: any implementation reads it.
- Every decoded value is checked: a type, length or range that the record does not allow is a RecordError.
- A record that would not decode is not encoded: the writer gets the error that a reader would get.
- The header `rose-schema` names the record; bytes under another name are refused.
- A prompt has no unknown field: such a field is misspelt, or needs a newer ROSE.
- A prompt has no repeated key: a decoder would drop one of the values without an error.
- Only a Prompt may also be JSON, which its first byte shows: MessagePack maps never begin with `{`.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import msgpack
import msgspec

from rose.schemas.cells import CellSummary
from rose.schemas.errors import RecordError
from rose.schemas.evaluations import EvaluationResult
from rose.schemas.grants import CapacityGrant
from rose.schemas.heartbeats import RoleBegun, SlackHeartbeat
from rose.schemas.journal import CoreJournal
from rose.schemas.limits import MAX_NESTING
from rose.schemas.progress import EnvSnapshot, Group, SettleRequest, TrajectoryProgress
from rose.schemas.prompts import Prompt, PromptSampling
from rose.schemas.record import Record
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.trace_context import span_of, traceparent
from rose.schemas.turns import TurnDispatch, TurnRequest, TurnResult
from rose.schemas.weights import WeightChunk, WeightManifest

RECORDS: tuple[type[Record], ...] = (
    Prompt,
    TurnRequest,
    TurnDispatch,
    TurnResult,
    SlackHeartbeat,
    CapacityGrant,
    CellSummary,
    Sample,
    SampleOutcome,
    Group,
    TrajectoryProgress,
    EnvSnapshot,
    SettleRequest,
    WeightManifest,
    WeightChunk,
    RoleBegun,
    CoreJournal,
    EvaluationResult,
)
"""Every record type that is written to a topic."""

SCHEMA_HEADER = "rose-schema"
TRACE_HEADER = "traceparent"

R = TypeVar("R", bound=Record)
Headers = Iterable[tuple[str, bytes | str | None]]

ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Matches in JSON: a backslash, a surrogate pair, or (the group) half of a pair."""

MSGPACK_MAPS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
"""First bytes of a MessagePack map."""

NO_OBJECT = "it does not begin with {: a prompt is one JSON object"

NAME_CHARACTERS = 64
"""Most characters of an unknown name in the sentence that says so."""

_encoder = msgspec.msgpack.Encoder()

_untyped_fields: dict[type[Record], Callable[[Any], object]] = {
    Prompt: lambda prompt: prompt.arguments,
    Group: lambda group: group.prompt and group.prompt.arguments,
    Sample: lambda sample: sample.info,
}
"""Return the part of a record that holds values of any type."""

_unpack = partial(msgpack.unpackb, strict_map_key=False, object_pairs_hook=lambda pairs: [*chain.from_iterable(pairs)])
"""Decode each map to a list of its keys and values, so that repeated keys stay; msgspec keeps only the last value."""

_names_in_json = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_names_in_msgpack = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
"""Decode the names of a map, without decoding the values."""

_names: dict[type[msgspec.Struct], set[str]] = {
    struct: {field.encode_name for field in msgspec.structs.fields(struct)} for struct in (Prompt, PromptSampling)
}

_decoders: dict[type[Record], msgspec.msgpack.Decoder[Any]] = {
    record: msgspec.msgpack.Decoder(record) for record in RECORDS
}


def encode(record: Record) -> bytes:
    """Return the record's bytes.

    Raises RecordError if a reader would refuse them: a size, a range, a value of no type.
    """
    try:
        wire = _encoder.encode(record)
        _check_size(record, wire)
        read = _decoders[type(record)].decode(wire)
        _check_field_bounds(record if _same_request(record, read) else read)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"no {record.SCHEMA} can be written of this: {error}") from error
    return wire


@dataclass(frozen=True, slots=True)
class EncodedRecord(Generic[R]):
    """A record with its bytes, so that a record that was encoded to be measured or signed is not encoded again."""

    record: R
    wire: bytes


def encoded(record: R) -> EncodedRecord[R]:
    """The record with its bytes. Raises RecordError if a reader would refuse the bytes."""
    return EncodedRecord(record, encode(record))


def decode(record: type[R], wire: bytes, headers: Headers = ()) -> R:
    """Return the typed record. Raises RecordError if the bytes, their size or the schema header are wrong."""
    _check_size(record, wire)
    _check_schema(record, headers)
    return _decoded(record, wire)


def parse_prompt_json(text: bytes) -> Prompt:
    """Return the prompt in a JSON text, which may be longer than the encoded record. Raises RecordError."""
    if text[:1] != b"{":
        raise RecordError(NO_OBJECT)
    return _decoded(Prompt, text)


def _decoded(record: type[R], wire: bytes) -> R:
    as_json = record is Prompt and wire[:1] == b"{"
    try:
        decoded: R = msgspec.json.decode(wire, type=record) if as_json else _decoders[record].decode(wire)
        if record is Prompt:
            _check_known(wire, _names_in_json if as_json else _names_in_msgpack)
        if record is TurnRequest and wire != _encoder.encode(decoded):
            msgspec.msgpack.decode(wire)  # it goes on as it came, with what is not known of it
            _check_nesting(record, _unpack(wire))
        _check_field_bounds(decoded)
        if record is Prompt:
            _check_duplicate_keys(wire, as_json=as_json)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        reason = (as_json and _lone_surrogate(wire)) or (record is Prompt and _not_an_object(wire)) or error
        raise RecordError(f"not a {record.SCHEMA}: {reason}") from error
    return decoded


def _not_an_object(wire: bytes) -> str | None:
    """Why bytes hold no prompt that are neither a JSON object nor a MessagePack map; None if they begin as one."""
    if wire[:1] == b"{" or (wire and wire[0] in MSGPACK_MAPS):
        return None
    framed = " (a first byte 00 is the framing of a schema registry's serializer: send the text without it)"
    return f"{NO_OBJECT}{framed if wire[:1] == bytes(1) else ''}"


def _lone_surrogate(text: bytes) -> str | None:
    """Where JSON has an escape that stands for no character; None if it has none."""
    half = next((found[1] for found in ESCAPES.finditer(text) if found[1]), b"").decode()
    return (
        half and f"it has {half} alone, half of a surrogate pair, which is no character: leave it out or write \\ufffd"
    )


def headers_of(record: Record, trajectory_id: str | None = None) -> list[tuple[str, bytes]]:
    """Return the headers of a record: its schema and, for a trajectory's records, the W3C trace context of its span."""
    headers: list[tuple[str, bytes]] = [(SCHEMA_HEADER, record.SCHEMA.encode())]
    if trajectory_id is not None:
        headers.append((TRACE_HEADER, traceparent(trajectory_id, span_of(record)).encode()))
    return headers


def _check_size(record: Record | type[Record], wire: bytes) -> None:
    if len(wire) > record.MAX_BYTES:
        raise RecordError(f"{record.SCHEMA} of {len(wire)} bytes is over the limit of {record.MAX_BYTES}: cut it up")


def _check_field_bounds(record: Record) -> None:
    """Check what the types of the fields do not say. Raises RecordError or ValueError."""
    if (loose := _untyped_fields.get(type(record))) is not None:
        _check_nesting(record, loose(record))
    if isinstance(record, TurnDispatch):
        record.request  # noqa: B018  (decoded here, so that later accesses cannot fail)


def _same_request(record: Record, read: Record) -> bool:
    """Whether a dispatch was decoded with the same request. Then its own `request` is checked, and stays cached."""
    if not isinstance(record, TurnDispatch) or not isinstance(read, TurnDispatch):
        return False
    return bytes(record.request_wire) == bytes(read.request_wire)


def _check_nesting(record: Record | type[Record], value: object) -> None:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        nests = [each for each in level if isinstance(each, dict | list | tuple)]  # keys of MessagePack may be lists
        if not nests:
            return
        level = [
            inner for each in nests for inner in (chain.from_iterable(each.items()) if isinstance(each, dict) else each)
        ]
    raise RecordError(f"{record.SCHEMA} holds more than {MAX_NESTING} lists and maps within one another")


def _check_known(wire: bytes, names_in: Callable[[bytes], dict[str, msgspec.Raw]]) -> None:
    values = names_in(wire)
    sampling = names_in(bytes(values["sampling"])) if "sampling" in values else {}
    for names, struct in ((values, Prompt), (sampling, PromptSampling)):
        if unknown := sorted(names.keys() - _names[struct]):
            known = ", ".join(struct.__struct_encode_fields__)
            raise RecordError(f"{struct.__name__} has no field `{unknown[0][:NAME_CHARACTERS]}`, only {known}")


def _check_duplicate_keys(wire: bytes, *, as_json: bool) -> None:
    """Raise ValueError for a map, at any level, with two values under one key."""
    if as_json:
        json.loads(wire, object_pairs_hook=reject_duplicate_keys)
    else:
        msgpack.unpackb(wire, strict_map_key=False, object_pairs_hook=reject_duplicate_keys)


def _check_schema(record: type[Record], headers: Headers) -> None:
    for name, value in headers:
        if name == SCHEMA_HEADER:
            announced = value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
            if announced.partition("/")[0] != record.SCHEMA.partition("/")[0]:
                says = f"says {announced}" if announced else "is empty"
                raise RecordError(f"header {SCHEMA_HEADER} {says}, the topic holds {record.SCHEMA}")


SHOWN_KEY_CHARACTERS = 64
"""Characters of a duplicate key that the error shows."""


def reject_duplicate_keys(pairs: Iterable[tuple[Hashable, Any]]) -> dict[Hashable, Any]:
    """Return the map of the pairs. Raises ValueError if two pairs have the same key.

    Example: `json.loads(text, object_pairs_hook=reject_duplicate_keys)`.
    """
    found: dict[Hashable, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key `{str(key)[:SHOWN_KEY_CHARACTERS]}` is there twice: leave one of them out")
        found[key] = value
    return found
