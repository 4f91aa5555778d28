"""The command's cores: prompt files, restarts, the live view, and a trajectory's life in words."""

from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.command.sections import TasksSection
from pipeline.command.submit import BadPrompts, read_prompts
from pipeline.command.supervisor import MOST_QUICK_CRASHES, QUICK_SECONDS, Restarts
from pipeline.command.tasks import training_prompts
from pipeline.command.view import View
from pipeline.replay.life import fold_life
from pipeline.replay.text import told
from schemas.errors import UsageError
from schemas.prompts import Prompt
from schemas.record import Record
from schemas.samples import Sample, SampleOutcome
from schemas.slack import SlackHeartbeat
from schemas.turns import TurnDispatch, TurnResult
from tests.golden.examples import EXAMPLES, PROMPT, REQUEST
from topics.catalog import COMPLETED, DISPATCHED, OUTCOMES, PROMPTS, REQUESTED, SAMPLES, Topic
from topics.records import Envelope
from workers.environments.registry import BUILT_IN

R = TypeVar("R", bound=Record)


def line(**changes: object) -> bytes:
    return msgspec.json.encode({"group_id": "g1", "group_size": 2, "environment": "calculator", "seed": 1} | changes)


def test_a_good_prompt_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\n".join([line(), b"", line(group_id="g2", arguments={"max_operands": 3})]))
    prompts = read_prompts(file, BUILT_IN)
    assert [prompt.group_id for prompt in prompts] == ["g1", "g2"]
    assert prompts[1].arguments == {"max_operands": 3}


def test_every_bad_line_is_named_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    bad = {
        2: (b"not json", "malformed"),
        3: (line(group_id="g3", group_size=0), "group_size"),
        4: (line(group_id="g4", groupsize=4), "unknown field groupsize"),
        5: (line(), "is that of line 1"),
        6: (line(group_id="g6", environment="calculater"), "calculater"),
        7: (b'{"group_id": "g7"}', "missing required field"),
        8: (line(group_id="a b"), "group_id"),
        9: (line(group_id="g9", arguments={"text": "x" * 1_000_000}), "over the limit"),
        10: (b"[1]", "array"),
        11: (b"\xff\xfe", "line 11"),
    }
    file.write_bytes(b"\n".join([line(), *(text for text, _ in bad.values())]))
    with pytest.raises(BadPrompts) as refused:
        read_prompts(file, BUILT_IN)
    first, *named = str(refused.value).splitlines()
    assert "10 of 11 lines" in first
    assert "nothing was sent" in first
    for told_line, (number, (_, reason)) in zip(named, bad.items(), strict=True):
        assert told_line.startswith(f"  line {number}: ")
        assert reason in told_line.lower(), told_line


def test_an_empty_or_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no prompt in it"):
        read_prompts(tmp_path / "empty.jsonl", BUILT_IN)
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "missing.jsonl", BUILT_IN)


@given(seed=st.integers(0, 5000), groups=st.integers(1, 300))
def test_no_training_task_is_a_held_out_one(seed: int, groups: int) -> None:
    tasks = TasksSection()
    held_out = range(tasks.held_out_seed, tasks.held_out_seed + tasks.held_out)
    try:
        prompts = training_prompts(tasks, run="r", seed=seed, groups=groups)
    except UsageError:
        return
    assert not any(prompt.seed in held_out for prompt in prompts)
    assert len({prompt.group_id for prompt in prompts}) == groups


@given(st.lists(st.floats(0, 1000), max_size=40))
def test_only_quick_crashes_in_a_row_end_a_run(runs: list[float]) -> None:
    restarts = Restarts()
    for position, seconds in enumerate(runs):
        restarts = restarts.crashed(seconds)
        row = 1
        while row <= position and runs[position - row + 1] < QUICK_SECONDS:
            row += 1
        if seconds >= QUICK_SECONDS:
            row = 1
        assert (restarts.pause_seconds is None) == (row >= MOST_QUICK_CRASHES)
        if restarts.pause_seconds is None:
            return
        assert restarts.pause_seconds == 0.5 * 2 ** (row - 1)


def example(kind: type[R]) -> R:
    return next(record for record in EXAMPLES if isinstance(record, kind))


DISPATCH, RESULT, SAMPLE, OUTCOME = example(TurnDispatch), example(TurnResult), example(Sample), example(SampleOutcome)


def test_the_view_shows_what_is_recent_and_who_is_silent() -> None:
    view = View()
    for record in EXAMPLES:
        view.take(record, 10.0)
    assert (view.settled, view.step, view.version, view.solved, view.turns_each) == (1, 5, 5, 1.0, 1.0)
    assert list(view.curve) == [1.0]
    assert view.turns_per_second(10.0) == 0.1
    assert view.turns_per_second(30.0) == 0.0
    beat = example(SlackHeartbeat)
    assert not view.silent(beat.worker, beat.sent_at + beat.ttl_seconds)
    assert view.silent(beat.worker, beat.sent_at + beat.ttl_seconds + 0.1)


def envelope(record: Record, topic: Topic) -> Envelope:
    return Envelope(record, topic, 0, 0, "", 0.0)


def test_a_life_is_told_with_every_attempt_and_text() -> None:
    stranger = msgspec.structs.replace(RESULT, trajectory_id="other:0")
    late = msgspec.structs.replace(RESULT, attempt=0)
    records = [
        envelope(PROMPT, PROMPTS),
        envelope(REQUEST, REQUESTED),
        envelope(DISPATCH, DISPATCHED),
        envelope(RESULT, COMPLETED),
        envelope(late, COMPLETED),
        envelope(stranger, COMPLETED),
        envelope(SAMPLE, SAMPLES),
        envelope(OUTCOME, OUTCOMES),
    ]
    life = fold_life(REQUEST.trajectory_id, records)
    assert life.prompt == PROMPT
    turn = life.turns[REQUEST.turn]
    assert turn.request == REQUEST
    assert turn.attempts[DISPATCH.request.attempt].dispatch == DISPATCH
    assert [each for _, attempt in sorted(turn.attempts.items()) for each in attempt.results] == [late, RESULT]
    assert life.sample == SAMPLE
    text = "\n".join(told(life, lambda tokens: f"<{len(tokens)} tokens>"))
    for words in (REQUEST.trajectory_id, "calculator", "executor-0", "because", "trained at step 5", "reward 1", "<2"):
        assert words in text
    assert "<" not in "\n".join(told(life))


def test_a_prompt_alone_is_a_life_too() -> None:
    prompt = Prompt(group_id="g", group_size=1, environment="calculator", seed=0)
    text = "\n".join(told(fold_life("g:0", [envelope(prompt, PROMPTS)])))
    assert "no turn has been asked for yet" in text
