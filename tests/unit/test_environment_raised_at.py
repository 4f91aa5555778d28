"""Where an environment's error was raised, as its trajectory's failure says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rose.workers.environments.jobs import EnvironmentFailure
from rose.workers.environments.raised_at import raised_at
from tests.support.environment_fixtures import Counter, act, answers, pool_of
from tests.support.scripted_executors import model_folder

HERE = Path(__file__)


def answer_of(row: dict[str, Any]) -> Any:
    return row["answer"]  # the line that is told


class Careless(Counter):
    async def meddle(self, action: str) -> None:
        if action == "key":
            answer_of({})
        if action == "assert":
            assert action == "other"
        if action == "json":
            json.loads("{")
        if action == "group":
            async with asyncio.TaskGroup() as tools:
                tools.create_task(self.meddle("key"))


def failure_of(folder: Path, action: str) -> str:
    with pool_of(folder, lambda _: Careless()) as stage:
        failed = answers(stage, [act("bad", action)])["bad"]
    assert isinstance(failed, EnvironmentFailure)
    return failed.failure


@pytest.mark.parametrize(
    ("action", "line", "function"),
    [
        ("key", "# the line that is told", "answer_of"),
        ("group", "# the line that is told", "answer_of"),
        ("assert", 'assert action == "other"', "meddle"),
        ("json", 'json.loads("{")', "meddle"),
    ],
)
def test_a_failure_says_where_in_the_users_code_it_was_raised(
    tmp_path: Path, action: str, line: str, function: str
) -> None:
    lines = HERE.read_text(encoding="utf-8").splitlines()
    number = next(at for at, text in enumerate(lines, 1) if line in text)
    failure = failure_of(model_folder(tmp_path), action)
    assert failure.endswith(f"({HERE}, line {number}, in {function})")


def test_an_error_that_no_code_of_a_user_has_met_has_no_place() -> None:
    assert raised_at(TimeoutError("took longer than 1 s")) == ""


def test_a_failure_with_a_long_message_says_where_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "raises", ValueError("x" * 5000))
    with pool_of(model_folder(tmp_path)) as stage:
        failed = answers(stage, [act("bad", "raise")])["bad"]
    assert isinstance(failed, EnvironmentFailure) and failed.failure.endswith("in meddle)")
    assert len(failed.failure) == 1000
