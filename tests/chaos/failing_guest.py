"""A scheduler for a serving engine whose guest fails at steps drawn from a seed while a file exists."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import StepResult
from tests.chaos.lending import GUEST_FAULTS

MOST_STEPS = 300
"""Largest number of steps between two failures."""

BEFORE = 0.5
"""Share of failures before the step. The other failures come after the step and lose its sampled tokens."""


class UnprintableError(Exception):
    """An exception whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("nor does this")


def _out_of_memory() -> None:
    raise MemoryError


def _unprintable() -> None:
    raise UnprintableError


def _of_torch() -> None:
    torch.zeros(2, 3) @ torch.zeros(2, 3)


def _of_nobody() -> None:
    assert not "a guest that fails"


KINDS: tuple[Callable[[], None], ...] = (_out_of_memory, _unprintable, _of_torch, _of_nobody)


class Failing(Scheduler):  # type: ignore[misc]
    """The scheduler. A server selects it by `--scheduler-cls`."""

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
