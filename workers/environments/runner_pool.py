"""Where environments run: beside the bus, each kind in runners of its own (see `runner_group.py`).

Keeps true
- Jobs go in and answers come out by value; the bus thread never touches an environment.
- Every job that was started is answered once, whatever environments do, unless its life is over: nobody waits then.
"""

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from rose.workers.environments.jobs import Job, JobResult, ResultCallback, Runner, RunnerLimits
from rose.workers.environments.runner_group import LOOKS, InFlight, JobResults, RunnerGroup, RunnerSlot
from rose.workers.environments.thread_runner import CLOSE_SECONDS

LOOK_SECONDS = 0.1
"""The longest wait between two looks at whether a runner is silent. Each counts for the time since the one before, but
for no more than a part of what a step may take: who was frozen has not looked; who was busy with the bus for a second
has, that late."""

NewRunner = Callable[[str, ResultCallback, int], Runner]
"""Makes a runner from the name of its environments, a callback for each answer, and its first generation."""


class RunnerPool:
    """Runs jobs. Used by one thread."""

    def __init__(self, new_runner: NewRunner, limits: RunnerLimits) -> None:
        self._new_runner = new_runner
        self._limits = limits
        self._generation = 0
        self._groups: dict[str, RunnerGroup] = {}
        """Groups of runners, by the name of the environment."""
        self._results: queue.Queue[tuple[int, Job, JobResult]] = queue.Queue()
        """Each with the number of the runner that gave it. No SimpleQueue: a signal amid its wait can make that
        endless, as if no timeout had been given."""
        self._numbers = count()
        self._looked_at = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Jobs that were started and not answered."""
        return sum(lane.in_flight for lane in self._groups.values())

    @property
    def live(self) -> int:
        """Environments that are held or stepped; as another thread sees it, so a figure for people."""
        return sum(runner.live for runner in self._runners())

    @property
    def threads_stuck(self) -> int:
        """Threads in which a call goes on that was given up."""
        return sum(runner.threads_stuck for runner in self._runners())

    def warm_up(self, kind: str) -> Runner:
        """The runner in which environments of this name will run, before there is anything to do."""
        return self._group(kind).begin().runner

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin with these jobs."""
        kinds: dict[str, list[InFlight]] = {}
        for job in jobs:
            kinds.setdefault(job.environment, []).append(InFlight(job))
        for kind, of_kind in kinds.items():
            self._group(kind).start(of_kind)

    def results(self, timeout_seconds: float) -> JobResults:
        """What has ended since the last call; waits for the first one, no longer than the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            answers = self._taken(min(left, LOOK_SECONDS))
            now = time.monotonic()
            looked, self._looked_at = min(now - self._looked_at, self._limits.timeout_seconds / LOOKS), now
            for lane in self._groups.values():
                answers += lane.check(looked)
            if answers or left <= LOOK_SECONDS:
                return answers

    def release(self, trajectory_ids: Iterable[str]) -> None:
        """Close the environments of trajectories that have ended."""
        ended = list(trajectory_ids)
        for lane in self._groups.values():
            lane.release(ended)

    def begin_generation(self, generation: int) -> None:
        """Close all environments, and forget all jobs: what was of earlier lives does not count any more."""
        self._generation = generation
        for lane in self._groups.values():
            lane.begin_generation(generation)

    def close(self) -> None:
        """Stop everything, within little more than environments may take to close."""
        runners = self._runners()
        for runner in runners:
            runner.stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for runner in runners:
            runner.close(max(0.0, deadline - time.monotonic()))

    def _runners(self) -> list[Runner]:
        return [runner for lane in self._groups.values() for runner in lane.runners()]

    def _group(self, kind: str) -> RunnerGroup:
        if kind not in self._groups:
            self._groups[kind] = RunnerGroup(kind, lambda: self._new_slot(kind), self._limits)
        return self._groups[kind]

    def _taken(self, timeout_seconds: float) -> JobResults:
        answers: JobResults = []
        try:
            number, job, answer = self._results.get(timeout_seconds > 0, timeout_seconds)
            while True:
                if self._groups[job.environment].on_result(number, job):
                    answers.append((job, answer))
                number, job, answer = self._results.get_nowait()
        except queue.Empty:
            return answers

    def _new_slot(self, kind: str) -> RunnerSlot:
        number = next(self._numbers)
        runner = self._new_runner(kind, lambda job, answer: self._results.put((number, job, answer)), self._generation)
        return RunnerSlot(number, runner)
