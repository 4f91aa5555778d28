"""What is written on a dead letter beside its message: why it is one, and where the message lay.

Keeps true
- A message's own headers stay, whatever they are called: those written here have a prefix of their own.
- What a message brings under that prefix was written on another letter, which somebody sent on whole. It is left out,
  or it would be said of this one.
- Of a message that no topic would take unless it is compressed, a letter is the beginning, and says so.

Pure.
"""

from topics.catalog import MAX_MESSAGE_BYTES
from topics.records import Envelope, Raw, Spoiled

PREFIX = "rose-letter-"
"""What the headers begin with that are of the letter, not of the message."""

REASON = f"{PREFIX}reason"
TOPIC = f"{PREFIX}topic"
"""Under the name that the broker has for it."""
PARTITION = f"{PREFIX}partition"
OFFSET = f"{PREFIX}offset"
KEY = f"{PREFIX}key"
"""Of the message, where it lay; its place is the letter's. Left out of one that had none."""

ORIGIN = (REASON, TOPIC, PARTITION, OFFSET)
"""What every letter says."""

SENT_BACK = f"{PREFIX}sent-back"
"""On a letter's newest copy once its message was sent back; its value is nothing."""

REASON_CHARACTERS = 1_000
"""What a letter says of why; the rest is cut off."""

BEGINNING_BYTES = 512 * 1024
"""Of the value of a message that is too large for a letter, so much is in it; of its key KEY_BYTES are."""

KEY_BYTES = 1024


def labelled(found: Envelope | Spoiled, reason: str, *, topic: str, sent_back: bool = False) -> Raw:
    """The letter of this message. Its key is the message's place, so that the same one twice counts once."""
    raw = found.raw
    if raw.size > MAX_MESSAGE_BYTES:
        reason = f"(its beginning; {raw.size} bytes lie there) {reason}"
        raw = _beginning(raw)
    said = (
        reason[:REASON_CHARACTERS].encode(errors="replace"),
        topic.encode(),
        b"%d" % found.partition,
        b"%d" % found.offset,
    )
    key = [(KEY, raw.key)] if raw.key is not None else []
    headers = (*unlabelled(raw).headers, *zip(ORIGIN, said, strict=True), *key, *[(SENT_BACK, b"")] * sent_back)
    return Raw(f"{topic}/{found.partition}/{found.offset}".encode(), raw.value, headers)


def unlabelled(letter: Raw) -> Raw:
    """The message that it holds, under the key that it had."""
    own = tuple(header for header in letter.headers if not header[0].startswith(PREFIX))
    return Raw(dict(letter.headers).get(KEY), letter.value, own)


def _beginning(raw: Raw) -> Raw:
    """What a letter can hold of a message that came compressed: topics limit the bytes that travel."""
    key, value = raw.key, raw.value
    return Raw(None if key is None else key[:KEY_BYTES], None if value is None else value[:BEGINNING_BYTES])
