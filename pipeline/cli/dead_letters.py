"""`rose dlq`: lists dead letters, shows them, and sends them back to their topics, edited or unchanged.

Keeps true
- A message is not sent back if it is known here that it would be refused again: bytes that are no record of the topic,
  a prompt whose group id is taken, an environment that no worker has, sampling that the trainer cannot use.
- A message is sent back under its original key, to the partition where its readers expect it: a prompt goes to the home
  of its group.
- An edited message carries the schema header of its topic, whatever schema header the dead letter had.
"""

import base64
import json
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from rose.pipeline.clock import format_utc as moment
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log
from rose.pipeline.replay.records import find_group
from rose.pipeline.terminal import print_line
from rose.schemas.errors import RecordError, UsageError
from rose.schemas.prompts import Prompt, sampling_error
from rose.schemas.record import Record
from rose.schemas.wire import SCHEMA_HEADER, decode, reject_duplicate_keys
from rose.topics.acl import OPERATOR, VIEW, connect_as
from rose.topics.catalog import DEAD_LETTER_SOURCES, PROMPTS, Topic, home_partition
from rose.topics.dead_letters import UNKNOWN_ORIGIN, DeadLetter, read_dead_letter_infos, read_dead_letters
from rose.topics.reader import Reader
from rose.topics.records import RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import resend

SHOWN_BYTES = 4_096
"""Maximum number of bytes that are shown of a value that is not a record."""

UNENCODABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors that msgspec raises for values without a form in Python, JSON or MessagePack, or nested too deep."""


class DeadLetterRefused(UsageError):
    """The message would be refused again."""


def list_dead_letters(common: Common, topic: str | None) -> None:
    """`rose dlq list`: prints one line for each dead letter, of one topic or of all topics."""
    with readable_log(load(common)) as settings:
        connect_as(settings, VIEW)
        infos = read_dead_letter_infos(settings, *_topics(topic))
    for letter in infos:
        key = (letter.key or b"").decode(errors="replace")
        again = f"  (sent back {moment(letter.sent_back_at)})" if letter.sent_back_at is not None else ""
        reason = " ".join(letter.reason.split())
        print_line(f"{letter.place}  {moment(letter.dead_lettered_at)}  {reason}  key {key or '-'}{again}")
    print_line(f"{len(infos)} dead letters{f' of {topic}' if topic else ''}")


def show_dead_letter(common: Common, place: str) -> None:
    """`rose dlq show`: prints the origin, the reason, the headers and the value of one dead letter."""
    with readable_log(load(common)) as settings:
        connect_as(settings, VIEW)
        letter = _find(settings, place)
    value = letter.raw.value
    print_line(f"place    {letter.place}")
    print_line(f"buried   {moment(letter.dead_lettered_at)}")
    if letter.sent_back_at is not None:
        print_line(f"sent     back to its topic {moment(letter.sent_back_at)}")
    print_line(f"because  {letter.reason}")
    print_line(f"key      {_bytes(letter.raw.key)}")
    for name, held in letter.raw.headers:
        print_line(f"header   {name} = {_bytes(held)}")
    print_line(f"value    {'none' if value is None else f'{len(value)} bytes'}")
    print_line(show_value(letter))


def retry_dead_letter(
    common: Common, place: str, edit: Path | None, changes: list[str] | None, *, again: bool = False
) -> None:
    """`rose dlq retry`: sends one dead letter back. `again` allows this for a dead letter that was sent back before.

    Raises DeadLetterRefused if the message would be refused again, UsageError if the dead letter was sent back before
    or has no known origin, or if an argument is wrong.
    """
    with readable_log(config := load(common)) as settings:
        connect_as(settings, OPERATOR)
        letter = _find(settings, place)
        if letter.partition == UNKNOWN_ORIGIN:
            raise UsageError(f"{place} does not say where its message lay, so nothing can note that it was sent back")
        if letter.sent_back_at is not None and not again:
            raise UsageError(f"{place} was sent back {moment(letter.sent_back_at)}: --again sends it once more")
        raw = edited_message(letter, edit, changes or [])
        record, partition = _checked(letter, raw), letter.partition
        if isinstance(record, Prompt):
            _check_prompt(settings, config, record)
            with closing(Reader(settings, "rose-letters")) as reader:
                partition = home_partition(record.group_id, reader.partition_count(PROMPTS))
            raw = raw._replace(key=raw.key or record.group_id.encode())
        resend(settings, letter, raw, partition=partition)
    print_line(f"{place} was sent back to {letter.topic.name} partition {partition}")


def edited_message(letter: DeadLetter, edit: Path | None, changes: list[str]) -> RawMessage:
    """Return the message to send: the original, the bytes of the file `edit`, or the original with fields set.

    A file that holds a JSON object is the record as `rose dlq show` prints it, with bytes in base64. Fields that the
    schema does not know are kept. Raises UsageError for a file that cannot be read and for a change that is not
    FIELD=VALUE, DeadLetterRefused for a record that cannot be encoded.
    """
    if edit is None and not changes:
        return letter.raw
    value = letter.raw.value or b""
    if edit is not None:
        try:
            value = edit.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {edit}: {error.strerror}") from None
        value = _from_json(letter, value)
    if changes:
        value = _with_fields(changes, letter, value)
    schema = SCHEMA_HEADER, _record(letter.topic).SCHEMA.encode()
    others = (header for header in letter.raw.headers if header[0] != SCHEMA_HEADER)
    return letter.raw._replace(value=value, headers=(schema, *others))


def _with_fields(changes: list[str], letter: DeadLetter, value: bytes) -> bytes:
    """Return the record's bytes with the fields of `changes` (FIELD=VALUE) set."""
    fields = _fields(value)
    if fields is None:
        raise UsageError(f"{letter.place} holds no fields that could be set: send mended bytes by --edit FILE")
    known = {field.encode_name for field in msgspec.structs.fields(_record(letter.topic))}
    for change in changes:
        name, equals, value_text = change.partition("=")
        if not equals or name not in known:
            raise UsageError(f"--field {change}: write it as FIELD=VALUE; the fields are {', '.join(sorted(known))}")
        fields[name] = _from_text(value_text)
    try:
        return msgspec.msgpack.encode(fields)
    except UNENCODABLE as error:
        raise DeadLetterRefused(f"{letter.place} cannot be written: {error}") from None


def _checked(letter: DeadLetter, raw: RawMessage) -> Record:
    try:
        return decode(_record(letter.topic), raw.value or b"", raw.headers)
    except RecordError as error:
        raise DeadLetterRefused(f"{letter.place} would be refused again: {error}") from None


def _check_prompt(settings: BusSettings, config: Config, prompt: Prompt) -> None:
    if prompt.environment not in config.environments:
        raise DeadLetterRefused(
            f"group {prompt.group_id} would be refused again: the workers of this configuration run "
            f"{', '.join(config.environments)}, not {prompt.environment}"
        )
    if reason := sampling_error(prompt.sampling):
        raise DeadLetterRefused(f"group {prompt.group_id} would be refused again: {reason}")
    if find_group(settings, prompt.group_id).opened:
        raise DeadLetterRefused(
            f"group {prompt.group_id} would be refused again: its id is taken; give it one of its own "
            "by --field group_id=ID"
        )


def _find(settings: BusSettings, place: str) -> DeadLetter:
    """Return the dead letter with this place. Raises UsageError if there is none."""
    known = any(place.startswith(f"{topic.name}/") for topic in DEAD_LETTER_SOURCES)
    name, _, rest = (place if known else place.removeprefix(settings.namespace)).partition("/")
    there = read_dead_letters(settings, *_topics(name), selects=lambda letter: letter.place == f"{name}/{rest}")
    if not there:
        raise UsageError(f"no dead letter lay at {place}: `rose dlq list` names their places")
    return there[0]


def _topics(name: str | None) -> tuple[Topic, ...]:
    found = tuple(topic for topic in DEAD_LETTER_SOURCES if name is None or topic.name == name)
    if not found:
        raise UsageError(
            f"there is no topic {name}; there are {', '.join(topic.name for topic in DEAD_LETTER_SOURCES)}"
        )
    return found


def _record(topic: Topic) -> type[Record]:
    assert topic.record is not None
    return topic.record


def _from_json(letter: DeadLetter, data: bytes) -> bytes:
    topic, record = letter.topic, _record(letter.topic)
    if topic is PROMPTS or not data.lstrip().startswith(b"{"):
        return data.strip() if topic is PROMPTS else data
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(record)}
    came = _fields(letter.raw.value or b"") or {}
    try:
        edited = msgspec.json.decode(data)
        json.loads(data, object_pairs_hook=reject_duplicate_keys)
        new = {
            name: msgspec.convert(edited[name], kinds[name]) for name in edited.keys() & (kinds.keys() - came.keys())
        }
        new = msgspec.to_builtins(new, builtin_types=(bytes,))
        return msgspec.msgpack.encode(
            {name: new.get(name, _merge_edit(came.get(name), edited[name])) for name in edited}
        )
    except (*UNENCODABLE, UnicodeDecodeError) as error:
        raise DeadLetterRefused(f"the file is no {record.SCHEMA}: {error}") from None


def _merge_edit(original: Any, edited: Any) -> Any:
    """Return the edited value, with base64 text decoded where the original holds bytes.

    Raises ValueError if the text is not base64.
    """
    if isinstance(original, dict) and isinstance(edited, dict):
        return {name: _merge_edit(original.get(name), value) for name, value in edited.items()}
    if isinstance(original, list) and isinstance(edited, list) and len(original) == len(edited):
        return [_merge_edit(*pair) for pair in zip(original, edited, strict=True)]
    if isinstance(original, bytes) and isinstance(edited, str):
        return base64.b64decode(edited, validate=True)
    return edited


def _from_text(text: str) -> Any:
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    try:
        json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except ValueError as error:
        raise UsageError(f"--field: {error}") from None
    return decoded


def _fields(value: bytes) -> dict[str, Any] | None:
    """Return the record's fields as plain values; None if the bytes cannot be decoded or are not a map."""
    try:
        decoded = msgspec.json.decode(value) if value[:1] == b"{" else msgspec.msgpack.decode(value)
    except UNENCODABLE:
        return None
    return decoded if isinstance(decoded, dict) else None


def show_value(letter: DeadLetter) -> str:
    """Return the value in readable form: the fields as JSON, else text, else hexadecimal."""
    value = letter.raw.value
    if value is None:
        return ""
    fields = _fields(value)
    if fields is not None:
        with suppress(*UNENCODABLE):
            return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
    more = f"\n... {len(value) - SHOWN_BYTES} bytes more" if len(value) > SHOWN_BYTES else ""
    return _bytes(value[:SHOWN_BYTES]) + more


def _bytes(value: bytes | None) -> str:
    """Return printable text unchanged, other bytes in hexadecimal."""
    if value is None:
        return "none"
    text = value.decode(errors="replace")
    return text if "�" not in text and all(each.isprintable() or each in "\n\t" for each in text) else value.hex()
