"""Intake of turns by an executor; at the channel of a parked lender every turn is answered."""

import os

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.prompts import Sampling
from rose.workers.executor.grants import MAX_BLOCKED_SECONDS, UNRESTRICTED, IntakeGate, Permission, allowed_tokens
from rose.workers.executor.ipc.messages import (
    NO_LIMIT,
    REPORT_DECODER,
    AbortTurn,
    ActivateWeights,
    EngineStatus,
    MessageSender,
    Resume,
    ServingStats,
    StageWeights,
    SubmitTurn,
    Suspend,
    TurnFinished,
    aborted_before_start,
)
from rose.workers.executor.ipc.shared_memory import RingBuffer, create_ring_memory
from rose.workers.lender.guest_lifecycle import SuspendedEngine

TICK = EngineStatus(0, "cpu", 0, 0, 1000, 1000, 10, 1.0, 1.0, 0, 0.0)


PARKED, HELD = (
    msgspec.structs.replace(TICK, **changes)
    for changes in ({"suspended_reason": "it is built"}, {"blocked_seconds": MAX_BLOCKED_SECONDS})
)


def test_gate_is_open_with_permission_and_closed_with_a_reason() -> None:
    for tick, leave, why in (
        (TICK, UNRESTRICTED, ""),
        (TICK, Permission(denied_reason="its grant ran out"), "its grant ran out"),
        (PARKED, UNRESTRICTED, "it is built"),
        (HELD, UNRESTRICTED, "no moment"),
        (PARKED, Permission(denied_reason="its grant ran out"), "its grant ran out"),
    ):
        gate = IntakeGate(lambda: leave, lends=True)  # noqa: B023
        gate.update(tick, busy=True)
        assert why in (gate.reason or "") and gate.evicts_running is bool(why) is bool(gate.reason)


@given(st.lists(st.tuples(st.sampled_from([TICK, PARKED, HELD]), st.booleans(), st.booleans(), st.booleans())))
def test_running_turns_continue_only_in_a_drain_with_time_and_a_live_guest(
    history: list[tuple[EngineStatus, bool, bool, bool]],
) -> None:
    leave = UNRESTRICTED
    gate, dedicated = IntakeGate(lambda: leave, lends=True), IntakeGate(lambda: leave, lends=False)
    parked = False
    for tick, drained, finishing, busy in history:
        leave = Permission(denied_reason="it is drained", may_finish=finishing) if drained else UNRESTRICTED
        order = gate.update(tick, busy=busy)
        goes_on = drained and finishing and busy and tick is TICK
        assert bool(gate.reason) is (drained or tick is not TICK)
        assert gate.evicts_running is (bool(gate.reason) and not goes_on)
        assert not (goes_on and order)
        parked = order == Suspend() if order is not None else parked
        assert goes_on or parked is drained
        assert dedicated.update(tick, busy=busy) is None and dedicated.evicts_running is gate.evicts_running


@given(st.integers(0, 2000), st.integers(0, 200))
def test_permission_never_raises_the_available_tokens(kv_bytes: int, token_budget: int) -> None:
    tokens = allowed_tokens(TICK, Permission(kv_bytes=kv_bytes, token_budget=token_budget))
    assert tokens <= allowed_tokens(TICK, UNRESTRICTED) == 100
    assert not kv_bytes or 10 * tokens <= kv_bytes
    assert not token_budget or tokens <= token_budget


def test_kv_bytes_of_a_permission_are_sent_to_the_guest_on_every_change() -> None:
    newest = Permission(kv_bytes=500)
    gate = IntakeGate(lambda: newest, lends=True)
    assert gate.update(TICK, busy=True) == Resume(500) and gate.update(TICK, busy=True) is None
    newest = Permission(kv_bytes=700, token_budget=3)
    assert gate.update(TICK, busy=True) == Resume(700) and gate.allowed_tokens == 3
    newest = UNRESTRICTED
    assert gate.update(TICK, busy=True) == Resume(NO_LIMIT)
    newest = Permission(denied_reason="a grant parked it", kv_bytes=700)
    assert gate.update(TICK, busy=True) == Suspend() and gate.update(TICK, busy=True) is None


def test_parked_lender_hands_turns_back_and_wakes_on_a_grant() -> None:
    commands, reports = create_ring_memory(1 << 12, "orders"), create_ring_memory(1 << 12, "reports")
    serving = ServingStats(5, 2, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {})
    parked = SuspendedEngine(
        RingBuffer(commands),
        MessageSender(RingBuffer(reports)),
        lambda: serving,
        lambda: "a reason",
        status_seconds=0.0,
    )
    sender, received = MessageSender(RingBuffer(commands)), RingBuffer(reports)
    for word in (
        SubmitTurn("t", b"", Sampling(max_tokens=1), 3),
        AbortTurn("t"),
        StageWeights(3, 0, ()),
        ActivateWeights(3),
        Resume(),
    ):
        sender.send(word)
    assert parked.busy and not parked.granted_bytes
    parked.tick()
    done, tick = map(REPORT_DECODER.decode, received.read())
    assert isinstance(done, TurnFinished) and done == aborted_before_start("t", done.turn.times.finished_at)
    assert isinstance(tick, EngineStatus) and (tick.suspended_reason, tick.version, tick.serving) == (
        "a reason",
        -1,
        serving,
    )
    assert parked.granted_bytes and not parked.busy
    sender.send(Suspend())
    parked.tick_idle(blocked=True)
    assert not parked.granted_bytes
    os.close(commands)
    os.close(reports)
