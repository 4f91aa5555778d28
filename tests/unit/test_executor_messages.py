"""Messages between an executor's processes: none is lost or overtaken with any buffer size."""

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
    commands = [
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
    for word in (*commands, *reports):
        outbox.send(word)
    messages = list(line.read())
    assert [COMMAND_DECODER.decode(each) for each in messages[:3]] == commands
    assert [REPORT_DECODER.decode(each) for each in messages[3:]] == reports
    os.close(descriptor)


@given(st.lists(st.booleans(), max_size=200))
def test_messages_beyond_the_buffer_are_sent_later_in_order(actions: list[bool]) -> None:
    """True sends a message; False lets the reader read."""
    descriptor = create_ring_memory(40, "test")
    outbox, line = MessageSender(RingBuffer(descriptor)), RingBuffer(descriptor)
    sent_count, received = 0, list[int]()
    for action in [*actions, *[False] * len(actions)]:
        if action:
            outbox.send(ActivateWeights(sent_count))
            sent_count += 1
        else:
            received += [
                command.version
                for command in map(COMMAND_DECODER.decode, line.read())
                if isinstance(command, ActivateWeights)
            ]
            outbox.flush()
    received += [
        command.version for command in map(COMMAND_DECODER.decode, line.read()) if isinstance(command, ActivateWeights)
    ]
    assert received == list(range(sent_count)) and not len(outbox)
    os.close(descriptor)


def tick(number: int, *, lends: bool) -> EngineStatus:
    """Return the status of an engine with two steps since the last tick, or with none."""
    bare = EngineStatus(number, "cpu", 0, 0, 1, 1, 1, 1.0, 1.0, 2, 0.5)
    if not lends:
        return bare
    slack = ServingStats(5, 2, 0.5, 0.25, number / 4, number / 8, 0.1, 0.1, 0.1, {"waiting": 3})
    return structs.replace(bare, serving=slack, lending=LendingStats(64, True, 1, 0.25, 2, 3, 0.5))


@given(st.lists(st.sampled_from(["tick", "parked", "word", "read"]), max_size=200))
def test_newest_tick_is_kept_and_no_count_is_lost(actions: list[str]) -> None:
    """A tick is of a lending guest, or of a parked one."""
    descriptor = create_ring_memory(400, "test")
    outbox, line = MessageSender(RingBuffer(descriptor)), RingBuffer(descriptor)
    ticks, lent, longest, words, received = 0, 0, 0.0, 0, list[EngineStatus]()
    for action in [*actions, *["read"] * (len(actions) + 1)]:
        if action in ("tick", "parked"):
            ticks += 1
            lends = action == "tick"
            lent, longest = lent + lends, ticks / 4 if lends else longest
            outbox.send(tick(ticks, lends=lends))
        elif action == "word":
            words += 1
            outbox.send(WeightsActivated(words, 0.0))
        else:
            received += [
                report for report in map(REPORT_DECODER.decode, line.read()) if isinstance(report, EngineStatus)
            ]
            outbox.flush()
        assert len(outbox) <= words + 1
    assert [tick.version for tick in received] == sorted({tick.version for tick in received})
    assert (received[-1].version if received else 0) == ticks
    assert (sum(tick.steps for tick in received), sum(tick.step_seconds for tick in received)) == (
        2 * ticks,
        0.5 * ticks,
    )
    lending = [each.lending for each in received if each.lending is not None]
    assert (sum(each.cuts for each in lending), sum(each.preempted for each in lending)) == (lent, 2 * lent)
    assert (sum(each.looks for each in lending), sum(each.look_seconds for each in lending)) == (3 * lent, 0.5 * lent)
    slacks = [each.serving for each in received if each.serving is not None]
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
    [_, status] = map(REPORT_DECODER.decode, line.read())
    assert isinstance(status, EngineStatus) and status.lending == LendingStats(0, False, 1, 0.25, 2, 3, 0.5)
    assert status.serving == ServingStats(0, 0, None, None, 1 / 4, 1 / 8, 0.1, 0.1, 0.1, {"waiting": 3})
    os.close(descriptor)
