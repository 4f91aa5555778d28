"""The choice of an executor for a turn, and the order of waiting turns."""

import pytest

from rose.pipeline.routing.router import Router
from rose.schemas.heartbeats import ExecutorState, Tenant
from rose.schemas.turns import TurnDispatch, TurnOutcome
from tests.support.routing_fixtures import CONFIG, RoutingSimulation, heartbeat, request
from tests.support.routing_machine import started, step


def test_next_turn_goes_to_the_executor_of_the_last_turn() -> None:
    simulation, last = started(), ""
    for turn in range(6):
        simulation.ask(request("g0:0", turn, context=100 + 20 * turn))
        (dispatch,) = simulation.held.values()
        if turn > 0:
            assert dispatch.worker == last
            assert dispatch.cost.cached_tokens == 100 + 20 * (turn - 1) + 5
        last = dispatch.worker
        simulation.complete(dispatch)


def test_next_turn_leaves_a_cache_if_waiting_costs_more_than_recomputing() -> None:
    simulation = started()
    simulation.ask(request("g0:0", context=30))
    (first,) = simulation.held.values()
    simulation.complete(first)
    holder = int(first.worker[1:])
    # Only the holder is open while other turns send it much prefill; then all executors are open again.
    for worker in {0, 1, 2} - {holder}:
        simulation.beat(worker, state=ExecutorState.PAUSED)
    for index in range(3):
        simulation.ask(request(f"g9:{index}", context=300))
    step(simulation, "beats")
    simulation.ask(request("g0:0", 1, context=40))
    moved = simulation.held["g0:0"]
    assert moved.worker != first.worker and moved.cost.cached_tokens == 0
    assert moved.cost.passed_over


def test_unstarted_prefill_counts_at_any_age() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    for index in range(3):
        simulation.ask(request(f"g{index}:0", context=300))
    candidate = simulation.router.placement.candidates["w0"]
    each = 300 * candidate.cost_class.prefill.token_seconds
    simulation.pass_time(0.8)
    assert candidate.prefill_free_at - simulation.now == pytest.approx(3 * each - 0.8), "as its rate would have it"
    simulation.beat(0, rollout=Tenant(running=1, waiting=2))
    assert candidate.prefill_free_at - simulation.now == pytest.approx(2 * each), "two of three have not begun"
    simulation.pass_time(1.0)
    simulation.beat(0, rollout=Tenant(running=3))
    assert candidate.prefill_free_at <= simulation.now


def test_turns_that_wait_for_prefill_do_not_slow_decoding() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    for index in range(3):
        simulation.ask(request(f"g{index}:0", context=300))
    before = simulation.router.placement.candidates["w0"].decode_token_seconds
    simulation.beat(0, rollout=Tenant(running=1, waiting=2))
    assert simulation.router.placement.candidates["w0"].decode_token_seconds == before > 0.0


def test_cache_of_another_policy_version_has_no_value() -> None:
    simulation = started()
    simulation.ask(request("g0:0", context=100))
    simulation.complete(next(iter(simulation.held.values())))
    simulation.version = 1
    step(simulation, "beats")
    simulation.ask(request("g0:0", 1, context=120))
    assert simulation.held["g0:0"].cost.cached_tokens == 0


def test_cache_is_lost_in_a_period_without_a_version() -> None:
    """A parked lender behaves so: results that it returned may be read after its parked heartbeat."""
    simulation = RoutingSimulation()
    simulation.beat(0)
    for name in ("g0:0", "g1:0"):
        simulation.ask(request(name, context=100))
    simulation.complete(simulation.held["g0:0"])
    simulation.beat(0, state=ExecutorState.PAUSED, policy_version=-1)
    simulation.reject(simulation.held["g1:0"], TurnOutcome.PREEMPTED)
    simulation.beat(0)
    assert simulation.held["g1:0"].cost.cached_tokens == 0, "where it was preempted"
    simulation.ask(request("g1:1", context=100))
    simulation.ask(request("g0:0", 1, context=120))
    assert [simulation.held[name].cost.cached_tokens for name in ("g1:1", "g0:0")] == [99, 0], (
        "what is computed since counts"
    )
    simulation.complete(simulation.held["g0:0"])
    simulation.beat(0)
    simulation.ask(request("g0:0", 2, context=140))
    assert simulation.held["g0:0"].cost.cached_tokens == 125


def test_cached_group_prompt_is_lost_in_a_period_without_a_version() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0", context=100))
    for version in (-1, -1, 0):
        simulation.beat(0, policy_version=version)
    simulation.ask(request("g0:1", context=100))
    assert simulation.held["g0:1"].cost.cached_tokens == 0


def test_group_goes_to_its_cached_prompt_until_waiting_costs_more() -> None:
    simulation = started()
    for index in range(3):
        simulation.ask(request(f"g0:{index}", context=200, max_tokens=8))
    at = [dispatch.worker for dispatch in simulation.held.values()]
    cached = [dispatch.cost.cached_tokens for dispatch in simulation.held.values()]
    assert cached[0] == 0 and cached[1] == 199, "all but the last token of the prompt are shared"
    assert at[0] == at[1]


def test_big_turn_is_not_starved_by_small_turns() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0, token_budget=100, max_turns=10)
    simulation.ask(request("g0:0", context=40, max_tokens=20, patience_seconds=100.0))
    simulation.ask(request("g1:0", context=70, max_tokens=20, patience_seconds=101.0))
    for index in range(3):
        simulation.ask(request(f"g2:{index}", context=10, max_tokens=5, patience_seconds=102.0))
    assert set(simulation.held) == {"g0:0"}, "the small ones fit beside it, but the big one is before them"
    simulation.complete(simulation.held["g0:0"])
    assert "g1:0" in simulation.held


def test_turn_that_no_executor_can_run_lets_others_pass() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0, token_budget=100)
    simulation.ask(request("g0:0", context=200, patience_seconds=100.0))
    simulation.ask(request("g1:0", context=10, patience_seconds=101.0))
    assert set(simulation.held) == {"g1:0"}
    simulation.beat(0, token_budget=1000)
    assert set(simulation.held) == {"g0:0", "g1:0"}


def test_turn_that_ends_while_set_aside_is_not_held() -> None:
    """The fleet is unchanged, so no event brings the turn back."""
    router = Router(CONFIG)
    for beat in range(100):
        now = 0.2 * beat
        router.on_event(heartbeat(0, sequence=beat), now)
        router.on_event(request(f"g{beat}:0", context=2000, patience_seconds=1.0), now)
        router.tick(now)
        assert len(router.queue) == len(router.queue.skipped) <= 10
    assert router.counters.failed >= 90


def test_empty_context_has_no_cached_tokens() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    router.on_event(request("g0:0"), 0.0)
    (dispatch,) = router.on_event(request("g0:1", context=0), 0.0)
    assert isinstance(dispatch, TurnDispatch) and dispatch.cost.cached_tokens == 0
