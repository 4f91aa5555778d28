"""A trajectory's core: one application a turn, one end, and the same state from the log as from the life."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.arrays import count, pack_logprobs, pack_tokens, unpack_logprobs
from schemas.environments import EnvSnapshot, LogPosition
from schemas.prompts import Prompt, Sampling
from schemas.samples import Sample
from schemas.turns import TurnOutcome, TurnRequest, TurnResult, TurnTimes, VersionSpan
from schemas.wire import decode, encode
from workers.environments.home import Unfinished
from workers.environments.recovery import Recovery
from workers.environments.trajectory import (
    Ending,
    Rules,
    Stepped,
    Trajectory,
    Verdict,
    Written,
    advance,
    begin,
    broken,
    failed,
    first_request,
    problem_of,
    turn_sampling,
)

RULES = Rules(sampling=Sampling(stop_token_ids=(2,)), turn_deadline_seconds=60.0, max_context_tokens=400)


def prompt_of(**fields: object) -> Prompt:
    known = {"group_id": "g", "group_size": 3, "environment": "calculator", "seed": 1, "max_turns": 6}
    return Prompt(**{**known, **fields})  # type: ignore[arg-type]


def opened(prompt: Prompt, index: int = 0, *, observation: tuple[int, ...] = (5, 6)) -> Trajectory:
    return begin(
        prompt,
        index,
        home=0,
        opened=LogPosition(requested=0, completed=0),
        observation=pack_tokens(observation),
        state=b"start",
    )


def result_of(
    trajectory: Trajectory,
    *,
    turn: int | None = None,
    attempt: int = 0,
    outcome: TurnOutcome = TurnOutcome.COMPLETED,
    tokens: tuple[int, ...] = (7, 8, 2),
) -> TurnResult:
    return TurnResult(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.prompt.group_id,
        home=0,
        turn=trajectory.turn if turn is None else turn,
        attempt=attempt,
        outcome=outcome,
        worker=f"w{attempt}",
        tokens=pack_tokens(tokens),
        logprobs=pack_logprobs([-token / 8 for token in tokens]),
        spans=(VersionSpan(0, 1, attempt), VersionSpan(1, len(tokens), attempt + 1)),
        cached_tokens=attempt,
        times=TurnTimes(requested_at=1.0, finished_at=2.0),
        device_seconds={"dedicated": 0.25 * attempt},
    )


def stepped(
    *, observation: tuple[int, ...] = (9,), reward: float = 0.0, done: bool = False, state: bytes = b"start"
) -> Stepped:
    return Stepped(
        observation=pack_tokens(observation),
        reward=reward,
        done=done,
        success=done,
        info={"done": done},
        state=state,
        environment_seconds=0.125,
    )


def live(trajectory: Trajectory, result: TurnResult, step: Stepped, *, rules: Rules = RULES) -> Written:
    return advance(trajectory, result, step, rules=rules, applied_at=3.0, now=4.0)


@dataclass
class Life:
    """One home, lived by the core; its log beside it, as the bus would hold it."""

    snapshots: list[tuple[str, EnvSnapshot | None]] = field(default_factory=list)
    requests: list[TurnRequest] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    stepping: dict[str, tuple[int, TurnResult]] = field(default_factory=dict)
    inputs: Unfinished = field(default_factory=lambda: Unfinished(0))
    applied: list[TurnResult] = field(default_factory=list)
    now: float = 10.0

    def commit(self, trajectory_id: str, written: Written) -> None:
        """What a transaction puts on the log, through the wire."""
        if written.snapshot is not None:
            self.snapshots.append((trajectory_id, decode(EnvSnapshot, encode(written.snapshot))))
        if written.request is not None:
            self.requests.append(decode(TurnRequest, encode(written.request)))
        if written.sample is not None:
            self.samples.append(decode(Sample, encode(written.sample)))
            self.snapshots.append((trajectory_id, None))
            self.trajectories.pop(trajectory_id, None)

    def open(self, index: int) -> None:
        trajectory = begin(
            prompt_of(),
            index,
            home=0,
            opened=LogPosition(requested=len(self.requests), completed=len(self.results)),
            observation=pack_tokens([5, index]),
            state=b"start",
        )
        self.trajectories[trajectory.trajectory_id] = trajectory
        self.commit(trajectory.trajectory_id, first_request(trajectory, RULES, self.now))

    def arrives(self, result: TurnResult) -> None:
        """A result is stored, and read at once."""
        offset = len(self.results)
        self.results.append(result)
        trajectory = self.trajectories.get(result.trajectory_id)
        verdict = Verdict.LATE if trajectory is None else trajectory.judge(result)
        if trajectory is None or verdict not in (Verdict.APPLY, Verdict.FAIL):
            self.inputs.passed(offset)
            return
        self.inputs.read(offset)
        trajectory.applying = True
        if verdict is Verdict.FAIL:
            self.inputs.done(offset)
            self.commit(trajectory.trajectory_id, failed(trajectory, "given up", self.now))
        else:
            self.stepping[trajectory.trajectory_id] = (offset, result)

    def steps(self, trajectory_id: str, step: Stepped | None) -> None:
        """The environment has answered; None is a failure."""
        offset, result = self.stepping.pop(trajectory_id)
        trajectory = self.trajectories[trajectory_id]
        self.now += 1.0
        if step is None:
            written = broken(trajectory, result, "it broke", applied_at=self.now, now=self.now)
        else:
            written = advance(trajectory, result, step, rules=RULES, applied_at=self.now, now=self.now + 0.5)
        self.applied.append(result)
        self.inputs.done(offset)
        self.commit(trajectory_id, written)

    def recovered(self) -> Recovery:
        recovery = Recovery()
        for trajectory_id, snapshot in self.snapshots:
            recovery.snapshot(trajectory_id, snapshot)
        begins = recovery.opened or LogPosition(requested=0, completed=0)
        for request in self.requests[begins.requested :]:
            recovery.request(request)
        for result in self.results[begins.completed :]:
            recovery.result(result)
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
        st.tuples(st.just("open"), st.integers(0, 2)),
    ),
    max_size=60,
)


def lived(events: list[tuple[Any, ...]]) -> Iterator[Life]:
    """A life, after each of its events. Results come for the present turn and for turns that have passed."""
    life = Life()
    attempts = 0
    unopened = {0, 1, 2}
    for event in [*events, ("open", 0), ("open", 1), ("open", 2)]:
        trajectory_id = f"g:{event[1]}"
        if event[1] in unopened:
            if event[0] == "open":
                unopened.discard(event[1])
                life.open(event[1])
        elif event[0] == "result":
            _, _, back, outcome, tokens = event
            trajectory = life.trajectories.get(trajectory_id) or opened(prompt_of(), event[1])
            attempts += 1
            turn = max(0, trajectory.turn - back // 2)
            life.arrives(result_of(trajectory, turn=turn, attempt=attempts, outcome=outcome, tokens=tokens))
        elif trajectory_id in life.stepping and event[0] in ("step", "break"):
            if event[0] == "step":
                _, _, reward, state, done = event
                life.steps(trajectory_id, stepped(reward=reward, done=done, state=state))
            elif len(life.applied) % 3 == 0:
                life.steps(trajectory_id, None)
        yield life


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_the_state_built_from_the_log_is_the_state_that_lived(events: list[tuple[Any, ...]]) -> None:
    for life in lived(events):
        trajectories, cannot = life.recovered().finish()
        assert cannot == []
        assert trajectories == life.trajectories


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_who_takes_over_accepts_the_results_that_were_accepted(events: list[tuple[Any, ...]]) -> None:
    for life in lived(events):
        trajectories, _ = life.recovered().finish()
        accepted: dict[str, TurnResult] = {}
        for result in life.results[life.inputs.low_water :]:
            trajectory = trajectories.get(result.trajectory_id)
            if trajectory is not None and trajectory.judge(result) is Verdict.APPLY:
                trajectory.applying = True
                accepted[result.trajectory_id] = result
        assert accepted == {trajectory_id: result for trajectory_id, (_, result) in life.stepping.items()}


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_every_turn_applies_the_first_completed_result_and_every_trajectory_ends_once(
    events: list[tuple[Any, ...]],
) -> None:
    life = Life()
    for life in lived(events):  # noqa: B007 - its last state
        pass
    while life.trajectories:
        for trajectory in list(life.trajectories.values()):
            if trajectory.trajectory_id not in life.stepping:
                life.arrives(result_of(trajectory))
            life.steps(trajectory.trajectory_id, stepped())
    firsts: dict[tuple[str, int], TurnResult] = {}
    for result in life.results:
        if result.outcome is TurnOutcome.COMPLETED:
            firsts.setdefault((result.trajectory_id, result.turn), result)
    assert len({(result.trajectory_id, result.turn) for result in life.applied}) == len(life.applied)
    assert all(firsts[result.trajectory_id, result.turn] == result for result in life.applied)
    assert sorted(sample.trajectory_id for sample in life.samples) == ["g:0", "g:1", "g:2"]
    for sample in life.samples:
        assert_whole(sample)
        assert (sample.reward is None) == bool(sample.failure)
        mine = [result for result in life.applied if result.trajectory_id == sample.trajectory_id]
        assert [turn.attempt for turn in sample.turns] == [result.attempt for result in mine]
        assert sample.device_seconds.get("dedicated", 0.0) == sum(0.25 * result.attempt for result in mine)


def assert_whole(sample: Sample) -> None:
    """Mask, logprobs, spans and turns say the same of every token."""
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


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.data())
def test_a_log_with_holes_breaks_a_trajectory_but_never_bends_it(
    events: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    life = Life()
    for life in lived(events):  # noqa: B007 - its last state
        pass
    if life.results:
        del life.results[data.draw(st.integers(0, len(life.results) - 1))]
    loses_a_request: bool = data.draw(st.booleans())
    if life.requests and loses_a_request:
        del life.requests[data.draw(st.integers(0, len(life.requests) - 1))]
    recovery = Recovery()
    for trajectory_id, snapshot in life.snapshots:
        recovery.snapshot(trajectory_id, snapshot)
    for request in life.requests:
        recovery.request(request)
    for result in life.results:
        recovery.result(result)
    trajectories, cannot = recovery.finish()
    assert {lost.snapshot.trajectory_id for lost in cannot} | set(trajectories) == set(life.trajectories)
    assert all(lost.reason for lost in cannot)
    for trajectory_id, trajectory in trajectories.items():
        real = life.trajectories[trajectory_id]
        assert real.tokens.startswith(trajectory.tokens)
        if trajectory.turn == real.turn:
            assert (trajectory.tokens, trajectory.mask) == (real.tokens, real.mask)


MALFORMED = {
    "no tokens": {"tokens": b"", "logprobs": b"", "spans": ()},
    "half a token": {"tokens": b"\0\0\0\0\0"},
    "too few logprobs": {"logprobs": pack_logprobs([-1.0])},
    "a logprob of nan": {"logprobs": pack_logprobs([-1.0, float("nan"), -1.0])},
    "no spans": {"spans": ()},
    "a gap": {"spans": (VersionSpan(0, 1, 0), VersionSpan(2, 3, 0))},
    "an overlap": {"spans": (VersionSpan(0, 2, 0), VersionSpan(1, 3, 0))},
    "an empty span": {"spans": (VersionSpan(0, 0, 0), VersionSpan(0, 3, 0))},
    "past the end": {"spans": (VersionSpan(0, 4, 0),)},
    "short of the end": {"spans": (VersionSpan(0, 2, 0),)},
    "no version": {"spans": (VersionSpan(0, 3, -1),)},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_result_is_told_from_a_sound_one(fields: dict[str, object]) -> None:
    sound = result_of(opened(prompt_of()))
    assert problem_of(sound, 2) == ""
    assert problem_of(type(sound)(**{**{name: getattr(sound, name) for name in sound.__struct_fields__}, **fields}), 2)


def test_a_result_that_overflows_the_longest_context_is_malformed() -> None:
    assert "more than" in problem_of(result_of(opened(prompt_of())), 131_070)


def test_the_reward_is_the_sum_over_the_steps_and_the_last_observation_is_not_read() -> None:
    trajectory = opened(prompt_of())
    first = live(trajectory, result_of(trajectory), stepped(reward=0.25, observation=(9, 9)))
    assert first.request is not None and first.request.context == pack_tokens([5, 6, 7, 8, 2, 9, 9])
    last = live(trajectory, result_of(trajectory), stepped(reward=0.5, done=True))
    assert last.sample is not None and last.ending is Ending.DONE
    assert (last.sample.reward, last.sample.success) == (0.75, True)
    assert last.sample.tokens == pack_tokens([5, 6, 7, 8, 2, 9, 9, 7, 8, 2])


def test_a_snapshot_is_written_only_when_the_state_changed() -> None:
    trajectory = opened(prompt_of())
    same = live(trajectory, result_of(trajectory), stepped(state=b"start"))
    changed = live(trajectory, result_of(trajectory), stepped(state=b"changed"))
    assert same.snapshot is None
    assert changed.snapshot is not None and (changed.snapshot.state, changed.snapshot.turn) == (b"changed", 2)


def test_a_trajectory_ends_as_it_stands_after_max_turns() -> None:
    trajectory = opened(prompt_of(max_turns=2))
    assert live(trajectory, result_of(trajectory), stepped(reward=0.5)).sample is None
    last = live(trajectory, result_of(trajectory), stepped())
    assert last.ending is Ending.MAX_TURNS and last.sample is not None
    assert (last.sample.reward, last.sample.success, last.sample.failure) == (0.5, False, "")


def test_a_trajectory_ends_when_its_context_is_full_and_the_last_turn_gets_the_room_that_is_left() -> None:
    rules = Rules(sampling=Sampling(max_tokens=64), turn_deadline_seconds=1.0, max_context_tokens=8)
    trajectory = opened(prompt_of())
    first = first_request(trajectory, rules, 0.0)
    assert first.request is not None and first.request.sampling.max_tokens == 6
    second = live(trajectory, result_of(trajectory), stepped(observation=(9,)), rules=rules)
    assert second.request is not None and second.request.sampling.max_tokens == 2
    last = live(trajectory, result_of(trajectory, tokens=(7, 2)), stepped(reward=1.0), rules=rules)
    assert last.ending is Ending.CONTEXT and last.sample is not None and last.sample.reward == 1.0


def test_an_observation_without_room_and_a_state_without_room_are_failures_with_a_reason() -> None:
    small = Rules(sampling=Sampling(), turn_deadline_seconds=1.0, max_context_tokens=2)
    too_long = first_request(opened(prompt_of()), small, 0.0)
    assert too_long.sample is not None and "max_context_tokens 2" in too_long.sample.failure
    trajectory = opened(prompt_of())
    too_big = live(trajectory, result_of(trajectory), stepped(state=bytes(2_000_000)))
    assert too_big.sample is not None and too_big.sample.reward is None and "cannot be saved" in too_big.sample.failure


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_a_failure(reward: float) -> None:
    trajectory = opened(prompt_of())
    written = live(trajectory, result_of(trajectory), stepped(reward=reward))
    assert written.sample is not None and written.sample.reward is None and str(reward) in written.sample.failure


def test_remarks_that_no_record_can_hold_are_a_failure() -> None:
    trajectory = opened(prompt_of())
    step = stepped(done=True, reward=1.0)
    step.info["remark"] = object()
    written = live(trajectory, result_of(trajectory), step)
    assert written.sample is not None and written.sample.reward is None
    encode(written.sample)


@given(st.integers(0, 2**63 - 1))
def test_a_prompt_with_a_seed_samples_every_turn_of_every_trajectory_with_its_own(seed: int) -> None:
    prompt = prompt_of(sampling=Sampling(seed=seed, max_tokens=9))
    drawn = [
        turn_sampling(prompt, index, turn, room_tokens=100, default=RULES.sampling)
        for index in range(3)
        for turn in range(3)
    ]
    assert len({sampling.seed for sampling in drawn}) == 9
    assert all(sampling.seed is not None and 0 <= sampling.seed < 2**63 for sampling in drawn)
    assert drawn[0].stop_token_ids == (2,), "the model's stop tokens, since the prompt names none"
    assert drawn == [
        turn_sampling(prompt, index, turn, room_tokens=100, default=RULES.sampling)
        for index in range(3)
        for turn in range(3)
    ]
