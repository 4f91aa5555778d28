"""The headers of a dead letter: the reason and the origin of its message.

Keeps true
- A message's own headers are kept: the headers of a dead letter have a prefix of their own.
- Headers with this prefix in a message come from an earlier dead letter that was forwarded whole. They are dropped,
  because they do not concern the new dead letter.
- A dead letter holds only the beginning of a message that is larger than a topic accepts without compression, and its
  reason says so.

Pure.
"""

from rose.topics.catalog import MAX_MESSAGE_BYTES
from rose.topics.records import Envelope, InvalidMessage, RawMessage

HEADER_PREFIX = "rose-letter-"
"""Prefix of the headers that belong to the dead letter and not to its message."""

REASON = f"{HEADER_PREFIX}reason"
TOPIC = f"{HEADER_PREFIX}topic"
"""The topic's name on the broker."""
PARTITION = f"{HEADER_PREFIX}partition"
OFFSET = f"{HEADER_PREFIX}offset"
KEY = f"{HEADER_PREFIX}key"
"""The message's key in its own topic; the key of the dead letter is the message's place. Absent without a key."""

ORIGIN = (REASON, TOPIC, PARTITION, OFFSET)
"""Headers of every dead letter."""

SENT_BACK = f"{HEADER_PREFIX}sent-back"
"""Header, with an empty value, of a copy of the dead letter that notes that its message was sent back."""

MAX_REASON_CHARACTERS = 1_000
"""Longest reason; the rest is cut off."""

MAX_VALUE_BYTES = 512 * 1024
"""Bytes that are kept of the value of a message that is too large."""

MAX_KEY_BYTES = 1024
"""Bytes that are kept of the key of a message that is too large."""


def to_dead_letter(
    message: Envelope | InvalidMessage, reason: str, *, topic: str, sent_back: bool = False
) -> RawMessage:
    """The dead letter of this message. Its key is the message's place, so duplicates count once.

    `topic`: the topic's name on the broker. `sent_back`: whether to add the header SENT_BACK.
    """
    raw = message.raw
    if raw.size > MAX_MESSAGE_BYTES:
        reason = f"(its beginning; {raw.size} bytes lie there) {reason}"
        raw = _truncated(raw)
    reason_bytes = (
        reason[:MAX_REASON_CHARACTERS].encode(errors="replace"),
        topic.encode(),
        b"%d" % message.partition,
        b"%d" % message.offset,
    )
    key = [(KEY, raw.key)] if raw.key is not None else []
    headers = (
        *from_dead_letter(raw).headers,
        *zip(ORIGIN, reason_bytes, strict=True),
        *key,
        *[(SENT_BACK, b"")] * sent_back,
    )
    return RawMessage(f"{topic}/{message.partition}/{message.offset}".encode(), raw.value, headers)


def from_dead_letter(letter: RawMessage) -> RawMessage:
    """The original message of a dead letter, with its own key and headers."""
    own = tuple(header for header in letter.headers if not header[0].startswith(HEADER_PREFIX))
    return RawMessage(dict(letter.headers).get(KEY), letter.value, own)


def _truncated(raw: RawMessage) -> RawMessage:
    """The beginning of a message that is too large without compression: topics limit the compressed bytes only."""
    key, value = raw.key, raw.value
    return RawMessage(None if key is None else key[:MAX_KEY_BYTES], None if value is None else value[:MAX_VALUE_BYTES])
