"""A single stalled home, cell or inbox is named, however well the others do."""

from collections.abc import Iterator

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rose.pipeline.monitor.backlog import Backlog
from rose.pipeline.monitor.broker_probe import BrokerSnapshot, WorkerMember
from rose.pipeline.monitor.diagnosis import STALLED_SECONDS, STANDSTILL_SECONDS, Finding, Severity, diagnose
from rose.pipeline.monitor.facts import Facts, Patience
from rose.pipeline.monitor.run_state import RunState
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat, Tenant
from rose.schemas.progress import Group, GroupState
from rose.schemas.turns import TurnResult
from rose.topics.catalog import DISPATCHED, home_partition
from rose.topics.records import Place
from tests.golden.examples import EXAMPLES

BEAT = next(record for record in EXAMPLES if isinstance(record, SlackHeartbeat))
RESULT = next(record for record in EXAMPLES if isinstance(record, TurnResult))
EVERY = 2.0
"""Time between two answers of the broker."""


def group_at(home: int, homes: int) -> str:
    """Return the id of a group of this home."""
    return next(name for number in range(10_000) if home_partition(name := f"g{number}", homes) == home)


class Run:
    """A run with progressing and stalled homes, and its observer."""

    def __init__(self, homes: int, owners: list[int], *, cells: int = 1) -> None:
        """`owners` is the number of the worker of each home."""
        self.groups = [group_at(home, homes) for home in range(homes)]
        self.workers = [
            WorkerMember(
                f"environment-{number}", frozenset(home for home, owner in enumerate(owners) if owner == number)
            )
            for number in sorted(set(owners))
        ]
        self.homes, self.now = homes, 0.0
        self.view = RunState(began=0.0, homes=homes)
        self.places = Backlog(self.view, window_groups=2 * homes, cells=cells)
        self.ends: dict[Place, int] = {(DISPATCHED, slot): 0 for slot in range(4)}
        for home in range(homes):
            self.move(home)

    def move(self, home: int) -> None:
        """Open a group in the home, and apply a turn."""
        name = self.groups[home]
        group = Group(group_id=name, group_size=1, state=GroupState.OPEN, offset=0, changed_at=0.0)
        self.view.on_record(group, self.now)
        self.view.on_progress(f"{name}:0", self.now, live=True)

    def beat(self, worker: str, slot: int, **changes: object) -> None:
        could: dict[str, object] = {"state": ExecutorState.READY, "policy_version": 1, "max_turns": 4}
        could |= {"rollout": Tenant(), "ttl_seconds": 20.0, "refused_version": -1}
        self.view.on_record(msgspec.structs.replace(BEAT, worker=worker, slot=slot, **(could | changes)), self.now)

    def go(self, seconds: float, *, still: set[int], prompts: dict[int, int], results: dict[int, int]) -> None:
        """Advance the time; every home except the stalled ones progresses."""
        until = self.now + seconds
        while self.now < until:
            self.now += EVERY
            for home in set(range(self.homes)) - still:
                self.move(home)
            self.sound(prompts, results)

    def sound(self, prompts: dict[int, int], results: dict[int, int]) -> None:
        snapshot = BrokerSnapshot(
            at=self.now, ends=dict(self.ends), workers=self.workers, waiting_at=prompts, results_at=results
        )
        self.places.on_snapshot(snapshot, self.now)

    def found(self, patience: Patience = Patience()) -> list[Finding]:  # noqa: B008
        executors = self.places.executors(self.now)
        facts = Facts(
            executors=executors,
            newest_version=1,
            environment_workers=len(self.workers),
            homes=self.homes,
            homes_owned=self.homes,
            routers=1,
            open_groups=self.view.open_groups,
            in_a_turn=self.view.in_a_turn,
            openable=self.places.openable,
            opened_seconds=self.view.opened_seconds(self.now, None),
            applied_seconds=self.view.applied_seconds(self.now),
            settled_seconds=self.view.settled_seconds(self.now),
            home_facts=list(self.places.homes(self.now)),
            cells=list(self.places.cell_facts(executors, self.now)),
            patience=patience,
        )
        return diagnose(facts)

    def environments(self, patience: Patience = Patience(step_seconds=1.0)) -> list[Finding]:  # noqa: B008
        """Return the findings about environment workers."""
        return [each for each in self.found(patience) if each.who == "environments"]

    def unwell(self) -> list[Finding]:
        return [each for each in self.found() if each.severity is Severity.UNWELL]


def owned() -> st.SearchStrategy[list[int]]:
    """Return the number of the worker of each home."""
    return st.lists(st.integers(0, 3), min_size=2, max_size=8)


@settings(max_examples=30)
@given(owned(), st.data())
def test_stalled_home_among_progressing_homes_is_named_with_its_worker(owners: list[int], data: st.DataObject) -> None:
    homes = len(owners)
    home = data.draw(st.integers(0, homes - 1))
    step = data.draw(st.sampled_from([1.0, 60.0, 200.0]))
    kind = data.draw(st.sampled_from(["prompts", "results"]))
    busy = data.draw(st.sets(st.integers(0, homes - 1)))
    assume(kind == "results" or not {other for other in busy if owners[other] == owners[home]})
    run = Run(homes, owners)
    waits = {kind: dict.fromkeys({home, *busy}, 3)}
    run.go(max(step, STANDSTILL_SECONDS) + 2 * EVERY, still={home}, **{"prompts": {}, "results": {}} | waits)
    [finding] = run.environments(Patience(step_seconds=step))
    assert (finding.severity, finding.who) == (Severity.UNWELL, "environments")
    assert f"environment-{owners[home]} (home {home})" in finding.sentence
    assert finding.sentence.startswith(f"3 {kind} ")


@settings(max_examples=30)
@given(owned(), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_progressing_homes_are_healthy_at_any_backlog(owners: list[int], prompts: set[int], results: set[int]) -> None:
    run = Run(len(owners), owners)
    waits = [{home: 5 for home in among if home < len(owners)} for among in (prompts, results)]
    run.go(STANDSTILL_SECONDS + 2 * EVERY, still=set(), prompts=waits[0], results=waits[1])
    assert not run.environments()


@settings(max_examples=30)
@given(owned(), st.data())
def test_stalled_worker_is_named_with_all_its_homes(owners: list[int], data: st.DataObject) -> None:
    run = Run(len(owners), owners)
    worker = data.draw(st.sampled_from(run.workers))
    run.go(STALLED_SECONDS + 2 * EVERY, still=set(worker.homes), prompts={}, results=dict.fromkeys(worker.homes, 2))
    [finding] = run.environments()
    assert finding.severity is Severity.UNWELL
    homes = f"home{'s' if len(worker.homes) > 1 else ''} {', '.join(map(str, sorted(worker.homes)))}"
    assert f"results wait for {worker.name} ({homes}), and none was applied for" in finding.sentence


def test_stalled_worker_of_three_is_named_while_the_others_progress() -> None:
    run = Run(9, [0, 1, 2] * 3)
    prompts, results = {1: 7, 4: 7, 7: 6}, {1: 4, 7: 5}
    run.go(STALLED_SECONDS + 2 * EVERY, still={1, 4, 7}, prompts=prompts, results=results)
    sentences = {each.sentence for each in run.environments() if each.severity is Severity.UNWELL}
    assert sentences == {
        "9 results wait for environment-1 (homes 1, 7), and none was applied for 12 s",
        "20 prompts wait and the window has room, but no group was opened for 12 s: "
        "see the log of environment-1 (homes 1, 4, 7)",
    }


def still_since(run: Run, seconds: float) -> Iterator[Finding]:
    run.go(seconds, still={0}, prompts={}, results={0: 1})
    yield from run.environments()


def test_time_before_ownership_or_backlog_counts_against_no_worker() -> None:
    run = Run(2, [0, 1])
    run.go(40.0, still={0}, prompts={}, results={})
    assert not list(still_since(run, STALLED_SECONDS - EVERY)), "it came a moment ago"
    run.workers = [WorkerMember("environment-2", frozenset({0})), run.workers[1]]
    assert not list(still_since(run, STALLED_SECONDS - EVERY)), "another owns it since a moment ago"
    [finding] = still_since(run, 2 * EVERY)
    assert "for environment-2 (home 0)" in finding.sentence
    run.view.add_absence(60.0)
    run.places.add_absence(60.0)
    run.now += 60.0
    [later] = run.environments()
    assert later == finding, "nobody looked meanwhile"


def test_prompts_of_a_worker_that_opens_other_groups_are_not_stalled() -> None:
    run = Run(3, [0, 0, 1])
    run.go(200.0, still={0}, prompts={0: 5, 1: 5}, results={})
    assert not run.environments()
    run.go(200.0, still={0, 1}, prompts={0: 5, 1: 5}, results={})
    [finding] = run.environments()
    assert "10 prompts wait and the window has room, but no group was opened for 200 s" in finding.sentence
    assert "see the log of environment-0 (homes 0, 1)" in finding.sentence


def test_cell_without_a_router_is_named_while_another_cell_progresses() -> None:
    run = Run(4, [0, 0, 1, 1], cells=2)
    for _ in range(10):
        for slot in range(2):
            run.beat(f"executor-{slot}", slot)
        run.ends[DISPATCHED, 0] += 3
        run.view.on_record(msgspec.structs.replace(RESULT, worker="executor-0"), run.now)
        run.go(EVERY, still={1, 3}, prompts={}, results={})
    [finding] = run.unwell()
    assert finding.sentence.startswith("2 trajectories ask for turns in cell 1 and executor-1 could run them, but no")


def test_unread_inbox_is_named() -> None:
    run = Run(4, [0, 0, 1, 1], cells=2)
    for look in range(12):
        for slot in range(2):
            run.beat(f"executor-{slot}", slot)
            run.ends[DISPATCHED, slot] += look > 2
        run.view.on_record(msgspec.structs.replace(RESULT, worker="executor-0"), run.now)
        run.go(EVERY, still={1, 3}, prompts={}, results={})
    [finding] = run.unwell()
    assert finding.who == "executors"
    assert "executor-1 could run them, and has taken up nothing of what its inbox got" in finding.sentence


@given(st.lists(st.integers(0, 50), max_size=60))
def test_remembered_stage_times_are_bounded_by_the_homes(groups: list[int]) -> None:
    view = RunState(began=0.0, homes=4)
    for number in groups:
        view.on_progress(f"g{number}:0", 1.0, live=False, stamp=1.0)
        view.on_progress(f"g{number}:0", 1.0, live=False, fresh=False, stamp=1.0)
    assert len(view.stage_clock._at) <= 4 and len(view.stage_clock._stamps) <= 4


def test_executor_with_turns_that_never_end_is_named() -> None:
    run = Run(1, [0])
    run.beat("executor-0", 0, rollout=Tenant(running=2))
    run.now = STANDSTILL_SECONDS
    run.beat("executor-0", 0, rollout=Tenant(running=1))
    sentence = "executor-0 runs 1 turn, and none has ended for 120 s"
    assert Finding(Severity.WAITS, "executors", sentence) in run.found()
    run.view.on_record(msgspec.structs.replace(RESULT, worker="executor-0"), run.now)
    assert sentence not in str(run.found())
