"""A scheduler for a serving engine whose guest fails at steps that a seed draws, for as long as a file is there."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from rose.workers.executor.vllm.engine import Engine, StepResult
from tests.chaos.lending import GUEST_FAULTS

MOST_STEPS = 300
"""From one failure to the next."""

BEFORE = 0.5
"""Share of the failures that come before the step; the others come after it, so that what it sampled is lost."""


class UnprintableError(Exception):
    """One that does not let itself be told."""

    def __str__(self) -> str:
        raise RuntimeError("nor does this")


def _out_of_memory() -> None:
    raise MemoryError


def _untold() -> None:
    raise UnprintableError


def _of_torch() -> None:
    torch.zeros(2, 3) @ torch.zeros(2, 3)


def _of_nobody() -> None:
    assert not "a guest that fails"


KINDS: tuple[Callable[[], None], ...] = (_out_of_memory, _untold, _of_torch, _of_nobody)


class Failing(Scheduler):  # type: ignore[misc]
    """Stands in a server by `--scheduler-cls`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        step, file = Engine.step, Path(os.environ[GUEST_FAULTS])
        dice = random.Random(file.read_text())
        left = dice.randint(1, MOST_STEPS)

        def a_step_that_may_fail(engine: Engine, most_tokens: int | None = None) -> StepResult:
            nonlocal left
            left -= 1
            fails = left <= 0 and file.exists()
            if not fails:
                return step(engine, most_tokens)
            left = dice.randint(1, MOST_STEPS)
            if dice.random() >= BEFORE:
                step(engine, most_tokens)
            dice.choice(KINDS)()
            raise AssertionError("every kind fails")

        Engine.step = a_step_that_may_fail  # type: ignore[method-assign, assignment]
