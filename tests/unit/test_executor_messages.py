"""Words between an executor's processes: none is lost or overtaken, however little room the line has."""

import os

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.messages import (
    COMMAND_DECODER,
    REPORT_DECODER,
    ActivateWeights,
    EngineStatus,
    LendingStats,
    MessageSender,
    ServingStats,
    StageWeights,
    SubmitTurn,
    TensorLayout,
    WeightsActivated,
)
from rose.workers.executor.ipc.shared_memory import RingBuffer, create_ring_memory
from tests.support.scripted_engine import turn_finished


def test_every_message_round_trips() -> None:
    orders = [
        SubmitTurn("g:0/0/0", b"\x01\x00\x00\x00", Sampling(max_tokens=3, seed=7, stop_token_ids=(1, 2)), 4),
        StageWeights(5, 1, (TensorLayout("w", "bfloat16", (2, 3), 64),)),
        ActivateWeights(5),
    ]
    reports = [
        turn_finished("g:0/0/0", [5, 6, 7], version=4),
        WeightsActivated(5, 0.25),
    ]
    descriptor = create_ring_memory(1 << 12, "test")
    outbox, line = MessageSender(RingBuffer(descriptor)), RingBuffer(descriptor)
    for word in (*orders, *reports):
        outbox.send(word)
    said = list(line.read())
    assert [COMMAND_DECODER.decode(each) for each in said[:3]] == orders
    assert [REPORT_DECODER.decode(each) for each in said[3:]] == reports
    os.close(descriptor)


@given(st.lists(st.booleans(), max_size=200))
def test_messages_beyond_the_buffer_are_sent_later_in_order(deeds: list[bool]) -> None:
    """True: a word is said; False: the reader reads."""
    descriptor = create_ring_memory(40, "test")
    outbox, line = MessageSender(RingBuffer(descriptor)), RingBuffer(descriptor)
    said, heard = 0, list[int]()
    for deed in [*deeds, *[False] * len(deeds)]:
        if deed:
            outbox.send(ActivateWeights(said))
            said += 1
        else:
            heard += [
                order.version
                for order in map(COMMAND_DECODER.decode, line.read())
                if isinstance(order, ActivateWeights)
            ]
            outbox.flush()
    heard += [order.version for order in map(COMMAND_DECODER.decode, line.read()) if isinstance(order, ActivateWeights)]
    assert heard == list(range(said)) and not len(outbox)
    os.close(descriptor)


def tick(number: int, *, lends: bool) -> EngineStatus:
    """Of an engine that made two steps since the tick before, or of none."""
    bare = EngineStatus(number, "cpu", 0, 0, 1, 1, 1, 1.0, 1.0, 2, 0.5)
    if not lends:
        return bare
    slack = ServingStats(5, 2, 0.5, 0.25, number / 4, number / 8, 0.1, 0.1, 0.1, {"waiting": 3})
    return structs.replace(bare, serving=slack, lending=LendingStats(64, True, 1, 0.25, 2, 3, 0.5))


@given(st.lists(st.sampled_from(["tick", "parked", "word", "read"]), max_size=200))
def test_newest_tick_is_kept_and_no_count_is_lost(deeds: list[str]) -> None:
    """A tick is of a guest that lends, or of one that is parked."""
    descriptor = create_ring_memory(400, "test")
    outbox, line = MessageSender(RingBuffer(descriptor)), RingBuffer(descriptor)
    ticks, lent, longest, words, heard = 0, 0, 0.0, 0, list[EngineStatus]()
    for deed in [*deeds, *["read"] * (len(deeds) + 1)]:
        if deed in ("tick", "parked"):
            ticks += 1
            lends = deed == "tick"
            lent, longest = lent + lends, ticks / 4 if lends else longest
            outbox.send(tick(ticks, lends=lends))
        elif deed == "word":
            words += 1
            outbox.send(WeightsActivated(words, 0.0))
        else:
            heard += [report for report in map(REPORT_DECODER.decode, line.read()) if isinstance(report, EngineStatus)]
            outbox.flush()
        assert len(outbox) <= words + 1
    assert [tick.version for tick in heard] == sorted({tick.version for tick in heard})
    assert (heard[-1].version if heard else 0) == ticks
    assert (sum(tick.steps for tick in heard), sum(tick.step_seconds for tick in heard)) == (2 * ticks, 0.5 * ticks)
    told = [each.lending for each in heard if each.lending is not None]
    assert (sum(each.cuts for each in told), sum(each.preempted for each in told)) == (lent, 2 * lent)
    assert (sum(each.looks for each in told), sum(each.look_seconds for each in told)) == (3 * lent, 0.5 * lent)
    slacks = [each.serving for each in heard if each.serving is not None]
    assert sum(each.held_back["waiting"] for each in slacks) == 3 * lent
    assert max((each.longest_seconds for each in slacks), default=0.0) == longest
    assert max((each.computed_seconds for each in slacks), default=0.0) == longest / 2
    os.close(descriptor)


def test_lost_guest_still_reports_its_cuts_and_refusals() -> None:
    descriptor = create_ring_memory(300, "test")
    outbox, line = MessageSender(RingBuffer(descriptor)), RingBuffer(descriptor)
    words = 0
    while not len(outbox):
        outbox.send(WeightsActivated(words := words + 1, 0.0))
    outbox.send(tick(1, lends=True))
    outbox.send(tick(2, lends=False))
    assert len(list(line.read())) == words - 1
    outbox.flush()
    [_, told] = map(REPORT_DECODER.decode, line.read())
    assert isinstance(told, EngineStatus) and told.lending == LendingStats(0, False, 1, 0.25, 2, 3, 0.5)
    assert told.serving == ServingStats(0, 0, None, None, 1 / 4, 1 / 8, 0.1, 0.1, 0.1, {"waiting": 3})
    os.close(descriptor)
