"""Rounds of tail batching: every group ends, however rounds, crashes and trainer steps fall."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import Prompt, trajectory_id
from rose.schemas.turns import TurnRequest
from rose.schemas.wire import decode, encode
from rose.workers.environments.home import Home
from rose.workers.environments.outbox import PendingTransition, group_record, open_group_record
from rose.workers.environments.rounds import PROMPTS_SECONDS, Rounds
from rose.workers.environments.trajectory import with_full_sampling
from rose.workers.environments.transitions import advance
from tests.support.trajectory_fixtures import RULES, opened, result_of, stepped

WINDOW, SIZE = 4, 2


class TailBatchingRun:
    """One home with rounds, a router that knows which turns are on hold, and a trainer that takes whole groups."""

    def __init__(self, prompts: int, *, ratio: float = 1.5, max_deferrals: int = 2) -> None:
        self.prompts = prompts
        self.home = Home(0, homes=1)
        self.rounds = Rounds(window_groups=WINDOW, groups_ratio=ratio, max_deferrals=max_deferrals)
        self.records: dict[str, Group] = {}
        self.held: set[str] = set()
        """Trajectories whose turn is on hold in the router."""
        self.samples: Counter[str] = Counter()
        self.ended: list[str] = []
        """Groups that are complete and not taken, in order."""
        self.settled: list[str] = []
        self.offsets = 0
        self.now = 100.0

    def cycle(self) -> None:
        """One cycle of the worker: rounds, new groups, and the commit."""
        self.now += 0.1
        self.commit(self.rounds.advance([self.home], RULES, self.now, self.now))
        while self.prompts and self.home.active_groups < self.rounds.limit:
            self.prompts -= 1
            self.open(f"g{self.prompts}")
        if self.prompts:
            self.rounds.prompts_at = self.now  # as if the next prompt waited

    def open(self, group_id: str) -> None:
        prompt = Prompt(group_id=group_id, group_size=SIZE, environment="calculator", seed=1, max_turns=6)
        prompt = with_full_sampling(prompt, RULES.sampling)
        self.records[group_id] = group_record(prompt, GroupState.OPEN, offset=0, outcomes_from=0, now=self.now)
        self.home.on_group(self.records[group_id])
        for index in range(SIZE):
            trajectory = opened(prompt, index)
            self.home.trajectories[trajectory.trajectory_id] = trajectory

    def commit(self, transitions: list[PendingTransition]) -> None:
        for item in transitions:
            if item.records.request is not None:
                self.held.discard(item.trajectory_id)
            if item.records.stop is not None:
                stop = decode(TurnRequest, item.records.stop.wire)
                assert stop.hold and not stop.withdrawn
                self.held.add(item.trajectory_id)
        for known, group in self.home.take_changed():
            self.records[group.prompt.group_id] = decode(Group, encode(open_group_record(known, group)))

    def answer(self, which: int, *, done: bool) -> None:
        """Answer a turn that is not on hold: the trajectory goes on or ends."""
        running = sorted(self.home.trajectories.keys() - self.held)
        if not running:
            return
        trajectory = self.home.trajectories[running[which % len(running)]]
        written = advance(
            trajectory,
            result_of(trajectory),
            stepped(done=done or trajectory.turn >= 4),
            offset=self.offsets,
            rules=RULES,
            applied_at=1.0,
            now=2.0,
        )
        self.offsets += 1
        if written.sample is not None:
            del self.home.trajectories[trajectory.trajectory_id]
            self.samples[trajectory.trajectory_id] += 1
            group_id = trajectory.prompt.group_id
            if all(self.samples[trajectory_id(group_id, index)] for index in range(SIZE)):
                self.ended.append(group_id)

    def train(self, groups: int) -> None:
        """A step of the trainer: settles the first whole groups."""
        taken, self.ended = self.ended[:groups], self.ended[groups:]
        if not taken:
            return
        self.offsets += 1
        step = self.home.newest_step + 1
        for group_id in taken:
            self.settled.append(group_id)
            for index in range(SIZE):
                self.home.on_outcome(group_id, trajectory_id(group_id, index), 0, step=step)
        for record in self.home.take_settled(self.now):
            self.records[record.group_id] = record

    def crash(self) -> None:
        """Build the home again from its records; the router keeps its turns."""
        lives, step = self.home.trajectories, self.home.newest_step
        self.home = Home(0, homes=1)
        for record in self.records.values():
            self.home.on_group(record)
        self.home.trajectories, self.home.newest_step = lives, step
        self.rounds.recover([self.home], self.now)

    def finish(self, prompts: int) -> None:
        """Go on until all groups are settled."""
        for turn in range(20_000):
            if len(self.settled) == prompts:
                break
            self.answer(turn, done=False)
            self.train(WINDOW if len(self.ended) >= WINDOW or not self.prompts else 0)
            self.cycle()
            self.check()
        assert sorted(self.settled) == sorted(f"g{number}" for number in range(prompts))
        assert not self.home.trajectories and not self.home.open_groups

    def check(self) -> None:
        assert max(self.samples.values(), default=1) == 1
        for group_id, group in self.home.open_groups.items():
            assert group.deferrals <= self.rounds.max_deferrals
            record = self.records[group_id]
            assert (record.deferred, record.deferrals) == (group.deferred, group.deferrals)
            live = {name for name in group.members if name in self.home.trajectories}
            assert live <= self.held if group.deferred else not live & self.held


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("answer"), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("train"), st.integers(1, WINDOW)),
        st.tuples(st.just("cycle")),
        st.tuples(st.just("crash")),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 30), EVENTS, st.integers(1, 3))
def test_every_group_ends_over_rounds_and_crashes(
    prompts: int, events: list[tuple[object, ...]], max_deferrals: int
) -> None:
    run = TailBatchingRun(prompts, max_deferrals=max_deferrals)
    run.cycle()
    for what, *values in events:
        match what, *values:
            case "answer", int(which), bool(done):
                run.answer(which, done=done)
            case "train", int(groups):
                run.train(groups)
            case ("cycle",):
                run.cycle()
            case ("crash",):
                run.crash()
        run.check()
    run.finish(prompts)


def test_short_rounds_defer_the_slow_groups_and_a_long_round_runs_them() -> None:
    run = TailBatchingRun(60)
    kinds = []
    for _ in range(6):
        run.cycle()
        kinds.append((run.rounds.is_long, run.home.active_groups, len(run.held) // SIZE))
        active = sorted({name.partition(":")[0] for name in run.home.trajectories.keys() - run.held})
        for group_id in active[:WINDOW]:
            for index in range(SIZE):
                name = trajectory_id(group_id, index)
                place = sorted(run.home.trajectories.keys() - run.held).index(name)
                run.answer(place, done=True)
        run.train(WINDOW)
    assert kinds == [(False, 6, 0), (False, 6, 2), (True, 4, 0), (False, 6, 0), (False, 6, 2), (True, 4, 0)]


def test_round_is_long_before_few_deferred_groups_are_too_old() -> None:
    run = TailBatchingRun(80)
    kinds = []
    for _ in range(7):
        run.cycle()
        kinds.append((run.rounds.is_long, len(run.held) // SIZE))
        active = sorted({name.partition(":")[0] for name in run.home.trajectories.keys() - run.held})
        for group_id in active[: WINDOW if run.rounds.is_long else WINDOW + 1]:
            for index in range(SIZE):
                place = sorted(run.home.trajectories.keys() - run.held).index(trajectory_id(group_id, index))
                run.answer(place, done=True)
        run.train(WINDOW + 1)
    assert kinds == [(False, 0), (False, 1), (True, 0), (False, 0), (False, 1), (True, 0), (False, 0)]


def test_group_that_was_deferred_often_enough_runs_on() -> None:
    run = TailBatchingRun(40, max_deferrals=1)
    run.cycle()
    slow = sorted({name.partition(":")[0] for name in run.home.trajectories})[-1]
    for _ in range(8):
        active = sorted({name.partition(":")[0] for name in run.home.trajectories.keys() - run.held} - {slow})
        for group_id in active[:WINDOW]:
            for index in range(SIZE):
                place = sorted(run.home.trajectories.keys() - run.held).index(trajectory_id(group_id, index))
                run.answer(place, done=True)
        run.train(WINDOW)
        run.cycle()
        run.check()
    assert run.home.open_groups[slow].deferrals == 1 and not run.home.open_groups[slow].deferred


def test_deferred_groups_run_on_under_a_worker_without_tail_batching() -> None:
    run = TailBatchingRun(20)
    run.cycle()
    for name in [trajectory_id(f"g{number}", index) for number in range(14, 14 + WINDOW) for index in range(SIZE)]:
        run.answer(sorted(run.home.trajectories.keys() - run.held).index(name), done=True)
    run.train(WINDOW)
    run.cycle()
    assert len(run.held) == 2 * SIZE
    run.rounds = Rounds(window_groups=WINDOW)
    run.crash()
    run.finish(20)
    assert not run.rounds.is_long


def test_deferred_groups_run_in_a_short_round_once_no_prompt_waits() -> None:
    run = TailBatchingRun(WINDOW + 2)
    run.cycle()
    for name in [trajectory_id(f"g{number}", index) for number in range(WINDOW) for index in range(SIZE)]:
        run.answer(sorted(run.home.trajectories.keys() - run.held).index(name), done=True)
    run.train(WINDOW)
    run.cycle()
    assert len(run.held) == 2 * SIZE and not run.rounds.is_long
    run.now += PROMPTS_SECONDS
    run.cycle()
    assert not run.held and run.home.active_groups == 2
