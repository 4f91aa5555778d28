"""Invariants of liveness."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.routing.assignments import LISTING_SECONDS
from rose.pipeline.routing.liveness import FORGET_SECONDS, MAX_CLOCK_STEP_SECONDS, ExecutorStatus, Liveness
from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn import OutputLengths, TrajectoryState, Turn
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import TurnDispatch
from tests.support.routing_fixtures import (
    CONFIG,
    TTL_SECONDS,
    RoutingSimulation,
    dispatched,
    heartbeat,
    packed,
    request,
    result,
)

TURN = Turn(
    trajectory_id="g:0",
    group_id="g",
    turn=0,
    home=0,
    max_tokens=1,
    seeded=False,
    patience_seconds=1.0,
    requested_at=0.0,
    digest=bytes(16),
    is_anchor=True,
    request_bytes=b"",
    offset=0,
    trajectory=TrajectoryState(),
    lengths=OutputLengths(),
    context_tokens=1,
    epoch=0,
    room_tokens=2,
    due=1.0,
    queued_at=0.0,
)

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(1, 3), st.integers(-1, 4)),
        st.tuples(st.just("other"), st.integers(-1, 4), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("time"), st.sampled_from([1, 5, 19, 20, 21]), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_executor_is_live_only_with_proof_and_held_turns_return_once(events: list[tuple[str, int, int]]) -> None:
    liveness = Liveness(max_lag_versions=1)
    now, heard_at, other_at = 0.0, 0.0, 0.0
    held: list[bytes] = []
    returned: list[bytes] = []
    for what, value, version in events:
        before = liveness.executors.get("w0")
        was = before.status if before is not None else ExecutorStatus.GONE
        was_incarnation = before.incarnation if before is not None else 0
        if what == "beat":
            replaced, _ = liveness.on_heartbeat(heartbeat(0, incarnation=value, policy_version=version), now)
            returned += replaced.holds if replaced is not None else ()
            if liveness.executors["w0"].incarnation == value:
                heard_at = now
        elif what == "other":
            liveness.on_heartbeat(heartbeat(1, policy_version=value), now)
            other_at = now
        elif what == "hold" and before is not None and before.status is ExecutorStatus.LIVE:
            held.append(b"%d" % len(held))
            before.holds[held[-1]] = TURN
        elif what == "time":
            now += value / 10
        for executor in liveness.expire():
            if executor.worker == "w0":
                assert other_at >= heard_at + TTL_SECONDS - 1e-9 or was_incarnation > value, "nobody else was heard"
            returned += executor.holds
            executor.holds.clear()
        after = liveness.executors.get("w0")
        if after is None:
            continue
        if after.status is ExecutorStatus.LIVE:
            assert after.heartbeat is not None and liveness.lag_versions(after) <= 1 and after.expires > liveness.clock
            if was is not ExecutorStatus.LIVE or after.incarnation != was_incarnation:
                assert after.heartbeat.policy_version >= max(0, liveness.current_version), "LIVE without proof"
    present = liveness.executors.get("w0")
    still = list(present.holds) if present is not None else []
    assert sorted(returned + still) == sorted(held)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.sets(st.integers(0, 3))), max_size=40),
    st.permutations(range(4)),
)
def test_liveness_gap_costs_no_executor_more_than_the_hearing_seconds(
    gaps: list[tuple[float, set[int]]], order: list[int]
) -> None:
    liveness = Liveness(max_lag_versions=0)
    now = 0.0
    for worker in range(4):
        liveness.on_heartbeat(heartbeat(worker), now)
    missed = dict.fromkeys(range(4), 0.0)
    for gap, heard_workers in gaps:
        now += gap
        for worker in order:
            if worker in heard_workers:
                liveness.on_heartbeat(heartbeat(worker), now)
        for worker in range(4):
            missed[worker] = (
                0.0
                if worker in heard_workers
                else missed[worker] + (min(gap, MAX_CLOCK_STEP_SECONDS) if heard_workers else 0.0)
            )
        gone = {each.worker for each in liveness.expire()}
        for worker in range(4):
            if f"w{worker}" in gone:
                assert missed[worker] >= TTL_SECONDS - 1e-9 - MAX_CLOCK_STEP_SECONDS * len(gaps), (worker, missed)
        if not heard_workers:
            assert not gone, "nobody was heard: nobody is GONE"


def test_executor_is_live_until_another_is_heard_after_its_ttl() -> None:
    liveness = Liveness(max_lag_versions=0)
    liveness.on_heartbeat(heartbeat(0), 10.0)
    assert liveness.expire() == []
    for tenth in range(20):
        liveness.on_heartbeat(heartbeat(1), 10.0 + tenth / 10)
        assert liveness.expire() == []
    liveness.on_heartbeat(heartbeat(1), 10.0 + TTL_SECONDS)
    (gone,) = liveness.expire()
    assert (gone.worker, gone.status) == ("w0", ExecutorStatus.GONE)
    liveness.on_heartbeat(heartbeat(0, policy_version=-1), 13.0)
    assert liveness.executors["w0"].status is ExecutorStatus.STALE


def test_first_heartbeat_after_a_common_silence_does_not_expire_the_others() -> None:
    liveness = Liveness(max_lag_versions=0)
    for worker in range(3):
        liveness.on_heartbeat(heartbeat(worker), 0.0)
    for worker in range(3):
        liveness.on_heartbeat(heartbeat(worker), 60.0)
        assert liveness.expire() == []
    assert all(each.status is ExecutorStatus.LIVE for each in liveness.executors.values())


def test_older_incarnation_is_ignored_until_the_newer_is_gone() -> None:
    liveness = Liveness(max_lag_versions=0)
    liveness.on_heartbeat(heartbeat(0, incarnation=5), 0.0)
    liveness.on_heartbeat(heartbeat(0, incarnation=4), 1.0)
    assert liveness.executors["w0"].incarnation == 5
    for tenth in range(20):
        liveness.on_heartbeat(heartbeat(0, incarnation=4), 1.0 + tenth / 10)
    assert [each.incarnation for each in liveness.expire()] == [5]
    liveness.on_heartbeat(heartbeat(0, incarnation=4), 3.0)
    assert liveness.executors["w0"].incarnation == 4


def test_later_heard_start_in_another_inbox_is_the_newer_incarnation() -> None:
    liveness = Liveness(max_lag_versions=0)
    liveness.on_heartbeat(heartbeat(0, incarnation=500), 0.0)
    replaced, _ = liveness.on_heartbeat(heartbeat(0, incarnation=3, slot=7), 0.1)
    assert replaced is not None and replaced.incarnation == 500
    assert liveness.executors["w0"].incarnation == 3


def test_duplicate_names_in_two_inboxes_do_not_take_turns_repeatedly() -> None:
    liveness = Liveness(max_lag_versions=0)
    taken = [
        liveness.on_heartbeat(heartbeat(0, incarnation=incarnation, slot=slot), tenth / 10).replaced
        for tenth in range(15)
        for incarnation, slot in ((500, 0), (3, 7))
    ]
    assert [each.incarnation for each in taken if each is not None] == [500]
    assert liveness.executors["w0"].incarnation == 3
    liveness.on_heartbeat(heartbeat(1), 1.5)
    for tenth in range(16, 40):
        liveness.on_heartbeat(heartbeat(0, incarnation=500), tenth / 10)
        liveness.expire()
    assert liveness.executors["w0"].incarnation == 500, "the later one was silent"
    liveness.on_heartbeat(heartbeat(0, incarnation=4, slot=7), 4.0)
    assert liveness.executors["w0"].incarnation == 4, "one more start is a start"


def test_long_gone_executor_is_forgotten() -> None:
    liveness = Liveness(max_lag_versions=0)
    liveness.on_heartbeat(heartbeat(0), 0.0)
    for second in range(int(2 * (FORGET_SECONDS + TTL_SECONDS)) + 2):
        liveness.on_heartbeat(heartbeat(1), second / 2)
        liveness.expire()
    assert liveness.forget_gone() == ["w0"] and set(liveness.executors) == {"w1"}


def test_stopping_executor_is_gone_at_once() -> None:
    liveness = Liveness(max_lag_versions=0)
    liveness.on_heartbeat(heartbeat(0), 0.0)
    liveness.on_heartbeat(heartbeat(0, state=ExecutorState.STOPPING), 0.1)
    assert liveness.executors["w0"].status is ExecutorStatus.GONE and liveness.current_version == -1


def test_executor_too_far_behind_is_stale_until_caught_up() -> None:
    liveness = Liveness(max_lag_versions=1)
    liveness.on_heartbeat(heartbeat(0), 0.0)
    statuses = []
    for version in (1, 2):
        liveness.on_heartbeat(heartbeat(1, policy_version=version), 0.0)
        statuses.append(liveness.executors["w0"].status)
    for shown in (1, 2):
        liveness.on_heartbeat(heartbeat(0, policy_version=shown), 0.1)
        statuses.append(liveness.executors["w0"].status)
    # A lag of one version keeps an executor LIVE and does not make one LIVE.
    assert statuses == [ExecutorStatus.LIVE, ExecutorStatus.STALE, ExecutorStatus.STALE, ExecutorStatus.LIVE]


def test_turn_completed_elsewhere_fills_room_of_an_unlisted_dispatch() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0, max_turns=1)
    simulation.ask(request("g0:0"))
    (first,) = simulation.sent.values()
    simulation.beat(1, max_turns=1)
    simulation.beat(0, restart=True, max_turns=0)
    assert simulation.held["g0:0"].worker == "w1"
    simulation.complete(first)  # by the ended incarnation
    simulation.ask(request("g1:0"))
    simulation.beat_unread(1)
    assert len(simulation.router.queue) == 1, "w1 has yet to read that it was sent the turn"
    simulation.beat(1, max_turns=1)
    assert len(simulation.router.queue) == 1
    simulation.executors["w1"].held.clear()
    simulation.beat(1, max_turns=1)
    assert simulation.held["g1:0"].worker == "w1"


def beats_until(simulation: RoutingSimulation, met: Callable[[], bool], *, worker: int = 0) -> float:
    """Send heartbeats five times a second until the condition holds; return the seconds."""
    began = simulation.now
    while not met():
        simulation.now += 0.2
        simulation.beat(worker, max_turns=1)
        assert simulation.now < began + 3 * LISTING_SECONDS
    return simulation.now - began


def with_a_lost_one() -> RoutingSimulation:
    """Return a simulation in which a turn waits for the room of a dispatch that never reached w0, the only executor."""
    simulation = RoutingSimulation()
    simulation.beat(0, max_turns=1)
    simulation.ask(request("g0:0"))
    simulation.executors["w0"].held.clear()
    simulation.ask(request("g0:0", 1))
    return simulation


def test_never_listed_turn_fills_room_for_the_listing_time() -> None:
    simulation = with_a_lost_one()
    assert LISTING_SECONDS <= beats_until(simulation, lambda: bool(simulation.held)) <= LISTING_SECONDS + 0.2
    assert simulation.held["g0:0"].request.turn == 1


def test_never_listed_turn_expires_also_on_an_intermittent_executor() -> None:
    simulation = with_a_lost_one()
    for _ in range(int(LISTING_SECONDS / MAX_CLOCK_STEP_SECONDS)):
        for _ in range(12):
            simulation.now += 0.2
            simulation.beat(1, max_turns=0)
            simulation.feed(None)
        simulation.beat(0, max_turns=1)
    assert simulation.held["g0:0"].request.turn == 1


def test_unlisted_dispatch_of_a_silent_executor_keeps_filling_its_room() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0, max_turns=1)
    simulation.ask(request("g0:0"))
    for _ in range(40):
        simulation.now += 0.2
        simulation.beat(1, max_turns=0)
        simulation.feed(None)
    assert not simulation.held and simulation.router.liveness.executors["w0"].status is ExecutorStatus.GONE
    simulation.beat(1, max_turns=1)
    assert simulation.held["g0:0"].worker == "w1"
    simulation.ask(request("g1:0"))
    simulation.beat_unread(0)
    assert [turn.trajectory_id for turn in simulation.router.queue.turns.values()] == ["g1:0"]


def test_unlisted_dispatch_keeps_filling_room_after_a_router_replacement() -> None:
    old, new = dispatched(request("g0:0"), 0), dispatched(request("g0:0"), 1, attempt=1)
    restored = Router(CONFIG)
    restored.restore([ReceivedRequest.from_record(request("g0:0"))], [old, new], [], lambda: 0.0)
    restored.on_event(heartbeat(0, max_turns=1), 0.1)
    assert restored.on_event(request("g1:0"), 0.1) == []
    restored.on_event(heartbeat(0, max_turns=1, holds=packed([old])), 0.2)
    assert restored.on_event(heartbeat(0, max_turns=1), 0.3), "it has ended it"


def test_turn_running_over_a_router_replacement_fills_room_until_unlisted() -> None:
    over = dispatched(request("g0:0"), 0)
    restored = Router(CONFIG)
    restored.restore([ReceivedRequest.from_record(request("g0:0", turn)) for turn in (0, 1)], [over], [], lambda: 0.0)
    assert restored.on_event(heartbeat(0, max_turns=1, holds=packed([over])), 0.1) == []
    (sent,) = restored.on_event(result(over), 0.2)
    assert isinstance(sent, TurnDispatch) and sent.request.turn == 1


def test_dispatch_to_an_ended_incarnation_fills_no_room_of_the_next() -> None:
    done = dispatched(request("g0:0"), 1)
    sent = [done, dispatched(request("g0:0"), 0, attempt=1), dispatched(request("g1:0"), 0, incarnation=2)]
    restored = Router(CONFIG)
    requests = [ReceivedRequest.from_record(each.request) for each in (done, sent[2])]
    restored.restore(requests, sent, [result(done), result(sent[2])], lambda: 0.0)
    restored.on_event(heartbeat(0, max_turns=1, incarnation=2), 0.1)
    assert restored.on_event(request("g2:0"), 0.1)


def test_once_listed_turn_fills_no_room_when_no_longer_listed() -> None:
    simulation = RoutingSimulation()
    simulation.beat(0, max_turns=1)
    simulation.ask(request("g0:0"))
    simulation.beat(0, max_turns=1)
    simulation.executors["w0"].held.clear()
    simulation.beat(0, max_turns=1)
    simulation.ask(request("g0:0", 1))
    simulation.beat(0, max_turns=1)
    assert simulation.held["g0:0"].request.turn == 1
