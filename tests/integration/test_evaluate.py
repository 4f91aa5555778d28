"""`rose evaluate`: reproducible figures, and no figures if an environment fails within a task."""

from dataclasses import replace
from pathlib import Path

import pytest

from rose.schemas.prompts import Sampling
from rose.workers.environments.calculator import Calculator
from rose.workers.environments.protocol import Step
from rose.workers.evaluate import EnvironmentFailed, Evaluation, evaluate_policy
from rose.workers.executor.vllm.types import EngineConfig

pytestmark = pytest.mark.slow

SHIPPED = Path(__file__).parents[2] / "workers" / "models" / "calculator"
CONFIG = EngineConfig(model_folder=SHIPPED, max_model_len=256, max_running=16, step_tokens=256, seed=0)


class RaisesLate(Calculator):
    """An environment that raises in a later step of one task."""

    async def step(self, action: str) -> Step:
        step = await super().step(action)
        if not step.done:
            raise ValueError("the sandbox is gone")
        return step


def evaluated(environment: str, config: EngineConfig = CONFIG) -> Evaluation:
    return evaluate_policy(
        config,
        environment=environment,
        arguments={},
        seeds=range(24),
        sampling=Sampling(temperature=1.0, max_tokens=16),
        max_turns=12,
        max_context_tokens=256,
        step_timeout_seconds=60.0,
    )


def test_evaluation_with_the_same_seed_is_reproducible() -> None:
    first, second = evaluated("calculator"), evaluated("calculator", replace(CONFIG, max_running=3))
    assert (first.solved, first.turns) == (second.solved, second.turns)
    assert first.solved > 0 and first.tasks == 24 < first.turns


def test_environment_failure_within_a_task_ends_the_evaluation_with_one_sentence() -> None:
    with pytest.raises(
        EnvironmentFailed,
        match=r"RaisesLate: ValueError: the sandbox is gone \(.*test_evaluate\.py, line \d+, in step\) \(task of seed",
    ):
        evaluated(f"{__name__}:RaisesLate")
