"""A runner pool for an environment that misbehaves on command, and jobs for this pool.

Keeps true: when the pool closes, every environment is closed.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rose.schemas.arrays import pack_tokens
from rose.workers.environments import thread_runner as runner_module
from rose.workers.environments.jobs import Job, JobResult, ResetJob, RunnerLimits, StepJob
from rose.workers.environments.protocol import Environment, EnvironmentArgumentError, JsonValue, Step
from rose.workers.environments.runner_pool import RunnerPool
from rose.workers.environments.thread_runner import ThreadRunner
from rose.workers.environments.turn_format import TurnFormat
from tests.support.scripted_executors import CHARACTERS, END, FIRST_CHARACTER

WAIT_SECONDS = 30.0

ANSWER_SECONDS = 100.0
"""How long `answers` waits for the next answer: processes start slowly on a busy machine."""


class Panic(BaseException):
    """An exception that is not an Exception, as an extension module may raise it."""


class UnprintableError(Exception):
    """An exception whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError


class UnprintableRefusal(UnprintableError, EnvironmentArgumentError):
    pass


class Counter:
    """An environment as a user might write it. It counts its steps, and the action selects its behaviour."""

    held = 0
    restored = 0
    gate = threading.Event()
    blocks = threading.Event()
    text = ""
    """Text that a step may show, and also a reset with the matching argument."""
    raises: BaseException | None = None
    """Exception that a step and every close may raise."""

    def __init__(self) -> None:
        self.steps = 0
        type(self).held += 1

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        if "refuse" in arguments:
            raise EnvironmentArgumentError("counter takes no refuse")
        if "break" in arguments:
            raise RuntimeError("no container")
        if "mute" in arguments:
            raise UnprintableRefusal
        return self.text if "text" in arguments else f"seed {seed}"

    async def step(self, action: str) -> Step:
        if action == "hang":
            await asyncio.Event().wait()
        if action == "pool":
            await asyncio.to_thread(self.gate.wait, 3600)
        if action == "text":
            return Step(observation=self.text, reward=1.0, done=False)
        if action == "wait":
            await asyncio.get_running_loop().run_in_executor(None, self.gate.wait, WAIT_SECONDS)
        if action == "sleep":
            self.gate.wait(3600)
        if action == "block":
            self.block()
        if action == "spin":
            while True:
                pass
        if action == "later":
            asyncio.get_running_loop().call_soon(self.block)
            await asyncio.Event().wait()
        await self.meddle(action)
        if action == "lie":
            return "no step"  # type: ignore[return-value]
        self.steps += 1
        done = action == "done"
        observation = "\ud800" if action == "half" else f"{self.steps}"
        return Step(observation=observation, reward=1.0, done=done, success=done)

    async def meddle(self, action: str) -> None:
        loop = asyncio.get_running_loop()
        if action == "raise":
            assert self.raises is not None
            raise self.raises
        if action == "raise later":
            loop.call_soon(self.interrupt)
            await asyncio.sleep(0)
        if action == "stop":
            loop.stop()
            await asyncio.sleep(0)
        if action == "cancel all":
            for task in asyncio.all_tasks():
                task.cancel()
        while action == "go on":
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        if action.startswith("freeze"):
            assert isinstance(loop, Freezing)
            await loop.freeze(looks=int(action.removeprefix("freeze")))

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def block(self) -> None:
        self.blocks.set()
        while not self.gate.is_set():
            pass

    async def snapshot(self) -> bytes:
        return str(self.steps).encode()

    async def restore(self, state: bytes) -> None:
        type(self).restored += 1
        self.steps = int(state)

    async def close(self) -> None:
        type(self).held -= 1
        if self.raises is not None:
            raise self.raises


class Freezing(asyncio.SelectorEventLoop):
    """An event loop whose process can be frozen."""

    ahead = 0.0
    """Seconds that the process was frozen in total."""

    def time(self) -> float:
        return super().time() + self.ahead

    async def freeze(self, *, looks: int) -> None:
        """Simulate a freeze of the process, and return after the given number of checks."""
        for _ in range(looks):
            self.ahead += runner_module.LOOK_SECONDS
            for _ in range(5):  # turns of the loop, in which the checks run
                await asyncio.sleep(0)
        answer = self.create_future()
        self.call_soon(self.frozen, answer)
        await answer

    def frozen(self, answer: asyncio.Future[None]) -> None:
        """Freeze the process while an answer arrives."""
        self.ahead += 3600.0
        self.call_soon(answer.set_result, None)


class Blocking(Counter):
    """An environment that blocks. Its instances are counted separately, because an instance may still close during the
    next test."""


@contextmanager
def pool_of(
    folder: Path, create: Callable[[str], Environment] = lambda _name: Counter(), **limits: Any
) -> Iterator[RunnerPool]:
    Counter.held = Counter.restored = 0
    Counter.gate.clear()
    Counter.blocks.clear()
    known = RunnerLimits(**{"max_live": 8, "timeout_seconds": WAIT_SECONDS, "max_context_tokens": 1024, **limits})
    turn_format = TurnFormat(folder)
    stage = RunnerPool(
        lambda _kind, answer, generation: ThreadRunner(turn_format, create, answer, known, generation=generation), known
    )
    stage.begin_generation(1)
    try:
        yield stage
    finally:
        stage.close()
        Counter.gate.set()  # Python 3.11 hangs profiled threads while a killed thread sleeps: see ThreadRunner.kill
    assert Counter.held == 0, "every environment was closed"


def reset(name: str, **arguments: Any) -> ResetJob:
    return ResetJob(generation=1, trajectory_id=name, environment="counter", ticket=name, seed=7, arguments=arguments)


def act(
    name: str,
    action: str,
    state: bytes = b"0",
    *,
    generation: int = 1,
    environment: str = "counter",
    stop: str | None = None,
) -> StepJob:
    """Return an act job. `stop` is the last letter, the requested stop token; without `stop` the token of the model
    ends the turn."""
    tokens = [FIRST_CHARACTER + CHARACTERS.index(character) for character in action]
    tokens += [END] if stop is None else []
    return StepJob(
        generation=generation,
        trajectory_id=name,
        environment=environment,
        ticket=name,
        tokens=pack_tokens(tokens),
        stop_token_ids=(END,) if not stop else (FIRST_CHARACTER + CHARACTERS.index(stop),),
        state=state,
    )


def answers(stage: RunnerPool, jobs: list[Job]) -> dict[str, JobResult]:
    """Run jobs and return the answer to each."""
    stage.start(jobs)
    found: dict[str, JobResult] = {}
    while len(found) < len(jobs):
        ended = stage.results(ANSWER_SECONDS)
        assert ended, f"only {sorted(found)} answered"
        found.update({job.trajectory_id: answer for job, answer in ended})
    assert stage.in_flight == 0
    return found


def answers_of(stage: RunnerPool, jobs: list[Job]) -> dict[str, JobResult]:
    """Return the answers to some jobs while others are in flight."""
    stage.start(jobs)
    return {job.trajectory_id: answer for job, answer in stage.results(WAIT_SECONDS)}
