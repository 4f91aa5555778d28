"""Leases, attempts, patience and restarts of the router's core, each in a small history."""

import msgpack
import msgspec
import pytest

from rose.pipeline.routing.assignments import LISTING_SECONDS
from rose.pipeline.routing.router import ATTEMPT_LIMIT, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.heartbeats import ExecutorState, Hardware
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.turns import Refusal, TurnDispatch, TurnOutcome, TurnResult, context_fields
from rose.schemas.wire import decode, encode
from tests.support.routing_fixtures import CONFIG, RoutingSimulation, dispatched, heartbeat, packed, request, result
from tests.support.routing_machine import settle, started, step


def test_first_result_wins_if_two_executors_run_one_turn() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0"))
    first = simulation.held["g0:0"]
    step(simulation, "beats_of", {1}, 20)
    second = simulation.held["g0:0"]
    assert (second.worker, second.attempt, second.failures) == ("w1", 1, 1)
    simulation.beat(0, max_turns=1)
    assert simulation.held["g0:0"] is second and simulation.router.turns["g0:0"].failures == 0
    simulation.beat(1, max_turns=1)
    simulation.ask(request("g1:0"))
    assert len(simulation.router.queue) == 1, "both have their room full"
    simulation.complete(first)
    assert simulation.ended == 1 and simulation.held["g1:0"].worker == "w0"
    simulation.complete(second)
    assert simulation.router.counters.late == 1


def test_turn_lost_again_is_reissued_under_a_new_attempt() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0"))
    step(simulation, "beats_of", {1}, 20)
    step(simulation, "beats_of", {2}, 20)
    simulation.beat(0)
    simulation.beat(0, state=ExecutorState.STOPPING)
    attempts = [decision.attempt for decision in simulation.decisions if isinstance(decision, TurnDispatch)]
    assert attempts == sorted(set(attempts))
    settle(simulation)


def test_turns_of_a_dead_lone_executor_return_at_its_next_start() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0"))
    for _ in range(60):
        simulation.pass_time(1.0)
    assert simulation.held, "nobody can tell a dead executor from a listener that hears nothing"
    simulation.beat(0, restart=True, policy_version=-1)
    assert len(simulation.router.queue) == 1
    simulation.beat(0)
    assert simulation.held["g0:0"].attempt == 1 and simulation.held["g0:0"].failures == 1


def test_seeded_turn_goes_to_an_executor_with_seeds_and_counts_no_failure() -> None:
    """The other executor would be cheaper in every other respect."""
    router = Router(CONFIG)
    cheap = Hardware(prefill_tokens_per_second=1e6, decode_tokens_per_second=1e6)
    assert router.on_event(heartbeat(0, hardware=cheap, seeded=False), 0.0) == []
    seeded = [request(f"g{number}:0", sampling=Sampling(max_tokens=10, seed=number)) for number in range(3)]
    assert router.on_event(seeded[0], 0.0) == [], "nobody is there who would take it"
    [other] = router.on_event(request("g9:0"), 0.0)
    assert isinstance(other, TurnDispatch) and other.worker == "w0", "and it holds nobody else up"
    decisions = router.on_event(heartbeat(1), 0.1)
    for turn_request in seeded[1:]:
        decisions += router.on_event(turn_request, 0.2)
    assert [(each.worker, each.failures) for each in decisions if isinstance(each, TurnDispatch)] == [("w1", 0)] * 3


def test_seeded_turn_fails_with_a_reason_if_no_executor_takes_seeds() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0, seeded=False), 0.0)
    assert router.on_event(request("g0:0", patience_seconds=3.0, sampling=Sampling(max_tokens=10, seed=1)), 0.0) == []
    failed = []
    for tenth in range(1, 60):
        router.on_event(heartbeat(0, seeded=False), tenth / 10)
        failed += router.tick(tenth / 10)
    [one] = failed
    assert isinstance(one, TurnResult) and one.outcome is TurnOutcome.FAILED
    assert "no executor takes turns with a seed" in one.reason


def test_closed_executors_do_not_make_seeds_the_failure_reason() -> None:
    """An executor with seeds exists and is parked."""
    router = Router(CONFIG)
    paused = heartbeat(0, state=ExecutorState.PAUSED)
    router.on_event(paused, 0.0)
    router.on_event(request("g0:0", patience_seconds=3.0, sampling=Sampling(max_tokens=10, seed=1)), 0.0)
    failed = []
    for tenth in range(1, 60):
        router.on_event(paused, tenth / 10)
        failed += router.tick(tenth / 10)
    [one] = failed
    assert isinstance(one, TurnResult) and "no executor has taken it up in 3 s" in one.reason


def test_running_turn_has_no_timeout() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0", patience_seconds=5.0))
    step(simulation, "beats_of", {0}, 500)
    assert simulation.held["g0:0"].attempt == 0
    # If its executor then dies, the turn is reissued with a new patience.
    step(simulation, "beats_of", {1}, 20)
    assert simulation.held["g0:0"].worker == "w1" and not simulation.ended


def test_turn_of_a_silent_executor_fails_after_its_patience() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0", patience_seconds=5.0))
    for _ in range(7):
        simulation.pass_time(1.0)
    (failed,) = [decision for decision in simulation.decisions if isinstance(decision, TurnResult)]
    assert "did not list it as running for 5 s" in failed.reason


def test_waiting_turn_fails_after_its_patience() -> None:
    simulation = RoutingSimulation()
    simulation.ask(request("g0:0", patience_seconds=5.0))
    simulation.pass_time(4.0)
    assert not simulation.ended
    simulation.pass_time(2.0)
    (failed,) = simulation.decisions
    assert isinstance(failed, TurnResult) and "no executor has taken it up in 5 s" in failed.reason


def test_dispatch_unlisted_by_a_live_executor_is_reissued() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.loses = True
    simulation.ask(request("g0:0"))
    step(simulation, "beats_of", {0}, int(LISTING_SECONDS / 0.2) - 1)
    assert simulation.held["g0:0"].attempt == 0
    step(simulation, "beats_of", {0}, 2)
    assert simulation.held["g0:0"].attempt == 1 and simulation.router.counters.lost == 1


def test_dispatch_is_not_lost_during_a_common_silence() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0"))
    simulation.now += 100.0
    for _ in range(30):  # heartbeats from before the dispatch, in transit during the broker outage
        simulation.beat(0, holds=b"")
        simulation.now += 0.001
    assert simulation.held["g0:0"].attempt == 0


@pytest.mark.parametrize(
    ("outcome", "refusal"),
    [
        (TurnOutcome.PREEMPTED, None),
        (TurnOutcome.REFUSED, Refusal.ROOM),
        (TurnOutcome.REFUSED, Refusal.VERSION),
    ],
)
def test_reissue_without_fault_counts_toward_no_limit(outcome: TurnOutcome, refusal: Refusal | None) -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0"))
    for attempt in range(3 * CONFIG.max_attempts):
        dispatch = simulation.held["g0:0"]
        assert (dispatch.attempt, dispatch.failures) == (attempt, 0)
        simulation.reject(dispatch, outcome, refusal)
        assert len(simulation.router.queue) == 1, "it gets nothing before its next heartbeat"
        simulation.beat(0)


def test_turn_refused_by_every_engine_fails_with_the_last_reason() -> None:
    simulation = RoutingSimulation()
    for _ in range(CONFIG.max_attempts):
        simulation.beat(0)
        simulation.ask(request("g0:0")) if not simulation.requested else None
        simulation.reject(simulation.held["g0:0"], TurnOutcome.REFUSED, Refusal.ENGINE)
    (failed,) = [decision for decision in simulation.decisions if isinstance(decision, TurnResult)]
    assert failed.attempt == CONFIG.max_attempts and "refused" in failed.reason and failed.home == 0


def test_executor_that_refused_while_closed_is_used_again_once_open() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g:0"))
    simulation.beat(0)
    simulation.ask(request("g:1"))
    simulation.reject(simulation.held["g:1"], TurnOutcome.REFUSED, Refusal.ROOM)
    simulation.beat(0, state=ExecutorState.PAUSED)
    assert "g:1" not in simulation.held
    simulation.beat(0)
    assert "g:1" in simulation.held


def test_closed_inbox_gets_no_dispatch_until_its_executor_is_heard_again() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.router.close_inboxes({0})
    simulation.ask(request("g:0"))
    assert not simulation.held
    simulation.beat(0)
    assert "g:0" in simulation.held


def test_executor_full_of_unknown_turns_is_not_retried_repeatedly() -> None:
    router = Router(CONFIG)
    unknown = packed([dispatched(request("other:0"))])
    router.on_event(heartbeat(0, holds=unknown), 0.0)
    (sent,) = router.on_event(request("g0:0"), 0.0)
    assert isinstance(sent, TurnDispatch)
    router.on_event(result(sent, TurnOutcome.REFUSED, refusal=Refusal.ROOM), 0.1)
    for beat in range(1, 100):
        assert router.on_event(heartbeat(0, holds=unknown), 0.1 * beat) == []
    (again,) = router.on_event(heartbeat(0), 10.0)
    assert isinstance(again, TurnDispatch) and again.attempt == 1


def test_attempt_numbers_stay_within_their_bound() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (sent,) = router.on_event(request("g0:0"), 0.0)
    assert isinstance(sent, TurnDispatch)
    router.turns["g0:0"].next_attempt = ATTEMPT_LIMIT
    (failed,) = router.on_event(result(sent, TurnOutcome.PREEMPTED), 0.1)
    assert isinstance(failed, TurnResult) and "moved 65536 times" in failed.reason
    encode(failed)


def test_stopping_executor_returns_its_turns_at_once_without_failures() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0)
    simulation.ask(request("g0:0"))
    simulation.beat(1)
    simulation.beat(0, state=ExecutorState.STOPPING)
    assert (simulation.held["g0:0"].worker, simulation.held["g0:0"].failures) == ("w1", 0)


def test_current_version_ignores_dead_executors() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0, policy_version=2**50)
    simulation.beat(1, policy_version=5)
    simulation.ask(request("g0:0"))
    assert simulation.held["g0:0"].worker == "w0"
    step(simulation, "publish")
    for _ in range(20):
        simulation.now += 0.2
        simulation.beat(1, policy_version=5)
        simulation.feed(None)
    assert simulation.router.liveness.current_version == 5
    assert simulation.held["g0:0"].worker == "w1"


def test_replay_time_of_a_restored_router_counts_against_no_turn() -> None:
    times = iter([0.0, 500.0])
    restored = Router(CONFIG)
    restored.restore(
        [ReceivedRequest.from_record(request(name, patience_seconds=60.0)) for name in ("g0:0", "g1:0")],
        [dispatched(request("g0:0", patience_seconds=60.0))],
        [],
        lambda: next(times),
    )
    assert restored.tick(500.1) == [] and (restored.outstanding, len(restored.queue)) == (1, 1)
    assert restored.on_event(heartbeat(1), 550.0)
    assert restored.tick(550.0) == []


@pytest.mark.parametrize("context", [20, 400], ids=["small", "cut"])
def test_unknown_request_fields_reach_the_executor_on_every_attempt(context: int) -> None:
    turn_request = request("g0:0", home=3, context=context)
    wire = msgpack.packb(msgpack.unpackb(encode(turn_request)) | {"added": [1, {"deep": b"bytes"}]})
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (sent,) = router.on_event(ReceivedRequest(turn_request, wire, 17), 0.0)
    assert isinstance(sent, TurnDispatch)
    assert router.on_event(result(sent, TurnOutcome.PREEMPTED), 0.1) == []
    for attempt, dispatch in enumerate([sent, *router.on_event(heartbeat(0), 0.2)]):
        assert isinstance(dispatch, TurnDispatch)
        read = decode(TurnDispatch, encode(dispatch))
        assert (read.attempt, read.home, read.offset) == (attempt, 3, 17)
        if not attempt or context == 20:
            assert (bytes(read.request_wire), read.request, read.cut) == (wire, turn_request, False)
        else:  # the appended tokens are read back by reference, and everything else is unchanged
            assert msgpack.unpackb(bytes(read.request_wire)) == msgpack.unpackb(wire) | {"appended": b""} and read.cut


def test_start_in_another_inbox_is_the_newer_incarnation_also_after_a_restore() -> None:
    before = dispatched(request("g0:0"), incarnation=500, slot=1, dispatched_at=1.0)
    after = dispatched(request("g1:0"), incarnation=3, slot=0, dispatched_at=2.0)
    for log in ([before, after], [after, before]):
        restored = Router(CONFIG)
        again = restored.restore([ReceivedRequest.from_record(each.request) for each in log], log, [], lambda: 0.0)
        assert again == [] and [turn.worker for turn in restored.turns.values()].count("w0") == 1
        assert restored.on_event(heartbeat(0, incarnation=3, slot=0, holds=packed([after])), 0.1)
        assert restored.turns["g1:0"].attempt == 0 and restored.turns["g0:0"].attempt == 1


def test_failures_survive_a_router_restart() -> None:
    sent = dispatched(request("g0:0"), attempt=7, failures=CONFIG.max_attempts - 1)
    restored = Router(CONFIG)
    restored.restore([ReceivedRequest.from_record(request("g0:0"))], [sent], [], lambda: 0.0)
    refused = result(sent, TurnOutcome.REFUSED, refusal=Refusal.ENGINE)
    (failed,) = restored.on_event(refused, 1.0)
    assert isinstance(failed, TurnResult) and failed.outcome is TurnOutcome.FAILED


def test_restored_turn_equals_its_request_despite_its_dispatch() -> None:
    turn_request = request("g0:0", home=1, patience_seconds=60.0)
    forged = msgspec.structs.replace(turn_request, home=2**31 - 1, **context_fields(b""), patience_seconds=1e9)
    restored = Router(CONFIG)
    restored.restore([ReceivedRequest.from_record(turn_request)], [dispatched(forged, attempt=3)], [], lambda: 0.0)
    (failed,) = restored.on_event(request("g1:0"), 1.0) or restored.tick(61.0)
    assert isinstance(failed, TurnResult)
    assert (failed.home, failed.attempt, failed.context_tokens) == (1, 3, 20)


def test_restored_turn_of_a_silent_executor_is_reissued() -> None:
    restored = Router(CONFIG)
    restored.restore([ReceivedRequest.from_record(request("g0:0"))], [dispatched(request("g0:0"), 1)], [], lambda: 0.0)
    decisions: list[Record] = []
    for beat in range(13):
        assert not decisions or beat > 9, "it may be silent for 2 s"
        decisions += restored.on_event(heartbeat(9), 0.2 * beat)
        decisions += restored.tick(0.2 * beat)
    (again,) = decisions
    assert isinstance(again, TurnDispatch) and again.worker == "w9" and again.attempt == 1


def test_restored_turn_stays_with_a_live_executor_and_fills_its_room() -> None:
    sent = dispatched(request("g0:0"))
    restored = Router(CONFIG)
    restored.restore([ReceivedRequest.from_record(request("g0:0"))], [sent], [], lambda: 0.0)
    assert restored.on_event(heartbeat(0, max_turns=1, holds=packed([sent])), 0.1) == []
    assert restored.on_event(request("g1:0"), 0.2) == [] and len(restored.queue) == 1
    (after,) = restored.on_event(result(sent), 0.3)
    assert isinstance(after, TurnDispatch) and after.request.trajectory_id == "g1:0"


def test_restored_router_returns_a_turn_to_the_executor_of_an_older_dispatch() -> None:
    old, new = dispatched(request("g0:0"), 0), dispatched(request("g0:0"), 1, attempt=1)
    restored = Router(CONFIG)
    restored.restore([ReceivedRequest.from_record(request("g0:0"))], [new, old], [], lambda: 0.0)
    assert restored.turns["g0:0"].worker == "w1"
    for beat in range(14):  # w1 is dead
        restored.on_event(heartbeat(0, holds=packed([old]), max_turns=1), 0.2 * beat)
        restored.tick(0.2 * beat)
    assert (restored.turns["g0:0"].worker, restored.turns["g0:0"].attempt) == ("w0", 0)


def test_next_turn_request_proves_that_the_current_turn_was_applied() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (first,) = router.on_event(request("g0:0"), 0.1)
    (second,) = router.on_event(request("g0:0", 1, context=40), 0.2)
    assert isinstance(first, TurnDispatch) and isinstance(second, TurnDispatch)
    assert second.cost.cached_tokens == 20, "the context of the turn before"
    assert router.on_event(result(first), 0.3) == []
    assert (router.counters.overtaken, router.counters.late, router.outstanding) == (1, 1, 1)


def test_record_that_is_not_a_router_input_is_named() -> None:
    with pytest.raises(TypeError, match="TurnDispatch is no input"):
        simulation = started()
        simulation.ask(request("g0:0"))
        simulation.router.on_event(simulation.held["g0:0"], 0.0)


def test_pinned_turn_goes_only_to_an_executor_of_its_version_and_holds_up_no_other_turn() -> None:
    """The executor of the other version would be cheaper in every other respect."""
    router = Router(CONFIG)
    cheap = Hardware(prefill_tokens_per_second=1e6, decode_tokens_per_second=1e6)
    router.on_event(heartbeat(0, hardware=cheap, policy_version=6), 0.0)
    assert router.on_event(request("evaluated:0", pinned_version=7), 0.0) == [], "nobody has the version yet"
    [other] = router.on_event(request("g0:0"), 0.0)
    assert isinstance(other, TurnDispatch) and other.worker == "w0"
    [pinned] = router.on_event(heartbeat(1, policy_version=7), 0.1)
    assert isinstance(pinned, TurnDispatch)
    assert (pinned.worker, pinned.request.pinned_version) == ("w1", 7)


def test_pinned_turn_is_tried_again_when_the_only_executor_of_its_version_opens_again() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0, policy_version=7), 0.0)
    router.on_event(heartbeat(1, policy_version=6), 0.0)
    router.close_inboxes([0, 1])
    router.on_event(heartbeat(1, policy_version=6), 0.1)
    assert router.on_event(request("evaluated:0", pinned_version=7), 0.1) == []
    [pinned] = router.on_event(heartbeat(0, policy_version=7), 0.2)
    assert isinstance(pinned, TurnDispatch) and pinned.worker == "w0"


def test_pinned_turn_whose_version_has_passed_fails_with_the_reason_after_its_patience() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0, policy_version=8), 0.0)
    assert router.on_event(request("evaluated:0", pinned_version=7, patience_seconds=5.0), 0.0) == []
    router.on_event(heartbeat(0, policy_version=8), 5.5)
    [failed] = router.tick(6.0)
    assert isinstance(failed, TurnResult) and failed.outcome is TurnOutcome.FAILED
    assert "no executor has version 7, to which it is pinned" in failed.reason
