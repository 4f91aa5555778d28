"""Runner processes for `tests.support.misbehaving_environment`, and jobs for them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rose.workers.environments.jobs import JobResult, ResetJob, RunnerLimits, StepJob
from rose.workers.environments.process_runner import ProcessRunner
from rose.workers.environments.runner_pool import RunnerPool
from rose.workers.environments.runner_server import ProcessSetup
from rose.workers.environments.transitions import StepResult
from tests.support.environment_fixtures import WAIT_SECONDS, act
from tests.support.misbehaving_environment import NAME

AWAY = """
import time
from pathlib import Path

from tests.support.misbehaving_environment import Wild

here = Path(__file__)
with here.with_name("begun").open("a") as begun:
    begun.write("x")
if here.with_name("away").exists():
    raise RuntimeError("the share is away")
while here.with_name("hangs").exists():
    time.sleep(0.01)
"""
"""A module that fails to load while the file `away` exists, and hangs while `hangs` does."""


@contextmanager
def processes(folder: Path, *, timeout_seconds: float = WAIT_SECONDS, memory_bytes: int = 0) -> Iterator[RunnerPool]:
    """Hold a pool of runner processes, closed at the end."""
    limits = RunnerLimits(
        max_live=64, timeout_seconds=timeout_seconds, max_context_tokens=1024, memory_bytes=memory_bytes
    )

    def new_runner(name: str, answer: Any, generation: int) -> ProcessRunner:
        kind = ProcessSetup(
            environment=name, model_folder=str(folder), import_paths=sys.path, limits=limits, generation=generation
        )
        return ProcessRunner(kind, answer)

    stage = RunnerPool(new_runner, limits)
    stage.begin_generation(1)
    try:
        yield stage
    finally:
        stage.close()


def step(name: str, action: str, state: bytes = b"0", *, kind: str = NAME) -> StepJob:
    return act(name, action, state, environment=kind)


def reset(name: str, **arguments: Any) -> ResetJob:
    return ResetJob(generation=1, trajectory_id=name, environment=NAME, ticket=name, seed=7, arguments=arguments)


def stepped(answer: JobResult) -> bytes:
    """Return the state after a step that succeeded."""
    assert isinstance(answer, StepResult), answer
    return answer.state
