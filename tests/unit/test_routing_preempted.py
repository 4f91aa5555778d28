"""A turn that its executor returns continues from its generated tokens, wherever these are read."""

import msgspec
import pytest

from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.arrays import pack_logprobs
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult
from rose.schemas.wire import decode, encode
from tests.support.routing_fixtures import (
    CONFIG,
    TTL_SECONDS,
    RoutingSimulation,
    begun_tokens,
    dispatched,
    heartbeat,
    request,
    result,
)
from tests.support.routing_machine import settle, step


def preempted(dispatch: TurnDispatch, tokens: int = 5) -> TurnResult:
    return result(dispatch, TurnOutcome.PREEMPTED, tokens)


def restored(requests: list[TurnRequest], dispatches: list[TurnDispatch], results: list[TurnResult]) -> TurnDispatch:
    """Return the dispatch of a router that read this log, once another executor is heard."""
    router = Router(CONFIG)
    assert router.restore(map(ReceivedRequest.from_record, requests), dispatches, results, lambda: 0.0) == []
    (again,) = router.on_event(heartbeat(9), 0.1)
    assert isinstance(again, TurnDispatch)
    return again


def test_each_dispatch_carries_all_earlier_generated_tokens() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0", max_tokens=100))
    for attempt in range(3):
        dispatch = simulation.held["g0:0"]
        assert (dispatch.attempt, begun_tokens(dispatch), dispatch.failures) == (attempt, 5 * attempt, 0)
        assert decode(TurnDispatch, encode(dispatch)) == dispatch
        simulation.reject(dispatch, TurnOutcome.PREEMPTED)
        simulation.beat(attempt + 1)
    settle(simulation)
    assert simulation.ended == 1 and simulation.router.counters.finished == 1


def test_preempting_executor_is_expected_to_cache_the_whole_partial_turn() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.beat(1)
    simulation.ask(request("g0:0", context=200, max_tokens=100))
    first = simulation.held["g0:0"]
    simulation.reject(first, TurnOutcome.PREEMPTED)
    assert simulation.held["g0:0"].worker != first.worker, "the other one has room at once"
    simulation.reject(simulation.held["g0:0"], TurnOutcome.PREEMPTED)
    for worker in (0, 1):
        simulation.beat(worker)
    again = simulation.held["g0:0"]
    assert (again.cost.cached_tokens, begun_tokens(again)) == (209, 10), "the last token is computed in any case"


@pytest.mark.parametrize(
    "spoiled",
    [
        {"logprobs": b""},
        {"spans": (VersionSpan(0, 4, 0),)},
        {"logprobs": pack_logprobs([float("nan")] * 5)},
        {"tokens": bytes(400), "logprobs": bytes(400), "spans": (VersionSpan(0, 100, 0),)},
    ],
    ids=["no logprobs", "short spans", "nan", "nothing left to sample"],
)
def test_unusable_partial_turn_is_sampled_anew(spoiled: dict[str, object]) -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (sent,) = router.on_event(request("g0:0", max_tokens=100), 0.0)
    assert isinstance(sent, TurnDispatch)
    router.on_event(msgspec.structs.replace(preempted(sent), **spoiled), 0.1)
    (again,) = router.on_event(heartbeat(0), 0.2)
    assert isinstance(again, TurnDispatch) and again.partial is None and again.attempt == 1


def test_shorter_later_part_removes_no_tokens() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (sent,) = router.on_event(request("g0:0", max_tokens=100), 0.0)
    assert isinstance(sent, TurnDispatch)
    router.on_event(preempted(sent, 40), 0.1)
    (again,) = router.on_event(heartbeat(1), 0.2)
    assert isinstance(again, TurnDispatch)
    router.on_event(result(msgspec.structs.replace(again, partial=None), TurnOutcome.PREEMPTED, 7), 0.3)
    (third,) = router.on_event(heartbeat(2), 0.4)
    assert isinstance(third, TurnDispatch) and begun_tokens(third) == 40


def test_restored_router_continues_from_an_unprocessed_partial_result() -> None:
    turn_request = request("g0:0", max_tokens=100)
    again = restored([turn_request], [dispatched(turn_request)], [preempted(dispatched(turn_request))])
    assert (begun_tokens(again), again.attempt, again.failures) == (5, 1, 0)


def test_restored_router_continues_from_the_newest_dispatch() -> None:
    turn_request = request("g0:0", max_tokens=100)
    part = preempted(dispatched(turn_request)).part
    second = dispatched(turn_request, 1, attempt=1, partial=part)
    for results in ([], [preempted(dispatched(turn_request))]):
        router = Router(CONFIG)
        router.restore(
            [ReceivedRequest.from_record(turn_request)], [dispatched(turn_request), second], results, lambda: 0.0
        )
        assert router.turns["g0:0"].worker == "w1" and router.turns["g0:0"].partial == part
        assert router.on_event(result(second), 0.1) == [] and router.counters.finished == 1
    again = restored([turn_request], [dispatched(turn_request), second], [preempted(second)])
    assert (begun_tokens(again), again.attempt) == (10, 2)


def test_restored_router_counts_no_failure_for_turns_handed_back_before_a_restart() -> None:
    turn_request, other = request("g0:0", max_tokens=100), request("g1:0")
    dispatches = [dispatched(turn_request), dispatched(other, incarnation=2)]
    again = restored([turn_request, other], dispatches, [preempted(dispatches[0]), result(dispatches[1])])
    assert (begun_tokens(again), again.failures) == (5, 0)


def test_turns_of_a_stopping_executor_wait_for_their_handed_back_parts() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0", max_tokens=100))
    simulation.beat(1)
    simulation.hand_back(0)
    assert simulation.held["g0:0"].worker == "w0", "its result is on the log, and about to be read"
    simulation.read_on()
    again = simulation.held["g0:0"]
    assert (again.worker, begun_tokens(again), again.failures, again.attempt) == ("w1", 5, 0, 1)
    settle(simulation)


def test_turn_without_a_handed_back_part_is_reissued() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0"))
    simulation.hand_back(0)
    simulation.unread.clear()
    step(simulation, "beats_of", {1}, int(TTL_SECONDS / 0.2) + 2)
    assert simulation.held["g0:0"].worker == "w1" and simulation.held["g0:0"].partial is None
    settle(simulation)


def test_turn_unnamed_by_a_stopping_executor_is_reissued_at_once() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.loses = True
    simulation.ask(request("g0:0"))
    simulation.beat(1)
    simulation.beat(0, state=ExecutorState.STOPPING)
    assert (simulation.held["g0:0"].worker, simulation.held["g0:0"].failures) == ("w1", 0)


def test_partial_result_of_a_superseded_attempt_is_kept() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0", max_tokens=100))
    first = simulation.held["g0:0"]
    step(simulation, "beats_of", {1}, 20)
    assert simulation.held["g0:0"].worker == "w1", "w0 was silent"
    simulation.feed(preempted(first, 40))
    step(simulation, "beats_of", {2}, 20)
    assert (simulation.held["g0:0"].worker, begun_tokens(simulation.held["g0:0"])) == ("w2", 40)


def test_cached_prefix_has_the_version_at_the_start_of_the_attempt() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (sent,) = router.on_event(request("g0:0", max_tokens=100), 0.0)
    assert isinstance(sent, TurnDispatch)
    router.on_event(preempted(sent, 40), 0.1)
    (again,) = router.on_event(heartbeat(1, policy_version=1), 0.2)
    assert isinstance(again, TurnDispatch) and again.worker == "w1"
    spans = (VersionSpan(0, 40, 0), VersionSpan(40, 50, 1))
    router.on_event(msgspec.structs.replace(preempted(again, 10), spans=spans), 0.3)
    (third,) = router.on_event(heartbeat(1, policy_version=1), 0.4)
    assert isinstance(third, TurnDispatch) and third.cost.cached_tokens == 69
