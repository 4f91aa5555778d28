"""The journal of a core: what is written, when, and what a reader makes of a journal with gaps."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import structlog

from rose.pipeline import journal as journal_module
from rose.pipeline.journal import JournalRecorder, JournalWriter
from rose.pipeline.replay.recorded_cores import recorded_cores
from rose.schemas.errors import RoseError
from rose.schemas.journal import CoreJournal, EntryKind, JournalDecision, RestoredRange
from rose.schemas.wire import encode
from rose.topics.settings import BusSettings

FIRST = CoreJournal(core="router-0", cell=0, began_at=0, sequence=0, settings={"max_attempts": 8.0})


def clock() -> Iterator[float]:
    now = 1_700_000_000.123456789
    while True:
        yield now
        now += 0.000_123_4


@pytest.fixture
def written() -> list[CoreJournal]:
    return []


@pytest.fixture
def recorder(written: list[CoreJournal]) -> JournalRecorder:
    """A recorder whose batch is due at every call of `write_due`."""
    times = clock()
    return JournalRecorder(lambda: next(times), written.append, FIRST, seconds=0.0)


def test_batch_waits_for_its_decisions_and_for_the_batch_before(
    recorder: JournalRecorder, written: list[CoreJournal]
) -> None:
    recorder.take(EntryKind.REQUEST, 1, 7)
    first, second = recorder.decide(EntryKind.DISPATCH), recorder.decide(EntryKind.DISPATCH)
    recorder.write_due()
    recorder.take(EntryKind.TICK)
    recorder.write_due()
    second(4, 12)
    recorder.write_due()
    assert written == []
    first(3, 9)
    recorder.write_due()
    assert [(each.sequence, [entry.kind for entry in each.inputs]) for each in written] == [
        (0, [EntryKind.REQUEST]),
        (1, [EntryKind.TICK]),
    ]
    places = (JournalDecision(EntryKind.DISPATCH, 3, 9), JournalDecision(EntryKind.DISPATCH, 4, 12))
    assert written[0].decisions == places, "in the order of the decisions, not of their storage"
    assert [each.settings for each in written] == [FIRST.settings, {}]


def test_journal_has_exactly_the_times_that_the_core_saw(recorder: JournalRecorder, written: list[CoreJournal]) -> None:
    seen = [recorder.take(EntryKind.TICK) for _ in range(50)]
    recorder.finish()
    at, found = written[0].began_at, []
    for entry in written[0].inputs:
        at += entry.microseconds
        found.append(at / 1_000_000)
    assert found == seen


def test_large_batch_takes_several_records_and_is_read_as_one(
    recorder: JournalRecorder, written: list[CoreJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_ENTRIES", 10)
    for offset in range(25):
        recorder.take(EntryKind.RESULT, 0, offset)
        recorder.decide(EntryKind.DISPATCH)(0, offset)
    recorder.finish()
    assert [each.continued for each in written] == [True, True, False]
    (core,) = recorded_cores(written)
    (batch,) = core.batches
    assert [entry.offset for entry in batch.inputs] == [each.offset for each in batch.decisions] == list(range(25))
    (cut,) = recorded_cores(written[:2])
    assert (cut.batches, cut.gap) == ([], "the end of its last batch is not on the log")


def test_restored_records_are_kept_in_the_order_in_which_they_were_read(
    recorder: JournalRecorder, written: list[CoreJournal]
) -> None:
    for partition, offset in ((0, 5), (0, 6), (1, 2), (0, 9)):
        begin = 7 if offset == 9 else offset
        recorder.restore(EntryKind.REQUEST, partition, begin, offset + 1)
    recorder.finish()
    ranges = [(0, 5, 7), (1, 2, 3), (0, 7, 10)]
    assert written[0].restored == tuple(RestoredRange(EntryKind.REQUEST, *each) for each in ranges)


def test_core_goes_on_when_its_journal_cannot_be_written() -> None:
    def refuse(_record: CoreJournal) -> None:
        raise RoseError("there is no such topic")

    times = clock()
    recorder = JournalRecorder(lambda: next(times), refuse, FIRST, seconds=0.0)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert recorder.take(EntryKind.TICK) > 1_700_000_000
            recorder.write_due()
    assert [(each["event"], each["reason"]) for each in logs] == [("journal_ended", "there is no such topic")]


def test_cores_with_a_gap_are_used_up_to_the_gap(recorder: JournalRecorder, written: list[CoreJournal]) -> None:
    for _ in range(4):
        recorder.take(EntryKind.TICK)
        recorder.write_due()
    (gapped,) = recorded_cores([written[0], written[1], written[3]])
    assert (len(gapped.batches), gapped.gap) == (2, "record 2 of its journal is missing")


def test_decision_that_is_never_stored_ends_the_journal_before_the_inputs_fill_the_memory(
    recorder: JournalRecorder, written: list[CoreJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_WAITING_INPUTS", 10)
    recorder.decide(EntryKind.DISPATCH)
    with structlog.testing.capture_logs() as logs:
        for _ in range(30):
            recorder.take(EntryKind.TICK)
            recorder.write_due()
    assert [each["event"] for each in logs] == ["journal_ended"]
    assert written == [] and not recorder.awaits_decisions


def test_journal_awaits_decisions_until_each_is_stored(recorder: JournalRecorder) -> None:
    recorder.take(EntryKind.TICK)
    stored = recorder.decide(EntryKind.GRANT)
    recorder.write_due()
    recorder.take(EntryKind.TICK)
    assert recorder.awaits_decisions
    stored(0, 5)
    assert not recorder.awaits_decisions


def test_inputs_that_are_written_do_not_count_as_waiting(
    recorder: JournalRecorder, written: list[CoreJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_WAITING_INPUTS", 10)
    for _ in range(30):
        recorder.take(EntryKind.TICK)
        recorder.decide(EntryKind.DISPATCH)(0, 0)
        recorder.write_due()
    assert len(written) == 30


def test_journal_waits_for_no_broker_and_ends_when_too_much_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(journal_module, "MAX_UNSTORED_BYTES", 10 * len(encode(FIRST)))
    silent = socket.create_server(("127.0.0.1", 0))
    settings = BusSettings(f"127.0.0.1:{silent.getsockname()[1]}")
    with silent, closing(JournalWriter(settings, "test-journal")) as journal:
        for _ in range(10):
            journal(FIRST)
        for _ in range(2):
            with pytest.raises(RoseError, match="has not stored the last"):
                journal(FIRST)
        journal.flush()
