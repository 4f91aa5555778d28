"""Dead letters read back: what could not be used, as it came, with why and where it lay; and sent back, mended.

Keeps true
- One that was written twice is handed out once.
- What is sent back and the note that it was are one transaction.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from confluent_kafka import OFFSET_BEGINNING

from topics.catalog import Topic
from topics.messages import read_messages
from topics.records import Raw, Spoiled
from topics.settings import BusSettings
from topics.writer import ORIGIN_HEADERS, Writer

NOWHERE = -1
"""Partition and offset of a letter that somebody else wrote and that does not say where it comes from."""

NUMBER_DIGITS = 19
"""Of the largest offset; what is longer is none, and Python takes no number of thousands of digits."""

SENT_BACK = "sent-back"
"""The header of a letter's newest copy once its message was sent back; its value is nothing."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that could not be used."""

    topic: Topic
    partition: int
    """Where it lay in its own topic."""
    offset: int
    raw: Raw
    """As it came, under the key that it had there."""
    reason: str
    buried_at: float
    """Unix seconds."""
    sent_back_at: float | None = None
    """Unix seconds; None: it never was."""

    @property
    def place(self) -> str:
        """`topic/partition/offset`, without a namespace."""
        return f"{self.topic.name}/{self.partition}/{self.offset}"


def read_letters(settings: BusSettings, *topics: Topic, client_id: str = "rose-letters") -> Iterator[Letter]:
    """Every committed dead letter of these topics, oldest first. Raises TopicMissing or BusError."""
    names = {f"{settings.namespace}{topic.dead_letters}": topic for topic in topics}
    known: dict[tuple[Topic, int, int], Letter] = {}
    of_nowhere: list[Letter] = []
    begins = {(name, 0): OFFSET_BEGINNING for name in names}
    for (name, _), _, raw, stamp in read_messages(settings, begins, client_id=client_id):
        letter = _letter(names[name], raw, stamp)
        place = letter.topic, letter.partition, letter.offset
        if letter.partition == NOWHERE:
            of_nowhere.append(letter)
        else:
            first = known.setdefault(place, letter)
            known[place] = replace(first, sent_back_at=letter.sent_back_at or first.sent_back_at)
    yield from sorted([*known.values(), *of_nowhere], key=lambda letter: letter.buried_at)


def buried(settings: BusSettings, topic: Topic, *, client_id: str = "rose-letters") -> set[tuple[int, int]]:
    """Partition and offset of every message of the topic that is a dead letter. Raises TopicMissing or BusError."""
    return {(letter.partition, letter.offset) for letter in read_letters(settings, topic, client_id=client_id)}


def send_back(settings: BusSettings, letter: Letter, mended: Raw, *, partition: int) -> None:
    """Write this message to the letter's topic, under its own key, and note that on the letter. Raises BusError."""
    writer = Writer(settings, "rose-letters", transactional_id="letters")
    writer.begin()
    key = (mended.key or b"").decode(errors="replace")
    writer.forward(letter.topic, mended, partition=partition, key=key)
    noted = letter.raw._replace(headers=(*letter.raw.headers, (SENT_BACK, b"")))
    writer.dead_letter(Spoiled(letter.topic, letter.partition, letter.offset, noted, letter.reason), letter.reason)
    writer.commit()


def _letter(topic: Topic, found: Raw, stamp: float) -> Letter:
    own = (*ORIGIN_HEADERS, SENT_BACK)
    return Letter(
        topic=topic,
        partition=_number(found.header("partition")),
        offset=_number(found.header("offset")),
        raw=Raw(found.header("key") or None, found.value, tuple(each for each in found.headers if each[0] not in own)),
        reason=found.header("exception").decode(errors="replace"),
        buried_at=stamp,
        sent_back_at=stamp if any(name == SENT_BACK for name, _ in found.headers) else None,
    )


def _number(header: bytes) -> int:
    return int(header) if header.isdigit() and len(header) <= NUMBER_DIGITS else NOWHERE
