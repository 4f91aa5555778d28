"""Preferences of placement: equal executors share, and a prefix and a short wait are worth what they save."""

import msgspec

from rose.pipeline.routing.candidates import PlacementQuery
from rose.pipeline.routing.placement import Placement
from rose.schemas.heartbeats import MAX_HELD_TURNS, Hardware, Tenant
from rose.schemas.limits import MAX_CONTEXT_TOKENS
from rose.schemas.wire import encode
from tests.support.routing_fixtures import dispatched, heartbeat, request


def test_equal_executors_share_groups_in_any_order_of_arrival() -> None:
    ask = [PlacementQuery(10, 5.0, 15, f"group-{group}") for group in range(400)]
    chosen: list[list[str]] = []
    for order in (range(8), reversed(range(8))):
        placement = Placement()
        for worker in order:
            placement.offer(heartbeat(worker), is_open=True, lag_versions=0)
        found = [placement.choose(each, 0.0) for each in ask]
        chosen.append([choice.worker for choice in found if choice is not None])
    assert chosen[0] == chosen[1] and len(chosen[0]) == 400
    counts = [chosen[0].count(f"w{worker}") for worker in range(8)]
    assert min(counts) >= 25 and max(counts) <= 80, counts


def test_few_groups_move_when_an_executor_leaves() -> None:
    before, after = Placement(), Placement()
    for worker in range(8):
        before.offer(heartbeat(worker), is_open=True, lag_versions=0)
        after.offer(heartbeat(worker), is_open=worker != 3, lag_versions=0)
    for group in range(200):
        ask = PlacementQuery(10, 5.0, 15, f"group-{group}")
        first, second = before.choose(ask, 0.0), after.choose(ask, 0.0)
        assert first is not None and second is not None
        assert second.worker == first.worker or first.worker == "w3"


def filled(kinds: list[tuple[int, float]]) -> Placement:
    """Return executors by their held turns, none in prefill, and the seconds of a step; a token adds 0.1 ms."""
    placement = Placement()
    for worker, (turns, step_seconds) in enumerate(kinds):
        rates = Hardware(prefill_tokens_per_second=10_000.0, decode_tokens_per_second=1 / (step_seconds + 1e-4))
        beat = heartbeat(worker, hardware=rates, max_turns=64, token_budget=100_000, rollout=Tenant(running=1))
        placement.offer(beat, is_open=True, lag_versions=0)
        for _ in range(turns):
            placement.reserve(f"w{worker}", 50, 4.0)
    return placement


def placed(placement: Placement, ask: PlacementQuery) -> str:
    choice = placement.choose(ask, 0.0)
    assert choice is not None
    return choice.worker


def test_long_turn_goes_where_it_delays_few_others() -> None:
    placement = filled([(32, 0.003), (2, 0.012)])
    assert placed(placement, PlacementQuery(200, 4.0, 210, "a")) == "w1", (
        "the slower one, for all that run on the faster"
    )
    assert placed(placement, PlacementQuery(200, 4.0, 210, "a", (("w0", 199),))) == "w0", (
        "little is left to compute there"
    )
    assert placed(filled([(0, 0.003), (2, 0.012)]), PlacementQuery(200, 4.0, 210, "a")) == "w0"


def test_prefix_is_worth_more_where_recomputing_delays_more_turns() -> None:
    ask = PlacementQuery(32, 4.0, 50, "a", (("w0", 31),))
    assert placed(filled([(16, 0.003), (0, 0.003)]), ask) == "w1", "nobody is delayed there"
    assert placed(filled([(16, 0.003), (16, 0.003)]), ask) == "w0"


def test_frozen_lender_gets_turns_only_without_other_room() -> None:
    placement = Placement()
    placement.offer(heartbeat(0, frozen=True), is_open=True, lag_versions=0)
    placement.offer(heartbeat(1), is_open=True, lag_versions=0)
    for key in range(20):
        cold = placement.choose(PlacementQuery(100, 5.0, 110, str(key)), 0.0)
        warm = placement.choose(PlacementQuery(100, 5.0, 110, str(key), (("w0", 99),)), 0.0)
        assert cold is not None and warm is not None
        assert (cold.worker, warm.worker) == ("w1", "w0")
    placement.offer(heartbeat(1, token_budget=50), is_open=True, lag_versions=0)
    only = placement.choose(PlacementQuery(100, 5.0, 110, "cold"), 0.0)
    assert only is not None and only.worker == "w0"
    placement.offer(heartbeat(0, frozen=True, token_budget=100), is_open=True, lag_versions=0)
    assert placement.choose(PlacementQuery(100, 5.0, 110, "warm", (("w0", 99),)), 0.0) is None, (
        "what it offers is what it takes"
    )


def test_reported_bad_rates_of_an_executor_expire() -> None:
    placement = Placement()
    slow = Hardware(prefill_tokens_per_second=1e-3, decode_tokens_per_second=1e-3)
    ask = PlacementQuery(context_tokens=100, new_tokens=1.0, room_tokens=110, tie_key="a")
    placement.offer(heartbeat(0, hardware=slow), is_open=True, lag_versions=0)
    choice = placement.choose(ask, 0.0)
    assert choice is not None
    placement.charge(choice, ask, 0.0)
    placement.offer(heartbeat(0), is_open=True, lag_versions=0)
    placement.release("w0", ask.room_tokens, ask.new_tokens)
    choice = placement.choose(ask, 1.0)
    assert choice is not None and choice.cost.wait_seconds == 0.0


def test_costs_of_any_reported_rates_are_encodable() -> None:
    placement = Placement()
    slow = Hardware(prefill_tokens_per_second=1e-3, decode_tokens_per_second=1e-3)
    placement.offer(
        heartbeat(0, hardware=slow, max_turns=MAX_HELD_TURNS, token_budget=2**53), is_open=True, lag_versions=4
    )
    ask = PlacementQuery(
        context_tokens=MAX_CONTEXT_TOKENS, new_tokens=65_536.0, room_tokens=2 * MAX_CONTEXT_TOKENS, tie_key="a"
    )
    choice = placement.choose(ask, 0.0)
    assert choice is not None
    for number in range(5 * MAX_HELD_TURNS):
        if number >= MAX_HELD_TURNS - 1:
            placement.release("w0", ask.room_tokens, ask.new_tokens)
        placement.charge(choice, ask, 0.0)
    choice = placement.choose(ask, 0.0)
    assert choice is not None
    assert encode(msgspec.structs.replace(dispatched(request("g0:0")), cost=choice.cost))
