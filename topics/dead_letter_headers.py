"""What is written on a dead letter beside its message: why it is one, and where the message lay.

Keeps true
- A message's own headers stay, whatever they are called: those written here have a prefix of their own.
- What a message brings under that prefix was written on another letter, which somebody sent on whole. It is left out,
  or it would be said of this one.
- Of a message that no topic would take unless it is compressed, a letter is the beginning, and says so.

Pure.
"""

from rose.topics.catalog import MAX_MESSAGE_BYTES
from rose.topics.records import Envelope, InvalidMessage, RawMessage

HEADER_PREFIX = "rose-letter-"
"""What the headers begin with that are of the letter, not of the message."""

REASON = f"{HEADER_PREFIX}reason"
TOPIC = f"{HEADER_PREFIX}topic"
"""Under the name that the broker has for it."""
PARTITION = f"{HEADER_PREFIX}partition"
OFFSET = f"{HEADER_PREFIX}offset"
KEY = f"{HEADER_PREFIX}key"
"""Of the message, where it lay; its place is the letter's. Left out of one that had none."""

ORIGIN = (REASON, TOPIC, PARTITION, OFFSET)
"""What every letter says."""

SENT_BACK = f"{HEADER_PREFIX}sent-back"
"""On a letter's newest copy once its message was sent back; its value is nothing."""

MAX_REASON_CHARACTERS = 1_000
"""What a letter says of why; the rest is cut off."""

MAX_VALUE_BYTES = 512 * 1024
"""Of the value of a message that is too large for a letter, so much is in it; of its key KEY_BYTES are."""

MAX_KEY_BYTES = 1024


def to_dead_letter(
    message: Envelope | InvalidMessage, reason: str, *, topic: str, sent_back: bool = False
) -> RawMessage:
    """The letter of this message. Its key is the message's place, so that the same one twice counts once."""
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
    """The message that it holds, under the key that it had."""
    own = tuple(header for header in letter.headers if not header[0].startswith(HEADER_PREFIX))
    return RawMessage(dict(letter.headers).get(KEY), letter.value, own)


def _truncated(raw: RawMessage) -> RawMessage:
    """What a letter can hold of a message that came compressed: topics limit the bytes that travel."""
    key, value = raw.key, raw.value
    return RawMessage(None if key is None else key[:MAX_KEY_BYTES], None if value is None else value[:MAX_VALUE_BYTES])
