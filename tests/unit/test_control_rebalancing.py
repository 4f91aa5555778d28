"""Moves between cells: a simulation of cells with work, executors that move when they can, and the invariants."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import SETTLE_SECONDS, STALE_SECONDS, ElasticityCore
from rose.pipeline.control.rebalancing import MAX_MOVE_SECONDS, REPEAT_SECONDS, UNNAMED_SECONDS, UNSERVED_SECONDS
from rose.schemas.cells import CellSummary, ExecutorLine
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.wire import encode
from tests.support.control_fixtures import JOB, at_work, line, summary

CONFIG = ControlConfig(lease_seconds=12.0, margin_seconds=2.0, dwell_seconds=5.0, idle_seconds=4.0)
SLOTS = 8
"""Turns that an executor holds."""


@dataclass
class Executor:
    """An executor with a rate in turns per second, in a cell. It moves some time after its cell grant."""

    cell: int
    rate: float = 1.0
    goes_in: float = 0.0
    goes_at: float | None = None
    goes_to: int = 0
    parked: bool = False


@dataclass
class RebalancingSimulation:
    """`work` is the number of waiting and running turns of each cell."""

    work: dict[int, int]
    executors: dict[str, Executor]
    now: float = 1000.0
    log: list[tuple[float, CapacityGrant]] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    late_seconds: float = 0.0
    """Delay until the log is read back."""
    lost: int = 0
    """Number of next cell grants that are never stored."""
    unread: list[tuple[float, CapacityGrant]] = field(default_factory=list)
    """Grants on the log, with the time at which they are read back."""
    control: ElasticityCore = field(default_factory=lambda: ElasticityCore(CONFIG, JOB))

    def summary(self, cell: int) -> CellSummary:
        here = {name: each for name, each in sorted(self.executors.items()) if each.cell == cell}
        at_it = [name for name, each in here.items() if not each.parked]
        held = dict.fromkeys(here, 0)
        for turn in range(min(self.work[cell], SLOTS * len(at_it))):
            held[at_it[turn % len(at_it)]] += 1
        lines = [self.line(name, each, held[name]) for name, each in here.items()]
        running = sum(held.values())
        cell_summary = summary(*lines, waiting=self.work[cell] - running, cell=cell, cells=len(self.work))
        return CellSummary(
            **{
                **{name: getattr(cell_summary, name) for name in cell_summary.__struct_fields__},
                "outstanding_turns": running,
            }
        )

    def line(self, name: str, executor: Executor, held: int) -> ExecutorLine:
        if executor.parked:
            return line(name)
        return at_work(
            name,
            serving=False,
            by_grant=False,
            prefill_tokens_per_second=1e9,
            decode_tokens_per_second=100.0 / 8 * executor.rate,
            held_turns=held,
            free_turns=SLOTS - held,
            load_seconds=held / executor.rate,
        )

    def second(self) -> CapacityGrant | None:
        """Advance by one second; return the new cell grants, after a check of each."""
        self.now += 1.0
        for each in self.executors.values():
            if each.goes_at is not None and each.goes_at <= self.now:
                each.cell, each.goes_at = each.goes_to, None
        summaries = {cell: self.summary(cell) for cell in self.work}
        for cell, cell_summary in summaries.items():
            if cell not in self.silent:
                self.control.on_summary(cell_summary, self.now)
        while self.unread and self.unread[0][0] <= self.now:
            _, read = self.unread.pop(0)
            self.control.on_grant(read.worker, read, self.now, source=GrantSource.CELL)
        words = [grant for grant in self.control.tick(self.now) if grant.cell is not None]
        if not words:
            return None
        [cell_grant] = words
        encode(cell_grant)
        assert cell_grant.reason and cell_grant.job == JOB and not cell_grant.lease_seconds
        self.log.append((self.now, cell_grant))
        if self.lost:
            self.lost -= 1
            return cell_grant
        executor = self.executors[cell_grant.worker]
        # otherwise the control app knows the move
        if cell_grant.cell != (executor.cell if executor.goes_at is None else executor.goes_to):
            executor.goes_to = cell_grant.cell or 0
            executor.goes_at = None if cell_grant.cell == executor.cell else self.now + executor.goes_in
        self.unread.append((self.now + self.late_seconds, cell_grant))
        if not self.late_seconds:
            self.control.on_grant(cell_grant.worker, cell_grant, self.now, source=GrantSource.CELL)
        return cell_grant

    def seconds(self, count: float) -> list[CapacityGrant]:
        return [cell_grant for _ in range(int(count)) if (cell_grant := self.second()) is not None]

    def at(self, cell: int) -> set[str]:
        return {name for name, each in self.executors.items() if each.cell == cell}


def simulation(*cells: tuple[int, int]) -> RebalancingSimulation:
    """Return a simulation. `cells` gives the work and the number of executors of each cell."""
    workers = [(cell, number) for cell, (_, count) in enumerate(cells) for number in range(count)]
    return RebalancingSimulation(
        {cell: work for cell, (work, _) in enumerate(cells)},
        {f"w{cell}{number}": Executor(cell) for cell, number in workers},
    )


def test_cell_with_work_and_no_executor_soon_gets_a_fair_share() -> None:
    cell_grants = simulation((3, 2), (5, 0)).seconds(SETTLE_SECONDS + UNSERVED_SECONDS + 2)
    assert [(each.worker, each.cell) for each in cell_grants] == [("w01", 1)], "who holds least"
    assert "no executor works there" in cell_grants[0].reason
    settled = simulation((3, 2), (5, 0))
    assert len(settled.seconds(200)) == 1 and len(settled.at(0)) == len(settled.at(1)) == 1


def test_last_executor_of_a_cell_stays_until_its_work_is_done() -> None:
    both = simulation((3, 1), (5, 0))
    assert not both.seconds(60)
    both.work[0] = 0
    assert [each.worker for each in both.seconds(UNSERVED_SECONDS + 2)] == ["w00"]


def test_executors_move_singly_from_the_least_to_the_most_loaded_cell() -> None:
    uneven = simulation((40, 4), (90, 2), (400, 1), (10, 3))
    first = uneven.seconds(60)[0]
    assert (first.cell, uneven.executors[first.worker].cell) == (2, 2) and first.worker.startswith("w3")
    assert "all is done in 400 s there, and in 5 s in cell 3 without it" in first.reason
    times = [at for at, cell_grant in uneven.log if cell_grant.cell == 2]
    assert all(later - at >= CONFIG.dwell_seconds for at, later in pairwise(times)), "each has to be worth it anew"


def test_cells_within_the_factor_are_not_rebalanced() -> None:
    assert not simulation((40, 4), (55, 3)).seconds(200)
    assert not simulation((7, 4), (8, 1)).seconds(200), "where nothing waits nobody is needed"


def test_moving_executor_counts_in_its_target_and_may_be_called_back() -> None:
    slow = simulation((3, 2), (500, 0))
    slow.executors["w01"].goes_in = 1e9
    assert [each.worker for each in slow.seconds(300)] == ["w01"], "a second one is not sent after it"
    del slow.executors["w00"]
    back = slow.second()
    assert back is not None and (back.worker, back.cell) == ("w01", 0)
    assert "has work and no other executor" in back.reason
    assert not slow.seconds(100)


def test_executor_that_does_not_move_or_is_gone_is_no_longer_awaited() -> None:
    stuck = simulation((3, 3), (500, 0))
    stuck.executors["w00"].goes_in = 1e9
    cell_grants = stuck.seconds(MAX_MOVE_SECONDS + 20)
    assert [(each.worker, each.cell) for each in cell_grants[:2]] == [("w00", 1), ("w00", 0)]
    assert "has not gone" in cell_grants[1].reason
    dies = simulation((0, 3), (500, 0))
    dies.executors["w00"].goes_in = 1e9
    assert [each.worker for each in dies.seconds(10)] == ["w00"]
    del dies.executors["w00"]
    assert [each.worker for each in dies.seconds(UNNAMED_SECONDS + CONFIG.dwell_seconds + 2)] == ["w01"]


def test_cell_grant_that_was_never_stored_is_repeated_soon() -> None:
    away = simulation((3, 2), (5, 0))
    away.lost = 2
    cell_grants = away.seconds(SETTLE_SECONDS + UNSERVED_SECONDS + 2 + 2 * REPEAT_SECONDS)
    assert [(each.worker, each.cell) for each in cell_grants] == [("w01", 1)] * 3 and len(
        {each.reason for each in cell_grants}
    ) == 1
    assert away.at(1) == {"w01"} and away.control.rebalancer.moves == 1
    assert not away.seconds(200)
    slow = simulation((3, 2), (500, 0))
    slow.executors["w01"].goes_in = 20.0
    slow.seconds(10)
    del slow.executors["w00"]
    slow.lost = 1
    slow.seconds(2 * REPEAT_SECONDS + 2)
    assert slow.at(0) == {"w01"}, "it was to go, and was told to stay"


def test_cell_grant_is_repeated_only_if_it_would_be_decided_now() -> None:
    for event in ("silent", "drained"):
        away = simulation((3, 2), (5, 0))
        away.lost = 1
        assert away.seconds(SETTLE_SECONDS + UNSERVED_SECONDS + 2)
        if event == "silent":
            away.silent = {1}
        else:
            manual_grant = CapacityGrant(worker="w01", lend=False, kv_bytes=0, token_budget=0, granted_at=0.0)
            away.control.on_grant("w01", manual_grant, away.now, source=GrantSource.DRAIN)
        assert not away.seconds(100)
        away.silent = set()
        away.control.on_grant("w01", None, away.now, source=GrantSource.DRAIN)
        assert away.seconds(2)


@pytest.mark.parametrize("late_seconds", [2.0, REPEAT_SECONDS - 1, 25.0, 60.0])
def test_late_read_back_grants_change_nothing(late_seconds: float) -> None:
    at_once, late = (simulation((40, 4), (90, 2), (400, 1), (10, 3)) for _ in range(2))
    late.late_seconds = late_seconds
    for each in (at_once, late):
        each.seconds(400)
    times = [at for at, _ in late.log]
    decided = [(cell_grant.worker, cell_grant.cell) for _, cell_grant in late.log]
    assert list(dict.fromkeys(decided)) == [(cell_grant.worker, cell_grant.cell) for _, cell_grant in at_once.log]
    assert late.control.rebalancer.moves == at_once.control.rebalancer.moves and times[-1] < late.now - 200
    assert late_seconds > REPEAT_SECONDS or len(decided) == len(set(decided))


def test_silent_cell_is_not_rebalanced() -> None:
    for cell in (0, 1):
        silent = simulation((3, 2), (5, 0))
        silent.seconds(2)
        silent.silent = {cell}
        silent.seconds(STALE_SECONDS)
        assert not silent.seconds(60)


def test_drained_manual_or_ambiguous_executor_is_not_moved() -> None:
    for grant_source in (GrantSource.DRAIN, GrantSource.BY_HAND):
        left = simulation((3, 2), (5, 0))
        manual_grant = CapacityGrant(worker="w01", lend=False, kv_bytes=0, token_budget=0, granted_at=0.0)
        left.control.on_grant("w01", manual_grant, left.now, source=grant_source)
        assert {each.worker for each in left.seconds(30)} == {"w00"}
    control = ElasticityCore(CONFIG, JOB)
    for now in range(30):
        for cell, waiting in ((0, 0), (1, 9), (2, 9)):
            lines = [at_work("twin", serving=False)] if cell != 1 else []
            control.on_summary(summary(*lines, waiting=waiting, cell=cell, cells=3), now)
        assert not control.tick(now)


def test_executor_heard_in_two_cells_gets_no_grant_despite_an_old_grant() -> None:
    control = ElasticityCore(CONFIG, JOB)
    manual_grant = CapacityGrant(worker="w", lend=True, kv_bytes=0, token_budget=0, granted_at=0.0, cell=0)
    control.on_grant("w", manual_grant, 0.0, source=GrantSource.CELL)
    for now in range(1000, 1030):
        for cell in (0, 1):
            control.on_summary(summary(at_work("w", serving=False), waiting=9, cell=cell, cells=2), now)
        assert not control.tick(now)


def test_parked_lender_moves_to_an_empty_cell_and_is_woken_there() -> None:
    lenders = simulation((0, 0), (40, 0))
    lenders.executors = {name: Executor(0, parked=True) for name in ("a", "b")}
    assert [each.worker for each in lenders.seconds(20)] == ["a"], "one is enough to begin with"
    assert [name for name, each in lenders.control.lenders.items() if each.lends] == ["a"]
    none = simulation((0, 0), (40, 0))
    none.executors = {"a": Executor(0, parked=True)}
    none.control = ElasticityCore(ControlConfig(most_lenders=1), JOB)
    other = CapacityGrant(worker="x", lend=True, kv_bytes=0, token_budget=0, granted_at=0.0)
    none.control.on_grant("x", other, none.now, source=GrantSource.BY_HAND)
    none.control.on_summary(summary(line("x"), cell=0, cells=2), none.now)
    assert not none.seconds(4), "it might not be woken there"


def test_restarted_rebalancing_resumes_from_the_log() -> None:
    slow = simulation((0, 3), (500, 0))
    slow.executors["w00"].goes_in = 60.0
    slow.seconds(20)
    [(_, cell_grant)] = slow.log
    slow.control = ElasticityCore(CONFIG, JOB)
    slow.control.on_grant(cell_grant.worker, cell_grant, slow.now, source=GrantSource.CELL)
    slow.second()
    assert set(slow.control.rebalancer.moving_workers(slow.now)) == {"w00"}
    assert not slow.seconds(30)


def test_deleted_cell_grant_has_no_effect() -> None:
    slow = simulation((0, 3), (500, 0))
    slow.executors["w00"].goes_in = 1e9
    slow.seconds(20)
    slow.control.on_grant("w00", None, slow.now, source=GrantSource.CELL)
    assert not slow.control.rebalancer.moving_workers(slow.now)


CELLS = st.lists(
    st.tuples(st.integers(0, 300), st.lists(st.tuples(st.floats(0.1, 20.0), st.floats(0.0, 30.0)), max_size=5)),
    min_size=2,
    max_size=4,
)


def of(cells: list[tuple[int, list[tuple[float, float]]]]) -> RebalancingSimulation:
    return RebalancingSimulation(
        {cell: work for cell, (work, _) in enumerate(cells)},
        {
            f"w{cell}.{number}": Executor(cell, rate, goes_in)
            for cell, (_, workers) in enumerate(cells)
            for number, (rate, goes_in) in enumerate(workers)
        },
    )


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(CELLS)
def test_moves_end_under_constant_load(cells: list[tuple[int, list[tuple[float, float]]]]) -> None:
    """The cells are crowded or empty, with executors of all kinds."""
    steady = of(cells)
    steady.seconds(1000)
    move_times: defaultdict[str, list[float]] = defaultdict(list)
    for at, cell_grant in steady.log:
        move_times[cell_grant.worker].append(at)
    for times in move_times.values():
        assert all(later - at >= CONFIG.dwell_seconds for at, later in pairwise(times))
    assert not steady.log or steady.log[-1][0] < steady.now - 300, f"still moving: {steady.log[-3:]}"
    stands = [cell for cell, work in steady.work.items() if work and not steady.at(cell)]
    to_give = [cell for cell, work in steady.work.items() if len(steady.at(cell)) > bool(work)]
    assert not stands or not to_give, "nobody is at work somewhere, and elsewhere one could be missed"


STEP = st.tuples(
    st.integers(0, 3),
    st.integers(0, 300),
    st.sampled_from(["work", "work", "silent", "heard", "dies", "comes", "drained", "restart"]),
    st.integers(1, 15),
)


@settings(max_examples=60, deadline=None)
@given(CELLS, st.lists(STEP, max_size=30))
def test_no_needed_executor_is_moved_and_no_silent_executor_is_decided_on(
    cells: list[tuple[int, list[tuple[float, float]]]], steps: list[tuple[int, int, str, int]]
) -> None:
    changing, drained, newest = of(cells), set[str](), dict[str, float]()
    for which, amount, event, seconds in steps:
        cell = which % len(cells)
        names = sorted(changing.executors)
        name = names[amount % len(names)] if names else ""
        match event:
            case "work":
                changing.work[cell] = amount
            case "silent":
                changing.silent.add(cell)
            case "heard":
                changing.silent.discard(cell)
            case "dies" if name:
                del changing.executors[name]
            case "comes":
                changing.executors[f"c{len(changing.log)}.{amount}"] = Executor(cell, goes_in=seconds)
            case "drained" if name:
                manual_grant = CapacityGrant(worker=name, lend=False, kv_bytes=0, token_budget=0, granted_at=0.0)
                changing.control.on_grant(name, manual_grant, changing.now, source=GrantSource.DRAIN)
                drained.add(name)
            case "restart":
                old, changing.control = changing.control, ElasticityCore(CONFIG, JOB)
                for each, grant in old.drains.items():
                    changing.control.on_grant(each, grant, changing.now, source=GrantSource.DRAIN)
                for _, cell_grants in changing.log:
                    changing.control.on_grant(cell_grants.worker, cell_grants, changing.now, source=GrantSource.CELL)
        for _ in range(seconds):
            before = {each: executor.cell for each, executor in changing.executors.items()}
            cell_grant = changing.second()
            if cell_grant is None or cell_grant.cell == before[cell_grant.worker]:
                continue
            heard_cells = {manual_grant.cell for manual_grant in changing.control.live_summaries(changing.now)}
            assert {before[cell_grant.worker], cell_grant.cell} <= heard_cells and cell_grant.worker not in drained
            left = changing.control.cells[before[cell_grant.worker]].summary
            others = {each.worker for each in left.executors} - {
                cell_grant.worker,
                *changing.control.rebalancer.moving_workers(changing.now),
            }
            assert others or not left.waiting_turns + left.outstanding_turns
            assert changing.now - newest.get(cell_grant.worker, 0.0) >= CONFIG.dwell_seconds
            newest[cell_grant.worker] = changing.now
