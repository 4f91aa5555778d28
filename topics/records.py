"""What reading hands out: records with their places in the log, and what lies there and is no record."""

import math
from operator import methodcaller
from typing import NamedTuple

import msgspec
from confluent_kafka import Message

from schemas.record import Record
from topics.catalog import Topic

Place = tuple[Topic, int]
"""A topic and one of its partitions."""


RECORD_FRAMING_BYTES = 36
"""What Kafka writes of a record beside its key, value and headers, at most: their lengths, its number and its time."""


class Raw(NamedTuple):
    """A message as it came."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def size(self) -> int:
        """Bytes that it takes on the wire uncompressed, at most: each header has lengths of its own there."""
        headers = sum(_framed(len(name.encode())) + _framed(len(value)) for name, value in self.headers)
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
    raw: Raw
    by_broker: bool = False
    """Whether that was the broker, when it appended the record."""


class Spoiled(msgspec.Struct, frozen=True, gc=False):
    """A message that is no record of its topic."""

    topic: Topic
    partition: int
    offset: int
    raw: Raw
    reason: str


class EndOfPartition(msgspec.Struct, frozen=True, gc=False):
    """The reader has reached the end of what is committed in this partition."""

    topic: Topic
    partition: int
    offset: int
    """The next one to be written; what ends a transaction counts, and is no record."""


Item = Envelope | Spoiled | EndOfPartition


class Passed(msgspec.Struct, frozen=True, gc=False):
    """A message that was passed over, unread."""

    topic: Topic
    partition: int
    offset: int
    value_bytes: int


_headers_of = methodcaller("headers")
"""Not `message.headers()`: for that call Python takes a short cut in which an error that comes with a list is lost."""


def raw_of(message: Message) -> Raw:
    """The message's bytes; a header without a value is an empty one.

    Where the name of a header is no text, or there are more than 100,000, there are none: the client cannot hand out a
    single one then.
    """
    key, value = message.key(), message.value()
    try:
        found = _headers_of(message) or ()
    except SystemError:  # not to be asked again: the list that it leaves behind is not whole
        found = ()
    headers = tuple((name, _bytes(held)) for name, held in found)
    return Raw(None if key is None else _bytes(key), None if value is None else _bytes(value), headers)


def _bytes(held: bytes | str | None) -> bytes:
    return held.encode() if isinstance(held, str) else held or b""


def _framed(length: int) -> int:
    """So many bytes with their length before them, a zigzag varint."""
    return length + max(1, math.ceil((2 * length).bit_length() / 7))
