"""Users of a trace leave idle time; whole workers are lent late and never while users need them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.arms import Shape, actions_of, specs_of
from bench.fleet.executor import GRANT, USERS, NoteKind
from bench.fleet.figures import Waiting, first_turns, from_grants, last_lent, last_turns_off, spread_of
from bench.fleet.fleet import Action, Line, PlannedAction
from bench.fleet.users import BUSY, UTILISED, Load, ServingRates, Users, short_seconds, users_of, whole_workers
from rose.workers.loadgen.config import TRACE_FILE
from rose.workers.loadgen.traces import Arrival, read_trace

PACE = ServingRates(prefill_tokens_per_second=1000.0, tpot_seconds=0.1)


def arrival(at: float, prompt: int = 1000, output: int = 10) -> Arrival:
    return Arrival(at=at, prompt_tokens=prompt, output_tokens=output)


def test_worker_is_busy_from_user_arrival_to_last_token() -> None:
    load = Load([arrival(0.0), arrival(1.0), arrival(10.0)], PACE)  # each request is served for 2 s
    assert [(step.at, step.running, step.tokens) for step in load.steps[:4]] == [
        (0.0, 1, 1010),
        (1.0, 2, 2020),
        (2.0, 1, 1010),
        (3.0, 0, 0),
    ]
    users = Users(load, offset=9.0, speed=2.0, full=1)
    assert users.at(0.0).running == 0 and users.at(0.0).at == -3.0
    assert users.at(0.5).running == 1 and users.at(0.5).at == 0.5
    assert users.idle(0.0, 1.5) == pytest.approx(0.5)
    assert users.idle(1.5, 3.0) == pytest.approx(0.0)  # the trace begins again


ARRIVALS = st.lists(
    st.builds(arrival, st.floats(0.0, 100.0), st.integers(1, 5000), st.integers(1, 100)), min_size=1, max_size=30
)


@given(ARRIVALS, st.lists(st.floats(0.0, 500.0), min_size=2, max_size=10))
def test_idle_time_is_the_time_between_steps(arrivals: list[Arrival], moments: list[float]) -> None:
    load = Load(sorted(arrivals, key=lambda each: each.at), PACE)
    moments.sort()
    sums = [load.idle_until(at) for at in moments]
    assert all(
        -1e-6 <= later - sooner <= there - here + 1e-6
        for (sooner, later), (here, there) in zip(pairwise(sums), pairwise(moments), strict=True)
    )
    assert load.idle_until(load.seconds) == pytest.approx(load.seconds * (1 - load.busy), abs=1e-6)
    for at in moments:
        if load.at(at).running and load.at(at).at < at:
            assert load.idle_until(at) == pytest.approx(load.idle_until(load.at(at).at), abs=1e-6)


def test_real_trace_repeats_to_reach_the_production_load() -> None:
    users = users_of(read_trace(str(TRACE_FILE)), PACE, workers=8, speed=6.0)
    assert len({each.load for each in users}) > 1
    assert users[0].load.busy == pytest.approx(BUSY, rel=0.25)
    assert users[0].full == max(step.running for each in users for step in each.load.steps)


@given(ARRIVALS, st.floats(1.0, 40.0), st.integers(1, 8))
def test_whole_worker_is_lent_late_and_never_while_users_need_it(
    arrivals: list[Arrival], delay: float, workers: int
) -> None:
    load = Load(sorted(arrivals, key=lambda each: each.at), PACE)
    users = [Users(load, offset=number * 5.0, speed=2.0, full=2) for number in range(workers)]
    moves = whole_workers(users, delay=delay, wall_seconds=60.0)
    given: set[int] = set()
    for move in moves:
        assert (move.worker in given) is not move.given
        given ^= {move.worker}
        if move.given:
            assert move.at >= delay / users[0].speed - 1e-9
            needed = sum(each.at(move.at).running for each in users)
            assert needed <= UTILISED * 2 * (workers - len(given)) + 1e-9
    assert short_seconds(users, (), wall_seconds=10.0) <= 10.0


def line(what: NoteKind, at: float, since: float = 0.0, reason: str = "", worker: str = "s0") -> Line:
    return Line(worker=worker, what=what.value, at=at, since=since, reason=reason)


def test_first_turn_counts_only_if_turns_waited_throughout() -> None:
    waiting = Waiting([(0.0, 3), (1.0, 3), (2.0, 0), (3.0, 0), (4.0, 5), (5.0, 5)])
    lines = [
        line(NoteKind.FREE, 0.5, 0.2, GRANT),
        line(NoteKind.FIRST, 0.9, 0.5, GRANT),
        line(NoteKind.FREE, 2.5, 2.5, USERS),
        line(NoteKind.FIRST, 3.5, 2.5, USERS),
        line(NoteKind.FREE, 4.1, 4.1, USERS),
        line(NoteKind.FIRST, 4.2, 4.1, USERS),
    ]
    assert first_turns(lines, waiting, late=0.25) == {GRANT: [pytest.approx(0.4)], USERS: [pytest.approx(0.1)]}
    assert from_grants(lines, waiting) == [pytest.approx(0.7)]
    assert spread_of([0.1]) is None


def test_capacity_lost_before_a_late_turn_counts() -> None:
    lines = [
        line(NoteKind.FREE, 0.5, 0.5, USERS),
        line(NoteKind.FIRST, 0.6, 0.5, USERS),
        line(NoteKind.SHUT, 0.7, 0.7, USERS),
        line(NoteKind.FREE, 1.0, 0.1, GRANT),
        line(NoteKind.SHUT, 2.5, 2.5, USERS),
        line(NoteKind.FREE, 3.0, 3.0, USERS),
        line(NoteKind.SHUT, 3.1, 3.1, USERS),
    ]
    found = {GRANT: [pytest.approx(1.5)], USERS: [pytest.approx(0.1)]}
    assert first_turns(lines, Waiting([(0.0, 3), (5.0, 3)]), late=0.25) == found
    assert first_turns(lines, Waiting([(0.0, 3), (2.0, 0), (5.0, 3)]), late=0.25)[GRANT] == []


def test_last_lent_time_is_unknown_while_a_lender_lends_and_if_none_lent() -> None:
    lines = [
        line(NoteKind.FREE, 1.0, reason=GRANT),
        line(NoteKind.FREE, 1.0, reason=GRANT, worker="s1"),
        line(NoteKind.SHUT, 7.0, reason=GRANT),
        line(NoteKind.OFF, 7.1, 7.0, GRANT),
        line(NoteKind.SHUT, 6.0, reason=USERS, worker="s1"),
    ]
    assert last_lent(lines, ["s0", "s1"], since=0.0) is None
    assert last_lent([*lines, line(NoteKind.SHUT, 7.4, reason=GRANT, worker="s1")], ["s0", "s1"], since=7.0) == 7.4
    for seen in ([], [*lines, line(NoteKind.SHUT, 7.4, reason=GRANT, worker="s1")]):
        assert last_lent(seen, ["s0", "s1"], since=8.0) is None, "nobody lent then: of that no bound is kept"
    assert last_turns_off(lines) == {GRANT: [pytest.approx(0.1)]}


def test_arms_differ_in_lenders_and_none_lends_before_its_grant() -> None:
    shape = Shape(
        dedicated=4, lenders=8, groups=1, group_size=1, trace=TRACE_FILE, speed=6.0, allocation_delay=34.0, wake=5.0
    )
    arms = {arm: {spec.name for spec in specs_of(shape, arm)} for arm in ("fixed", "whole", "rose")}
    assert len(arms["fixed"]) == 4 and len(arms["rose"]) == 12
    first: dict[str, PlannedAction] = {}
    for planned in actions_of(shape, "whole"):
        first.setdefault(planned.worker, planned)
    assert arms["whole"] - arms["fixed"] == set(first) != set()
    assert all(planned.action is Action.START and planned.at >= 34.0 / 6.0 for planned in first.values())
