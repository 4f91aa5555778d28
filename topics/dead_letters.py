"""Dead letters: messages that their readers refuse, with reason and origin in headers. `topics/writer.py` writes them.

Keeps true
- A message's own headers are kept: the headers of a dead letter have a prefix of their own.
- Headers with this prefix in a message come from an earlier dead letter that was forwarded whole. They are dropped,
  because they do not concern the new dead letter.
- A dead letter holds only the beginning of a message that is larger than a topic accepts without compression, and its
  reason says so.
- A dead letter that was written twice is returned once.
- Queries for origins, counts and reasons keep no message in memory.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from confluent_kafka import OFFSET_BEGINNING

from rose.topics.catalog import MAX_MESSAGE_BYTES, Topic
from rose.topics.log_reader import NamedPlace, read_messages
from rose.topics.queries import noop
from rose.topics.records import Envelope, InvalidMessage, RawMessage
from rose.topics.settings import BusSettings

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

UNKNOWN_ORIGIN = -1
"""Partition and offset of a dead letter without valid origin headers, written by another program."""

NUMBER_DIGITS = 19
"""Digits of the largest offset. A longer header is no offset, and Python refuses to parse thousands of digits."""

PREFETCH_SETTINGS = {"fetch.message.max.bytes": 64 * 1024, "queued.max.messages.kbytes": 8 * 1024}
"""Small fetches: librdkafka decompresses a fetch whole, and an invalid message may grow by a factor of hundreds."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterInfo:
    """Reason and origin of a dead letter, without its message."""

    topic: Topic
    partition: int
    """Partition of the message in its own topic."""
    offset: int
    key: bytes | None
    """Key of the message in its own topic, cut off after MAX_KEY_BYTES."""
    reason: str
    dead_lettered_at: float
    """Unix seconds."""
    sent_back_at: float | None = None
    """Unix seconds; None if it was not sent back."""

    @property
    def place(self) -> str:
        """`topic/partition/offset`, without a namespace."""
        return f"{self.topic.name}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter(DeadLetterInfo):
    """A dead letter with its message."""

    raw: RawMessage
    """The message as it came, with its own key."""


class DeadLetterIndex:
    """The origins of all dead letters of some topics, without their messages. Each `read` continues the last one.

    Dead letters that the broker has deleted since they were read still count.
    """

    def __init__(self, settings: BusSettings, *topics: Topic, client_id: str = "rose-letters") -> None:
        self._settings = settings
        self._client_id = client_id
        self._next = _start_offsets(settings, topics)
        self._sent_back: dict[Topic, dict[tuple[int, int], bool]] = {topic: {} for topic in topics}
        """Whether the dead letter was sent back, by topic and by partition and offset of the message."""
        self._of_unknown_origin: Counter[Topic] = Counter()

    def read(self, on_wait: Callable[[], None] = noop) -> None:
        """Read the new dead letters. `on_wait`: as in `read_messages`. Raises TopicMissing or BusError."""
        names = {f"{self._settings.namespace}{topic.dead_letters}": topic for topic in self._sent_back}
        for place, offset, raw, _ in read_messages(
            self._settings,
            dict(self._next),
            client_id=self._client_id,
            prefetch_settings=PREFETCH_SETTINGS,
            on_wait=on_wait,
        ):
            topic, where = names[place[0]], _origin_of(raw)
            if where[0] == UNKNOWN_ORIGIN:
                self._of_unknown_origin[topic] += 1
            else:
                known = self._sent_back[topic]
                known[where] = known.get(where, False) or _was_sent_back(raw)
            self._next[place] = offset + 1

    def places(self, topic: Topic) -> set[tuple[int, int]]:
        """Partition and offset of every message of the topic that is a dead letter."""
        return set(self._sent_back[topic])

    def count(self, topic: Topic) -> int:
        """Number of dead letters of a topic."""
        return len(self._sent_back[topic]) + self._of_unknown_origin[topic]

    def pending(self, topic: Topic) -> int:
        """Number of the topic's dead letters that were not sent back."""
        return self.count(topic) - sum(self._sent_back[topic].values())


def dead_lettered_places(
    settings: BusSettings,
    topic: Topic,
    *,
    client_id: str = "rose-letters",
    on_wait: Callable[[], None] = noop,
) -> set[tuple[int, int]]:
    """Partition and offset of every message of the topic that is a dead letter.

    `on_wait`: as in `read_messages`. Raises TopicMissing or BusError.
    """
    found = DeadLetterIndex(settings, topic, client_id=client_id)
    found.read(on_wait)
    return found.places(topic)


def read_dead_letter_infos(
    settings: BusSettings, *topics: Topic, client_id: str = "rose-letters"
) -> list[DeadLetterInfo]:
    """Every committed dead letter of these topics without its message, oldest first.

    Raises TopicMissing or BusError.
    """
    return _deduplicated(_info_of(*found) for found in _stored_copies(settings, topics, client_id))


def read_dead_letters(
    settings: BusSettings,
    *topics: Topic,
    selects: Callable[[DeadLetter], bool] = lambda letter: True,
    client_id: str = "rose-letters",
) -> list[DeadLetter]:
    """The committed dead letters of these topics that `selects` accepts, with their messages, oldest first.

    Raises TopicMissing or BusError.
    """
    letters = (_dead_letter_of(*found) for found in _stored_copies(settings, topics, client_id))
    return _deduplicated(letter for letter in letters if selects(letter))


B = TypeVar("B", bound=DeadLetterInfo)


def _deduplicated(found: Iterable[B]) -> list[B]:
    """The first copy of each dead letter, with the time at which a copy notes that it was sent back."""
    known: dict[tuple[Topic, int, int], B] = {}
    of_nowhere: list[B] = []
    for each in found:
        if each.partition == UNKNOWN_ORIGIN:
            of_nowhere.append(each)
        else:
            place = each.topic, each.partition, each.offset
            first = known.setdefault(place, each)
            known[place] = replace(first, sent_back_at=each.sent_back_at or first.sent_back_at)
    return sorted([*known.values(), *of_nowhere], key=lambda each: each.dead_lettered_at)


def _stored_copies(
    settings: BusSettings, topics: Iterable[Topic], client_id: str
) -> Iterator[tuple[Topic, RawMessage, float]]:
    """Topic, message and timestamp (unix seconds) of each committed message in the dead letter queues."""
    begins = _start_offsets(settings, topics)
    of = dict(zip((name for name, _ in begins), topics, strict=True))
    for (name, _), _, raw, stamp in read_messages(
        settings, begins, client_id=client_id, prefetch_settings=PREFETCH_SETTINGS
    ):
        yield of[name], raw, stamp


def _start_offsets(settings: BusSettings, topics: Iterable[Topic]) -> dict[NamedPlace, int]:
    return {(f"{settings.namespace}{topic.dead_letters}", 0): OFFSET_BEGINNING for topic in topics}


def _info_of(topic: Topic, found: RawMessage, stamp: float) -> DeadLetterInfo:
    partition, offset = _origin_of(found)
    return DeadLetterInfo(
        topic=topic,
        partition=partition,
        offset=offset,
        key=found.header(KEY)[:MAX_KEY_BYTES] or None,
        reason=found.header(REASON).decode(errors="replace")[:MAX_REASON_CHARACTERS],
        dead_lettered_at=stamp,
        sent_back_at=stamp if _was_sent_back(found) else None,
    )


def _dead_letter_of(topic: Topic, found: RawMessage, stamp: float) -> DeadLetter:
    info = _info_of(topic, found, stamp)
    return DeadLetter(
        topic=topic,
        partition=info.partition,
        offset=info.offset,
        key=info.key,
        reason=info.reason,
        dead_lettered_at=info.dead_lettered_at,
        sent_back_at=info.sent_back_at,
        raw=from_dead_letter(found),
    )


def _origin_of(found: RawMessage) -> tuple[int, int]:
    """Partition and offset of the original message."""
    return _number(found.header(PARTITION)), _number(found.header(OFFSET))


def _was_sent_back(found: RawMessage) -> bool:
    return any(name == SENT_BACK for name, _ in found.headers)


def _number(header: bytes) -> int:
    return int(header) if header.isdigit() and len(header) <= NUMBER_DIGITS else UNKNOWN_ORIGIN
