"""Runs environments outside of the bus thread, each kind in runners of its own (see `runner_supervisor.py`).

Keeps true
- Jobs go in and answers come out by value; the bus thread never touches an environment.
- Every job that was started is answered once, whatever environments do, unless its generation has ended.
"""

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from rose.workers.environments.jobs import Job, JobResult, ResultCallback, Runner, RunnerLimits
from rose.workers.environments.runner_supervisor import LOOKS, InFlight, JobResults, RunnerSlot, RunnerSupervisor
from rose.workers.environments.thread_runner import CLOSE_SECONDS

LOOK_SECONDS = 0.1
"""Longest wait between two checks whether a runner is silent. A check counts the time since the check before, at most
1/LOOKS of the step limit: the time of a freeze of the worker does not count as silence of a runner."""

NewRunner = Callable[[str, ResultCallback, int], Runner]
"""Makes a runner from the name of its environments, a callback for each answer, and its first generation."""


class RunnerPool:
    """Runs jobs. Used by one thread."""

    def __init__(self, new_runner: NewRunner, limits: RunnerLimits) -> None:
        self._new_runner = new_runner
        self._limits = limits
        self._generation = 0
        self._supervisors: dict[str, RunnerSupervisor] = {}
        """Supervisors of runners, by the name of the environment."""
        self._results: queue.Queue[tuple[int, Job, JobResult]] = queue.Queue()
        """Results with the number of the runner that gave them. A SimpleQueue is not used: a signal during its wait can
        make the wait endless."""
        self._numbers = count()
        self._looked_at = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Number of jobs without an answer."""
        return sum(supervisor.in_flight for supervisor in self._supervisors.values())

    @property
    def live(self) -> int:
        """Number of environments that are held or stepped, as other threads see it; for people."""
        return sum(runner.live for runner in self._runners())

    @property
    def threads_stuck(self) -> int:
        """Number of threads in which an abandoned call still runs."""
        return sum(runner.threads_stuck for runner in self._runners())

    def warm_up(self, kind: str) -> Runner:
        """Start the runner for environments of this name before there is a job."""
        return self._supervisor(kind).begin().runner

    def start(self, jobs: Sequence[Job]) -> None:
        """Start these jobs."""
        kinds: dict[str, list[InFlight]] = {}
        for job in jobs:
            kinds.setdefault(job.environment, []).append(InFlight(job))
        for kind, of_kind in kinds.items():
            self._supervisor(kind).start(of_kind)

    def results(self, timeout_seconds: float) -> JobResults:
        """Return the results since the last call; waits for the first one up to the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            answers = self._taken(min(left, LOOK_SECONDS))
            now = time.monotonic()
            looked, self._looked_at = min(now - self._looked_at, self._limits.timeout_seconds / LOOKS), now
            for supervisor in self._supervisors.values():
                answers += supervisor.check(looked)
            if answers or left <= LOOK_SECONDS:
                return answers

    def release(self, trajectory_ids: Iterable[str]) -> None:
        """Close the environments of ended trajectories."""
        ended = list(trajectory_ids)
        for supervisor in self._supervisors.values():
            supervisor.release(ended)

    def begin_generation(self, generation: int) -> None:
        """Close all environments of earlier generations and forget all jobs."""
        self._generation = generation
        for supervisor in self._supervisors.values():
            supervisor.begin_generation(generation)

    def close(self) -> None:
        """Stop everything; takes little longer than environments may take to close."""
        runners = self._runners()
        for runner in runners:
            runner.stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for runner in runners:
            runner.close(max(0.0, deadline - time.monotonic()))

    def _runners(self) -> list[Runner]:
        return [runner for supervisor in self._supervisors.values() for runner in supervisor.runners()]

    def _supervisor(self, kind: str) -> RunnerSupervisor:
        if kind not in self._supervisors:
            self._supervisors[kind] = RunnerSupervisor(kind, lambda: self._new_slot(kind), self._limits)
        return self._supervisors[kind]

    def _taken(self, timeout_seconds: float) -> JobResults:
        answers: JobResults = []
        try:
            number, job, answer = self._results.get(timeout_seconds > 0, timeout_seconds)
            while True:
                if self._supervisors[job.environment].on_result(number, job):
                    answers.append((job, answer))
                number, job, answer = self._results.get_nowait()
        except queue.Empty:
            return answers

    def _new_slot(self, kind: str) -> RunnerSlot:
        number = next(self._numbers)
        runner = self._new_runner(kind, lambda job, answer: self._results.put((number, job, answer)), self._generation)
        return RunnerSlot(number, runner)
