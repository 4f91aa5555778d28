"""The adapter for verifiers, with verifiers itself: the examples of the guide."""

import json
import os
import subprocess
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from rose.schemas.arrays import pack_tokens, unpack_tokens
from rose.workers.environments.byte_model import write_byte_model
from rose.workers.environments.config import EnvironmentConfig
from rose.workers.environments.jobs import ResetJob, RunnerLimits, StepJob
from rose.workers.environments.main import begin_environments, runners_of
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.runner_pool import RunnerPool
from rose.workers.environments.transitions import StepResult
from rose.workers.environments.turn_format import TurnFormat
from tests.support.adapter_environments import ROOT, python_of
from tests.support.environment_fixtures import answers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "docs/examples/verifiers"

NAME = "verifiers_tasks:Addition"


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
    assert "SnapshotError: verifiers does not repeat a task" in played["changed"]["error"]


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


def test_worker_plays_tasks_with_the_interpreter_of_verifiers(tmp_path: Path) -> None:
    folder = write_byte_model(tmp_path)
    config = EnvironmentConfig(
        model_folder=folder,
        environments=(NAME,),
        import_paths=(EXAMPLES,),
        python=Path(python_of("verifiers")),
    )
    form = TurnFormat(folder)
    limits = RunnerLimits(max_live=4, timeout_seconds=60.0, max_context_tokens=1024)
    pool = RunnerPool(runners_of(config, form, limits), limits)
    pool.begin_generation(1)
    try:
        begin_environments(config, pool, Event())
        job = ResetJob(generation=1, trajectory_id="t", environment=NAME, ticket=None, seed=0, arguments={})
        begun = answers(pool, [job])["t"]
        assert isinstance(begun, ResetResult), begun
        text = form.text([int(token) for token in unpack_tokens(begun.observation)])
        assert text.startswith("<|im_start|>system\nAnswer with the number alone.<|im_end|>\n<|im_start|>user\n")
        left, right = text.partition("user\n")[2].partition("<|im_end|>")[0].split("+")
        action = pack_tokens(form.action_tokens(str(int(left) + int(right))))
        step = StepJob(generation=1, trajectory_id="t", environment=NAME, ticket=None, tokens=action, state=begun.state)
        stepped = answers(pool, [step])["t"]
        assert isinstance(stepped, StepResult) and stepped.done and stepped.reward == 1.0
    finally:
        pool.close()


def test_subclass_without_verifiers_is_refused_with_the_fix() -> None:
    from importlib.util import find_spec

    from rose.schemas.errors import UsageError
    from rose.workers.environments.verifiers_adapter import Verifiers

    if find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed here")
    with pytest.raises(UsageError, match=r"install rose-rollouts\[verifiers\] in an environment without vLLM"):
        type("Any", (Verifiers,), {"env": {}})
