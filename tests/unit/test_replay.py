"""Replay of a trajectory from its records: every attempt, stages that add up, separate episodes, and its location."""

from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.clock import format_utc as moment
from rose.pipeline.replay.description import describe_trajectory, latency_stages
from rose.pipeline.replay.records import TrajectoryRecords, UnknownTrajectory, find_group, fold_trajectory, sort_records
from rose.pipeline.replay.why import GroupFacts, PromptAt, why_group, why_trajectory
from rose.schemas.progress import Group, GroupState, TrajectoryProgress
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.samples import TRUNCATED, Ending, Outcome, Sample, SampleOutcome
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnResult, TurnTimes, context_fields
from rose.schemas.wire import encode
from rose.topics.settings import BusSettings
from tests.golden.examples import EXAMPLES, PROMPT, REQUEST

R = TypeVar("R", bound=Record)
replace = msgspec.structs.replace


def example(kind: type[R]) -> R:
    return next(record for record in EXAMPLES if isinstance(record, kind))


DISPATCH, RESULT, SAMPLE, OUTCOME = example(TurnDispatch), example(TurnResult), example(Sample), example(SampleOutcome)
NAME = REQUEST.trajectory_id
PROGRESS = TrajectoryProgress(
    trajectory_id=NAME, group_id=REQUEST.group_id, index=3, turn=REQUEST.turn, requested_from=0, prompted=1
)


def found(*records: Record) -> TrajectoryRecords:
    kept = TrajectoryRecords()
    sort_records(kept, records)
    return kept


@given(st.lists(st.floats(0.001, 100), min_size=9, max_size=9), st.sets(st.integers(0, 8)))
def test_stages_of_a_turn_add_up_to_its_duration(steps: list[float], passed: set[int]) -> None:
    stations = [field.name for field in msgspec.structs.fields(TurnTimes)]
    moments = [1_795_304_978.0 + sum(steps[: number + 1]) for number in range(9)]
    times = TurnTimes(**{stations[number]: moments[number] for number in passed})
    legs = latency_stages(times)
    first, last = min(passed, default=0), max(passed, default=0)
    assert sum(leg.seconds for leg in legs) == pytest.approx(moments[last] - moments[first], abs=1e-5)
    assert len(legs) == max(0, len(passed) - 1)


def test_wait_for_the_transaction_of_the_request_is_a_stage() -> None:
    times = TurnTimes(requested_at=10.0, committed_at=10.015, queued_at=10.02, dispatched_at=10.03, received_at=10.04)
    names = ["its transaction", "to the router", "wait for room", "to the inbox"]
    assert [leg.name for leg in latency_stages(times)] == names


def test_abandoned_turn_has_no_prefill_and_no_decode() -> None:
    failed = replace(
        RESULT,
        outcome=TurnOutcome.FAILED,
        worker=None,
        tokens=b"",
        logprobs=b"",
        spans=(),
        times=TurnTimes(requested_at=1.5, finished_at=1_795_304_978.07),
    )
    text = "\n".join(describe_trajectory(fold_trajectory(NAME, found(REQUEST, failed))))
    assert "decode" not in text
    assert "to its end" in text
    assert "failed     by the router" in text


def test_replay_of_a_trajectory_shows_every_attempt_and_text() -> None:
    late = replace(RESULT, attempt=0, times=replace(RESULT.times, finished_at=9.0))
    episodes = fold_trajectory(NAME, found(PROMPT, REQUEST, DISPATCH, RESULT, late, SAMPLE, OUTCOME))
    [episode] = episodes.episodes
    turn = episode.turns[REQUEST.turn]
    assert turn.request == REQUEST
    assert turn.attempts[DISPATCH.attempt].dispatches == [DISPATCH]
    assert [each for _, attempt in sorted(turn.attempts.items()) for each in attempt.results] == [late, RESULT]
    assert episode.samples == [SAMPLE]
    text = "\n".join(describe_trajectory(episodes, lambda tokens: f"<{len(tokens)} tokens>"))
    for words in (NAME, "calculator", "executor-0", "because", "trained at step 5", "reward 1", "<2"):
        assert words in text
    assert "<" not in "\n".join(describe_trajectory(episodes))


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ending.DONE, "reward 1, solved, done, 1 turns"),
        (Ending.MAX_TURNS, "reward 1, solved, cut off by max_turns, 1 turns"),
        (Ending.CONTEXT, "reward 1, solved, cut off by the end of its context, 1 turns"),
        (Ending.UNKNOWN, "reward 1, solved, 1 turns"),
    ],
)
def test_replay_shows_the_end_of_a_trajectory(ended: Ending, words: str) -> None:
    sample = replace(SAMPLE, ended=ended)
    assert words in "\n".join(describe_trajectory(fold_trajectory(NAME, found(PROMPT, sample))))
    cut = words.partition("solved, ")[2].partition(", 1 turns")[0] if ended in TRUNCATED else ""
    why = why_trajectory(group(sampled=frozenset([NAME])), facts(sample, live=False))
    assert why.startswith(f"is finished with reward 1{f' ({cut})' if cut else ''} and waits")
    settled = why_trajectory(group(), facts(sample, OUTCOME, live=False))
    assert settled.endswith(f"at step 5{f' ({cut})' if cut else ''}")


def test_withdrawn_turn_keeps_its_request_and_begins_no_other_life() -> None:
    first = replace(REQUEST, turn=0, requested_at=1.5)
    withdrawal = replace(first, withdrawn=True, requested_at=9.0, **context_fields(b""))
    sent = replace(DISPATCH, request_wire=msgspec.Raw(encode(first)), attempt=0)
    stop = replace(sent, request_wire=msgspec.Raw(encode(withdrawal)), withdrawn=True)
    sample = replace(SAMPLE, turns=(), reward=None, ended=Ending.SURPLUS)
    history = fold_trajectory(NAME, found(PROMPT, first, withdrawal, sent, stop, sample))
    [episode] = history.episodes
    assert (episode.turns[0].request, episode.turns[0].later) == (first, [withdrawal])
    assert episode.turns[0].attempts[0].dispatches == [sent, stop] and episode.samples == [sample]
    text = "\n".join(describe_trajectory(history))
    for words in ("asked      00:00:01.500", "withdrawn  00:00:09.000", "stop       of attempt 0", "ended early"):
        assert words in text
    assert text.count("because") == 1


def test_turn_that_was_on_hold_is_one_turn_of_one_life() -> None:
    first = replace(REQUEST, turn=0, requested_at=1.5)
    hold = replace(first, hold=True, requested_at=9.0, **context_fields(b""))
    again = replace(first, requested_at=20.0)
    sent = [
        replace(DISPATCH, request_wire=msgspec.Raw(encode(each)), attempt=n) for n, each in enumerate((first, again))
    ]
    [episode] = fold_trajectory(NAME, found(PROMPT, first, hold, again, *sent)).episodes
    assert (episode.turns[0].request, episode.turns[0].later) == (first, [hold, again])
    assert episode.turns[0].attempts[1].dispatches == [sent[1]]
    text = "\n".join(describe_trajectory(fold_trajectory(NAME, found(PROMPT, first, hold, again))))
    assert "on hold    00:00:09.000" in text and "asked      00:00:20.000 again" in text


def test_replay_of_a_prompt_without_trajectories_is_shown() -> None:
    prompt = Prompt(group_id="g", group_size=1, environment="calculator", seed=0)
    text = "\n".join(describe_trajectory(fold_trajectory("g:0", found(prompt))))
    assert "no turn has been asked for yet" in text


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_two_trajectories_of_one_id_are_not_mixed(first: int, second: int, order: object) -> None:
    requests: list[Record] = []
    rest: list[Record] = []
    for trajectory_number, turns in enumerate((first, second)):
        for turn in range(turns):
            turn_request = replace(REQUEST, turn=turn, requested_at=100.0 * trajectory_number + turn + 1)
            times = TurnTimes(requested_at=turn_request.requested_at)
            requests.append(turn_request)
            rest.append(
                replace(
                    DISPATCH,
                    request_wire=msgspec.Raw(encode(turn_request)),
                    attempt=0,
                    worker=f"executor-{trajectory_number}",
                )
            )
            rest.append(replace(RESULT, turn=turn, attempt=0, worker=f"executor-{trajectory_number}", times=times))
    order.shuffle(rest)  # type: ignore[attr-defined]
    episodes = fold_trajectory(NAME, found(*requests, *rest)).episodes
    assert [len(episode.turns) for episode in episodes] == [first, second]
    for number, episode in enumerate(episodes):
        for own in episode.turns.values():
            assert [each.worker for each in own.attempts[0].dispatches] == [f"executor-{number}"]
            assert [each.worker for each in own.attempts[0].results] == [f"executor-{number}"]


def group(state: GroupState | None = GroupState.OPEN, **changes: object) -> GroupFacts:
    record = None
    if state is not None:
        record = Group(group_id="g-1", group_size=4, state=state, offset=3, changed_at=0.0)
    return GroupFacts(group_id="g-1", group=record, size=4, **changes)  # type: ignore[arg-type]


def facts(*records: Record, live: bool = True) -> TrajectoryRecords:
    return found(*records, *[PROGRESS] * live)


def attempt(number: int, outcome: TurnOutcome, reason: str = "") -> TurnResult:
    return replace(RESULT, attempt=number, outcome=outcome, reason=reason)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((REQUEST,), "turn 2 waits in the router since 00:00:01 UTC"),
        ((REQUEST, DISPATCH), "turn 2 is with executor-0 since 00:00:01 UTC (attempt 1)"),
        (
            (REQUEST, DISPATCH, attempt(1, TurnOutcome.REFUSED, "full")),
            "turn 2 waits in the router since 00:00:02 UTC, after attempt 1 was refused by executor-0: full",
        ),
        (
            (REQUEST, DISPATCH, attempt(0, TurnOutcome.PREEMPTED)),
            "(attempt 1), after attempt 0 was preempted by executor-0",
        ),
        ((REQUEST, DISPATCH, RESULT), "was completed by executor-0 at 00:00:02 UTC and waits for its environment"),
        ((REQUEST, attempt(1, TurnOutcome.FAILED, "no attempts left")), "turn 2 was given up (no attempts left)"),
        ((), "its request is on the log no more"),
    ],
)
def test_running_trajectory_is_located_by_its_current_turn(records: tuple[Record, ...], words: str) -> None:
    assert words in why_trajectory(group(live=frozenset([NAME])), facts(*records))


def test_finished_trajectory_waits_for_its_group_or_the_trainer_or_is_settled() -> None:
    waits = facts(SAMPLE, live=False)
    others = group(live=frozenset(["g-1:0", "g-1:2"]), sampled=frozenset([NAME]))
    assert "waits for its group: 2 of 4 are under way (g-1:0, g-1:2)" in why_trajectory(others, waits)
    complete = group(sampled=frozenset(f"g-1:{index}" for index in range(4)))
    assert "waits for the trainer: its group is complete" in why_trajectory(complete, waits)
    stale = replace(OUTCOME, outcome=Outcome.STALE, reason="7 versions old")
    assert why_trajectory(complete, facts(SAMPLE, stale, live=False)) == (
        "ended as stale at step 5 because 7 versions old"
    )
    assert "is lost" in why_trajectory(complete, facts(live=False))
    assert (
        why_trajectory(group(GroupState.SETTLED), facts(live=False)) == "is settled: its outcome is on the log no more"
    )


HERE = PromptAt(place="rose.prompts.submitted.v1/3/17", home=3, at_home=True, before=2)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ((HERE,), "its prompt waits at rose.prompts.submitted.v1/3/17, behind 2 others; 5 groups are open there"),
        ((REFUSED_HERE := PromptAt(place="p/3/17", home=3, at_home=True, refused="too big"),), "was refused: too big"),
        ((REFUSED_HERE, HERE), "is not opened: its prompt waits"),
        ((PromptAt(place="p/1/4", home=3, at_home=False),), "lies at p/1/4, its home is partition 3"),
        ((), "is not on the log"),
    ],
)
def test_unopened_group_names_the_reason_of_the_wait(prompts: tuple[PromptAt, ...], words: str) -> None:
    unopened = group(None, prompts=prompts, open_at_home=5)
    assert words in why_group(unopened)
    assert words in why_trajectory(unopened, facts(live=False))


def test_open_group_is_described_by_its_trajectories() -> None:
    told_of = group(
        live=frozenset([NAME]),
        sampled=frozenset(["g-1:0", "g-1:1"]),
        settled=(replace(OUTCOME, trajectory_id="g-1:0"),),
    )
    assert why_group(told_of) == (
        "is open: 1 of its 4 trajectories are settled (1 trained), 1 under way (g-1:3), 1 wait for the others"
    )
    assert why_group(group(GroupState.SETTLED, settled=(OUTCOME,))) == "is settled: 1 trained"


def test_inconsistent_result_and_sample_are_still_shown() -> None:
    halved = replace(RESULT, tokens=RESULT.tokens[:-1], logprobs=b"\xff" * 5)
    text = "\n".join(
        describe_trajectory(fold_trajectory(NAME, found(PROMPT, REQUEST, halved, replace(SAMPLE, reward=None))), repr)
    )
    assert "1 tokens by stop" in text and "no reward" in text and "(9)" not in text and "[9]" in text
    assert (
        "version 4\n"
        in "\n".join(describe_trajectory(fold_trajectory(NAME, found(REQUEST, replace(RESULT, logprobs=b""))))) + "\n"
    )


@pytest.mark.parametrize("stamp", [float("nan"), float("inf"), -1e300, 2.0**62, -1.0])
def test_timestamp_outside_the_calendar_is_shown_as_a_number(stamp: float) -> None:
    assert "UTC" in moment(stamp) or moment(stamp).endswith("s after 1970")


def test_non_utf8_name_is_not_found() -> None:
    """Invalid bytes of a command line arrive as lone surrogates. No broker is queried."""
    with pytest.raises(UnknownTrajectory):
        find_group(BusSettings("127.0.0.1:9"), "g\udce9")
