"""The items that a reader returns: records with their places in the log, invalid messages, ends of partitions."""

import math
from operator import methodcaller
from typing import NamedTuple

import msgspec
from confluent_kafka import Message

from rose.schemas.record import Record
from rose.topics.catalog import Topic

Place = tuple[Topic, int]
"""A topic and one of its partitions."""


RECORD_FRAMING_BYTES = 36
"""Most bytes that Kafka writes for a record in addition to its key, value and headers: lengths, offset and time."""


class RawMessage(NamedTuple):
    """A message as it came, not decoded."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def size(self) -> int:
        """Upper bound of the message's bytes on the wire without compression, with the lengths of its headers."""
        headers = sum(_framed_bytes(len(name.encode())) + _framed_bytes(len(value)) for name, value in self.headers)
        return RECORD_FRAMING_BYTES + len(self.key or b"") + len(self.value or b"") + headers

    def header(self, name: str) -> bytes:
        """The value of the last header of this name, which the last writer of the message wrote; empty if none."""
        return next((value for key, value in reversed(self.headers) if key == name), b"")


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A record with its place in the log."""

    record: Record | None
    """None is a tombstone: the key was deleted."""
    topic: Topic
    partition: int
    offset: int
    key: str
    timestamp_seconds: float
    """Timestamp of the broker or the producer, unix seconds."""
    raw: RawMessage
    stamped_by_broker: bool = False
    """Whether the timestamp is the time at which the broker appended the record."""


class InvalidMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that is no record of its topic."""

    topic: Topic
    partition: int
    offset: int
    raw: RawMessage
    reason: str
    timestamp_seconds: float = 0.0
    """Timestamp of the broker or the producer, unix seconds; 0 if it is not known."""


class EndOfPartition(msgspec.Struct, frozen=True, gc=False):
    """The reader has reached the end of the committed records in this partition."""

    topic: Topic
    partition: int
    offset: int
    """The next offset to be written. Transaction markers have offsets, too, although they are no records."""


Item = Envelope | InvalidMessage | EndOfPartition


class SkippedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that was not selected and therefore not decoded."""

    topic: Topic
    partition: int
    offset: int
    value_bytes: int


_headers_of = methodcaller("headers")
"""Used in place of `message.headers()`: Python's fast path for that call loses an error that comes with a list."""


def raw_of(message: Message) -> RawMessage:
    """The message's bytes. A header without a value has an empty value.

    If the name of a header is not valid text, or if there are more than 100,000 headers, the result has no headers: the
    client cannot return any of them.
    """
    key, value = message.key(), message.value()
    try:
        found = _headers_of(message) or ()
    except SystemError:  # a second call would return an incomplete list
        found = ()
    headers = tuple((name, _as_bytes(stored)) for name, stored in found)
    return RawMessage(None if key is None else _as_bytes(key), None if value is None else _as_bytes(value), headers)


def _as_bytes(stored: bytes | str | None) -> bytes:
    return stored.encode() if isinstance(stored, str) else stored or b""


def _framed_bytes(length: int) -> int:
    """Size of `length` bytes with their length before them, as a zigzag varint."""
    return length + max(1, math.ceil((2 * length).bit_length() / 7))
