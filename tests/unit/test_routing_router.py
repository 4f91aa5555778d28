"""Laws of the router's core, on histories of executors that come and go."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.routing.liveness import Standing
from pipeline.routing.router import LEASE_SECONDS, Router
from schemas.record import Record
from schemas.slack import ExecutorState
from schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult
from schemas.wire import encode
from tests.unit.routing_world import CONFIG, World, heartbeat, manifest, request, result

WORKERS = st.integers(0, 2)
TRAJECTORIES = st.sampled_from([f"g{group}:{index}" for group in range(3) for index in range(3)])
STEPS = st.one_of(
    st.tuples(st.just("ask"), TRAJECTORIES, st.integers(1, 60), st.integers(1, 40), st.sampled_from([5.0, 20.0, 1e9])),
    st.tuples(st.just("ask_version"), TRAJECTORIES, st.integers(0, 2)),
    st.tuples(st.just("ask_again"), TRAJECTORIES),
    st.tuples(
        st.just("beat"),
        WORKERS,
        st.integers(0, 4),
        st.integers(0, 200),
        st.sampled_from(ExecutorState),
        st.integers(-1, 2),
    ),
    st.tuples(st.just("beats")),
    st.tuples(st.just("restart"), WORKERS),
    st.tuples(st.just("complete"), st.integers(0, 20)),
    st.tuples(st.just("reject"), st.integers(0, 20), st.sampled_from([TurnOutcome.PREEMPTED, TurnOutcome.REFUSED])),
    st.tuples(st.just("echo"), st.integers(0, 200), st.sampled_from(list(TurnOutcome)[:3])),
    st.tuples(st.just("publish")),
    st.tuples(st.just("time"), st.sampled_from([0.05, 0.3, 1.0, 2.5, 6.0, 70.0])),
)


def step(world: World, what: str, *values: object) -> None:
    """Let one thing happen in the world; steps that make no sense at the moment do nothing."""
    match what, *values:
        case "ask", str(trajectory), int(context), int(most), float(patience):
            ask_next(world, trajectory, context=context, max_tokens=most, deadline=world.now + patience)
        case "ask_version", str(trajectory), int(version):
            ask_next(world, trajectory, min_policy_version=version)
        case "ask_again", str(trajectory):
            if trajectory in world.asked:
                world.feed(world.asked[trajectory])
        case "beat", int(worker), int(turns), int(tokens), ExecutorState() as state, int(lag):
            version = -1 if lag < 0 else max(-1, world.version - lag)
            world.beat(worker, max_turns=turns, token_budget=tokens, state=state, policy_version=version)
        case ("beats",):
            for worker in range(3):
                world.beat(worker, policy_version=world.version)
        case "restart", int(worker):
            world.beat(worker, restart=True, state=ExecutorState.STARTING, policy_version=-1)
        case "complete", int(which):
            if world.held:
                world.complete(list(world.held.values())[which % len(world.held)])
        case "reject", int(which), TurnOutcome() as outcome:
            if world.held:
                world.reject(list(world.held.values())[which % len(world.held)], outcome)
        case "echo", int(which), TurnOutcome() as outcome:
            sent = [decision for decision in world.decisions if isinstance(decision, TurnDispatch)]
            if sent and outcome is TurnOutcome.COMPLETED:
                world.complete(sent[which % len(sent)])
            elif sent:
                world.reject(sent[which % len(sent)], outcome)
        case ("publish",):
            world.version += 1
            world.feed(manifest(world.version))
        case "time", float(seconds):
            world.pass_time(seconds)


def ask_next(world: World, trajectory: str, **fields: object) -> None:
    known = world.asked.get(trajectory)
    turn = 0 if known is None else known.turn + 1
    if turn == world.done.get(trajectory, -1) + 1:
        world.ask(request(trajectory, turn, **fields))  # type: ignore[arg-type]


def started() -> World:
    world = World()
    world.feed(manifest(0))
    step(world, "beats")
    return world


@settings(deadline=None, max_examples=300, print_blob=True)
@given(st.lists(STEPS, max_size=80))
def test_the_laws_hold_in_every_history(steps: list[tuple[object, ...]]) -> None:
    # World.feed checks after every event: conservation, the books, budgets, liveness, reissue exactly once, order.
    world = started()
    for what, *values in steps:
        step(world, str(what), *values)
    # In the end the fleet is well: every turn that can run does, until nothing is left.
    for _ in range(200):
        step(world, "beats")
        if not world.held:
            break
        world.complete(next(iter(world.held.values())))
    impossible = [turn for turn in world.router.turns.values() if turn.request.min_policy_version <= world.version]
    assert not impossible


@settings(deadline=None, max_examples=100, print_blob=True)
@given(st.lists(STEPS, max_size=60))
def test_the_same_history_gives_the_same_bytes(steps: list[tuple[object, ...]]) -> None:
    world = started()
    for what, *values in steps:
        step(world, str(what), *values)
    again = Router(CONFIG)
    decisions: list[Record] = []
    for now, event in world.history:
        decisions += again.tick(now) if event is None else again.on(event, now)
    assert [encode(decision) for decision in decisions] == [encode(decision) for decision in world.decisions]


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import hashlib; from bench.history import Fleet, Recorder; from pipeline.routing.router import Router;"
        "from schemas.wire import encode; recorder = Recorder(Fleet(20, 200, 0.5)); recorder.record(2.0);"
        "router = Router(); digest = hashlib.blake2b();"
        "[digest.update(encode(each)) for now, event in recorder.history for each in router.on(event, now)];"
        "print(router.counters.dispatched, digest.hexdigest())"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert int(printed[0].split()[0]) > 100


@settings(deadline=None, max_examples=100, print_blob=True)
@given(st.lists(STEPS, max_size=60))
def test_a_restart_knows_from_the_log_what_is_unfinished_and_where(steps: list[tuple[object, ...]]) -> None:
    world = started()
    for what, *values in steps:
        step(world, str(what), *values)
    restored = Router(CONFIG)
    restored.published(world.version, world.now)
    decisions = restored.restore(
        [record for record in world.log if isinstance(record, TurnRequest)],
        [record for record in world.log if isinstance(record, TurnDispatch)],
        [record for record in world.log if isinstance(record, TurnResult)],
        world.now,
    )
    failed = {decision.trajectory_id for decision in decisions if isinstance(decision, TurnResult)}
    assert all(isinstance(decision, TurnResult) for decision in decisions), "nobody is LIVE yet"
    assert set(restored.turns) | failed == set(world.router.turns) | failed
    for trajectory, dispatch in world.held.items():
        assert restored.turns[trajectory].worker == dispatch.worker
        assert restored.turns[trajectory].request.attempt == dispatch.request.attempt


def test_a_restored_turn_of_a_silent_executor_is_issued_again() -> None:
    world = started()
    world.ask(request("g0:0"))
    (dispatch,) = world.held.values()
    restored = Router(CONFIG)
    restored.published(0, 0.0)
    restored.restore([dispatch.request], [dispatch], [], 0.0)
    restored.on(heartbeat(9), 1.9)
    assert restored.outstanding == 1 and restored.tick(1.9) == []
    (again,) = restored.tick(2.1)
    assert isinstance(again, TurnDispatch) and again.worker == "w9" and again.request.attempt == 1


def test_a_restored_turn_stays_with_an_executor_that_is_heard_from_and_fills_its_room() -> None:
    world = started()
    world.ask(request("g0:0"))
    (dispatch,) = world.held.values()
    restored = Router(CONFIG)
    restored.published(0, 0.0)
    restored.restore([dispatch.request], [dispatch], [], 0.0)
    assert restored.on(heartbeat(dispatch.slot, max_turns=1), 0.1) == []
    assert restored.on(request("g1:0"), 0.2) == [] and len(restored.waiting) == 1
    (after,) = restored.on(result(dispatch), 0.3)
    assert isinstance(after, TurnDispatch) and after.request.trajectory_id == "g1:0"


def test_a_next_turn_goes_where_the_last_one_ran() -> None:
    world, last = started(), ""
    for turn in range(6):
        world.ask(request("g0:0", turn, context=100 + 20 * turn))
        (dispatch,) = world.held.values()
        if turn > 0:
            assert dispatch.worker == last
            assert dispatch.cost.cached_tokens == 100 + 20 * (turn - 1) + 5
        last = dispatch.worker
        world.complete(dispatch)


def test_a_next_turn_leaves_a_cache_that_costs_more_to_wait_for_than_to_compute_again() -> None:
    world = started()
    world.ask(request("g0:0", context=30))
    (first,) = world.held.values()
    world.complete(first)
    holder = int(first.worker[1:])
    # The holder alone is open while others send it much to prefill; then all are open again.
    for worker in {0, 1, 2} - {holder}:
        world.beat(worker, state=ExecutorState.PAUSED)
    for index in range(3):
        world.ask(request(f"g9:{index}", context=300))
    step(world, "beats")
    world.ask(request("g0:0", 1, context=40))
    moved = world.held["g0:0"]
    assert moved.worker != first.worker and moved.cost.cached_tokens == 0
    assert moved.cost.passed_over


def test_a_cache_of_another_policy_version_is_worth_nothing() -> None:
    world = started()
    world.ask(request("g0:0", context=100))
    world.complete(next(iter(world.held.values())))
    world.version = 1
    world.feed(manifest(1))
    step(world, "beats")
    world.ask(request("g0:0", 1, context=120))
    assert world.held["g0:0"].cost.cached_tokens == 0


def test_a_group_goes_where_its_prompt_is_until_waiting_costs_more() -> None:
    world = started()
    for index in range(3):
        world.ask(request(f"g0:{index}", context=200, max_tokens=8))
    at = [dispatch.worker for dispatch in world.held.values()]
    cached = [dispatch.cost.cached_tokens for dispatch in world.held.values()]
    assert cached[0] == 0 and cached[1] == 199, "all but the last token of the prompt are shared"
    assert at[0] == at[1]


def test_an_executor_that_refuses_gets_nothing_before_its_next_heartbeat() -> None:
    world = World()
    world.feed(manifest(0))
    world.beat(0)
    world.ask(request("g0:0"))
    world.reject(world.held["g0:0"], TurnOutcome.REFUSED)
    assert len(world.router.waiting) == 1
    world.beat(0)
    assert world.held["g0:0"].request.attempt == 1


def test_a_turn_that_is_refused_every_time_fails_with_the_last_reason() -> None:
    world = World()
    world.feed(manifest(0))
    for _ in range(CONFIG.max_attempts):
        world.beat(0)
        world.ask(request("g0:0")) if not world.asked else None
        world.reject(world.held["g0:0"], TurnOutcome.REFUSED)
    (failed,) = [decision for decision in world.decisions if isinstance(decision, TurnResult)]
    assert failed.attempt == CONFIG.max_attempts - 1 and "refused" in failed.reason and failed.home == 0


def test_a_dispatch_whose_lease_runs_out_is_issued_again() -> None:
    world = World()
    world.feed(manifest(0))
    world.beat(0)
    world.ask(request("g0:0"))
    lost = world.held["g0:0"]
    assert lost.lease_until >= LEASE_SECONDS
    world.router.liveness.executors["w0"].expires = world.beats["w0"][0].ttl_seconds + 1e6  # never silent
    world.now = lost.lease_until
    (again,) = world.router.tick(world.now)
    assert isinstance(again, TurnDispatch) and again.request.attempt == 1
    assert world.router.counters.expired == 1


def test_a_waiting_turn_fails_at_its_deadline() -> None:
    world = World()
    world.feed(manifest(0))
    world.ask(request("g0:0", deadline=5.0))
    world.pass_time(4.0)
    assert not world.ended
    world.pass_time(2.0)
    (failed,) = world.decisions
    assert isinstance(failed, TurnResult) and "deadline" in failed.reason


def test_a_request_for_the_next_turn_proves_that_the_present_one_was_applied() -> None:
    router = Router(CONFIG)
    router.published(0, 0.0)
    router.on(heartbeat(0), 0.0)
    (first,) = router.on(request("g0:0"), 0.1)
    (second,) = router.on(request("g0:0", 1, context=40), 0.2)
    assert isinstance(first, TurnDispatch) and isinstance(second, TurnDispatch)
    assert second.cost.cached_tokens == 20, "the context of the turn before"
    assert router.on(result(first), 0.3) == []
    assert (router.counters.overtaken, router.counters.late, router.outstanding) == (1, 1, 1)


def test_a_big_turn_is_not_starved_by_small_ones() -> None:
    world = World()
    world.feed(manifest(0))
    world.beat(0, token_budget=100, max_turns=10)
    world.ask(request("g0:0", context=40, max_tokens=20, deadline=100.0))
    world.ask(request("g1:0", context=70, max_tokens=20, deadline=101.0))
    for index in range(3):
        world.ask(request(f"g2:{index}", context=10, max_tokens=5, deadline=102.0))
    assert set(world.held) == {"g0:0"}, "the small ones fit beside it, but the big one is before them"
    world.complete(world.held["g0:0"])
    assert "g1:0" in world.held


def test_a_turn_that_nobody_could_run_lets_others_pass() -> None:
    world = World()
    world.feed(manifest(0))
    world.beat(0, token_budget=100)
    world.ask(request("g0:0", context=200, deadline=100.0))
    world.ask(request("g1:0", context=10, deadline=101.0))
    assert set(world.held) == {"g1:0"}
    world.beat(0, token_budget=1000)
    assert set(world.held) == {"g0:0", "g1:0"}


def test_an_excused_absence_gives_nobody_up() -> None:
    world = started()
    world.router.excuse(5.0)
    world.router.tick(6.0)
    assert all(each.standing is Standing.LIVE for each in world.router.liveness.executors.values())


def test_what_is_no_input_is_named() -> None:
    with pytest.raises(TypeError, match="TurnDispatch is no input"):
        world = started()
        world.ask(request("g0:0"))
        world.router.on(world.held["g0:0"], 0.0)
