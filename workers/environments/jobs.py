"""Jobs for environments, their results, and the interface of runners, with counters that show their progress.

Keeps true
- Jobs and results are passed by value, so they may cross from one process to another. A message of a process is checked
  against the fields of a job or of a result before other code reads it.
- The counters of a runner are in memory that its process shares with the worker: the worker can read them while the
  process is blocked, and after the process has ended.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Coroutine, Generator, MutableSequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import msgspec

from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.transitions import StepResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A reset or a step of one trajectory's environment."""

    generation: int
    """Generation of the homes that the job is done for."""
    trajectory_id: str
    environment: str
    ticket: object
    """Value that is returned with the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetJob(Job):
    """Reset the environment with the prompt's task."""

    seed: int
    arguments: dict[str, Any]
    evaluation: str = ""
    """Name of the evaluation set that the task belongs to; empty for a task to train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob(Job):
    """Step the environment with an action."""

    tokens: bytes
    """Sampled tokens, packed."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens of the turn, in addition to the model's own."""
    state: bytes
    """State to restore from if the environment is not held any more."""


NO_JOB = Job(generation=-1, trajectory_id="", environment="", ticket=None)
"""Stands for every job whose answer is not needed any more."""


@dataclass(frozen=True, slots=True)
class ResetRefused:
    """The environment refuses the prompt's arguments."""

    reason: str


@dataclass(frozen=True, slots=True)
class EnvironmentFailure:
    """The environment failed; the trajectory cannot continue."""

    failure: str


JobResult = ResetResult | StepResult | ResetRefused | EnvironmentFailure

ResultCallback = Callable[[Job, JobResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """Limits of each runner."""

    max_live: int
    """Most environments that are held or stepped at once."""
    timeout_seconds: float
    """Longest time that a job may take."""
    max_context_tokens: int
    """Longest context; an observation that cannot fit may be encoded only in part."""
    memory_bytes: int = 0
    """Most private memory of a process and of each of its child processes; 0 for no limit."""
    max_runners: int = 4
    """Most runners of one kind of environments at once: one runner for all jobs, and further runners while that runner
    has a problem."""


class Runner(Protocol):
    """A thread or process that runs jobs.

    Used by one thread. Every job is answered once, or the runner ends.
    """

    killable: bool
    """Whether `kill` ends the runner whatever blocks it: true for a process, false for a thread."""

    @property
    def heartbeats(self) -> int:
        """Counter that grows while nothing blocks the runner."""
        ...

    @property
    def threads_stuck(self) -> int:
        """Number of pool threads in which an abandoned call still runs."""
        ...

    @property
    def live(self) -> int:
        """Number of environments that are held or stepped; for people."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the runner has begun; until then it may take time to import."""
        ...

    @property
    def load_error(self) -> str | None:
        """Why the runner could not begin, for example because the environment does not exist; None otherwise."""
        ...

    @property
    def exit_reason(self) -> str | None:
        """How the runner ended by itself; None while it runs."""
        ...

    def start(self, jobs: list[Job]) -> None:
        """Start these jobs."""
        ...

    def release(self, trajectory_ids: list[str]) -> None:
        """Close the environments of ended trajectories."""
        ...

    def cancel(self, trajectory_ids: list[str]) -> None:
        """Cancel these jobs without an answer, and release their environments."""
        ...

    def begin_generation(self, generation: int) -> None:
        """Close all environments of earlier generations."""
        ...

    def current_job(self) -> Job | None:
        """Return the job whose own code the runner is in, if that is known; NO_JOB for a job that was answered."""
        ...

    def stop(self) -> None:
        """Have the runner close everything and end, without waiting."""
        ...

    def kill(self) -> None:
        """End the runner although an environment blocks it, as far as possible."""
        ...

    def close(self, seconds: float) -> None:
        """Stop the runner, wait up to `seconds` for its end, then abandon it."""
        ...


JOBS: dict[str, type[ResetJob] | type[StepJob]] = {"ResetJob": ResetJob, "StepJob": StepJob}
RESULTS: dict[str, type[ResetResult] | type[StepResult] | type[ResetRefused] | type[EnvironmentFailure]] = {
    "ResetResult": ResetResult,
    "StepResult": StepResult,
    "ResetRefused": ResetRefused,
    "EnvironmentFailure": EnvironmentFailure,
}


def job_fields(job: Job, number: int) -> tuple[str, Job]:
    """Return the fields of a job for another process, with a number in place of the ticket."""
    return type(job).__name__, replace(job, ticket=number)


def decode_as(kinds: dict[str, type[T]], name: str, fields: object) -> T:
    """Return a job or an answer from received fields. Raises KeyError or msgspec.ValidationError for anything else."""
    return msgspec.convert(fields, kinds[name])


StatusCounters = MutableSequence[int]
"""Counters of a runner, by the indices below."""

BEATS, LIVE, STUCK, RUNNING = range(4)
"""Indices of StatusCounters. RUNNING: 0 while no job's code runs, otherwise the number of the job plus 1. The number
remains if the process ends while a job's code runs."""

COUNTERS = 4

COUNTERS_BYTES = COUNTERS * 8


class NoOwner:
    """Stands for the job of code that is not an environment's."""


NO_OWNER = NoOwner()

OWNER: ContextVar[Job | NoOwner | None] = ContextVar("owner", default=NO_OWNER)
"""The job whose code runs, also in the tasks that this code makes; None for the code that closes an environment."""


def map_counters(shared: int) -> StatusCounters:
    """Map the counters in shared memory. `shared`: descriptor of the memory, which is closed."""
    memory = mmap.mmap(shared, COUNTERS_BYTES)
    os.close(shared)
    return cast("StatusCounters", memoryview(memory).cast("q"))


class TrackedCall(Coroutine[Any, Any, T]):
    """Code of an environment in a task of its own. The counter RUNNING names the job whenever the code runs.

    `look` is called with False before each run of the code, and with True after it, while RUNNING still names the job.
    If `has_left` returns true, the code is cancelled instead of run.
    """

    def __init__(
        self,
        code: Coroutine[Any, Any, T],
        signs: StatusCounters,
        job: Job | None,
        look: Callable[[bool], None],
        has_left: Callable[[], bool],
    ) -> None:
        self._code = code
        self._signs = signs
        self._look = look
        self._has_left = has_left
        self._job = job
        self._mark = job.ticket + 1 if job is not None and isinstance(job.ticket, int) else -1

    def send(self, value: Any) -> Any:
        """Continue the call; a call whose runner has left is cancelled."""
        if self._has_left():
            return self._run(self._code.throw, asyncio.CancelledError())
        return self._run(self._code.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an error inside the call."""
        return self._run(self._code.throw, *error)

    def close(self) -> None:
        """Close the call's coroutine."""
        self._code.close()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the coroutine. Libraries read some of a task's coroutine, such as `cr_frame`."""
        return getattr(self._code, name)

    def __await__(self) -> Generator[Any, Any, T]:
        return self._code.__await__()

    def _run(self, code: Callable[..., Any], *given: Any) -> Any:
        self._look(False)
        OWNER.set(self._job)
        outer, self._signs[RUNNING] = self._signs[RUNNING], self._mark
        try:
            return code(*given)
        finally:
            self._look(True)
            self._signs[RUNNING] = outer  # an event loop may run within a task of another loop
