"""Dead letters read back: what could not be used, as it came, with why and where it lay; and sent back, mended.

Keeps true
- One that was written twice is handed out once.
- Who asks where they lay, how many they are or why holds none of what lay there in memory.
- What is sent back and the note that it was are one transaction.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from confluent_kafka import OFFSET_BEGINNING

from topics.asking import nothing
from topics.catalog import LETTERS_WRITER, Topic
from topics.labels import KEY, KEY_BYTES, OFFSET, PARTITION, REASON, REASON_CHARACTERS, SENT_BACK, unlabelled
from topics.messages import NamedPlace, read_messages
from topics.records import Raw, Spoiled
from topics.settings import BusSettings

NOWHERE = -1
"""Partition and offset of a letter that somebody else wrote and that does not say where it comes from."""

NUMBER_DIGITS = 19
"""Of the largest offset; what is longer is none, and Python takes no number of thousands of digits."""

AHEAD = {"fetch.message.max.bytes": 64 * 1024, "queued.max.messages.kbytes": 8 * 1024}
"""Poison unpacks to hundreds of times what it takes on the broker, and a fetch is unpacked whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burial:
    """That a message could not be used, and why: a letter without what lay there."""

    topic: Topic
    partition: int
    """Where it lay in its own topic."""
    offset: int
    key: bytes | None
    """That it had there; of a long one its beginning."""
    reason: str
    buried_at: float
    """Unix seconds."""
    sent_back_at: float | None = None
    """Unix seconds; None: it never was."""

    @property
    def place(self) -> str:
        """`topic/partition/offset`, without a namespace."""
        return f"{self.topic.name}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter(Burial):
    """A message that could not be used."""

    raw: Raw
    """As it came, under the key that it had there."""


class Buried:
    """Where the messages lay that are dead letters. It reads on from where it was, and keeps no message.

    What time has deleted since it was read is still counted.
    """

    def __init__(self, settings: BusSettings, *topics: Topic, client_id: str = "rose-letters") -> None:
        self._settings = settings
        self._client_id = client_id
        self._next = _beginnings(settings, topics)
        self._sent_back: dict[Topic, dict[tuple[int, int], bool]] = {topic: {} for topic in topics}
        """By place, whether it was sent back."""
        self._of_nowhere: Counter[Topic] = Counter()

    def read(self, meanwhile: Callable[[], None] = nothing) -> None:
        """Take in what has come. `meanwhile`: see read_messages. Raises TopicMissing or BusError."""
        names = {f"{self._settings.namespace}{topic.dead_letters}": topic for topic in self._sent_back}
        for place, offset, raw, _ in read_messages(
            self._settings, dict(self._next), client_id=self._client_id, ahead=AHEAD, meanwhile=meanwhile
        ):
            topic, where = names[place[0]], _where(raw)
            if where[0] == NOWHERE:
                self._of_nowhere[topic] += 1
            else:
                known = self._sent_back[topic]
                known[where] = known.get(where, False) or _was_sent_back(raw)
            self._next[place] = offset + 1

    def places(self, topic: Topic) -> set[tuple[int, int]]:
        """Partition and offset of every message of the topic."""
        return set(self._sent_back[topic])

    def count(self, topic: Topic) -> int:
        return len(self._sent_back[topic]) + self._of_nowhere[topic]

    def waiting(self, topic: Topic) -> int:
        """Those that were not sent back."""
        return self.count(topic) - sum(self._sent_back[topic].values())


def buried(
    settings: BusSettings,
    topic: Topic,
    *,
    client_id: str = "rose-letters",
    meanwhile: Callable[[], None] = nothing,
) -> set[tuple[int, int]]:
    """Partition and offset of every message of the topic that is a dead letter.

    `meanwhile`: see read_messages. Raises TopicMissing or BusError.
    """
    found = Buried(settings, topic, client_id=client_id)
    found.read(meanwhile)
    return found.places(topic)


def read_burials(settings: BusSettings, *topics: Topic, client_id: str = "rose-letters") -> list[Burial]:
    """Every committed dead letter of these topics without what lay there, oldest first.

    Raises TopicMissing or BusError.
    """
    return _once(_burial(*found) for found in _copies(settings, topics, client_id))


def read_letters(
    settings: BusSettings,
    *topics: Topic,
    wanted: Callable[[Letter], bool] = lambda letter: True,
    client_id: str = "rose-letters",
) -> list[Letter]:
    """The committed dead letters of these topics that are wanted, whole, oldest first.

    Raises TopicMissing or BusError.
    """
    letters = (_letter(*found) for found in _copies(settings, topics, client_id))
    return _once(letter for letter in letters if wanted(letter))


def send_back(settings: BusSettings, letter: Letter, mended: Raw, *, partition: int) -> None:
    """Write this message to the letter's topic, under its own key, and note that on the letter. Raises BusError."""
    from topics.writer import Writer  # who looks at letters writes nothing

    writer = Writer(settings, "rose-letters", transactional_id=LETTERS_WRITER)
    writer.begin()
    writer.forward(letter.topic, mended, partition=partition, key=mended.key)
    noted = Spoiled(letter.topic, letter.partition, letter.offset, letter.raw, letter.reason)
    writer.dead_letter(noted, letter.reason, sent_back=True)
    writer.commit()


B = TypeVar("B", bound=Burial)


def _once(found: Iterable[B]) -> list[B]:
    """The first copy of each, and when any of them says that it was sent back."""
    known: dict[tuple[Topic, int, int], B] = {}
    of_nowhere: list[B] = []
    for each in found:
        if each.partition == NOWHERE:
            of_nowhere.append(each)
        else:
            place = each.topic, each.partition, each.offset
            first = known.setdefault(place, each)
            known[place] = replace(first, sent_back_at=each.sent_back_at or first.sent_back_at)
    return sorted([*known.values(), *of_nowhere], key=lambda each: each.buried_at)


def _copies(settings: BusSettings, topics: Iterable[Topic], client_id: str) -> Iterator[tuple[Topic, Raw, float]]:
    """What lies in the dead letters of these topics, and when it was stamped."""
    begins = _beginnings(settings, topics)
    of = dict(zip((name for name, _ in begins), topics, strict=True))
    for (name, _), _, raw, stamp in read_messages(settings, begins, client_id=client_id, ahead=AHEAD):
        yield of[name], raw, stamp


def _beginnings(settings: BusSettings, topics: Iterable[Topic]) -> dict[NamedPlace, int]:
    return {(f"{settings.namespace}{topic.dead_letters}", 0): OFFSET_BEGINNING for topic in topics}


def _burial(topic: Topic, found: Raw, stamp: float) -> Burial:
    partition, offset = _where(found)
    return Burial(
        topic=topic,
        partition=partition,
        offset=offset,
        key=found.header(KEY)[:KEY_BYTES] or None,
        reason=found.header(REASON).decode(errors="replace")[:REASON_CHARACTERS],
        buried_at=stamp,
        sent_back_at=stamp if _was_sent_back(found) else None,
    )


def _letter(topic: Topic, found: Raw, stamp: float) -> Letter:
    told = _burial(topic, found, stamp)
    return Letter(
        topic=topic,
        partition=told.partition,
        offset=told.offset,
        key=told.key,
        reason=told.reason,
        buried_at=told.buried_at,
        sent_back_at=told.sent_back_at,
        raw=unlabelled(found),
    )


def _where(found: Raw) -> tuple[int, int]:
    """Partition and offset."""
    return _number(found.header(PARTITION)), _number(found.header(OFFSET))


def _was_sent_back(found: Raw) -> bool:
    return any(name == SENT_BACK for name, _ in found.headers)


def _number(header: bytes) -> int:
    return int(header) if header.isdigit() and len(header) <= NUMBER_DIGITS else NOWHERE
