"""The adapter for verifiers, with verifiers itself: the examples of the guide."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.support.adapter_environments import ROOT, python_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "docs/examples/verifiers"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module with the interpreter of verifiers, from this checkout."""
    command = [python_of("verifiers"), "-m", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    done = run("tests.support.verifiers_episodes")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_task_of_a_taskset_is_played_with_its_rewards(played: dict[str, Any]) -> None:
    left, right = played["sum"]
    assert played["right"] == {
        "first": ["Answer with the number alone.", f"{left}+{right}"],
        "steps": [["", 1.0, True, True]],
    }
    assert played["wrong"]["first"] == played["right"]["first"], "seed 100 of 100 tasks is task 0"
    assert played["wrong"]["steps"] == [["", 0.0, True, False]]


def test_environment_with_several_turns_shows_what_its_user_says(played: dict[str, Any]) -> None:
    steps = played["guessed"]["steps"]
    assert [step[0] for step in steps] == ["higher", "?", ""]
    assert steps[-1][1:] == [1.0, True, True]


def test_restored_episode_continues_like_the_original_or_is_refused(played: dict[str, Any]) -> None:
    assert played["again"] == {"equal": True}
    assert "SnapshotError: verifiers does not repeat the episode" in played["changed"]["error"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("beyond", "EnvironmentArgumentError: Addition has 100 tasks, and no task 100"),
        ("unknown", "EnvironmentArgumentError: Addition does not take these arguments"),
        ("two", "UsageError: environment 'Two' has the agents"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_sentence(played: dict[str, Any], case: str, words: str) -> None:
    assert words in played[case]["error"]


@pytest.mark.parametrize("name", ["Addition", "Guessing"])
def test_example_passes_every_check_in_a_workers_processes(name: str) -> None:
    where = ["--import-path", str(EXAMPLES), "--turns", "4", "--seed", "0", "--seed", "1", "--action", "50"]
    checked = run("rose.pipeline.cli", "environment", "check", f"verifiers_tasks:{name}", *where)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_subclass_without_verifiers_is_refused_with_the_fix() -> None:
    from importlib.util import find_spec

    from rose.schemas.errors import UsageError
    from rose.workers.environments.verifiers_adapter import Verifiers

    if find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed here")
    with pytest.raises(UsageError, match=r"install rose-rollouts\[verifiers\] in an environment without vLLM"):
        type("Any", (Verifiers,), {"env": {}})
