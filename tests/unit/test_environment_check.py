"""`rose environment check`: each rule that an environment breaks is named; one that breaks none passes."""

import subprocess
import sys
from pathlib import Path

import pytest

from rose.workers.environments.byte_model import write_byte_model
from rose.workers.environments.check import CheckPlan, Finding, check_environment

ROOT = Path(__file__).parents[2]

BROKEN = """
import asyncio
import os
import random
import subprocess
import time

from guessing import Guessing
from rose.workers.environments.protocol import Step


class SharedRandom(Guessing):
    async def reset(self, seed, arguments):
        await super().reset(seed, arguments)
        return f"guess {random.random()}"


class HashOrder(Guessing):
    async def reset(self, seed, arguments):
        await super().reset(seed, arguments)
        return f"guess {hash('a')}"


class HalfSnapshot(Guessing):
    async def step(self, action):
        self.told = getattr(self, "told", 0) + 1
        step = await super().step(action)
        return Step(observation=f"{step.observation} {self.told}", reward=step.reward, done=step.done)


class AnyBytes(Guessing):
    async def restore(self, state):
        try:
            await super().restore(state)
        except ValueError:
            await self.reset(0, {})


class NoTolerance(Guessing):
    async def step(self, action):
        int(action)
        return await super().step(action)


class BadReset(Guessing):
    async def reset(self, seed, arguments):
        if arguments:
            raise TypeError("unexpected keyword")
        return await super().reset(seed, arguments)


class Blocking(Guessing):
    async def step(self, action):
        time.sleep(1.5)
        return await super().step(action)


class Descriptors(Guessing):
    async def reset(self, seed, arguments):
        os.open(os.devnull, os.O_RDONLY)
        return await super().reset(seed, arguments)


class Children(Guessing):
    async def reset(self, seed, arguments):
        self.child = subprocess.Popen(["sleep", "1000"])
        return await super().reset(seed, arguments)


class Memory(Guessing):
    kept = []

    async def reset(self, seed, arguments):
        self.kept.append(os.urandom(4_000_000))
        return await super().reset(seed, arguments)


class Exits(Guessing):
    async def step(self, action):
        os._exit(0)


class Folder(Guessing):
    async def step(self, action):
        os.chdir("/")
        return await super().step(action)


class Failing(Guessing):
    async def reset(self, seed, arguments):
        raise RuntimeError("no container")
"""

FAULTS = {
    "SharedRandom": ("determinism", "another first observation"),
    "HashOrder": ("determinism", "another first observation"),
    "HalfSnapshot": ("restore", "another observation"),
    "AnyBytes": ("nonsense", "raise SnapshotError"),
    "NoTolerance": ("nonsense", "invalid literal"),
    "BadReset": ("nonsense", "instead of raising EnvironmentArgumentError"),
    "Descriptors": ("leaks", "16 descriptors"),
    "Children": ("leaks", "16 processes"),
    "Memory": ("leaks", "MiB of memory"),
    "Failing": ("play", "reset fails: RuntimeError: no container"),
}

SLOW_FAULTS = {
    "Blocking": ("blocking", "asyncio.to_thread"),
    "Exits": ("process", "ended with status 0"),
    "Folder": ("process", "changed the working directory"),
}
"""Faults for which the worker starts further processes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page = (ROOT / "docs/guides/environments.md").read_text()
    (tmp_path / "guessing.py").write_text(page.split("```python\n")[1].split("```")[0])
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def findings(folder: Path, name: str, **arguments: object) -> dict[str, Finding]:
    plan = CheckPlan(
        environment=name,
        model_folder=write_byte_model(folder / "model"),
        import_paths=(folder,),
        seeds=(0, 1),
        arguments=dict(arguments),
        actions=("50", "75"),
        turns=3,
        timeout_seconds=60.0,
    )
    return {finding.check: finding for finding in check_environment(plan)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guessing:Guessing", "calculator"])
def test_environment_that_keeps_the_rules_passes_every_check(folder: Path, name: str) -> None:
    found = findings(folder, name)
    assert [finding for finding in found.values() if not finding.passed] == []
    assert list(found) == ["nonsense", "play", "determinism", "restore", "leaks", "blocking", "process"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_broken_rule_fails_its_check_alone_with_the_reason(folder: Path, name: str) -> None:
    check, reason = FAULTS[name]
    failed = [finding for finding in findings(folder, f"broken:{name}").values() if not finding.passed]
    assert [finding.check for finding in failed] == [check]
    assert reason in failed[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_FAULTS)
def test_environment_that_harms_its_process_fails_and_ends_the_checks(folder: Path, name: str) -> None:
    check, reason = SLOW_FAULTS[name]
    found = findings(folder, f"broken:{name}")
    assert not found[check].passed and reason in found[check].reason
    assert "determinism" not in found


def rose(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `rose environment check` in a process of its own."""
    command = [sys.executable, "-m", "rose.pipeline.cli.main", "environment", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_command_prints_seeds_and_a_line_a_check_and_exits_with_1_for_a_finding(folder: Path) -> None:
    where = ["--import-path", str(folder), "--seed", "7", "--turns", "2"]
    passed = rose("guessing:Guessing", *where)
    assert passed.returncode == 0
    assert passed.stdout.splitlines()[0] == "guessing:Guessing: seeds 7, up to 2 turns each"
    assert [line.split()[0] for line in passed.stdout.splitlines()[1:]] == ["pass"] * 7
    failed = rose("broken:NoTolerance", *where)
    assert failed.returncode == 1
    assert "FAIL  nonsense" in failed.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere:Class"], "cannot import nowhere"),
        (["nocolon"], "unknown environment 'nocolon'"),
        (["calculator", "--arguments", "{"], "--arguments is no JSON"),
        (["calculator", "--arguments", "[]"], "--arguments is no JSON object"),
        (["calculator", "--arguments", '{"digits": 3}'], "does not take these arguments"),
        (["calculator", "--model", "nowhere"], "is no folder"),
    ],
)
def test_bad_input_is_one_sentence_with_status_2(arguments: list[str], sentence: str) -> None:
    result = rose(*arguments)
    assert result.returncode == 2 and sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
