"""Transactions on a real broker: committed once, aborted, fenced or repeated; and the release of their writers."""

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from threading import Event
from threading import enumerate as enumerate_threads

import pytest

from rose.schemas.wire import encode
from rose.topics.catalog import MAX_MESSAGE_BYTES, OUTCOMES, PROMPTS
from rose.topics.errors import BusError
from rose.topics.log_reader import RecordFetch, await_transactions, read_to_end
from rose.topics.reader import Reader
from rose.topics.records import Envelope, Place, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.golden.examples import OUTCOME, PROMPT
from tests.support.bus_fixtures import put, read_until
from tests.support.waiting import until


def test_running_reader_sees_commits_of_the_next_owner_of_a_transactional_id(
    settings: BusSettings, reader: Reader
) -> None:
    """A worker may be killed within a transaction and restarted."""

    def write_prompt(writer: Writer, key: str) -> None:
        writer.begin()
        writer.write(PROMPTS, PROMPT, key=key, partition=0)

    reader.assign({(PROMPTS, 0): 0})
    for number in range(3):
        writer = Writer(settings, "test", transactional_id="test")
        write_prompt(writer, f"whole {number}")
        writer.commit()
        [found] = read_until(reader, 1)
        assert isinstance(found, Envelope) and found.key == f"whole {number}"
        write_prompt(writer, "half")
        writer.flush()
    Writer(settings, "test", transactional_id="test")
    with pytest.raises(BusError) as refused:
        writer.commit()
    assert refused.value.is_fenced


def test_transaction_aborted_by_the_broker_is_repeated_whole_and_once(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt names a member that its group does not know, as after a change of coordinators."""
    if settings.embedded:
        pytest.skip("the embedded broker asks nobody who it is, and hides what comes after an abort")
    came: list[Place] = []

    def assigned(places: list[Place]) -> Mapping[Place, int]:
        came.extend(places)
        return dict.fromkeys(places, 0)

    with closing(Reader(settings, "member", group="test")) as member:
        member.subscribe([PROMPTS], on_assigned=assigned, on_revoked=lambda places: None)
        until(lambda: bool(member.read(1, 0.1)) or bool(came))
        gone = member.group_metadata()
    with closing(Reader(settings, "test", group="test")) as reader:
        answers = [gone, reader.group_metadata(), reader.group_metadata()]
        monkeypatch.setattr(reader, "group_metadata", lambda: answers.pop(0))
        writer = Writer(settings, "test", transactional_id="test")
        for offset in (3, 4):
            writer.transact(lambda: writer.write(OUTCOMES, OUTCOME, key="outcome"), {(PROMPTS, 0): offset}, reader)
            assert reader.committed([(PROMPTS, 0)]) == {(PROMPTS, 0): offset}
        assert not answers
    found = list(read_to_end(settings, {(OUTCOMES, 0): 0}, client_id="test"))
    assert [each.key for each in found] == ["outcome", "outcome"]


def test_transaction_with_an_unacceptable_record_is_not_repeated(settings: BusSettings) -> None:
    large = {**settings.properties, "message.max.bytes": str(4 * MAX_MESSAGE_BYTES)}
    writer = Writer(replace(settings, properties=large), "test", transactional_id="test")
    tried = []

    def write() -> None:
        tried.append(1)
        writer.forward(
            OUTCOMES, RawMessage(b"", random.Random(1).randbytes(2 * MAX_MESSAGE_BYTES)), partition=0, key=b"large"
        )

    with pytest.raises(BusError):
        writer.transact(write)
    assert len(tried) == 1


def test_transaction_of_a_fenced_writer_is_not_repeated(settings: BusSettings) -> None:
    old = Writer(settings, "test", transactional_id="test")
    new = Writer(settings, "test", transactional_id="test")
    with pytest.raises(BusError) as raised:
        old.transact(lambda: old.write(OUTCOMES, OUTCOME, key="old"))
    assert raised.value.is_fenced
    new.transact(lambda: new.write(OUTCOMES, OUTCOME, key="new"))
    assert [each.key for each in read_to_end(settings, {(OUTCOMES, 0): 0}, client_id="test")] == ["new"]


def test_writer_fenced_within_a_transaction_raises_fenced_on_its_next_call(settings: BusSettings) -> None:
    """Records are sent in the background: the broker refuses them before the next write."""
    old = Writer(settings, "test", transactional_id="test")
    old.begin()
    Writer(settings, "test", transactional_id="test")
    with pytest.raises(BusError) as refused:
        for _ in range(1_000_000):
            old.write(PROMPTS, PROMPT, key="g", partition=0)
    assert refused.value.is_fenced and "fenced by a newer instance" in str(refused.value)


def test_clients_end_no_later_than_their_writer(settings: BusSettings) -> None:
    """A new writer of the embedded broker aborts the open transaction of its predecessor with a client of that name."""
    before = set(enumerate_threads())
    writer = Writer(settings, "test", transactional_id="worker")
    until(lambda: not [each for each in set(enumerate_threads()) - before if each.name == "free"])
    for _ in range(2):
        writer.close()
    del writer
    until(lambda: not [each for each in set(enumerate_threads()) - before if each.name == "free"])


def test_transaction_marker_offset_has_no_record(settings: BusSettings, reader: Reader) -> None:
    writer = Writer(settings, "test", transactional_id="test")
    for _ in range(2):
        writer.begin()
        writer.write(PROMPTS, PROMPT, key="g", partition=0)
        writer.commit()
    await_transactions(
        settings, [(PROMPTS, 0)], client_id="test"
    )  # Kafka writes the marker of a commit after its acknowledgement
    fetch = RecordFetch(reader, {(PROMPTS, 0): range(4)})
    fetched = [envelope.offset for envelope in fetch]
    assert len(fetched) == 2 and sorted(fetched + [offset for _, offset in fetch.missing]) == [0, 1, 2, 3]


def test_offsets_are_committed_by_another_thread_while_the_reader_continues(settings: BusSettings) -> None:
    """The client admits one thread at a time, and a reader that waits for records is in the client almost always."""
    put(settings, [encode(PROMPT)])
    done = Event()

    def read_on(reader: Reader) -> None:
        while not done.is_set():
            reader.read(100, 0.2)

    with closing(Reader(settings, "test", group="test")) as reader, ThreadPoolExecutor(1) as pool:
        reader.assign({(PROMPTS, 0): 0})
        writer = Writer(settings, "test", transactional_id="test")
        reading = pool.submit(read_on, reader)
        try:
            for offset in range(20):
                writer.begin()
                writer.commit({(PROMPTS, 0): offset}, reader)
        finally:
            done.set()
        reading.result()
        assert reader.committed([(PROMPTS, 0)]) == {(PROMPTS, 0): 19}
