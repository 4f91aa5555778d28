"""What is asked of environments and what they answer, by value: it may cross from one process to another.

Keeps true: what a process wrote is held to the fields of a job or of an answer before anybody looks at it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from rose.workers.environments.home import ResetResult
from rose.workers.environments.transitions import StepResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing to do with one trajectory's environment."""

    generation: int
    """Of the homes for which it is done."""
    trajectory_id: str
    environment: str
    ticket: object
    """Comes back with the answer, untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetJob(Job):
    """Begin the task."""

    seed: int
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob(Job):
    """Take an action."""

    tokens: bytes
    """As sampled, packed."""
    stop_token_ids: tuple[int, ...] = ()
    """Of the turn, beside the model's own."""
    state: bytes
    """To restore from when the environment is not held any more."""


NO_JOB = Job(generation=-1, trajectory_id="", environment="", ticket=None)
"""Stands for every job that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class ResetRefused:
    """The environment does not take the prompt's arguments."""

    reason: str


@dataclass(frozen=True, slots=True)
class EnvironmentFailure:
    """The environment failed; the trajectory cannot go on."""

    failure: str


JobResult = ResetResult | StepResult | ResetRefused | EnvironmentFailure

ResultCallback = Callable[[Job, JobResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What holds for each runner."""

    max_live: int
    """Environments that are held or stepped at once."""
    timeout_seconds: float
    """Of a job."""
    max_context_tokens: int
    """An observation that cannot fit is not encoded to its end."""
    max_runners: int = 4
    """Of a kind of environments, at once: one for all, and further ones while something is wrong with that."""


class Runner(Protocol):
    """Where jobs run: a thread, or a process. Used by one thread; every job is answered once, or the runner ends."""

    killable: bool
    """Whether nothing of it is left once it was abandoned."""

    @property
    def heartbeats(self) -> int:
        """Grows while nothing blocks it."""
        ...

    @property
    def threads_stuck(self) -> int:
        """Threads of its pool in which a call goes on that was given up."""
        ...

    @property
    def live(self) -> int:
        """Environments that are held or stepped; a figure for people."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it has begun: until then it may import for as long as that takes."""
        ...

    @property
    def load_error(self) -> str | None:
        """Why there is no such environment; None unless it has ended by that."""
        ...

    @property
    def exit_reason(self) -> str | None:
        """How it ended by itself; None while it has not."""
        ...

    def start(self, jobs: list[Job]) -> None:
        """Begin with these jobs."""
        ...

    def release(self, trajectory_ids: list[str]) -> None:
        """Close the environments of trajectories that have ended."""
        ...

    def cancel(self, trajectory_ids: list[str]) -> None:
        """Answer no job of these that was started, and hold nothing of them: they go on elsewhere."""
        ...

    def begin_generation(self, generation: int) -> None:
        """Close all environments: what was held of earlier lives does not count any more."""
        ...

    def current_job(self) -> Job | None:
        """The job whose own code the runner is in at this moment, where that is known; NO_JOB for what was answered."""
        ...

    def stop(self) -> None:
        """Have it close everything and end; nobody waits for that."""
        ...

    def kill(self) -> None:
        """End it though an environment blocks it, as far as that can be done."""
        ...

    def close(self, seconds: float) -> None:
        """Leave, wait so long for the end, then abandon it."""
        ...


JOBS: dict[str, type[ResetJob] | type[StepJob]] = {"ResetJob": ResetJob, "StepJob": StepJob}
RESULTS: dict[str, type[ResetResult] | type[StepResult] | type[ResetRefused] | type[EnvironmentFailure]] = {
    "ResetResult": ResetResult,
    "StepResult": StepResult,
    "ResetRefused": ResetRefused,
    "EnvironmentFailure": EnvironmentFailure,
}


def job_fields(job: Job, number: int) -> tuple[str, Job]:
    """The job as it crosses to a process: its ticket stays here, a number goes instead."""
    return type(job).__name__, replace(job, ticket=number)


def decode_as(kinds: dict[str, type[T]], name: str, fields: object) -> T:
    """A job or an answer of what has crossed. Raises KeyError or msgspec.ValidationError for anything else."""
    return msgspec.convert(fields, kinds[name])
