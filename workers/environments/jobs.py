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
    """One task for one trajectory's environment."""

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
    """Longest context; an observation that cannot fit is not encoded to its end."""
    max_runners: int = 4
    """Most runners of one kind of environments at once: one for all jobs, and further ones while that one has a
    problem."""


class Runner(Protocol):
    """A thread or process that runs jobs.

    Used by one thread. Every job is answered once, or the runner ends.
    """

    killable: bool
    """Whether nothing of an abandoned runner remains."""

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
    def load_error(self) -> str:
        """Why there is no such environment; empty unless the runner ended for that reason."""
        ...

    @property
    def exit_reason(self) -> str:
        """How the runner ended by itself; empty while it runs."""
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
