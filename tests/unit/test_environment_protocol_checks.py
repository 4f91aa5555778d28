"""NumPy scalars of an environment are accepted, useless values are refused in one sentence, and errors have a
location."""

import asyncio
import json
import math
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from rose.schemas.limits import MAX_INFO_BYTES
from rose.workers.environments.jobs import EnvironmentFailure
from rose.workers.environments.protocol import (
    ProtocolViolation,
    Step,
    check_observation,
    check_snapshot,
    check_step,
    raised_at,
)
from tests.support.environment_fixtures import Counter, act, answers, pool_of
from tests.support.scripted_executors import model_folder


def step(**fields: Any) -> Step:
    return Step(**{"observation": "o", "reward": 0.5, "done": False, **fields})


@pytest.mark.parametrize(
    ("reward", "taken"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(-3), -3.0), (np.bool_(True), 1.0), (np.array(2.5), 2.5)],
)
def test_reward_may_be_any_number_type(reward: Any, taken: float) -> None:
    given = check_step(step(reward=reward)).reward
    assert type(given) is float and given == taken


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("1", "a reward of type str"),
        (None, "a reward of type NoneType"),
        (1j, "a reward of type complex"),
        (np.array([1.0, 2.0]), "a reward of type ndarray"),
        (Fraction(1, 2), "a reward of type Fraction"),
        (math.nan, "the reward nan: it must be a finite number"),
        (-math.inf, "the reward -inf: it must be a finite number"),
        (np.float32("nan"), "the reward nan: it must be a finite number"),
        (10**400, "the reward inf: it must be a finite number"),
    ],
)
def test_reward_that_is_not_a_finite_number_is_named_in_the_error(reward: Any, says: str) -> None:
    with pytest.raises(ProtocolViolation) as refused:
        check_step(step(reward=reward))
    assert says in str(refused.value) and "scale" not in str(refused.value)


@pytest.mark.parametrize("truth", [True, 1, np.bool_(True), np.int8(1)])
def test_bool_of_any_library_is_accepted(truth: Any) -> None:
    given = check_step(step(done=truth, success=truth))
    assert given.done is True and given.success is True


@pytest.mark.parametrize("truth", ["false", "", None, 2, 0.0, [], np.array([True, False])])
def test_done_that_is_not_a_bool_is_refused(truth: Any) -> None:
    with pytest.raises(ProtocolViolation, match=r"done of type .*: it must be True or False"):
        check_step(step(done=truth))


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        (None, "of type NoneType: it must be a str"),
        (b"seen", "of type bytes: it must be a str; decode it"),
        (("seen", {}), "of type tuple: it must be a str"),
        (7, "of type int: it must be a str"),
        ("ab\ud800", r"half a surrogate pair \(U\+D800, character 2\)"),
    ],
)
def test_non_text_observation_is_named_in_the_error(observation: Any, says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        check_step(step(observation=observation))
    with pytest.raises(ProtocolViolation, match=says):
        check_observation(observation, "reset()")
    assert check_step(step(observation=observation, done=True)).done, "no policy reads the last one"


def test_remarks_are_plain_values_that_a_record_can_hold() -> None:
    info = {"score": np.float32(0.5), "count": np.int64(3), "won": np.bool_(False), "name": np.str_("x"), "more": [1]}
    info["wide"] = np.float64(1.5)
    taken = check_step(step(info=info)).info
    assert taken == {"score": 0.5, "count": 3, "won": False, "name": "x", "more": [1], "wide": 1.5}
    assert {type(value) for value in taken.values()} == {float, int, bool, str, list}
    assert check_step(step(info=None)).info == {}


@pytest.mark.parametrize(
    "info",
    [{"a": object()}, {"a": "\udc00"}, {"a": 2**70}, {1: "a"}, {"a": [{0: 1}]}, ["a"], {"a": np.arange(3)}],
)
def test_remarks_that_no_record_can_hold_are_refused(info: Any) -> None:
    with pytest.raises(ProtocolViolation, match=r"step\(\) gave an info that"):
        check_step(step(info=info))


def test_invalid_step_or_snapshot_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="gave a tuple, not a Step"):
        check_step(("o", 0.5, True, False, {}))
    with pytest.raises(ProtocolViolation, match="gave a str, not bytes"):
        check_snapshot("state")


def test_info_too_large_for_a_sample_is_named() -> None:
    with pytest.raises(ProtocolViolation, match=f"an info of .* bytes: {MAX_INFO_BYTES} are allowed"):
        check_step(step(info={"log": "x" * (1 << 22)}))


HERE = Path(__file__)


def answer_of(row: dict[str, Any]) -> Any:
    return row["answer"]  # the reported line


class Careless(Counter):
    async def meddle(self, action: str) -> None:
        if action == "key":
            answer_of({})
        if action == "assert":
            assert action == "other"
        if action == "json":
            json.loads("{")
        if action == "threads":
            await asyncio.to_thread(json.loads, "{")
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
        ("key", "# the reported line", "answer_of"),
        ("group", "# the reported line", "answer_of"),
        ("assert", 'assert action == "other"', "meddle"),
        ("json", 'json.loads("{")', "meddle"),
        ("threads", 'asyncio.to_thread(json.loads, "{")', "meddle"),
    ],
)
def test_failure_names_the_line_of_user_code(tmp_path: Path, action: str, line: str, function: str) -> None:
    lines = HERE.read_text(encoding="utf-8").splitlines()
    number = next(at for at, text in enumerate(lines, 1) if line in text)
    failure = failure_of(model_folder(tmp_path), action)
    assert failure.endswith(f"({HERE}, line {number}, in {function})")


def test_compiled_library_is_not_named_as_user_code() -> None:
    def reported() -> None:
        FunctionType(compile("raise ValueError", "library/loop.pyx", "exec"), {})()  # as Cython names its files

    with pytest.raises(ValueError) as raised:
        reported()
    assert raised_at(raised.value).startswith(f"{HERE}, ") and raised_at(raised.value).endswith("in reported")


def test_error_of_a_coroutine_that_raised_stop_iteration_names_the_line_of_its_cause() -> None:
    async def runs_dry() -> None:
        next(iter(()))

    async def errors() -> tuple[BaseException | None]:
        return await asyncio.gather(runs_dry(), return_exceptions=True)

    [error] = asyncio.run(errors())
    assert isinstance(error, RuntimeError)
    assert raised_at(error).startswith(f"{HERE}, ") and raised_at(error).endswith("in runs_dry")


def test_error_without_user_code_has_no_location() -> None:
    assert raised_at(TimeoutError("took longer than 1 s")) == ""


def test_failure_with_a_long_message_keeps_its_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "raises", ValueError("x" * 5000))
    with pool_of(model_folder(tmp_path)) as stage:
        failed = answers(stage, [act("bad", "raise")])["bad"]
    assert isinstance(failed, EnvironmentFailure) and failed.failure.endswith("in meddle)")
    assert len(failed.failure) == 1000
