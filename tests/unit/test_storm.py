"""The storm's own cores: the promises of a plan, and the definition of a stall."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.storm.lines import LineKind
from tests.support.storm.log_checks import MARK, Log, of_turns
from tests.support.storm.plan import ROUND, Act, Part, Plan, PlannedFault, Role, cell_of, draw, first_of
from tests.support.storm.shape import Shape, leaving
from tests.support.storm.stalls import (
    SESSION_SECONDS,
    Change,
    Interval,
    RoleEvent,
    excuses,
    length,
    nobody_well,
    stalls,
    union,
)

SHAPES = st.builds(
    Shape,
    nodes=st.sampled_from([0, 3]),
    lenders=st.integers(0, 2),
    control=st.integers(0, 1),
    cells=st.integers(1, 3),
    rounds=st.integers(1, 3),
)


def of_any_plan(test: Callable[[Plan], None]) -> Callable[[int, Shape], None]:
    """Run a test on plans; a failure shows seed and shape instead of the plan."""

    @settings(max_examples=40)
    @given(st.integers(0, 2**32), SHAPES)
    def on_a_plan(seed: int, shape: Shape) -> None:
        test(draw(seed, shape))

    on_a_plan.__name__ = test.__name__
    return on_a_plan


def spans(plan: Plan, role: Role, ends: tuple[Act, ...]) -> list[Interval]:
    """Return the time from each such fault to the next on the same worker."""
    open_deeds: dict[object, PlannedFault] = {}
    found = []
    for planned_fault in plan.planned_faults:
        if planned_fault.worker.role is not role:
            continue
        if planned_fault.worker in open_deeds:
            found.append((open_deeds.pop(planned_fault.worker).at, planned_fault.at))
        if planned_fault.act in ends:
            open_deeds[planned_fault.worker] = planned_fault
    return found


@of_any_plan
def test_seed_determines_the_fault_plan(plan: Plan) -> None:
    assert draw(plan.seed, plan.shape) == plan


@of_any_plan
def test_every_plan_has_every_kind_of_fault(plan: Plan) -> None:
    done = {(planned_fault.act, planned_fault.worker.role) for planned_fault in plan.planned_faults}
    assert done >= set(ROUND)
    assert ((Act.KILL, Role.NODE) in done) == (plan.shape.nodes > 0)
    assert ((Act.PARK, Role.LENDER) in done) == (plan.shape.lenders > 0)


@of_any_plan
def test_faults_hit_a_worker_only_while_it_runs(plan: Plan) -> None:
    running, frozen = set(plan.first), set()
    for planned_fault in plan.planned_faults:
        worker = planned_fault.worker
        if worker.role is Role.NODE or planned_fault.act in (Act.PARK, Act.WAKE):
            continue
        if planned_fault.act is Act.START:
            assert worker not in running
            running.add(worker)
        else:
            assert worker in running
            assert (worker in frozen) == (planned_fault.act is Act.THAW)
            if planned_fault.act is Act.FREEZE:
                frozen.add(worker)
            elif planned_fault.act is Act.THAW:
                frozen.discard(worker)
            elif planned_fault.act in (Act.KILL, Act.LEAVE) and planned_fault.part in (Part.ALL, Part.CORE):
                running.discard(worker)
    assert not frozen
    for role in first_of(plan.shape):
        assert any(worker.role is role for worker in running)


@of_any_plan
def test_one_executor_per_cell_gets_no_fault(plan: Plan) -> None:
    cells = plan.shape.cells
    well = Counter(cell_of(worker, cells) for worker in plan.first if worker.role is Role.EXECUTOR)
    assert set(well) == set(range(cells))
    for planned_fault in (
        planned_fault for planned_fault in plan.planned_faults if planned_fault.worker.role is Role.EXECUTOR
    ):
        well[cell_of(planned_fault.worker, cells)] += 1 if planned_fault.act in (Act.START, Act.THAW) else -1
        assert min(well.values()) > 0


@pytest.mark.parametrize("seed", range(5))
def test_plan_of_departures_has_no_other_fault(seed: int) -> None:
    planned_faults = draw(seed, leaving(30)).planned_faults
    assert {planned_fault.act for planned_fault in planned_faults} == {Act.LEAVE, Act.START}
    left = [planned_fault.worker.role for planned_fault in planned_faults if planned_fault.act is Act.LEAVE]
    assert len(left) == 30 and set(left) == {*first_of(leaving(30)), Role.LENDER}


@of_any_plan
def test_at_most_one_node_is_down(plan: Plan) -> None:
    down = sorted(spans(plan, Role.NODE, (Act.KILL,)))
    assert all(first[1] < second[0] for first, second in pairwise(down))


@of_any_plan
def test_line_marks_are_unique_and_repeats_name_a_valid_group(plan: Plan) -> None:
    assert len({line.mark for line in plan.lines}) == len(plan.lines)
    for line in plan.lines:
        assert set(MARK.findall(line.value)) == {line.mark.encode()}
        assert b"\n" not in line.value and b"\t" not in line.value
        if line.sort is LineKind.REPEATED:
            assert line.group_id in plan.groups
        if line.sort is not LineKind.BAD:
            assert json.loads(line.value)["group_id"] == line.group_id
    assert plan.blocked and plan.blocked < plan.trajectories


@pytest.mark.parametrize(
    ("requested", "sampled", "breaches"),
    [
        ([0, 1, 2], [0, 1, 2], 0),
        ([], [], 0),
        ([0, 1, 2], [0, 1], 1),
        ([0, 1, 2], [0, 2, 1], 1),
        ([0, 1], [0, 1, 1], 1),
        ([0, 0, 1], [0, 1], 1),
    ],
)
def test_turn_missing_doubled_or_reordered_in_a_sample_is_a_breach(
    requested: list[int], sampled: list[int], breaches: int
) -> None:
    log = Log(requests=Counter(("a:0", turn) for turn in requested), samples=Counter(["a:0"]))
    log.sample_turns["a:0"] += sampled
    assert len(list(of_turns(log))) == breaches
    assert log.turns == len(sampled)


def test_excused_time_between_two_turns_does_not_count() -> None:
    found = stalls([0.0, 40.0, 45.0], [(0.0, 60.0)], [(5.0, 15.0), (42.0, 43.0)])
    assert [(stall.begin, stall.end, stall.seconds) for stall in found] == [
        (0.0, 40.0, 30.0),
        (45.0, 60.0, 15.0),
        (40.0, 45.0, 4.0),
    ]


def test_time_without_work_is_not_a_stall() -> None:
    assert [stall.seconds for stall in stalls([1.0], [(0.0, 2.0), (50.0, 51.0)], [])] == [1.0, 1.0, 1.0]


moments = st.floats(0, 1000)
intervals = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(st.lists(moments), intervals, intervals)
def test_stalls_and_excused_time_add_up_to_the_time_with_work(
    applied: list[float], work: list[Interval], excused: list[Interval]
) -> None:
    counted = sum(stall.seconds for stall in stalls(applied, work, excused))
    both = length(union(work)) + length(union(excused)) - length(union([*work, *excused]))
    assert counted == pytest.approx(length(union(work)) - both, abs=1e-6)


def test_role_is_unhealthy_until_a_process_is_ready_and_while_all_are_frozen_or_gone() -> None:
    role = Role.ROUTER
    happenings = [
        RoleEvent(1.0, Change.STARTED, role, 1),
        RoleEvent(2.0, Change.READY, role, 1),
        RoleEvent(10.0, Change.FROZEN, role, 1),
        RoleEvent(12.0, Change.STARTED, role, 2),
        RoleEvent(15.0, Change.THAWED, role, 1),
        RoleEvent(16.0, Change.ENDED, role, 1),
        RoleEvent(18.0, Change.READY, role, 2),
    ]
    assert nobody_well(happenings, until=30.0) == [(0.0, 2.0), (10.0, 15.0), (16.0, 18.0)]
    assert nobody_well([*happenings, RoleEvent(20.0, Change.ENDED, role, 2)], until=30.0)[-1] == (20.0, 30.0)


def test_missing_control_app_is_never_excused() -> None:
    everybody = [RoleEvent(0.0, Change.READY, role, number) for number, role in enumerate(Role)]
    frozen = [RoleEvent(50.0, Change.FROZEN, Role.CONTROL, list(Role).index(Role.CONTROL))]
    assert excuses([*everybody, *frozen], until=100.0) == []


def test_death_excuses_one_session_even_with_healthy_processes() -> None:
    everybody = [RoleEvent(0.0, Change.READY, role, number) for number, role in enumerate(first_of(Shape(nodes=3)))]
    everybody += [RoleEvent(0.0, Change.READY, Role.ENVIRONMENT, 9)]
    died = RoleEvent(50.0, Change.ENDED, Role.ENVIRONMENT, 9)
    assert excuses([*everybody, died], until=100.0) == [(50.0, 50.0 + SESSION_SECONDS[Role.ENVIRONMENT])]
    frozen = RoleEvent(50.0, Change.FROZEN, Role.ENVIRONMENT, 9)
    thawed = RoleEvent(52.0, Change.THAWED, Role.ENVIRONMENT, 9)
    assert excuses([*everybody, frozen, thawed], until=100.0) == [(50.0, 52.0)]
