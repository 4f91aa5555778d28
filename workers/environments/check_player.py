"""Plays tasks of one environment in processes of the worker, and watches these processes.

Keeps true
- An environment is loaded, run and supervised by the code that a worker uses: what works here works there.
- Time in which this process was frozen, or another one had no core to run on, does not count as a block.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rose.schemas.limits import MAX_CONTEXT_TOKENS
from rose.workers.environments.config import EnvironmentConfig
from rose.workers.environments.jobs import Job, JobResult, ResetJob, ResultCallback, Runner, RunnerLimits, StepJob
from rose.workers.environments.main import begin_environments, runners_of
from rose.workers.environments.process_runner import ProcessRunner
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.runner_pool import RunnerPool
from rose.workers.environments.transitions import StepResult
from rose.workers.environments.turn_format import TurnFormat

LOOK_SECONDS = 0.02
"""Time between two looks at the processes."""

LONGEST_LOOK_SECONDS = 0.1
"""Most time that one look counts as silence of a process: this process may have been frozen."""

SETTLE_SECONDS = 5.0
"""Time that closed environments have to give back what they hold."""

SETTLED_SECONDS = 0.2
"""Time between two looks at what the processes hold."""

GENERATION = 1


class Holdings(NamedTuple):
    """Descriptors, threads and children that a process of environments holds."""

    descriptors: int
    threads: int
    children: int
    memory_bytes: int
    """Private memory in use."""


NOTHING = Holdings(0, 0, 0, 0)


@dataclass(slots=True)
class Life:
    """One trajectory: the first observation, and each action with its result."""

    trajectory_id: str
    seed: int
    first: ResetResult
    turns: list[tuple[bytes, StepResult]] = field(default_factory=list)
    """Packed tokens of the action, and the result."""

    @property
    def done(self) -> bool:
        """Whether the task has ended."""
        return bool(self.turns) and self.turns[-1][1].done

    def state(self, turn: int) -> bytes:
        """Return the snapshot before this turn."""
        return self.first.state if turn == 0 else self.turns[turn - 1][1].state


@dataclass(slots=True)
class Silence:
    """The longest time that a process has shown no heartbeat while it had work."""

    seconds: float = 0.0
    job: Job | None = None
    """The job whose code ran, if that is known."""


class Player:
    """A pool of processes for one environment. A context manager; used by one thread."""

    def __init__(
        self, environment: str, model_folder: Path, *, import_paths: tuple[Path, ...], timeout_seconds: float
    ) -> None:
        """Start a process and import the environment. Raises UsageError."""
        self.environment = environment
        self.turn_format = TurnFormat(model_folder)
        self.silence = Silence()
        self.cold_silence = Silence()
        """The longest silence before the first answer, when an environment may load what it needs."""
        self._runners: list[Runner] = []
        self._heard: dict[int, tuple[int, float, float]] = {}
        """Heartbeats and silent seconds of each runner, and the seconds for which it has waited for a core so far."""
        self._looked_at = time.monotonic()
        self._warm = False
        self._lives = 0
        config = EnvironmentConfig(
            model_folder=model_folder,
            environments=(environment,),
            import_paths=import_paths,
            isolation="process",
            step_timeout_seconds=timeout_seconds,
        )
        limits = RunnerLimits(
            max_live=config.max_live_environments,
            timeout_seconds=timeout_seconds,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            max_runners=config.max_processes,
        )
        make = runners_of(config, self.turn_format, limits)

        def new_runner(name: str, answer: ResultCallback, generation: int) -> Runner:
            runner = make(name, answer, generation)
            self._runners.append(runner)
            return runner

        self._pool = RunnerPool(new_runner, limits)
        self._pool.begin_generation(GENERATION)
        try:
            begin_environments(config, self._pool, threading.Event())
        except BaseException:
            self._pool.close()
            raise

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    @property
    def endings(self) -> list[str]:
        """How processes have ended by themselves, in sentences without a subject."""
        return [each.exit_reason.strip() for each in self._processes() if each.exit_reason and each.exit_unasked]

    def reset(self, seed: int, arguments: Mapping[str, Any]) -> ResetJob:
        """Return the job that begins this task in a new trajectory."""
        return ResetJob(
            generation=GENERATION,
            trajectory_id=self.new_id(),
            environment=self.environment,
            ticket=None,
            seed=seed,
            arguments=dict(arguments),
        )

    def restored(self, state: bytes, action: bytes) -> StepJob:
        """Return the job that restores a new instance from `state` and takes one action."""
        return self.step(self.new_id(), action, state)

    def step(self, trajectory_id: str, action: bytes, state: bytes) -> StepJob:
        """Return the job that takes one action in a trajectory, whose newest snapshot is `state`."""
        return StepJob(
            generation=GENERATION,
            trajectory_id=trajectory_id,
            environment=self.environment,
            ticket=None,
            tokens=action,
            state=state,
        )

    def new_id(self) -> str:
        """Return the id of a new trajectory."""
        self._lives += 1
        return f"check-{self._lives}"

    def run(self, jobs: Iterable[Job]) -> list[JobResult]:
        """Run these jobs at the same time; return their results in the same order."""
        asked = list(jobs)
        answers: dict[str, JobResult] = {}
        self._pool.start(asked)
        self._looked_at = time.monotonic()
        while len(answers) < len(asked):
            for job, answer in self._pool.results(LOOK_SECONDS):
                answers[job.trajectory_id] = answer
            self._look()
            self._warm |= bool(answers)
        return [answers[job.trajectory_id] for job in asked]

    def _look(self) -> None:
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, LONGEST_LOOK_SECONDS), now
        for runner in self._processes():
            beats, silent, waited = self._heard.get(id(runner), (-1, 0.0, 0.0))
            now_waited = waited_seconds(runner.guard)
            if not runner.ready or runner.exit_reason or runner.heartbeats != beats:
                self._heard[id(runner)] = runner.heartbeats, 0.0, now_waited
                continue
            silent += max(0.0, passed - max(0.0, now_waited - waited))
            self._heard[id(runner)] = beats, silent, now_waited
            longest = self.silence if self._warm else self.cold_silence
            if silent > longest.seconds:
                longest.seconds, longest.job = silent, runner.current_job()

    def release(self, trajectory_ids: Iterable[str]) -> None:
        """Close the environments of these trajectories."""
        self._pool.release(trajectory_ids)

    def holdings(self, *, at_most: Holdings | None = None) -> Holdings:
        """Return what the running processes hold once all environments are closed.

        Waits up to SETTLE_SECONDS until two looks in a row agree; with `at_most`, until they hold no more than that.
        The memory is not waited for.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        held = self._held()
        while time.monotonic() < deadline:
            self._pool.results(SETTLED_SECONDS)
            before, held = held, self._held()
            aim = at_most or before
            if not self._pool.live and all(now <= then for now, then in zip(held[:3], aim[:3], strict=True)):
                break
        return held

    def _held(self) -> Holdings:
        held = [NOTHING, *(holdings_of(each.guard) for each in self._processes() if not each.exit_reason)]
        return Holdings(*(sum(column) for column in zip(*held, strict=True)))

    def _processes(self) -> list[ProcessRunner]:
        return [each for each in self._runners if isinstance(each, ProcessRunner)]


def holdings_of(guard: int) -> Holdings:
    """Return what the environments' process under this guard holds. Zeros for a process that has ended."""
    with suppress(OSError, ValueError, IndexError):
        process, *orphans = _children(guard)
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        )
        return Holdings(
            descriptors=len(list(Path(f"/proc/{process}/fd").iterdir())),
            threads=int(status["Threads"]),
            children=len(orphans) + len(_children(process)),
            memory_bytes=int(status["RssAnon"].split()[0]) * 1024,
        )
    return NOTHING


def waited_seconds(guard: int) -> float:
    """Return how long the main thread of the environments' process has been ready to run without a core."""
    with suppress(OSError, ValueError, IndexError):
        process = _children(guard)[0]
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    return 0.0


def _children(pid: int) -> list[int]:
    """Return the process ids of the children that any thread of the process has started."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return sorted(found)
