"""A walk through a trajectory: its steps, the moves between them, and the keys of a terminal."""

import io
import os
import termios

import msgspec
import pytest

from rose.pipeline.cli.replay_trajectory import walk
from rose.pipeline.replay.records import TrajectoryRecords, fold_trajectory, sort_records
from rose.pipeline.replay.steps import Step, trajectory_steps
from rose.pipeline.terminal import read_commands
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnResult
from tests.golden.examples import EXAMPLES, PROMPT, REQUEST

DISPATCH = next(each for each in EXAMPLES if isinstance(each, TurnDispatch))
RESULT = next(each for each in EXAMPLES if isinstance(each, TurnResult))


def steps_of(*records: Record) -> list[Step]:
    found = TrajectoryRecords()
    sort_records(found, records)
    return trajectory_steps(fold_trajectory(REQUEST.trajectory_id, found))


def test_each_attempt_is_a_step_between_the_prompt_and_the_end() -> None:
    earlier = msgspec.structs.replace(DISPATCH, attempt=0, worker="w-early")
    steps = steps_of(PROMPT, REQUEST, earlier, DISPATCH, RESULT)
    assert [step.title for step in steps] == [
        f"trajectory {REQUEST.trajectory_id}",
        "turn 2, attempt 0",
        f"turn 2, attempt {DISPATCH.attempt}",
        "end",
    ]
    first, last = "\n".join(steps[1].lines), "\n".join(steps[2].lines)
    assert "w-early" in first and "completed" not in first
    assert DISPATCH.worker in last and "completed" in last and "policy" in last


def test_request_without_an_attempt_is_a_step() -> None:
    (_, waiting, _) = steps_of(PROMPT, REQUEST)
    assert waiting.title == "turn 2, no attempt yet"
    assert "asked" in waiting.lines[0]


def shown(commands: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    steps = [Step(name, ()) for name in "abc"]
    walk(steps, io.StringIO(commands), is_terminal=False)
    return [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("commands", "titles"),
    [
        ("", "a"),
        ("n\nn\np\nq\nn\n", "abcb"),
        ("\n\n\n", "abcc"),
        ("p\nx\nn\n", "aab"),
    ],
)
def test_walk_goes_back_and_forth_and_stays_within_its_ends(
    commands: str, titles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(commands, capsys) == list(titles)


def test_keys_of_a_terminal_are_commands_and_the_terminal_is_restored() -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "r") as terminal:
        before = termios.tcgetattr(terminal)
        commands, found = read_commands(terminal), []
        for pressed in (b"\x1b[C", b"\x1b[D", b"n", b"q"):
            os.write(ours, pressed)
            found.append(next(commands))
        commands.close()
        assert found == ["n", "p", "n", "q"]
        assert termios.tcgetattr(terminal) == before
    os.close(ours)
