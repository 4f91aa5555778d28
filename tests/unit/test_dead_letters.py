"""Dead letters are listed without their values in memory, and undecodable dead letters can be shown."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rose.topics.dead_letters
from rose.pipeline.cli.dead_letters import edited_message, show_value
from rose.schemas.errors import UsageError
from rose.topics.catalog import PROMPTS, SAMPLES, Topic
from rose.topics.dead_letters import (
    KEY,
    OFFSET,
    PARTITION,
    REASON,
    SENT_BACK,
    DeadLetter,
    DeadLetterIndex,
    from_dead_letter,
    read_dead_letter_infos,
    read_dead_letters,
    to_dead_letter,
)
from rose.topics.records import InvalidMessage, RawMessage
from rose.topics.settings import BusSettings

SETTINGS = BusSettings("")
Copy = tuple[Topic, int, bool]
"""Topic, offset in the topic (-1 if unknown), and whether the dead letter was sent back."""

COPIES = st.lists(st.tuples(st.sampled_from([PROMPTS, SAMPLES]), st.integers(-1, 4), st.booleans()), max_size=20)


class CountedBytes(bytes):
    """Bytes whose instances in memory are counted."""

    held = 0

    def __init__(self, _: bytes) -> None:
        CountedBytes.held += 1

    def __del__(self) -> None:
        CountedBytes.held -= 1


class DeadLetterTopics:
    """The dead-letter topics, and the largest number of their values in memory during a read."""

    def __init__(self, copies: list[Copy]) -> None:
        self.stored: dict[str, list[RawMessage]] = {PROMPTS.dead_letters: [], SAMPLES.dead_letters: []}
        self.add(copies)
        self.most_held = self.read = 0
        self.before = CountedBytes.held

    def add(self, copies: list[Copy]) -> None:
        for topic, offset, sent_back in copies:
            where = () if offset < 0 else ((PARTITION, b"0"), (OFFSET, b"%d" % offset))
            headers = ((REASON, b"no prompt"), (KEY, b"k" * 5000), *where, *[(SENT_BACK, b"")] * sent_back)
            self.stored[topic.dead_letters].append(RawMessage(None, b"v", headers))

    def messages(
        self, settings: BusSettings, begins: Mapping[tuple[str, int], int], **_: object
    ) -> Iterator[tuple[tuple[str, int], int, RawMessage, float]]:
        for place, begin in begins.items():
            for offset in range(max(0, begin), len(self.stored[place[0]])):
                self.read += 1
                yield (
                    place,
                    offset,
                    self.stored[place[0]][offset]._replace(value=CountedBytes(b"v" * 100)),
                    float(offset),
                )
                self.most_held = max(self.most_held, CountedBytes.held - self.before)


@given(COPIES, COPIES)
def test_dead_letters_are_listed_without_their_values_in_memory(before: list[Copy], after: list[Copy]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dead = DeadLetterTopics(before)
        patch.setattr(rose.topics.dead_letters, "read_messages", dead.messages)
        here = DeadLetterIndex(SETTINGS, PROMPTS, SAMPLES)
        here.read()
        dead.add(after)
        here.read()
        assert dead.read == len(before) + len(after), "it reads on"
        burials = read_dead_letter_infos(SETTINGS, PROMPTS, SAMPLES)
        assert dead.most_held <= 1
        assert all(len(burial.key or b"") < 5000 for burial in burials)
        dead_letters = read_dead_letters(SETTINGS, PROMPTS, SAMPLES)
        summaries = [(each.place, each.reason, each.dead_lettered_at, each.sent_back_at) for each in dead_letters]
        assert summaries == [(each.place, each.reason, each.dead_lettered_at, each.sent_back_at) for each in burials]
        for topic in (PROMPTS, SAMPLES):
            of = [each for each in dead_letters if each.topic is topic]
            assert here.count(topic) == len(of)
            assert here.places(topic) == {(each.partition, each.offset) for each in of if each.partition >= 0}
            nowhere = sum(each.partition < 0 for each in of)
            assert here.pending(topic) == nowhere + sum(each.sent_back_at is None for each in of if each.partition >= 0)


def test_only_selected_dead_letters_are_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = DeadLetterTopics([(PROMPTS, offset, False) for offset in range(50)])
    monkeypatch.setattr(rose.topics.dead_letters, "read_messages", dead.messages)
    [dead_letter] = read_dead_letters(SETTINGS, PROMPTS, selects=lambda dead_letter: dead_letter.offset == 7)
    assert (dead_letter.offset, dead_letter.raw.value) == (7, b"v" * 100) and dead.most_held <= 3


NAMES = st.sampled_from(["topic", "partition", "offset", "key", "exception", "sent-back", "rose-schema"]) | st.text()
MESSAGES = st.builds(
    RawMessage,
    st.none() | st.binary(min_size=1),
    st.none() | st.binary(),
    st.lists(st.tuples(NAMES, st.binary()), max_size=9).map(tuple),
)


def letter_at(offset: int, raw: RawMessage, *, sent_back: bool = False) -> RawMessage:
    return to_dead_letter(
        InvalidMessage(PROMPTS, 0, offset, raw, "why"), "why", topic="team.prompts", sent_back=sent_back
    )


@given(MESSAGES, st.booleans())
def test_dead_letter_gives_the_original_message_back(raw: RawMessage, sent_back: bool) -> None:
    dead_letter = letter_at(7, raw, sent_back=sent_back)
    assert from_dead_letter(dead_letter) == raw
    assert dead_letter.key == b"team.prompts/0/7" and dead_letter.header(OFFSET) == b"7"
    assert ((SENT_BACK, b"") in dead_letter.headers) is sent_back


@given(MESSAGES)
def test_forwarded_dead_letter_headers_do_not_affect_the_next_dead_letter(raw: RawMessage) -> None:
    old = letter_at(7, raw, sent_back=True)
    assert letter_at(8, old._replace(key=raw.key)) == letter_at(8, raw)


POISON = {
    "deep JSON": b'{"a":' + b"[" * 5000,
    "deep MessagePack": b"\x81\xa1a" + b"\x91" * 5000,
    "an extension": b"\x81\xa1a\xd4\x05\x00",
    "a key of bytes": b"\x81\xc4\x01a\x01",
    "nil as key": b"\x81\xc0\x01",
    "a list as key": b"\x81\x91\x01\x01",
    "a map as key": b"\x81\x80\x01",
    "no such time": b"\x81\xa1a\xc7\x0c\xff\0\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff",
}


def letter_of(value: bytes) -> DeadLetter:
    raw = RawMessage(b"k", value)
    return DeadLetter(topic=PROMPTS, partition=0, offset=1, key=b"k", raw=raw, reason="why", dead_lettered_at=0.0)


@pytest.mark.parametrize("value", POISON.values(), ids=POISON)
def test_undecodable_dead_letter_is_shown_and_not_editable(value: bytes) -> None:
    check(value)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda more: b"\x81\xa1a" + more))
def test_any_dead_letter_bytes_can_be_shown(value: bytes) -> None:
    check(value)


def check(value: bytes) -> None:
    dead_letter = letter_of(value)
    assert show_value(dead_letter) or not value
    for change in ("environment=x", "environment=" + "[" * 5000):
        try:
            fields: Any = msgspec.msgpack.decode(edited_message(dead_letter, None, [change]).value or b"")
        except UsageError:
            continue
        assert "environment" in fields
