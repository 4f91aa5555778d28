"""`rose evaluate` with failing environments: one sentence and no figure. No test here reaches the engine."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rose.schemas.errors import UsageError
from rose.schemas.prompts import Sampling
from rose.workers.environments.protocol import Environment, EnvironmentArgumentError
from rose.workers.evaluate import EnvironmentFailed, evaluate_policy
from rose.workers.executor.vllm.types import EngineConfig

SHIPPED = Path(__file__).parents[2] / "workers" / "models" / "calculator"


class Failing:
    """An environment that fails in its reset."""

    async def reset(self, seed: int, arguments: Mapping[str, Any]) -> Any:
        if seed == 3:
            return await self.fail()
        return "0+1"

    async def fail(self) -> Any:
        raise NotImplementedError

    async def step(self, action: str) -> Any:
        raise AssertionError("no engine was made")

    async def snapshot(self) -> bytes:
        return b""

    async def restore(self, state: bytes) -> None: ...

    async def close(self) -> None: ...


class Raises(Failing):
    async def fail(self) -> str:
        raise RuntimeError("no sandbox\nis free")


class GivesNone(Failing):
    async def fail(self) -> None:
        return None


class Waits(Failing):
    async def fail(self) -> None:
        await asyncio.Event().wait()


class Blocks(Failing):
    blocked = threading.Event()

    async def fail(self) -> None:
        self.blocked.wait()


class Exits(Failing):
    async def fail(self) -> None:
        raise SystemExit(7)


class Refuses(Failing):
    async def fail(self) -> None:
        raise EnvironmentArgumentError("there is no such size")


def cannot_be_made() -> Environment:
    raise OSError("no licence")


def evaluated(environment: Callable[..., object]) -> None:
    evaluate_policy(
        EngineConfig(model_folder=SHIPPED, max_model_len=128),
        environment=f"{__name__}:{environment.__name__}",
        arguments={},
        seeds=range(5),
        sampling=Sampling(max_tokens=8),
        max_turns=2,
        max_context_tokens=128,
        step_timeout_seconds=0.4,
    )


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (
            Raises,
            r"Raises: RuntimeError: no sandbox is free \(.*test_evaluate\.py, line \d+, in fail\) \(task of seed 3\)",
        ),
        (GivesNone, r"GivesNone: .*NoneType"),
        (Waits, r"Waits: TimeoutError: took longer than 0\.4 s"),
        (Exits, r"Exits: SystemExit: 7"),
        (
            cannot_be_made,
            r"cannot_be_made: OSError: no licence \(.*test_evaluate\.py, line \d+, in cannot_be_made\) \(task of seed",
        ),
    ],
)
def test_failing_environment_ends_the_evaluation_with_one_sentence(
    environment: Callable[..., object], reason: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=reason) as caught:
        evaluated(environment)
    assert "\n" not in str(caught.value)


def test_blocking_environment_ends_the_evaluation_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.workers.environments.thread_runner.CLOSE_SECONDS", 0.1)
    try:
        with pytest.raises(EnvironmentFailed, match=r"Blocks blocks the thread .*step_timeout_seconds \(0\.4\)"):
            evaluated(Blocks)
    finally:
        Blocks.blocked.set()


def test_refused_arguments_are_reported_as_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"^tasks\.arguments: there is no such size$"):
        evaluated(Refuses)
