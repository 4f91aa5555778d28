"""What reading hands out: records with their places in the log, and what lies there and is no record."""

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
"""What Kafka writes of a record beside its key, value and headers, at most: their lengths, its number and its time."""


class RawMessage(NamedTuple):
    """A message as it came."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def size(self) -> int:
        """Bytes that it takes on the wire uncompressed, at most: each header has lengths of its own there."""
        headers = sum(_framed_bytes(len(name.encode())) + _framed_bytes(len(value)) for name, value in self.headers)
        return RECORD_FRAMING_BYTES + len(self.key or b"") + len(self.value or b"") + headers

    def header(self, name: str) -> bytes:
        """The last header of this name, as the newest hand that touched the message wrote it; empty without one."""
        return next((value for key, value in reversed(self.headers) if key == name), b"")


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A record with its place in the log."""

    record: Record | None
    """None is a tombstone: the key has ended."""
    topic: Topic
    partition: int
    offset: int
    key: str
    timestamp_seconds: float
    """When the broker or the producer stamped it, unix seconds."""
    raw: RawMessage
    stamped_by_broker: bool = False
    """Whether that was the broker, when it appended the record."""


class InvalidMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that is no record of its topic."""

    topic: Topic
    partition: int
    offset: int
    raw: RawMessage
    reason: str


class EndOfPartition(msgspec.Struct, frozen=True, gc=False):
    """The reader has reached the end of what is committed in this partition."""

    topic: Topic
    partition: int
    offset: int
    """The next one to be written; what ends a transaction counts, and is no record."""


Item = Envelope | InvalidMessage | EndOfPartition


class SkippedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that was passed over, unread."""

    topic: Topic
    partition: int
    offset: int
    value_bytes: int


_headers_of = methodcaller("headers")
"""Not `message.headers()`: for that call Python takes a short cut in which an error that comes with a list is lost."""


def raw_of(message: Message) -> RawMessage:
    """The message's bytes; a header without a value is an empty one.

    Where the name of a header is no text, or there are more than 100,000, there are none: the client cannot hand out a
    single one then.
    """
    key, value = message.key(), message.value()
    try:
        found = _headers_of(message) or ()
    except SystemError:  # not to be asked again: the list that it leaves behind is not whole
        found = ()
    headers = tuple((name, _as_bytes(stored)) for name, stored in found)
    return RawMessage(None if key is None else _as_bytes(key), None if value is None else _as_bytes(value), headers)


def _as_bytes(stored: bytes | str | None) -> bytes:
    return stored.encode() if isinstance(stored, str) else stored or b""


def _framed_bytes(length: int) -> int:
    """So many bytes with their length before them, a zigzag varint."""
    return length + max(1, math.ceil((2 * length).bit_length() / 7))
