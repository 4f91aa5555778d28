"""Readers and writers on a real broker: returned, dead-lettered, fetched and deleted records."""

import json
import random
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from rose.schemas.errors import RecordError
from rose.schemas.prompts import Prompt
from rose.schemas.wire import encode
from rose.topics.admin import delete_before
from rose.topics.catalog import MAX_MESSAGE_BYTES, OUTCOMES, PROMPTS, Retention
from rose.topics.dead_letters import MAX_REASON_CHARACTERS, MAX_VALUE_BYTES, dead_lettered_places, read_dead_letters
from rose.topics.errors import TopicMissing
from rose.topics.log_reader import SEARCH_RECORDS, RecordFetch, RecordSearch, await_transactions, read_to_end
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, InvalidMessage, Place, RawMessage, SkippedMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.environments.home import FORWARD_BYTES
from tests.golden.examples import OUTCOME, PROMPT
from tests.support.bus_fixtures import BAD, WAIT_SECONDS, put, read_until
from tests.support.waiting import until

ONE_HEADER_A_NAME = pytest.mark.embedded_fault(
    "keeps the last header of a name where it stamps records", raises=AssertionError
)


def test_undecodable_message_is_returned_raw_and_nothing_is_written(settings: BusSettings, reader: Reader) -> None:
    put(settings, [encode(PROMPT), BAD])
    reader.assign({(PROMPTS, 0): 0})
    good, bad = read_until(reader, 2)
    assert isinstance(good, Envelope) and good.record == PROMPT and good.raw.value == encode(PROMPT)
    assert isinstance(bad, InvalidMessage) and bad.raw == RawMessage(b"own key", BAD, (("from", b"elsewhere"),))
    assert "prompt" in bad.reason and (bad.partition, bad.offset) == (0, good.offset + 1)
    assert not dead_lettered_places(settings, PROMPTS)


def test_dead_letter_has_the_original_message_and_its_location(settings: BusSettings, reader: Reader) -> None:
    put(settings, [encode(PROMPT), BAD])
    reader.assign({(PROMPTS, 0): 0})
    good, bad = read_until(reader, 2)
    assert isinstance(good, Envelope) and isinstance(bad, InvalidMessage)
    writer = Writer(settings, "test")
    for _ in range(2):  # a restart reports the message again
        writer.dead_letter(bad, bad.reason)
    writer.dead_letter(good, "its group is known")
    writer.flush()
    dead_letters = list(read_dead_letters(settings, PROMPTS))
    assert [(dead_letter.partition, dead_letter.offset, dead_letter.raw) for dead_letter in dead_letters] == [
        (0, bad.offset, bad.raw),
        (0, good.offset, good.raw),
    ]
    assert dead_letters[1].reason == "its group is known"
    assert dead_lettered_places(settings, PROMPTS) == {(0, bad.offset), (0, good.offset)}


def test_message_dead_lettered_again_has_its_latest_location(settings: BusSettings, reader: Reader) -> None:
    put(settings, [BAD])
    reader.assign({(PROMPTS, 0): 0})
    [first] = read_until(reader, 1)
    assert isinstance(first, InvalidMessage)
    writer = Writer(settings, "test")
    writer.dead_letter(first, "one")
    writer.flush()
    [dead_letter] = read_dead_letters(settings, PROMPTS)
    writer.forward(PROMPTS, dead_letter.raw, partition=1, key=b"own key")
    writer.flush()
    reader.assign({(PROMPTS, 1): 0})
    [again] = read_until(reader, 1)
    assert isinstance(again, InvalidMessage)
    writer.dead_letter(again, "two")
    writer.flush()
    found = [
        (dead_letter.partition, dead_letter.reason, dead_letter.raw)
        for dead_letter in read_dead_letters(settings, PROMPTS)
    ]
    assert found == [(0, "one", first.raw), (1, "two", first.raw)]


@pytest.mark.parametrize("large", ["value", "headers", pytest.param("many headers", marks=ONE_HEADER_A_NAME)])
def test_message_too_large_once_decompressed_is_dead_lettered_truncated(
    settings: BusSettings, reader: Reader, large: str
) -> None:
    """Topics limit the transferred bytes, which are few with a compressing producer."""
    packing = {**settings.producer("stranger"), "message.max.bytes": 20_000_000, "compression.type": "gzip"}
    value, headers = {
        "value": (b"x" * 5_000_000, [("padding", b"")]),
        "headers": (b"x" * 900_000, [("padding", b"x" * 5_000_000)]),
        "many headers": (b"x" * 966_000, [("a", b"")] * 20_000),
    }[large]
    raw_producer = Producer(packing)
    raw_producer.produce(settings.topic(PROMPTS), value=value, key="own key", partition=0, headers=headers)
    assert raw_producer.flush(WAIT_SECONDS) == 0
    reader.assign({(PROMPTS, 0): 0})
    [bad] = read_until(reader, 1)
    assert isinstance(bad, InvalidMessage)
    writer = Writer(settings, "test")
    writer.dead_letter(bad, bad.reason)
    writer.flush()
    [dead_letter] = read_dead_letters(settings, PROMPTS)
    assert (dead_letter.partition, dead_letter.offset) == (0, bad.offset)
    assert dead_letter.raw == RawMessage(b"own key", value[:MAX_VALUE_BYTES])
    assert f"{bad.raw.size} bytes lie there" in dead_letter.reason and bad.reason in dead_letter.reason


@pytest.mark.parametrize("headers", [0, *(pytest.param(number, marks=ONE_HEADER_A_NAME) for number in (9_000, 90_000))])
def test_every_accepted_message_fits_the_dlq_and_another_partition(
    settings: BusSettings, reader: Reader, headers: int
) -> None:
    """The number of headers varies, because each header has two lengths on the wire."""
    headers_of_message = (("a", b""),) * headers
    for spare, limit in (("whole", MAX_MESSAGE_BYTES), ("sent on", FORWARD_BYTES)):
        value = random.Random(headers).randbytes(limit - RawMessage(b"k", b"", headers_of_message).size)
        raw = RawMessage(b"k", value, headers_of_message)
        writer = Writer(settings, "test")
        if spare == "sent on":
            writer.forward(PROMPTS, raw, partition=1, key=b"g" * 128)
        else:
            writer.dead_letter(InvalidMessage(PROMPTS, 0, headers, raw, "bad"), "ü" * MAX_REASON_CHARACTERS)
        writer.flush()
    [dead_letter] = read_dead_letters(settings, PROMPTS)
    # Megabytes stay out of a failed assertion: with CI set, pytest takes minutes to show their difference.
    same = dead_letter.raw == RawMessage(b"k", dead_letter.raw.value, headers_of_message)
    assert (same, dead_letter.raw.size) == (True, MAX_MESSAGE_BYTES)


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed: it sends what Python cannot")
def test_message_with_a_non_text_header_name_is_read_without_headers(settings: BusSettings, reader: Reader) -> None:
    """Any client may send such a header, and confluent-kafka cannot return it."""
    address = ["-b", settings.bootstrap, "-t", settings.topic(PROMPTS), "-p", "0"]
    odd = [b"-H", b"\xff\xfe=1", b"-H", b"said=2"]
    wire = json.dumps(msgspec.to_builtins(PROMPT)).encode()
    lines = (wire + b"\n" + BAD + b"\n") * 10  # enough repetitions for Python's adaptive interpreter
    put(settings, [encode(PROMPT)] * 10)
    subprocess.run(["kcat", *address, "-P", *odd], input=lines, check=True, timeout=WAIT_SECONDS)
    reader.assign({(PROMPTS, 0): 0})
    found = read_until(reader, 30)[10:]
    for good, bad in zip(found[::2], found[1::2], strict=True):
        assert isinstance(good, Envelope) and good.record == PROMPT and good.raw == RawMessage(None, wire)
        assert isinstance(bad, InvalidMessage) and bad.raw == RawMessage(None, BAD)


def test_unselected_message_is_not_decoded_and_has_its_size(settings: BusSettings, reader: Reader) -> None:
    wire = encode(PROMPT)
    put(settings, [wire, BAD, wire, BAD])
    put(settings, [wire], partition=1)
    reader.assign({(PROMPTS, 0): 0, (PROMPTS, 1): 0})
    found: dict[tuple[int, int], object] = {}

    def all_there() -> bool:
        for item in reader.read_selected(100, 0.2, {(PROMPTS, 0): {2, 3}}):
            if not isinstance(item, EndOfPartition):
                found[item.partition, item.offset] = item
        return len(found) == 5

    until(all_there)
    assert isinstance(found[0, 2], Envelope) and isinstance(found[0, 3], InvalidMessage)
    sizes = {(0, 0): len(wire), (0, 1): len(BAD), (1, 0): len(wire)}
    assert {at: item.value_bytes for at, item in found.items() if isinstance(item, SkippedMessage)} == sizes


def test_reader_with_a_full_prefetch_still_gets_records(settings: BusSettings) -> None:
    """librdkafka would check for room only after a second, when the reader has long read everything."""
    if settings.embedded:
        pytest.skip("an answer of the embedded broker holds the whole partition: nothing is left to fetch")
    put(settings, [random.Random(each).randbytes(2**16) for each in range(100)])
    limits: dict[str, Any] = {"queued.max.messages.kbytes": 512, "fetch.message.max.bytes": 2**18}
    with closing(Reader(settings, "test", **limits)) as reader:
        reader.assign({(PROMPTS, 0): 0})
        found = read_until(reader, 1)
        while len(found) < 100:
            more = reader.read(10, 0.8)
            assert more, f"nothing after {len(found)} records"
            found += more


@pytest.mark.parametrize("far", [0, 5, 10**9])
def test_every_requested_offset_is_fetched_or_missing(settings: BusSettings, reader: Reader, far: int) -> None:
    put(settings, [BAD if number == 7 else encode(PROMPT) for number in range(40)])
    put(settings, [encode(PROMPT)] * 3, partition=1)
    fetch = RecordFetch(
        reader, {(PROMPTS, 0): [30, 2, 3, 7, 39, 40, 1000], (PROMPTS, 1): [1], (PROMPTS, 9): [0]}, jump_records=far
    )
    fetched = [(envelope.partition, envelope.offset) for envelope in fetch]
    assert sorted(fetched) == [(0, 2), (0, 3), (0, 30), (0, 39), (1, 1)]
    assert [offset for partition, offset in fetched if partition == 0] == [2, 3, 30, 39]
    missing = {(place[1], offset) for place, offset in fetch.missing}
    assert missing == {(0, 7), (0, 40), (0, 1000), (9, 0)}


def test_end_offsets_of_many_partitions_equal_those_of_each_partition(settings: BusSettings) -> None:
    writer = Writer(settings, "test", transactional_id="test")
    writer.transact(lambda: writer.write(OUTCOMES, OUTCOME, key="done"))
    await_transactions(settings, [(OUTCOMES, 0)], client_id="test")
    writer.begin()
    writer.write(PROMPTS, PROMPT, key="open", partition=0)
    places: list[Place] = [(PROMPTS, 0), (OUTCOMES, 0), (PROMPTS, 1)]
    uncommitted: dict[str, Any] = {"isolation.level": "read_uncommitted"}
    for isolation in (dict[str, Any](), uncommitted):
        with closing(Reader(settings, "test", **isolation)) as reader:
            while isolation and not reader.watermarks(places[0])[1]:
                writer.poll(0.01)
            assert reader.all_watermarks(places) == {place: reader.watermarks(place) for place in places}
            assert reader.all_watermarks([]) == {}
            with pytest.raises(TopicMissing, match=r"has no partition 99, but \d+ in all: `rose topics check`"):
                reader.all_watermarks([(OUTCOMES, 0), (PROMPTS, 99)])
    writer.abort()


@pytest.mark.parametrize("far", [0, 5, 10**9])
def test_searched_record_is_found_after_its_hint_or_abandoned(settings: BusSettings, reader: Reader, far: int) -> None:
    notes = [str(number) for number in range(60)]
    put(settings, [encode(msgspec.structs.replace(PROMPT, environment=note)) for note in notes])
    put(settings, [BAD, encode(msgspec.structs.replace(PROMPT, environment="there"))], partition=1)
    hints = {
        (PROMPTS, 0): {"3": 3, "7": 2, "2": 0, "40": 38, "nowhere": 20, "59": 59, "never": 2**53},
        (PROMPTS, 1): {"there": 0},
    }
    find = RecordSearch(
        reader,
        hints,
        lambda found: found.record.environment if isinstance(found.record, Prompt) else None,
        jump_records=far,
    )
    found = [(name, envelope.partition, envelope.offset) for name, envelope in find]
    expected = [("2", 0, 2), ("3", 0, 3), ("7", 0, 7), ("40", 0, 40), ("59", 0, 59), ("there", 1, 1)]
    assert sorted(found) == sorted(expected)
    assert [offset for _, partition, offset in found if partition == 0] == [2, 3, 7, 40, 59]


@pytest.mark.slow
def test_search_ends_soon_after_its_hint(settings: BusSettings, reader: Reader) -> None:
    put(settings, [encode(PROMPT)] * (2 * SEARCH_RECORDS))
    find = RecordSearch(reader, {(PROMPTS, 0): {"nowhere": 0}}, lambda _found: None)
    assert list(find) == [] and SEARCH_RECORDS < find.records_read < SEARCH_RECORDS + 1_000


def test_needed_or_young_records_are_not_deleted(settings: BusSettings) -> None:
    put(settings, [encode(PROMPT)] * 5)

    def kept() -> list[int]:
        return [envelope.offset for envelope in read_to_end(settings, {(PROMPTS, 0): 0})]

    assert delete_before(settings, {(PROMPTS, 0): 4, (PROMPTS, 1): 0}, client_id="test") == {}
    assert kept() == [0, 1, 2, 3, 4]
    at_once = replace(settings, retention=Retention(prompts=-3600.0))
    assert delete_before(at_once, {(PROMPTS, 0): 3}, client_id="test") == {(PROMPTS, 0): 3}
    assert kept() == [3, 4]
    assert delete_before(at_once, {(PROMPTS, 0): 2}, client_id="test") == {}, "it never goes back"


def test_replay_reports_undecodable_messages_and_calls_back(settings: BusSettings) -> None:
    put(settings, [encode(PROMPT), BAD, encode(PROMPT)])
    spoiled: list[InvalidMessage] = []
    alive: list[int] = []
    found = [
        envelope.offset
        for envelope in read_to_end(
            settings, {(PROMPTS, 0): 0}, on_invalid=spoiled.append, on_wait=lambda: alive.append(1)
        )
    ]
    assert found == [0, 2] and [item.offset for item in spoiled] == [1] and alive


def test_every_name_at_the_broker_has_the_namespace_prefix(settings: BusSettings) -> None:
    names = [settings.name("environment"), settings.topic(PROMPTS), settings.topic(OUTCOMES)]
    assert all(name.startswith(f"{settings.namespace}rose.") for name in names)


def test_record_refused_by_readers_is_refused_by_its_writer(settings: BusSettings) -> None:
    writer = Writer(settings, "test")
    broken = Prompt(group_id="g", group_size=1, environment="e", seed=1, arguments={"n": 2**70})
    with pytest.raises(RecordError, match="written"):
        writer.write(PROMPTS, broken, key="g", partition=0)
    writer.write(OUTCOMES, OUTCOME, key="g", partition=0)
    writer.flush()
