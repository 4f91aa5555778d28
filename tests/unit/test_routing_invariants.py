"""Invariants of the router's core on histories of executors that join and leave."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.routing.router import Router
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch
from rose.schemas.wire import encode
from tests.support.routing_fixtures import CONFIG, request
from tests.support.routing_machine import STEPS, WORKERS, settle, started, step


@pytest.mark.slow
@settings(max_examples=300, print_blob=True)
@given(st.lists(STEPS, max_size=80))
def test_router_invariants_hold_in_every_history(steps: list[tuple[object, ...]]) -> None:
    # `feed` checks after every event: conservation, books, budgets, liveness, attempts, faults and order.
    simulation = started()
    for what, *values in steps:
        step(simulation, str(what), *values)
    settle(simulation)


@settings(max_examples=200, print_blob=True)
@given(st.lists(st.one_of(STEPS, st.just(("new router",))), max_size=60))
def test_router_invariants_hold_over_router_replacement(steps: list[tuple[object, ...]]) -> None:
    simulation = started()
    for what, *values in steps:
        if what == "new router":
            simulation.restart_router()
        else:
            step(simulation, str(what), *values)
    settle(simulation)


@settings(max_examples=100, print_blob=True)
@given(st.lists(STEPS, max_size=60))
def test_same_history_gives_the_same_decision_bytes(steps: list[tuple[object, ...]]) -> None:
    simulation = started()
    for what, *values in steps:
        step(simulation, str(what), *values)
    again = Router(CONFIG)
    decisions: list[Record] = []
    for now, event in simulation.history:
        decisions += again.tick(now) if event is None else again.on_event(event, now)
    assert [encode(decision) for decision in decisions] == [encode(decision) for decision in simulation.decisions]


@settings(max_examples=30, print_blob=True)
@given(
    turns=st.integers(1, 12),
    silences=st.lists(st.floats(0.1, 500.0), min_size=1, max_size=12),
    heartbeat_orders=st.lists(st.permutations(range(3)), min_size=12, max_size=12),
)
def test_common_silence_takes_no_turn_from_any_executor(
    turns: int, silences: list[float], heartbeat_orders: list[list[int]]
) -> None:
    simulation = started()
    for index in range(turns):
        simulation.ask(request(f"g{index}:0", patience_seconds=600.0))
    sent = dict(simulation.held)
    for silence, order in zip(silences, heartbeat_orders, strict=False):
        for _ in range(4):
            simulation.pass_time(silence / 4)
        for worker in order:
            simulation.beat(worker)
            simulation.pass_time(0.01)
    assert simulation.held == sent and simulation.router.counters.reissued == 0
    settle(simulation)
    assert all(isinstance(decision, TurnDispatch) and decision.failures == 0 for decision in simulation.decisions)
    assert all(decision.attempt == 0 for decision in simulation.decisions if isinstance(decision, TurnDispatch))


@settings(max_examples=30, print_blob=True)
@given(st.integers(1, 4), st.lists(st.tuples(WORKERS, st.floats(2.5, 10.0)), max_size=10))
def test_turns_are_reissued_without_failure_after_a_single_executor_silence(
    turns: int, silences: list[tuple[int, float]]
) -> None:
    simulation = started()
    for index in range(turns):
        simulation.ask(request(f"g{index}:0"))
    for silent, seconds in silences:
        others = {0, 1, 2} - {silent}
        for worker in others:
            simulation.beat(worker, max_turns=0)
        for _ in range(int(seconds / 0.2)):
            simulation.now += 0.2
            for worker in others:
                simulation.beat(worker, max_turns=0)
            simulation.feed(None)
        simulation.beat(silent, max_turns=4)
        assert {each.request.trajectory_id for each in simulation.running} == set(simulation.held), (
            "it is back where it was"
        )
        assert not any(turn.failures for turn in simulation.router.turns.values())
    assert len(simulation.sent) == turns, "nothing was dispatched twice"
    settle(simulation)


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import hashlib; from bench.history import Fleet, Recorder; from rose.pipeline.routing.router import Router;"
        "from rose.schemas.wire import encode; recorder = Recorder(Fleet(20, 200, 0.5)); recorder.record(2.0);"
        "router = Router(); digest = hashlib.blake2b();"
        "[digest.update(encode(each)) for now, event in recorder.history for each in router.on_event(event, now)];"
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
