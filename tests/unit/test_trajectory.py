"""A trajectory's core: each turn is applied once, the trajectory ends once, and the log gives the live state."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.arrays import count, pack_tokens, unpack_logprobs
from rose.schemas.limits import MAX_CHAIN
from rose.schemas.progress import EnvSnapshot, Group, GroupState, TrajectoryProgress
from rose.schemas.prompts import PromptSampling
from rose.schemas.samples import Ending, Sample
from rose.schemas.turns import Refusal, TurnOutcome, TurnRequest, TurnResult, assemble_context, context_fields
from rose.schemas.wire import decode, encode
from rose.workers.environments.home import Home, OffsetTracker
from rose.workers.environments.outbox import group_record
from rose.workers.environments.recovery import Recovery
from rose.workers.environments.trajectory import ResultVerdict, Trajectory
from rose.workers.environments.transitions import (
    OutgoingRecords,
    StepResult,
    advance,
    end_at_result,
    fail_trajectory,
    fail_unrecovered,
    first_request,
    request_again,
)
from tests.support.trajectory_fixtures import RULES, opened, prompt_of, result_of, stepped


@dataclass
class HomeRun:
    """One home, driven by its core, with its log."""

    snapshots: list[tuple[str, EnvSnapshot | None]] = field(default_factory=list)
    progress: list[tuple[str, TrajectoryProgress | None]] = field(default_factory=list)
    requests: list[TurnRequest] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    stepping: dict[str, tuple[int, TurnResult]] = field(default_factory=dict)
    inputs: OffsetTracker = field(default_factory=lambda: OffsetTracker(0))
    applied: list[TurnResult] = field(default_factory=list)
    now: float = 10.0
    lag: int = 2
    """Lag of the worker's knowledge of the end of the requests."""

    def commit(self, trajectory_id: str, written: OutgoingRecords) -> None:
        """Write a transaction to the log, through the wire format."""
        if written.snapshot is not None:
            self.snapshots.append((trajectory_id, decode(EnvSnapshot, written.snapshot.wire)))
        if written.request is not None:
            trajectory = self.trajectories[trajectory_id]
            trajectory.requested_from = max(0, len(self.requests) - self.lag)
            trajectory.request_offset = len(self.requests) if len(self.requests) % 5 else None  # its report may be lost
            self.requests.append(decode(TurnRequest, written.request.wire))
            self.progress.append((trajectory_id, decode(TrajectoryProgress, encode(trajectory.progress()))))
        if written.sample is not None:
            self.samples.append(decode(Sample, written.sample.wire))
            self.snapshots.append((trajectory_id, None))
            self.progress.append((trajectory_id, None))
            self.trajectories.pop(trajectory_id, None)

    def open(self, index: int) -> None:
        trajectory = opened(prompt_of(), index, observation=(5, index))
        self.trajectories[trajectory.trajectory_id] = trajectory
        self.commit(trajectory.trajectory_id, first_request(trajectory, RULES, self.now))

    def arrives(self, result: TurnResult) -> None:
        """Store a result and read it at once."""
        offset = len(self.results)
        self.results.append(result)
        trajectory = self.trajectories.get(result.trajectory_id)
        verdict = ResultVerdict.LATE if trajectory is None else trajectory.classify(result)
        if trajectory is not None and verdict is ResultVerdict.ANCHOR:
            self.commit(trajectory.trajectory_id, request_again(trajectory, RULES, self.now))
        if trajectory is None or verdict not in (ResultVerdict.APPLY, ResultVerdict.FAIL):
            self.inputs.on_skipped(offset)
            return
        self.inputs.on_read(offset)
        trajectory.applying = True
        if verdict is ResultVerdict.FAIL:
            self.inputs.on_done(offset)
            self.commit(trajectory.trajectory_id, fail_trajectory(trajectory, "given up", RULES, self.now))
        else:
            self.stepping[trajectory.trajectory_id] = (offset, result)

    def steps(self, trajectory_id: str, step: StepResult | None) -> None:
        """Apply an answer of the environment; None is a failure."""
        offset, result = self.stepping.pop(trajectory_id)
        trajectory = self.trajectories[trajectory_id]
        self.now += 1.0
        if step is None:
            written = end_at_result(
                trajectory,
                result,
                Ending.FAILED,
                "it broke",
                offset=offset,
                rules=RULES,
                applied_at=self.now,
                now=self.now,
            )
        else:
            written = advance(
                trajectory, result, step, offset=offset, rules=RULES, applied_at=self.now, now=self.now + 0.5
            )
        self.applied.append(result)
        self.inputs.on_done(offset)
        self.commit(trajectory_id, written)

    def recovered(self, *, without_results: int | None = None, without_requests: int | None = None) -> Recovery:
        """Recover the home as a new owner: the newest records, and the records that they name."""
        recovery = Recovery(Home(0, homes=1))
        prompt = opened(prompt_of()).prompt
        recovery.on_group(
            "g", decode(Group, encode(group_record(prompt, GroupState.OPEN, offset=0, outcomes_from=0, now=1.0)))
        )
        for trajectory_id, snapshot in self.snapshots:
            recovery.on_snapshot(trajectory_id, snapshot)
        for trajectory_id, progress in self.progress:
            recovery.on_progress(trajectory_id, progress)
        for offset in recovery.results:
            if offset != without_results:
                recovery.on_result(offset, self.results[offset])
        for (name, turn), begin in recovery.requests.items():
            for offset in range(begin, min(begin + self.lag + 1, len(self.requests))):
                request = self.requests[offset]
                if (request.trajectory_id, request.turn) == (name, turn) and offset != without_requests:
                    recovery.on_request(offset, request)
        for offset in recovery.links:
            if offset != without_requests:
                recovery.on_link(offset, self.requests[offset])
        return recovery


OUTCOMES = st.sampled_from(
    [TurnOutcome.COMPLETED] * 12 + [TurnOutcome.PREEMPTED, TurnOutcome.REFUSED, TurnOutcome.FAILED]
)
TOKENS = st.lists(st.integers(3, 90), min_size=2, max_size=5).map(tuple)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("result"), st.integers(0, 2), st.integers(0, 2), OUTCOMES, TOKENS),
        st.tuples(
            st.just("step"),
            st.integers(0, 2),
            st.sampled_from([0.0, 0.25, -1.0]),
            st.sampled_from([b"start", b"a", b"b"]),
            st.sampled_from([False] * 7 + [True]),
        ),
        st.tuples(st.just("break"), st.integers(0, 2)),
        st.tuples(st.just("torn"), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.just("open"), st.integers(0, 2)),
    ),
    max_size=60,
)


def lived(events: list[tuple[Any, ...]]) -> Iterator[HomeRun]:
    """Yield a run after each of its events. Results arrive for the current turn and for past turns."""
    home_run = HomeRun()
    attempts = 0
    unopened = {0, 1, 2}
    for event in [*events, ("open", 0), ("open", 1), ("open", 2)]:
        trajectory_id = f"g:{event[1]}"
        if event[1] in unopened:
            if event[0] == "open":
                unopened.discard(event[1])
                home_run.open(event[1])
        elif event[0] == "result":
            _, _, back, outcome, tokens = event
            trajectory = home_run.trajectories.get(trajectory_id) or opened(prompt_of(), event[1])
            attempts += 1
            turn = max(0, trajectory.turn - back // 2)
            home_run.arrives(result_of(trajectory, turn=turn, attempt=attempts, outcome=outcome, tokens=tokens))
        elif event[0] == "torn" and trajectory_id in home_run.trajectories:
            trajectory = home_run.trajectories[trajectory_id]
            turn = max(0, trajectory.turn - event[2])
            home_run.arrives(
                result_of(trajectory, turn=turn, tokens=(), outcome=TurnOutcome.REFUSED, refusal=Refusal.CONTEXT)
            )
        elif trajectory_id in home_run.stepping and event[0] in ("step", "break"):
            if event[0] == "step":
                _, _, reward, state, done = event
                home_run.steps(trajectory_id, stepped(reward=reward, done=done, state=state))
            elif len(home_run.applied) % 3 == 0:
                home_run.steps(trajectory_id, None)
        yield home_run


@settings(max_examples=200)
@given(EVENTS)
def test_state_rebuilt_from_the_log_equals_the_live_state(events: list[tuple[Any, ...]]) -> None:
    for home_run in lived(events):
        trajectories, cannot, strays = home_run.recovered().finish(RULES.max_context_tokens)
        assert cannot == [] == strays
        assert trajectories == home_run.trajectories


@settings(max_examples=200)
@given(EVENTS)
def test_every_request_resolves_to_its_whole_context_from_retained_records(events: list[tuple[Any, ...]]) -> None:
    present: dict[str, TurnRequest] = {}
    for home_run in lived(events):
        present |= {request.trajectory_id: request for request in home_run.requests}
        for name, trajectory in home_run.trajectories.items():
            kept = {offset: each for offset, each in enumerate(home_run.requests) if offset >= trajectory.needs_from}
            if name not in home_run.stepping:
                assert assemble_context(present[name], kept) == trajectory.tokens


def test_chain_ends_at_its_bound_and_restarts_with_an_anchor() -> None:
    home_run = HomeRun()
    home_run.open(0)
    trajectory = home_run.trajectories["g:0"]
    trajectory.prompt = prompt_of(max_turns=200, sampling=PromptSampling.from_sampling(RULES.sampling))
    for _ in range(MAX_CHAIN + 20):
        home_run.arrives(result_of(trajectory, tokens=(7, 2)))
        home_run.steps("g:0", stepped())
    links = dict(enumerate(home_run.requests))
    assert max(len(request.chain) for request in home_run.requests) <= MAX_CHAIN
    assert sum(request.is_anchor for request in home_run.requests) > 1
    assert all(count(assemble_context(request, links)) == request.context_tokens for request in home_run.requests)


@given(st.lists(st.none() | st.integers(0, 20), min_size=1, max_size=12))
def test_requests_are_consistent_at_any_offsets_of_their_chain(offsets: list[int | None]) -> None:
    """A broker that lost its newest records assigns their offsets again."""
    home_run = HomeRun()
    home_run.open(0)
    trajectory = home_run.trajectories["g:0"]
    trajectory.prompt = prompt_of(max_turns=200, sampling=PromptSampling.from_sampling(RULES.sampling))
    for offset in offsets:
        trajectory.request_offset = offset
        home_run.arrives(result_of(trajectory, tokens=(7, 2)))
        home_run.steps("g:0", stepped())
        assert home_run.requests[-1].validation_error is None


@settings(max_examples=200)
@given(EVENTS)
def test_new_owner_accepts_the_already_accepted_results(events: list[tuple[Any, ...]]) -> None:
    for home_run in lived(events):
        trajectories, _, _ = home_run.recovered().finish(RULES.max_context_tokens)
        accepted: dict[str, TurnResult] = {}
        for result in home_run.results[home_run.inputs.low_water :]:
            trajectory = trajectories.get(result.trajectory_id)
            if trajectory is not None and trajectory.classify(result) is ResultVerdict.APPLY:
                trajectory.applying = True
                accepted[result.trajectory_id] = result
        assert accepted == {trajectory_id: result for trajectory_id, (_, result) in home_run.stepping.items()}


@settings(max_examples=200)
@given(EVENTS)
def test_every_turn_applies_the_first_completed_result_and_every_trajectory_ends_once(
    events: list[tuple[Any, ...]],
) -> None:
    home_run = HomeRun()
    for home_run in lived(events):  # noqa: B007 - its last state
        pass
    while home_run.trajectories:
        for trajectory in list(home_run.trajectories.values()):
            if trajectory.trajectory_id not in home_run.stepping:
                home_run.arrives(result_of(trajectory))
            home_run.steps(trajectory.trajectory_id, stepped())
    firsts: dict[tuple[str, int], TurnResult] = {}
    for result in home_run.results:
        if result.outcome is TurnOutcome.COMPLETED:
            firsts.setdefault((result.trajectory_id, result.turn), result)
    assert len({(result.trajectory_id, result.turn) for result in home_run.applied}) == len(home_run.applied)
    assert all(firsts[result.trajectory_id, result.turn] == result for result in home_run.applied)
    assert sorted(sample.trajectory_id for sample in home_run.samples) == ["g:0", "g:1", "g:2"]
    for sample in home_run.samples:
        assert_whole(sample)
        assert (sample.reward is None) == bool(sample.failure)
        mine = [result for result in home_run.applied if result.trajectory_id == sample.trajectory_id]
        assert [turn.attempt for turn in sample.turns] == [result.attempt for result in mine]
        assert sample.device_seconds.get("dedicated", 0.0) == sum(0.25 * result.attempt for result in mine)


def assert_whole(sample: Sample) -> None:
    """Assert that mask, logprobs, spans and turns agree on every token."""
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
    assert count(sample.tokens) == len(mask) == count(sample.logprobs)
    for ranges in (
        [(span.start, span.end) for span in sample.spans],
        [(turn.start, turn.end) for turn in sample.turns],
    ):
        covered = np.zeros_like(mask)
        for start, end in ranges:
            covered[start:end] += 1
        assert (covered == mask).all()
    assert (unpack_logprobs(sample.logprobs)[mask == 0] == 0.0).all()


@settings(max_examples=100)
@given(EVENTS, st.data())
def test_log_with_gaps_fails_a_trajectory_and_never_alters_it(
    events: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    home_run = HomeRun()
    for home_run in lived(events):  # noqa: B007 - its last state
        pass
    results, requests = (
        st.integers(0, max(0, len(home_run.results) - 1)),
        st.integers(0, max(0, len(home_run.requests) - 1)),
    )
    recovery = home_run.recovered(
        without_results=data.draw(st.none() | results), without_requests=data.draw(st.none() | requests)
    )
    trajectories, cannot, strays = recovery.finish(RULES.max_context_tokens)
    assert {lost.trajectory_id for lost in cannot} | set(trajectories) == set(home_run.trajectories) and strays == []
    assert all(lost.reason for lost in cannot)
    assert all(trajectory == home_run.trajectories[name] for name, trajectory in trajectories.items())


@settings(max_examples=100)
@given(EVENTS, st.integers(1, 2**40), st.sampled_from(["result", "request", "state"]))
def test_altered_record_fails_a_trajectory_and_never_alters_it(
    events: list[tuple[Any, ...]], pick: int, what: str
) -> None:
    home_run = HomeRun()
    for home_run in lived(events):  # noqa: B007 - its last state
        pass
    if not home_run.trajectories:
        return
    name = sorted(home_run.trajectories)[pick % len(home_run.trajectories)]
    live = home_run.trajectories[name]
    recovery = home_run.recovered()
    if what == "state":
        recovery.on_snapshot(name, EnvSnapshot(trajectory_id=name, digest=live.digest, state=b"another"))
    elif what == "request":
        offset, request = next((at, held) for at, held in enumerate(home_run.requests) if held.trajectory_id == name)
        last = msgspec.structs.replace(request, turn=live.turn, **context_fields(live.tokens + pack_tokens([1])))
        recovery.on_request(offset, last)
    elif live.applied:
        other = result_of(live, turn=live.turn - 1, tokens=(90, 91, 92, 93, 94, 95))
        recovery.on_result(live.applied[-1].offset, other)
    else:
        return
    trajectories, cannot, _ = recovery.finish(RULES.max_context_tokens)
    assert name not in trajectories and [lost.trajectory_id for lost in cannot] == [name]


def test_group_without_sampling_settings_fails_only_its_trajectories() -> None:
    home_run = HomeRun()
    home_run.open(0)
    recovery = home_run.recovered()
    unsaid = msgspec.structs.replace(recovery.home.open_groups["g"].prompt, sampling=PromptSampling())
    recovery.home.open_groups["g"].prompt = unsaid
    trajectories, lost, _ = recovery.finish(RULES.max_context_tokens)
    assert not trajectories and ["how it is sampled" in each.reason for each in lost] == [True]


def test_trajectory_that_cannot_be_rebuilt_withdraws_its_turn() -> None:
    """A turn on hold would stay in the router for ever."""
    written = fail_unrecovered(prompt_of(), 1, "recovery: gone", RULES, 5.0, home=3, turn=2)
    assert written.sample is not None and written.sample.record.failure == "recovery: gone"
    assert written.stop is not None
    stop = decode(TurnRequest, written.stop.wire)
    assert (stop.trajectory_id, stop.home, stop.turn, stop.withdrawn) == ("g:1", 3, 2, True)
