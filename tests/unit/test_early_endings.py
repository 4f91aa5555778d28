"""Trajectories that end early: surplus ones, over-stale ones and overdue ones, over any order of events and crashes."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.limits import MAX_RECORD_BYTES
from rose.schemas.progress import Group, GroupState, SettleRequest
from rose.schemas.prompts import Prompt, trajectory_id
from rose.schemas.samples import TRUNCATED, Ending, Sample
from rose.schemas.turns import TurnRequest, TurnResult
from rose.schemas.wire import decode, encode
from rose.topics.catalog import PROMPTS
from rose.topics.records import Envelope, RawMessage
from rose.workers.environments.config import members_to_open
from rose.workers.environments.early_endings import (
    ending_at_result,
    overdue_endings,
    stale_endings,
    surplus_endings,
)
from rose.workers.environments.home import Home
from rose.workers.environments.outbox import PendingTransition, group_record, open_group_record
from rose.workers.environments.prompt_decisions import DecisionKind
from rose.workers.environments.trajectory import Trajectory
from rose.workers.environments.transitions import OutgoingRecords, advance, end_at_result, fail_trajectory
from tests.support.trajectory_fixtures import RULES, opened, prompt_of, result_of, stepped

NEEDED, MEMBERS = 4, 6
DEADLINE = replace(RULES, deadline_seconds=60.0)


def group_of(*, needed: int = NEEDED, now: float = 0.0) -> Group:
    prompt = opened(prompt_of(group_size=MEMBERS)).prompt
    return group_record(prompt, GroupState.OPEN, offset=3, outcomes_from=0, needed=needed, now=now)


def home_of(group: Group) -> Home:
    home = Home(0, homes=1)
    home.on_group(decode(Group, encode(group)))
    assert group.prompt is not None
    for index in range(group.group_size):
        trajectory = opened(group.prompt, index)
        home.trajectories[trajectory.trajectory_id] = trajectory
    return home


class GroupRun:
    """One group with surplus trajectories, as the worker's loop runs it. A crash loses what is not committed."""

    def __init__(self) -> None:
        self.home = home_of(group_of())
        self.record = group_of()
        self.bound = 0
        self.ready: list[PendingTransition] = []
        self.stepping: dict[str, TurnResult] = {}
        self.samples: list[Sample] = []
        self.withdrawn: list[TurnRequest] = []

    def _prepare(self, trajectory: Trajectory, written: OutgoingRecords) -> None:
        if written.sample is not None:
            self.home.on_sample(written.sample.record)
        self.ready.append(PendingTransition(self.home, trajectory.trajectory_id, written, None))

    def result(self, index: int, version: int) -> None:
        trajectory = self.home.trajectories.get(trajectory_id("g", index))
        if trajectory is None or trajectory.applying:
            return
        trajectory.applying = True
        result = result_of(trajectory, attempt=version)
        self.home.on_result_spans(result.spans)
        if ending := ending_at_result(self.home, trajectory, result):
            self._end(trajectory, result, ending)
        else:
            self.stepping[trajectory.trajectory_id] = result

    def step(self, index: int, how: str) -> None:
        name = trajectory_id("g", index)
        result = self.stepping.pop(name, None)
        if result is None:
            return
        trajectory = self.home.trajectories[name]
        if how == "fails":
            self._prepare(trajectory, fail_trajectory(trajectory, "boom", RULES, 5.0))
        elif ending := ending_at_result(self.home, trajectory, result):
            self._end(trajectory, result, ending)
        else:
            step = stepped(done=how == "done")
            written = advance(trajectory, result, step, offset=0, rules=RULES, applied_at=3.0, now=4.0)
            self._prepare(trajectory, written)

    def _end(self, trajectory: Trajectory, result: TurnResult, ending: Ending) -> None:
        written = end_at_result(trajectory, result, ending, offset=0, rules=RULES, applied_at=3.0, now=4.0)
        self._prepare(trajectory, written)

    def raise_bound(self, version: int) -> None:
        self.bound = max(version, self.bound)
        self.home.on_outcome("g", "g:none", 0, oldest_fresh=self.bound)

    def commit(self) -> None:
        self.ready += surplus_endings(self.home, RULES, 5.0) + stale_endings(self.home, RULES, 5.0)
        ready, self.ready = self.ready, []
        for item in ready:
            if item.records.sample is not None:
                self.samples.append(decode(Sample, item.records.sample.wire))
                del self.home.trajectories[item.trajectory_id]
            if item.records.stop is not None:
                self.withdrawn.append(decode(TurnRequest, item.records.stop.wire))
        for known, group in self.home.take_changed():
            self.record = decode(Group, encode(open_group_record(known, group)))

    def crash(self) -> None:
        """Begin again with what is on the log: here a trajectory without a sample begins anew."""
        self.home = home_of(self.record)
        for sample in self.samples:
            del self.home.trajectories[sample.trajectory_id]
        self.ready, self.stepping = [], {}
        self.raise_bound(self.bound)

    def check(self) -> None:
        assert not [name for name, count in Counter(each.trajectory_id for each in self.samples).items() if count > 1]
        rewarded = sum(each.reward is not None for each in self.samples)
        assert rewarded <= NEEDED and self.record.rewarded == rewarded
        assert all((each.reward is None) == (each.ended not in {Ending.DONE, *TRUNCATED}) for each in self.samples)
        assert rewarded == NEEDED or not any(each.ended is Ending.SURPLUS for each in self.samples)
        ended = {each.trajectory_id for each in self.samples}
        assert all(each.withdrawn and each.trajectory_id in ended for each in self.withdrawn)


INDEX = st.integers(0, MEMBERS - 1)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("result"), INDEX, st.integers(0, 4)),
        st.tuples(st.just("step"), INDEX, st.sampled_from(["done", "done", "goes on", "fails"])),
        st.tuples(st.just("bound"), st.integers(0, 4)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("crash")),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_every_trajectory_of_a_group_ends_once_and_surplus_ones_only_behind_a_complete_group(
    events: list[tuple[object, ...]],
) -> None:
    run = GroupRun()
    for what, *values in events:
        match what, *values:
            case "result", int(index), int(version):
                run.result(index, version)
            case "step", int(index), str(how):
                run.step(index, how)
            case "bound", int(version):
                run.raise_bound(version)
            case ("commit",):
                run.commit()
            case ("crash",):
                run.crash()
        run.check()
    run.commit()
    for index in range(MEMBERS):
        run.result(index, 9)
        run.step(index, "done")
        run.commit()
        run.check()
    assert {each.trajectory_id for each in run.samples} == {trajectory_id("g", index) for index in range(MEMBERS)}
    assert not run.home.trajectories


def test_prompt_opens_a_group_with_surplus_trajectories_and_a_refusal_keeps_its_size() -> None:
    prompt = Prompt(group_id="g", group_size=NEEDED, environment="calculator")
    found = Envelope(prompt, PROMPTS, 0, 0, "g", 0.0, RawMessage(b"g", encode(prompt)))
    home = Home(0, homes=1, members_ratio=1.25)
    home.begin(prompts_from=0, results_from=0)
    home.on_prompt(found)
    decision = home.decide(has_room=True, outcomes_from=0)
    assert decision is not None and decision.kind is DecisionKind.OPEN
    assert (decision.opens.group_size, decision.needed, decision.awaited) == (5, NEEDED, 5)
    home.refuse(decision, "no such environment")
    assert decision.opens.group_size == NEEDED


@pytest.mark.parametrize(("asked", "held"), [(NEEDED, MEMBERS), (NEEDED - 1, NEEDED - 1)])
def test_group_settled_by_hand_before_it_opens_starts_no_surplus_trajectory(asked: int, held: int) -> None:
    prompt = Prompt(group_id="g", group_size=NEEDED, environment="calculator")
    home = Home(0, homes=1, members_ratio=MEMBERS / NEEDED)
    home.begin(prompts_from=0, results_from=0)
    home.on_prompt(Envelope(prompt, PROMPTS, 0, 7, "g", 0.0, RawMessage(b"g", encode(prompt))))
    for index in range(asked):
        name = trajectory_id("g", index)
        home.on_settle_request(
            SettleRequest(trajectory_id=name, group_id="g", offset=7, reason="mistake", asked_at=1.0)
        )
    decision = home.decide(has_room=True, outcomes_from=0)
    assert decision is not None
    assert list(home.settle_requests_of(decision)) == list(range(held))


@pytest.mark.parametrize(
    ("size", "ratio", "members"), [(16, 1.25, 20), (50, 1.1, 55), (45, 2.2, 99), (3, 1.1, 4), (8, 1.0, 8)]
)
def test_group_opens_with_no_more_trajectories_than_its_ratio_asks_for(size: int, ratio: float, members: int) -> None:
    assert members_to_open(size, ratio) == members


def test_group_without_surplus_trajectories_counts_nothing() -> None:
    home = home_of(group_of(needed=0))
    trajectory = home.trajectories["g:0"]
    written = advance(
        trajectory,
        result_of(trajectory),
        stepped(done=True),
        offset=0,
        rules=RULES,
        applied_at=3.0,
        now=4.0,
    )
    assert written.sample is not None
    home.on_sample(written.sample.record)
    assert home.take_changed() == [] and surplus_endings(home, RULES, 5.0) == []


def test_overdue_trajectory_fails_and_its_turn_is_withdrawn() -> None:
    home = home_of(group_of(now=1_000.0))
    home.on_log_time(1_100.0)
    ended = overdue_endings(home, DEADLINE, 1_100.0, 0.0)
    assert len(ended) == MEMBERS
    for item in ended:
        assert item.records.sample is not None and item.records.stop is not None
        sample, withdrawal = item.records.sample.record, item.records.stop.record
        assert (sample.reward, sample.ended) == (None, Ending.FAILED) and "60 s" in sample.failure
        assert (withdrawal.trajectory_id, withdrawal.turn, withdrawal.withdrawn) == (item.trajectory_id, 0, True)
    assert overdue_endings(home, DEADLINE, 1_100.0, 0.0) == [], "each trajectory ends once"


def test_wrong_clock_ends_no_trajectory_before_the_worker_has_seen_it_for_the_deadline() -> None:
    home = home_of(group_of(now=1_000.0))
    home.on_log_time(1_010.0)
    assert overdue_endings(home, DEADLINE, 9_999.0, 100.0) == []
    assert overdue_endings(home, DEADLINE, 0.0, 159.0) == []
    assert len(overdue_endings(home, DEADLINE, 0.0, 161.0)) == MEMBERS


def test_no_trajectory_ends_as_too_old_while_no_result_is_fresh() -> None:
    home = home_of(group_of())
    home.on_outcome("g", "g:none", 0, oldest_fresh=5)
    old, fresh = (result_of(home.trajectories["g:0"], attempt=version) for version in (1, 5))
    home.on_result_spans(old.spans)
    assert ending_at_result(home, home.trajectories["g:0"], old) is None, "the executors do not follow the versions"
    home.on_result_spans(fresh.spans)
    assert ending_at_result(home, home.trajectories["g:0"], old) is Ending.STALE


def test_bound_of_an_unknown_group_ends_nothing() -> None:
    home = home_of(group_of())
    home.on_outcome("other", "other:0", 0, oldest_fresh=7)
    trajectory = home.trajectories["g:0"]
    assert ending_at_result(home, trajectory, result_of(trajectory)) is None


def test_trajectory_that_failed_behind_its_step_is_not_ended_again() -> None:
    home = home_of(group_of(now=1_000.0))
    home.on_log_time(1_100.0)
    trajectory = home.trajectories["g:0"]
    trajectory.applying = True
    large = stepped(state=bytes(MAX_RECORD_BYTES + 1))
    written = advance(trajectory, result_of(trajectory), large, offset=0, rules=RULES, applied_at=3.0, now=4.0)
    assert written.sample is not None and "cannot be saved" in written.sample.record.failure
    home.on_outcome("g", "g:none", 0, oldest_fresh=9)
    ended = [*stale_endings(home, RULES, 5.0), *overdue_endings(home, DEADLINE, 1_100.0, 0.0)]
    assert "g:0" not in {item.trajectory_id for item in ended}
