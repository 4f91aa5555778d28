"""The summary of a cell has the state of its core, and is always a valid record."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.routing.candidates import rate_bucket
from rose.pipeline.routing.cell_summary import MAX_COUNTED_TURNS, SILENT_SECONDS, summarize_cell
from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.cells import MAX_EXECUTORS, CellSummary
from rose.schemas.heartbeats import ExecutorState, Hardware, Tenant, WorkerClass
from rose.schemas.wire import decode, encode
from tests.support.routing_fixtures import RoutingSimulation, heartbeat, request
from tests.support.routing_machine import STEPS, step


def summary(router: Router, now: float = 0.0) -> CellSummary:
    made = summarize_cell(router, name="router-0", now=now)
    assert decode(CellSummary, encode(made)) == made
    return made


@settings(max_examples=50, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_cell_summary_equals_the_router_counts_in_any_history(steps: list[tuple[object, ...]]) -> None:
    simulation = RoutingSimulation()
    for what in steps:
        step(simulation, *what)  # type: ignore[arg-type]
        found = summary(simulation.router, simulation.now)
        waiting, outstanding = simulation.router.queue.waiting_for_room, simulation.router.outstanding
        counts_of_turns = (waiting, outstanding) if found.executors else (waiting + outstanding, 0)
        assert (found.waiting_turns, found.outstanding_turns) == counts_of_turns
        assert (found.wanted_tokens > 0) == (found.waiting_turns > 0)
        assert all(line.free_turns == 0 == line.free_tokens for line in found.executors if not line.open)


def test_executor_line_has_held_turns_and_load_seconds() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0, max_turns=2, token_budget=100)
    simulation.ask(request("g0:0", context=20, max_tokens=10))
    simulation.ask(request("g1:0", context=20, max_tokens=100))
    found = summary(simulation.router, simulation.now)
    (line,) = found.executors
    assert (line.worker, line.open, line.serving, line.by_grant) == ("w0", True, False, False)
    assert (line.held_turns, line.held_tokens, line.free_turns, line.free_tokens) == (1, 30, 1, 70)
    prefill = rate_bucket(1000.0, None).token_seconds
    assert line.load_seconds == pytest.approx(20 * prefill + 10 / 100.0 / 2)
    assert (found.waiting_turns, found.wanted_tokens, found.prefill_tokens, found.new_tokens) == (1, 120, 20, 100)
    assert found.waiting_seconds == pytest.approx(20 / 1000 + 100 / (100 * 2))


def test_silent_executors_have_no_expected_work() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    for index in range(2):
        simulation.ask(request(f"g{index}:0", context=20, max_tokens=10))
    silent = summary(simulation.router, simulation.now + SILENT_SECONDS)
    assert (silent.executors, silent.waiting_turns, silent.outstanding_turns) == ((), 2, 0)
    assert (silent.wanted_tokens, silent.prefill_tokens) == (60, 40)
    assert simulation.router.outstanding == 2, "what they hold is theirs until somebody is heard"


def test_lender_line_has_its_users_and_a_gone_executor_has_no_line() -> None:
    router = Router()
    lender = msgspec.structs.replace(
        heartbeat(1, state=ExecutorState.PAUSED),
        worker_class=WorkerClass.SERVING,
        by_grant=True,
        serving=Tenant(running=3, waiting=1),
    )
    router.on_heartbeat(heartbeat(0, policy_version=2), 0.0)
    router.on_heartbeat(lender, 0.1)
    router.on_heartbeat(heartbeat(2, state=ExecutorState.STOPPING), 0.2)
    found = summary(router)
    assert [line.worker for line in found.executors] == ["w1", "w0"]
    line = found.executors[0]
    assert (line.open, line.serving, line.by_grant, line.lag_versions) == (False, True, True, 2)
    assert (line.serving_running, line.serving_waiting) == (3, 1)


def test_long_summary_keeps_lenders_and_then_the_oldest_executors() -> None:
    router = Router()
    for number in range(MAX_EXECUTORS + 5):
        beat = heartbeat(number, hardware=Hardware(prefill_tokens_per_second=1e3, decode_tokens_per_second=1e-3))
        beat = msgspec.structs.replace(beat, worker=f"{number:x<128}", by_grant=number >= MAX_EXECUTORS)
        router.on_heartbeat(msgspec.structs.replace(beat, state=ExecutorState.PAUSED), 0.1)
    for number in range(3 * MAX_COUNTED_TURNS):
        router.on_request(ReceivedRequest.from_record(request(f"g{number}:0", context=20, max_tokens=10)), 0.2)
    found = summary(router)
    assert len(found.executors) == MAX_EXECUTORS and all(line.by_grant for line in found.executors[:5])
    assert found.waiting_turns == 3 * MAX_COUNTED_TURNS
    assert (found.prefill_tokens, found.wanted_tokens) == (60 * MAX_COUNTED_TURNS, 90 * MAX_COUNTED_TURNS)
