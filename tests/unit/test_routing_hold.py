"""Turns on hold and withdrawn turns: no executor runs them, a turn on hold goes on with what was sampled."""

from typing import Any

import pytest

from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest
from tests.support.routing_fixtures import CONFIG, TTL_SECONDS, begun_tokens, heartbeat, packed, request, result


def control(**kind: bool) -> TurnRequest:
    return request("g0:0", 0, context=0, anchors=True, **kind)


def dispatches_of(router: Router, event: Any, now: float = 0.0) -> list[TurnDispatch]:
    decisions = router.on_event(event, now)
    assert all(isinstance(each, TurnDispatch) for each in decisions)
    return [each for each in decisions if isinstance(each, TurnDispatch)]


def running() -> tuple[Router, TurnDispatch]:
    """Return a router with one turn, which an executor runs."""
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (sent,) = dispatches_of(router, request("g0:0", patience_seconds=5.0))
    router.on_event(heartbeat(0, holds=packed([sent])), 0.1)
    return router, sent


@pytest.mark.parametrize("kind", ["withdrawn", "hold"])
def test_executor_is_told_to_stop_the_turn(kind: str) -> None:
    router, sent = running()
    (stop,) = dispatches_of(router, control(**{kind: True}), 0.2)
    assert stop.withdrawn and (stop.key, stop.worker, stop.incarnation) == (sent.key, sent.worker, sent.incarnation)
    assert router.outstanding == 0 and len(router.turns) == (kind == "hold")
    assert dispatches_of(router, control(**{kind: True}), 0.3) == [], "once"


@pytest.mark.parametrize("kind", ["withdrawn", "hold"])
def test_queued_turn_leaves_the_queue_without_a_dispatch(kind: str) -> None:
    router = Router(CONFIG)
    assert router.on_event(request("g0:0"), 0.0) == []
    assert router.on_event(control(**{kind: True}), 0.1) == []
    assert router.on_event(heartbeat(0), 0.2) == [] and router.queue.waiting_for_room == 0


def test_turn_on_hold_goes_on_with_its_partial_when_it_is_requested_again() -> None:
    router, sent = running()
    router.on_event(control(hold=True), 0.2)
    assert router.on_event(result(sent, TurnOutcome.PREEMPTED, tokens=4), 0.3) == []
    (again,) = dispatches_of(router, request("g0:0", patience_seconds=5.0), 0.4)
    assert (begun_tokens(again), again.attempt, again.failures, again.withdrawn) == (4, 1, 0, False)
    router.on_event(result(again), 0.5)
    assert (router.counters.finished, len(router.turns)) == (1, 0)


def test_turn_on_hold_that_completes_meanwhile_is_finished() -> None:
    router, sent = running()
    router.on_event(control(hold=True), 0.2)
    router.on_event(result(sent), 0.3)
    assert (router.counters.finished, len(router.turns)) == (1, 0)
    assert router.on_event(control(hold=True), 0.4) == [], "the hold of a finished turn opens none"
    assert not router.turns


def test_turn_on_hold_has_no_patience() -> None:
    router, _ = running()
    router.on_event(control(hold=True), 0.2)
    for tenth in range(3, 300):
        assert router.on_event(heartbeat(0), tenth / 10) == [] and router.tick(tenth / 10) == []
    (again,) = dispatches_of(router, request("g0:0", patience_seconds=5.0), 31.0)
    assert again.attempt == 1


def test_executor_that_lists_a_turn_on_hold_does_not_get_it_back() -> None:
    router, sent = running()
    router.on_event(control(hold=True), 0.2)
    assert router.on_event(heartbeat(0, holds=packed([sent])), 0.3) == []
    assert router.outstanding == 0, "the executor has not read the stop yet"


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("kind", ["withdrawn", "hold"])
def test_next_router_keeps_the_turn_stopped(kind: str, answered: bool) -> None:
    _, sent = running()
    router = Router(CONFIG)
    records = [request("g0:0", patience_seconds=5.0), control(**{kind: True})]
    results = [result(sent, TurnOutcome.PREEMPTED, tokens=4)] * answered
    decisions = router.restore([ReceivedRequest.from_record(each) for each in records], [sent], results, lambda: 1.0)
    assert [each.withdrawn for each in decisions if isinstance(each, TurnDispatch)] == [True] * len(decisions)
    assert len(decisions) == (not answered), "a stop that the log lacks is sent, unless its execution has ended"
    assert router.on_event(heartbeat(0), 1.1) == [] and router.outstanding == 0
    if kind == "hold":
        (again,) = dispatches_of(router, request("g0:0", patience_seconds=5.0), 1.2)
        assert (again.attempt, begun_tokens(again)) == (1, 4 * answered)


def test_next_router_runs_a_turn_that_was_requested_again() -> None:
    router, held = Router(CONFIG), [request("g0:0"), control(hold=True), request("g0:0")]
    router.restore([ReceivedRequest.from_record(each) for each in held], [], [], lambda: 1.0)
    (sent,) = dispatches_of(router, heartbeat(0), 1.1)
    assert not sent.withdrawn


def test_stopped_turn_takes_room_until_its_executor_has_answered() -> None:
    router, sent = running()
    router.on_event(heartbeat(0, max_turns=1, holds=packed([sent])), 0.15)
    router.on_event(control(hold=True), 0.2)
    assert router.on_event(request("g1:0"), 0.3) == []
    (other,) = dispatches_of(router, result(sent, TurnOutcome.PREEMPTED), 0.4) or dispatches_of(
        router, heartbeat(0, max_turns=1), 0.5
    )
    assert other.request.trajectory_id == "g1:0" and other.dispatched_at < TTL_SECONDS
