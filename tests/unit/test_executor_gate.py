"""Whether an executor takes turns, and at the wires of one that is parked every turn is answered."""

import os

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.prompts import Sampling
from workers.executor.gate import FREELY, HELD_SECONDS, Gate, Leave, budget_tokens
from workers.executor.line import Line, memory
from workers.executor.words import (
    ABORTED,
    NO_LIMIT,
    REPORTS,
    Done,
    GiveUp,
    Outbox,
    Park,
    Prepare,
    Serve,
    Slack,
    Take,
    Tick,
    Wake,
)
from workers.lender.parked import Parked

TICK = Tick(0, "cpu", 0, 0, 1000, 1000, 10, 1.0, 1.0, 0, 0.0)


PARKED, HELD = (
    msgspec.structs.replace(TICK, **said) for said in ({"parked": "it is built"}, {"held_seconds": HELD_SECONDS})
)


def test_with_leave_it_lends_and_what_closes_it_says_why() -> None:
    for tick, leave, why in (
        (TICK, FREELY, ""),
        (TICK, Leave(refused="its grant ran out"), "its grant ran out"),
        (PARKED, FREELY, "it is built"),
        (HELD, FREELY, "no moment"),
        (PARKED, Leave(refused="its grant ran out"), "its grant ran out"),
    ):
        gate = Gate(lambda: leave, lends=True)  # noqa: B023
        gate.follow(tick, busy=True)
        assert why in gate.reason and gate.shut is bool(why) is bool(gate.reason)


@given(st.lists(st.tuples(st.sampled_from([TICK, PARKED, HELD]), st.booleans(), st.booleans(), st.booleans())))
def test_what_runs_goes_on_only_where_it_is_drained_has_time_and_can_and_no_guest_is_parked_under_it(
    history: list[tuple[Tick, bool, bool, bool]],
) -> None:
    leave = FREELY
    gate, dedicated = Gate(lambda: leave, lends=True), Gate(lambda: leave, lends=False)
    parked = False
    for tick, drained, finishing, busy in history:
        leave = Leave(refused="it is drained", finishing=finishing) if drained else FREELY
        order = gate.follow(tick, busy=busy)
        goes_on = drained and finishing and busy and tick is TICK
        assert bool(gate.reason) is (drained or tick is not TICK)
        assert gate.shut is (bool(gate.reason) and not goes_on)
        assert not (goes_on and order)
        parked = order == Park() if order is not None else parked
        assert goes_on or parked is drained
        assert dedicated.follow(tick, busy=busy) is None and dedicated.shut is gate.shut


@given(st.integers(0, 2000), st.integers(0, 200))
def test_a_leave_never_raises_what_there_is(kv_bytes: int, token_budget: int) -> None:
    tokens = budget_tokens(TICK, Leave(kv_bytes=kv_bytes, token_budget=token_budget))
    assert tokens <= budget_tokens(TICK, FREELY) == 100
    assert not kv_bytes or 10 * tokens <= kv_bytes
    assert not token_budget or tokens <= token_budget


def test_what_a_leave_says_of_bytes_is_told_to_the_guest_and_told_again_when_it_changes() -> None:
    newest = Leave(kv_bytes=500)
    gate = Gate(lambda: newest, lends=True)
    assert gate.follow(TICK, busy=True) == Wake(500) and gate.follow(TICK, busy=True) is None
    newest = Leave(kv_bytes=700, token_budget=3)
    assert gate.follow(TICK, busy=True) == Wake(700) and gate.budget_tokens == 3
    newest = FREELY
    assert gate.follow(TICK, busy=True) == Wake(NO_LIMIT)
    newest = Leave(refused="a grant parked it", kv_bytes=700)
    assert gate.follow(TICK, busy=True) == Park() and gate.follow(TICK, busy=True) is None


def test_one_that_is_parked_hands_back_what_comes_and_hears_when_to_wake() -> None:
    orders, reports = memory(1 << 12, "orders"), memory(1 << 12, "reports")
    serving = Slack(5, 2, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {})
    parked = Parked(Line(orders), Outbox(Line(reports)), lambda: serving, tick_seconds=0.0)
    parked.why = "a reason"
    said, heard = Outbox(Line(orders)), Line(reports)
    for word in (Take("t", b"", Sampling(max_tokens=1), 3), GiveUp("t"), Prepare(3, 0, ()), Serve(3), Wake()):
        said.say(word)
    assert parked.busy and not parked.granted
    parked.tick()
    done, tick = map(REPORTS.decode, heard.read())
    assert isinstance(done, Done) and (done.name, done.tokens, done.finish_reason) == ("t", b"", ABORTED)
    assert isinstance(tick, Tick) and (tick.parked, tick.version, tick.slack) == ("a reason", -1, serving)
    assert parked.granted and not parked.busy
    said.say(Park())
    parked.beat(held=True)
    assert not parked.granted
    os.close(orders)
    os.close(reports)
