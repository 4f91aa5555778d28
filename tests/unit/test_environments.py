"""The protocol checks, applied to every built-in environment."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.errors import UsageError
from rose.workers.environments import registry
from rose.workers.environments.calculator import CALL, MALFORMED, SPARE_TURNS, Calculator
from rose.workers.environments.protocol import (
    Environment,
    EnvironmentArgumentError,
    JsonValue,
    LifeCycleError,
    SnapshotError,
    Step,
)
from rose.workers.environments.registry import BUILT_IN, UnknownEnvironment, load_environment

SEEDS = st.integers(min_value=0, max_value=2**63 - 1)
CALCULATOR_ACTIONS = st.one_of(
    st.from_regex(r"-?[0-9]{1,3}[+-][0-9]{1,3}", fullmatch=True),
    st.from_regex(r"=-?[0-9]{1,3}", fullmatch=True),
    st.text(max_size=12),
)
LAKE_ACTIONS = st.one_of(st.sampled_from(["left", "down", "right", "up"]), st.text(max_size=6))
CASES = {
    "calculator": ({"max_operands": 4}, CALCULATOR_ACTIONS),
    "frozenlake": ({"size": 3, "slippery": True}, LAKE_ACTIONS),
}


def play(environment: Environment, actions: Sequence[str]) -> list[Step]:
    async def steps() -> list[Step]:
        taken: list[Step] = []
        for action in actions:
            taken.append(await environment.step(action))
            if taken[-1].done:
                break
        return taken

    return asyncio.run(steps())


def test_every_built_in_environment_has_a_case() -> None:
    assert set(CASES) == set(BUILT_IN) - {"sandbox"}  # its state is files and processes: test_sandbox_environment.py


@pytest.mark.parametrize("name", CASES)
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=60)
def test_restored_environment_continues_like_the_original(name: str, data: st.DataObject, seed: int) -> None:
    arguments, actions = CASES[name]
    before = data.draw(st.lists(actions, max_size=5))
    after = data.draw(st.lists(actions, min_size=1, max_size=12))
    original, restored = load_environment(name)(), load_environment(name)()
    asyncio.run(original.reset(seed, arguments))
    taken = play(original, before)
    state = asyncio.run(original.snapshot())
    asyncio.run(restored.restore(state))
    assert asyncio.run(restored.snapshot()) == state
    if not (taken and taken[-1].done):
        assert play(restored, after) == play(original, after)
    assert asyncio.run(restored.snapshot()) == asyncio.run(original.snapshot())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=60)
def test_any_action_is_a_step_and_every_task_ends(name: str, data: st.DataObject, seed: int) -> None:
    arguments, actions = CASES[name]
    environment = load_environment(name)()
    asyncio.run(environment.reset(seed, arguments))
    steps = play(environment, data.draw(st.lists(actions, min_size=20, max_size=20)))
    assert steps[-1].done
    assert not any(step.success for step in steps[:-1])
    with pytest.raises(LifeCycleError):
        play(environment, ["=1"])


@pytest.mark.parametrize("name", CASES)
@given(seed=SEEDS)
@settings(max_examples=20)
def test_seed_determines_the_task(name: str, seed: int) -> None:
    arguments, _ = CASES[name]
    first, second = (asyncio.run(load_environment(name)().reset(seed, arguments)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", CASES)
@given(state=st.binary(max_size=60))
@settings(max_examples=60)
def test_invalid_snapshot_bytes_are_refused(name: str, state: bytes) -> None:
    with pytest.raises(SnapshotError):
        asyncio.run(load_environment(name)().restore(state))


@pytest.mark.parametrize("name", CASES)
def test_unknown_arguments_are_refused_by_name(name: str) -> None:
    with pytest.raises(EnvironmentArgumentError, match="colour"):
        asyncio.run(load_environment(name)().reset(0, {"colour": "red"}))


@given(seed=SEEDS, bounds=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted))
@settings(max_examples=100)
def test_direct_solution_of_a_sum_takes_one_turn_per_operand_and_the_answer(seed: int, bounds: list[int]) -> None:
    environment = Calculator()
    least, most = bounds
    observation = asyncio.run(environment.reset(seed, {"min_operands": least, "max_operands": most}))
    operands = re.findall(r"[+-][1-9]", observation)
    assert least <= len(operands) <= most and "".join(operands) == observation
    total, turns = "0", 0
    for operand in operands:
        (step,) = play(environment, [total + operand])
        assert not step.done and step.reward == 0
        total, turns = step.observation, turns + 1
    (last,) = play(environment, ["=" + total])
    assert last.success and last.reward == 1 and last.info["turns"] == turns + 1 == len(operands) + 1


@given(seed=SEEDS, guess=st.integers(-80, 80))
@settings(max_examples=60)
def test_early_answer_is_not_accepted_and_a_wrong_answer_earns_nothing(seed: int, guess: int) -> None:
    environment = Calculator()
    observation = asyncio.run(environment.reset(seed, {}))
    (early,) = play(environment, [f"={guess}"])
    assert (early.observation, early.done) == (MALFORMED, False)
    total = sum(int(operand) for operand in re.findall(r"[+-][1-9]", observation))
    *_, last = play(environment, ["0+1", f"={guess}"])
    assert (last.success, last.reward) == ((True, 1.0) if guess == total else (False, 0.0))


def test_longest_trajectory_has_twelve_turns() -> None:
    environment = Calculator()
    asyncio.run(environment.reset(1, {"min_operands": 8}))
    steps = play(environment, ["nonsense"] * 20)
    assert len(steps) == 8 + 1 + SPARE_TURNS == 12
    assert steps[-1].info["ending"] == "out of turns" and steps[-1].reward == 0


@given(st.integers(-9999, 9999), st.sampled_from("+-"), st.integers(0, 9999))
def test_tool_computes_the_requested_operation(left: int, sign: str, right: int) -> None:
    environment = Calculator()
    asyncio.run(environment.reset(0, {}))
    action = f"{left}{sign}{right}"
    assert CALL.fullmatch(action)
    (step,) = play(environment, [action])
    assert int(step.observation) == (left + right if sign == "+" else left - right)


def test_swapped_bounds_are_refused() -> None:
    with pytest.raises(EnvironmentArgumentError, match="swap them"):
        asyncio.run(Calculator().reset(0, {"min_operands": 5, "max_operands": 2}))


class Forgetful(Environment):
    """The protocol has a body of each method, which does nothing."""

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        return ""

    async def step(self, action: str) -> Step:
        return Step(observation="", reward=0.0, done=True)

    async def snapshot(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sokoban", "calculator, frozenlake"),
        ("no_such_package.tasks:Task", "cannot import no_such_package.tasks"),
        ("json:Nothing", "json has no Nothing"),
        ("json:JSONDecoder", "lacks reset, step, snapshot"),
        (f"{__name__}:Forgetful", "lacks restore, close"),
        ("json:__name__", "is not a class"),
        (":Task", "calculator, frozenlake"),
    ],
)
def test_environment_name_without_a_target_is_refused(name: str, says: str) -> None:
    with pytest.raises(UnknownEnvironment, match=says) as refusal:
        load_environment(name)
    assert isinstance(refusal.value, UsageError)


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit()", "raise BaseException('no')", "import asyncio; raise asyncio.CancelledError"]
)
def test_module_that_fails_at_import_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    name = f"leaves_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvironment, match=f"cannot import {name}"):
        load_environment(f"{name}:Any")


def test_module_imported_without_its_package_is_refused_with_the_folder_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lone_part.py").write_text("from .other import Any")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvironment, match="name the parent folder of its package in `import_paths`"):
        load_environment("lone_part:Any")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("queue", "from queue import SUBJECTS"),
        ("rose", "import rose.cats"),
        ("json", "import json; json.SUBJECTS"),
        ("numpy", "from numpy import SUBJECTS"),
    ],
)
def test_module_with_a_taken_name_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    debate = f"debate_{abs(hash(code))}"
    (tmp_path / f"{debate}.py").write_text(code)
    (tmp_path / f"{name}.py").write_text("SUBJECTS = ['cats']\n")
    monkeypatch.syspath_prepend(tmp_path)
    for environment in (f"{debate}:Any", f"{name}:Any"):
        with pytest.raises(UnknownEnvironment, match=f"; {name} is taken by a module .*: call .*{name}.py otherwise"):
            load_environment(environment)


METHODS = "".join(f"    async def {name}(self, *given): ...\n" for name in registry.METHODS)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "class Any:\n" + METHODS.replace("async def step", "def step"),
            r"has a plain step: write `async",
        ),
        ("class Any:\n" + METHODS.replace("...", "yield"), "has a plain reset, step, snapshot, restore, close: write"),
        ("class Any:\n    def __init__(self, path): ...\n" + METHODS, "without arguments.*'path'"),
        ("class Own:\n" + METHODS + "async def Any(): return Own()\n", "is a coroutine function"),
        ("def Any(config): ...\n", "without arguments.*'config'"),
        (
            "import abc\nclass Any(abc.ABC):\n    @abc.abstractmethod\n    def x(self): ...\n" + METHODS,
            "has abstract methods",
        ),
        ("def __getattr__(name): raise OSError(name)\n", r"cannot import.*OSError: Any\)$"),
        (
            "class Any:\n" + METHODS.replace("reset(self, *given)", "reset(self, *, seed=None, options=None)"),
            r"has a reset that does not take \(self, seed, arguments\) by position: too many",
        ),
        (
            "class Any:\n" + METHODS.replace("close(self, *given)", "close()"),
            r"has a close that does not take \(self\) by",
        ),
        ("import _thread\n_thread.start_new_thread = lambda *given: 1\n", "replaces Python's threads, as gevent"),
    ],
)
def test_invalid_environment_factory_is_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    name = f"makes_none_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvironment, match=says):
        load_environment(f"{name}:Any")


def test_decorated_method_and_class_with_defaults_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "decorated.py").write_text(
        "import functools\ndef passed(call):\n    return functools.wraps(call)(lambda *given: call(*given))\n"
        f"class Any:\n    def __init__(self, path=''): ...\n{METHODS}    step = passed(step)\n"
        "    async def close(self, client, *, why): ...\n    close = passed(close)\n"
        "    @staticmethod\n    async def snapshot(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    load_environment("decorated:Any")()


def test_method_of_a_decorator_that_hides_the_function_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden.py").write_text(
        "import functools\ndef passed(call):\n    def hides(*given):\n        return call(*given)\n    return hides\n"
        f"class Any:\n{METHODS}    step = passed(step)\n"
        "    async def leave(self, seconds): ...\n    close = functools.partialmethod(leave, 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    load_environment("hidden:Any")()


def test_environment_is_found_by_import_path_and_by_built_in_name() -> None:
    assert load_environment("rose.workers.environments.calculator:Calculator") is Calculator
    assert isinstance(load_environment("calculator")(), Environment)


@given(seed=SEEDS)
@settings(max_examples=30)
def test_every_lake_has_a_path_to_the_goal(seed: int) -> None:
    first = asyncio.run(load_environment("frozenlake")().reset(seed, {"size": 4}))
    assert isinstance(first, str)
    rows = first.split("\n")
    assert rows[0][0] == "P" and rows[3][3] == "G"
    reached, frontier = {(0, 0)}, [(0, 0)]
    while frontier:
        row, column = frontier.pop()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if cell not in reached and 0 <= cell[0] < 4 and 0 <= cell[1] < 4 and rows[cell[0]][cell[1]] != "H":
                reached.add(cell)
                frontier.append(cell)
    assert (3, 3) in reached


def test_lake_actions_move_the_player_and_the_goal_is_rewarded() -> None:
    environment = load_environment("frozenlake")()
    assert asyncio.run(environment.reset(0, {"size": 2, "frozen_share": 1.0})) == "PF\nFG"
    right, unknown, down = play(environment, ["right", "jump", "down"])
    assert (right.observation, right.done) == ("SP\nFG", False)
    assert (unknown.observation, unknown.done, unknown.reward) == (MALFORMED, False, 0.0)
    assert (down.done, down.success, down.reward) == (True, True, 1.0)
    assert down.info == {"turns": 3, "malformed": 1}


def test_documented_example_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "environments.md").read_text()
    (tmp_path / "guessing.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    make = load_environment("guessing:Guessing")
    environment, other = make(), make()
    assert asyncio.run(environment.reset(4, {"highest": 3})) == "guess"
    wrong = play(environment, ["0", "x", "9"])
    assert [step.observation for step in wrong] == ["higher", "?", "lower"]
    asyncio.run(other.restore(asyncio.run(environment.snapshot())))
    last = play(other, ["1", "2", "3"])[-1]
    assert last.success and last.reward == 1.0
