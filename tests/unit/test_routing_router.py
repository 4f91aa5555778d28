"""Laws of the router's core, on histories of executors that come and go."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.routing.custody import LEASE_SECONDS
from pipeline.routing.router import MOST_ATTEMPTS, Router
from schemas.record import Record
from schemas.slack import ExecutorState
from schemas.turns import Refusal, TurnDispatch, TurnOutcome, TurnResult
from schemas.wire import encode
from tests.unit.routing_world import CONFIG, World, dispatched, heartbeat, packed, request, result

WORKERS = st.integers(0, 2)
TRAJECTORIES = st.sampled_from([f"g{group}:{index}" for group in range(3) for index in range(3)])
REJECTIONS = st.sampled_from(
    [
        (TurnOutcome.PREEMPTED, None),
        (TurnOutcome.REFUSED, Refusal.ROOM),
        (TurnOutcome.REFUSED, Refusal.VERSION),
        (TurnOutcome.REFUSED, Refusal.ENGINE),
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("ask"), TRAJECTORIES, st.integers(1, 60), st.integers(1, 40), st.sampled_from([5.0, 20.0, 1e9])),
    st.tuples(st.just("ask"), TRAJECTORIES, st.integers(1, 60), st.integers(1, 40), st.just(1e9)),
    st.tuples(st.just("ask_again"), TRAJECTORIES),
    st.tuples(st.just("overtake"), st.integers(0, 20)),
    st.tuples(
        st.just("beat"),
        WORKERS,
        st.integers(0, 4),
        st.integers(0, 200),
        st.sampled_from(ExecutorState),
        st.integers(-1, 2),
    ),
    st.tuples(st.just("beats")),
    st.tuples(st.just("beats_of"), st.sets(WORKERS), st.integers(1, 40)),
    st.tuples(st.just("restart"), WORKERS),
    st.tuples(st.just("complete"), st.integers(0, 20)),
    st.tuples(st.just("reject"), st.integers(0, 20), REJECTIONS),
    st.tuples(st.just("echo"), st.integers(0, 200), st.booleans()),
    st.tuples(st.just("lose")),
    st.tuples(st.just("publish")),
    st.tuples(st.just("time"), st.sampled_from([0.05, 0.3, 1.0, 2.5, 6.0, 70.0])),
)


def step(world: World, what: str, *values: object) -> None:
    """Let one thing happen in the world; steps that make no sense at the moment do nothing."""
    match what, *values:
        case "ask", str(trajectory), int(context), int(most), float(patience):
            ask_next(world, trajectory, context=context, max_tokens=most, patience_seconds=patience)
        case "ask_again", str(trajectory):
            if trajectory in world.asked:
                world.feed(world.asked[trajectory][0])
        case "overtake", int(which):
            if world.running:  # its result and the request that it led to lie in two partitions
                done = world.running[which % len(world.running)]
                trajectory, turn = done.request.trajectory_id, done.request.turn
                if world.asked[trajectory][0].turn == turn and world.done.get(trajectory, -1) < turn:
                    del world.executors[done.worker].held[done.request.key]
                    world.ask(request(trajectory, turn + 1))
                    world.feed(result(done))
        case "beat", int(worker), int(turns), int(tokens), ExecutorState() as state, int(lag):
            version = -1 if lag < 0 else max(-1, world.version - lag)
            world.beat(worker, max_turns=turns, token_budget=tokens, state=state, policy_version=version)
        case ("beats",):
            for worker in range(3):
                world.beat(worker, policy_version=world.version)
        case "beats_of", set(workers), int(times):
            for _ in range(times):
                world.pass_time(0.2)
                for worker in sorted(workers):
                    world.beat(worker, policy_version=world.version)
        case "restart", int(worker):
            world.beat(worker, restart=True, state=ExecutorState.STARTING, policy_version=-1)
        case "complete", int(which):
            if world.running:
                world.complete(world.running[which % len(world.running)])
        case "reject", int(which), (outcome, refusal):
            if world.running:
                world.reject(world.running[which % len(world.running)], outcome, refusal)
        case "echo", int(which), bool(completed):
            sent = [each for each in world.sent.values() if each.request.key not in world.executors[each.worker].held]
            if sent and completed:
                world.complete(sent[which % len(sent)])
            elif sent:
                world.reject(sent[which % len(sent)], TurnOutcome.PREEMPTED)
        case ("lose",):
            world.loses = True
        case ("publish",):
            world.version += 1
        case "time", float(seconds):
            world.pass_time(seconds)


def ask_next(world: World, trajectory: str, **fields: object) -> None:
    turn = world.asked[trajectory][0].turn + 1 if trajectory in world.asked else 0
    if turn == world.done.get(trajectory, -1) + 1:
        world.ask(request(trajectory, turn, **fields))  # type: ignore[arg-type]


def started() -> World:
    world = World()
    step(world, "beats")
    return world


def settle(world: World) -> None:
    """The fleet is well from now on: every turn ends."""
    world.loses = False
    for _ in range(200):
        step(world, "beats_of", {0, 1, 2}, 1)
        for dispatch in world.running:
            world.complete(dispatch)
        if not world.router.turns and not world.running:
            return
    raise AssertionError(f"{len(world.router.turns)} turns never end")


@settings(deadline=None, max_examples=300, print_blob=True)
@given(st.lists(STEPS, max_size=80))
def test_the_laws_hold_in_every_history(steps: list[tuple[object, ...]]) -> None:
    # World.feed checks after every event: conservation, the books, budgets, liveness, attempts, faults, order.
    world = started()
    for what, *values in steps:
        step(world, str(what), *values)
    settle(world)


@settings(deadline=None, max_examples=200, print_blob=True)
@given(st.lists(st.one_of(STEPS, st.just(("new router",))), max_size=60))
def test_the_laws_hold_when_routers_are_replaced(steps: list[tuple[object, ...]]) -> None:
    world = started()
    for what, *values in steps:
        if what == "new router":
            world.restart_router()
        else:
            step(world, str(what), *values)
    settle(world)


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


@settings(deadline=None, max_examples=30, print_blob=True)
@given(
    turns=st.integers(1, 12),
    silences=st.lists(st.floats(0.1, 500.0), min_size=1, max_size=12),
    orders=st.lists(st.permutations(range(3)), min_size=12, max_size=12),
)
def test_silences_of_everybody_take_nothing_from_anybody(
    turns: int, silences: list[float], orders: list[list[int]]
) -> None:
    world = started()
    for index in range(turns):
        world.ask(request(f"g{index}:0", patience_seconds=600.0))
    sent = dict(world.held)
    for silence, order in zip(silences, orders, strict=False):
        for _ in range(4):
            world.pass_time(silence / 4)
        for worker in order:
            world.beat(worker)
            world.pass_time(0.01)
    assert world.held == sent and world.router.counters.reissued == 0
    settle(world)
    assert all(isinstance(decision, TurnDispatch) and decision.failures == 0 for decision in world.decisions)
    assert all(decision.request.attempt == 0 for decision in world.decisions if isinstance(decision, TurnDispatch))


@settings(deadline=None, max_examples=30, print_blob=True)
@given(st.integers(1, 4), st.lists(st.tuples(WORKERS, st.floats(2.5, 10.0)), max_size=10))
def test_who_was_silent_alone_keeps_what_it_holds_and_no_turn_is_failed_for_it(
    turns: int, silences: list[tuple[int, float]]
) -> None:
    world = started()
    for index in range(turns):
        world.ask(request(f"g{index}:0"))
    for silent, seconds in silences:
        others = {0, 1, 2} - {silent}
        for worker in others:
            world.beat(worker, max_turns=0)
        for _ in range(int(seconds / 0.2)):
            world.now += 0.2
            for worker in others:
                world.beat(worker, max_turns=0)
            world.feed(None)
        world.beat(silent, max_turns=4)
        assert {each.request.trajectory_id for each in world.running} == set(world.held), "it is back where it was"
        assert not any(turn.failures for turn in world.router.turns.values())
    assert len(world.sent) == turns, "nothing was dispatched twice"
    settle(world)


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


def test_two_executors_that_hold_one_turn_both_run_it_and_the_first_result_wins() -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0"))
    first = world.held["g0:0"]
    step(world, "beats_of", {1}, 20)
    second = world.held["g0:0"]
    assert (second.worker, second.request.attempt, second.failures) == ("w1", 1, 1)
    world.beat(0, max_turns=1)
    assert world.held["g0:0"] is second and world.router.turns["g0:0"].failures == 0
    world.beat(1, max_turns=1)
    world.ask(request("g1:0"))
    assert len(world.router.waiting) == 1, "both have their room full"
    world.complete(first)
    assert world.ended == 1 and world.held["g1:0"].worker == "w0"
    world.complete(second)
    assert world.router.counters.late == 1


def test_what_came_back_is_issued_under_a_new_number_when_it_is_lost_again() -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0"))
    step(world, "beats_of", {1}, 20)
    step(world, "beats_of", {2}, 20)
    world.beat(0)
    world.beat(0, state=ExecutorState.STOPPING)
    attempts = [decision.request.attempt for decision in world.decisions if isinstance(decision, TurnDispatch)]
    assert attempts == sorted(set(attempts))
    settle(world)


def test_a_lone_executor_that_dies_gives_its_turns_back_once_its_next_start_is_heard() -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0"))
    for _ in range(60):
        world.pass_time(1.0)
    assert world.held, "nobody can tell a dead executor from a listener that hears nothing"
    world.beat(0, restart=True, policy_version=-1)
    assert len(world.router.waiting) == 1
    world.beat(0)
    assert world.held["g0:0"].request.attempt == 1 and world.held["g0:0"].failures == 1


def test_a_turn_that_runs_has_all_the_time_in_the_world() -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0", patience_seconds=5.0))
    step(world, "beats_of", {0}, 500)
    assert world.held["g0:0"].request.attempt == 0
    # When its executor dies after that, it is issued again, and has its patience anew.
    step(world, "beats_of", {1}, 20)
    assert world.held["g0:0"].worker == "w1" and not world.ended


def test_a_turn_whose_executor_is_not_heard_is_given_up_after_its_patience() -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0", patience_seconds=5.0))
    for _ in range(7):
        world.pass_time(1.0)
    (failed,) = [decision for decision in world.decisions if isinstance(decision, TurnResult)]
    assert "was not heard to run it for 5 s" in failed.reason


def test_a_waiting_turn_fails_after_its_patience() -> None:
    world = World()
    world.ask(request("g0:0", patience_seconds=5.0))
    world.pass_time(4.0)
    assert not world.ended
    world.pass_time(2.0)
    (failed,) = world.decisions
    assert isinstance(failed, TurnResult) and "no executor has taken it up in 5 s" in failed.reason


def test_a_dispatch_that_a_living_executor_does_not_list_is_issued_again() -> None:
    world = World()
    world.beat(0)
    world.loses = True
    world.ask(request("g0:0"))
    step(world, "beats_of", {0}, int(LEASE_SECONDS / 0.2) - 1)
    assert world.held["g0:0"].request.attempt == 0
    step(world, "beats_of", {0}, 2)
    assert world.held["g0:0"].request.attempt == 1 and world.router.counters.lost == 1


def test_a_dispatch_is_not_lost_while_nothing_is_heard() -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0"))
    world.now += 100.0
    for _ in range(30):  # heartbeats from before the dispatch, that were on their way while the broker was away
        world.beat(0, holds=b"")
        world.now += 0.001
    assert world.held["g0:0"].request.attempt == 0


@pytest.mark.parametrize(
    ("outcome", "refusal"),
    [
        (TurnOutcome.PREEMPTED, None),
        (TurnOutcome.REFUSED, Refusal.ROOM),
        (TurnOutcome.REFUSED, Refusal.VERSION),
    ],
)
def test_what_is_nobodys_fault_counts_against_no_limit(outcome: TurnOutcome, refusal: Refusal | None) -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0"))
    for attempt in range(3 * CONFIG.max_attempts):
        dispatch = world.held["g0:0"]
        assert (dispatch.request.attempt, dispatch.failures) == (attempt, 0)
        world.reject(dispatch, outcome, refusal)
        assert len(world.router.waiting) == 1, "it gets nothing before its next heartbeat"
        world.beat(0)


def test_a_turn_that_no_engine_runs_fails_with_the_last_reason() -> None:
    world = World()
    for _ in range(CONFIG.max_attempts):
        world.beat(0)
        world.ask(request("g0:0")) if not world.asked else None
        world.reject(world.held["g0:0"], TurnOutcome.REFUSED, Refusal.ENGINE)
    (failed,) = [decision for decision in world.decisions if isinstance(decision, TurnResult)]
    assert failed.attempt == CONFIG.max_attempts and "refused" in failed.reason and failed.home == 0


def test_an_executor_that_is_full_of_what_the_router_does_not_know_is_not_asked_time_and_again() -> None:
    router = Router(CONFIG)
    unknown = packed([dispatched(request("other:0"))])
    router.on(heartbeat(0, holds=unknown), 0.0)
    (sent,) = router.on(request("g0:0"), 0.0)
    assert isinstance(sent, TurnDispatch)
    router.on(result(sent, TurnOutcome.REFUSED, refusal=Refusal.ROOM), 0.1)
    for beat in range(1, 100):
        assert router.on(heartbeat(0, holds=unknown), 0.1 * beat) == []
    (again,) = router.on(heartbeat(0), 10.0)
    assert isinstance(again, TurnDispatch) and again.request.attempt == 1


def test_attempts_are_numbered_within_their_bound() -> None:
    router = Router(CONFIG)
    router.on(heartbeat(0), 0.0)
    (sent,) = router.on(request("g0:0"), 0.0)
    assert isinstance(sent, TurnDispatch)
    router.turns["g0:0"].next_attempt = MOST_ATTEMPTS
    (failed,) = router.on(result(sent, TurnOutcome.PREEMPTED), 0.1)
    assert isinstance(failed, TurnResult) and "moved 65536 times" in failed.reason
    encode(failed)


def test_an_executor_that_stops_gives_its_turns_back_at_once_and_for_nothing() -> None:
    world = World()
    world.beat(0)
    world.ask(request("g0:0"))
    world.beat(1)
    world.beat(0, state=ExecutorState.STOPPING)
    assert (world.held["g0:0"].worker, world.held["g0:0"].failures) == ("w1", 0)


def test_versions_are_what_is_served_and_a_dead_executors_count_no_more() -> None:
    world = World()
    world.beat(0, policy_version=2**50)
    world.beat(1, policy_version=5)
    world.ask(request("g0:0"))
    assert world.held["g0:0"].worker == "w0"
    step(world, "publish")
    for _ in range(20):
        world.now += 0.2
        world.beat(1, policy_version=5)
        world.feed(None)
    assert world.router.liveness.current_version == 5
    assert world.held["g0:0"].worker == "w1"


def test_a_restored_router_has_read_for_nobodys_time() -> None:
    times = iter([0.0, 500.0])
    restored = Router(CONFIG)
    restored.restore(
        [request("g0:0", patience_seconds=60.0), request("g1:0", patience_seconds=60.0)],
        [dispatched(request("g0:0", patience_seconds=60.0))],
        [],
        lambda: next(times),
    )
    assert restored.tick(500.1) == [] and (restored.outstanding, len(restored.waiting)) == (1, 1)
    assert restored.on(heartbeat(1), 550.0)
    assert restored.tick(550.0) == []


def test_failures_are_remembered_over_a_restart() -> None:
    asked = request("g0:0", attempt=7)
    restored = Router(CONFIG)
    restored.restore([request("g0:0")], [dispatched(asked, failures=CONFIG.max_attempts - 1)], [], lambda: 0.0)
    refused = result(dispatched(asked), TurnOutcome.REFUSED, refusal=Refusal.ENGINE)
    (failed,) = restored.on(refused, 1.0)
    assert isinstance(failed, TurnResult) and failed.outcome is TurnOutcome.FAILED


def test_a_restored_turn_of_a_silent_executor_is_issued_again() -> None:
    restored = Router(CONFIG)
    restored.restore([request("g0:0")], [dispatched(request("g0:0"), 1)], [], lambda: 0.0)
    decisions: list[Record] = []
    for beat in range(13):
        assert not decisions or beat > 9, "it may be silent for 2 s"
        decisions += restored.on(heartbeat(9), 0.2 * beat)
        decisions += restored.tick(0.2 * beat)
    (again,) = decisions
    assert isinstance(again, TurnDispatch) and again.worker == "w9" and again.request.attempt == 1


def test_a_restored_turn_stays_with_an_executor_that_is_heard_from_and_fills_its_room() -> None:
    sent = dispatched(request("g0:0"))
    restored = Router(CONFIG)
    restored.restore([request("g0:0")], [sent], [], lambda: 0.0)
    assert restored.on(heartbeat(0, max_turns=1, holds=packed([sent])), 0.1) == []
    assert restored.on(request("g1:0"), 0.2) == [] and len(restored.waiting) == 1
    (after,) = restored.on(result(sent), 0.3)
    assert isinstance(after, TurnDispatch) and after.request.trajectory_id == "g1:0"


def test_a_restored_router_gives_a_turn_back_to_the_executor_of_an_older_dispatch() -> None:
    old, new = dispatched(request("g0:0"), 0), dispatched(request("g0:0", attempt=1), 1)
    restored = Router(CONFIG)
    restored.restore([request("g0:0")], [new, old], [], lambda: 0.0)
    assert restored.turns["g0:0"].worker == "w1"
    for beat in range(14):  # w1 is dead
        restored.on(heartbeat(0, holds=packed([old]), max_turns=1), 0.2 * beat)
        restored.tick(0.2 * beat)
    assert (restored.turns["g0:0"].worker, restored.turns["g0:0"].request.attempt) == ("w0", 0)


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


def test_a_big_turn_is_not_starved_by_small_ones() -> None:
    world = World()
    world.beat(0, token_budget=100, max_turns=10)
    world.ask(request("g0:0", context=40, max_tokens=20, patience_seconds=100.0))
    world.ask(request("g1:0", context=70, max_tokens=20, patience_seconds=101.0))
    for index in range(3):
        world.ask(request(f"g2:{index}", context=10, max_tokens=5, patience_seconds=102.0))
    assert set(world.held) == {"g0:0"}, "the small ones fit beside it, but the big one is before them"
    world.complete(world.held["g0:0"])
    assert "g1:0" in world.held


def test_a_turn_that_nobody_could_run_lets_others_pass() -> None:
    world = World()
    world.beat(0, token_budget=100)
    world.ask(request("g0:0", context=200, patience_seconds=100.0))
    world.ask(request("g1:0", context=10, patience_seconds=101.0))
    assert set(world.held) == {"g1:0"}
    world.beat(0, token_budget=1000)
    assert set(world.held) == {"g0:0", "g1:0"}


def test_a_turn_that_ends_while_it_is_set_aside_is_not_held() -> None:
    """In a fleet that stays as it is, which brings nothing back."""
    router = Router(CONFIG)
    for beat in range(100):
        now = 0.2 * beat
        router.on(heartbeat(0, sequence=beat), now)
        router.on(request(f"g{beat}:0", context=2000, patience_seconds=1.0), now)
        router.tick(now)
        assert len(router.waiting) == len(router.waiting.aside) <= 10
    assert router.counters.failed >= 90


def test_a_request_for_the_next_turn_proves_that_the_present_one_was_applied() -> None:
    router = Router(CONFIG)
    router.on(heartbeat(0), 0.0)
    (first,) = router.on(request("g0:0"), 0.1)
    (second,) = router.on(request("g0:0", 1, context=40), 0.2)
    assert isinstance(first, TurnDispatch) and isinstance(second, TurnDispatch)
    assert second.cost.cached_tokens == 20, "the context of the turn before"
    assert router.on(result(first), 0.3) == []
    assert (router.counters.overtaken, router.counters.late, router.outstanding) == (1, 1, 1)


def test_what_is_no_input_is_named() -> None:
    with pytest.raises(TypeError, match="TurnDispatch is no input"):
        world = started()
        world.ask(request("g0:0"))
        world.router.on(world.held["g0:0"], 0.0)
