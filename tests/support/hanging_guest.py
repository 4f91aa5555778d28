"""A scheduler of a serving engine whose guest hangs while a file exists."""

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import StepResult
from tests.support.lender_server_fixtures import HANG


class Hanging(Scheduler):  # type: ignore[misc]
    """The scheduler. A server selects it by `--scheduler-cls`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        step, file = Engine.step, Path(os.environ[HANG])

        def a_step_that_hangs(engine: Engine, most_tokens: int | None = None) -> StepResult:
            while file.exists():
                time.sleep(0.1)  # this is the hang
            return step(engine, most_tokens)

        Engine.step = a_step_that_hangs  # type: ignore[method-assign, assignment]
