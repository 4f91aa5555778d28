"""Where environments run: in a thread beside the bus, and in another one when that is blocked.

Keeps true
- Jobs go in and answers come out by value; the bus thread never touches an environment.
- Every job that was started is answered once, whatever environments do.
- An environment that blocks its thread fails its own trajectory. The others that were under way are done again from
  their states: nobody has seen what came of them.
"""

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from workers.environments import metrics
from workers.environments.protocol import Environment
from workers.environments.runner import Answer, Failed, Job, Runner
from workers.environments.turn_format import TurnFormat

LOOK_SECONDS = 0.1
"""Silence of a thread counts by the looks at it, and each for no more than this: who was frozen has not looked."""

REPEATS = 3
"""A job that was under way so often when its thread was blocked by nobody knows whom is taken to be who did it."""

log = structlog.get_logger()


@dataclass(slots=True)
class _InFlight:
    job: Job
    blocked: int = 0
    """Times that it was under way when its thread was blocked by nobody knows whom."""


class Stage:
    """Runs jobs. Used by one thread."""

    def __init__(
        self,
        turn_format: TurnFormat,
        create: Callable[[str], Environment],
        *,
        max_live: int,
        timeout_seconds: float,
    ) -> None:
        """`create` makes a new environment of a name."""
        self._format = turn_format
        self._create = create
        self._max_live = max_live
        self._timeout_seconds = timeout_seconds
        self._life = 0
        self._in_flight: dict[int, _InFlight] = {}
        """By identity of the job."""
        self._answers: queue.SimpleQueue[tuple[int, Job, Answer]] = queue.SimpleQueue()
        """Each with the number of the thread that gave it."""
        self._threads = 0
        self._runner = self._new_runner()
        self._beats = 0
        self._looked_at = time.monotonic()
        self._silent_seconds = 0.0

    @property
    def in_flight(self) -> int:
        """Jobs that were started and not answered."""
        return len(self._in_flight)

    @property
    def live(self) -> int:
        """Environments that are held or stepped; as another thread sees it, so a figure for people."""
        return self._runner.live

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin with these jobs."""
        if jobs:
            self._in_flight.update((id(job), _InFlight(job)) for job in jobs)
            self._runner.start(jobs)

    def answers(self, timeout_seconds: float) -> list[tuple[Job, Answer]]:
        """What has ended since the last call; waits for the first one, no longer than the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            answers = self._taken(min(left, LOOK_SECONDS))
            if self._blocked():
                answers += self._move_on()
            if answers or left <= LOOK_SECONDS:
                return answers

    def _taken(self, timeout_seconds: float) -> list[tuple[Job, Answer]]:
        answers: list[tuple[Job, Answer]] = []
        try:
            thread, job, answer = self._answers.get(timeout_seconds > 0, timeout_seconds)
            while True:
                if thread == self._threads:  # what one that was left behind says late is being done again
                    del self._in_flight[id(job)]
                    answers.append((job, answer))
                thread, job, answer = self._answers.get_nowait()
        except queue.Empty:
            return answers

    def let_go(self, trajectory_ids: Iterable[str]) -> None:
        """Close the environments of trajectories that have ended."""
        self._runner.let_go(trajectory_ids)

    def new_life(self, life: int) -> None:
        """Close all environments: what was held of earlier lives does not count any more."""
        self._life = life
        self._runner.new_life(life)

    def close(self) -> None:
        """Stop everything. An environment that blocks its thread is left behind."""
        self._runner.close()

    def _new_runner(self) -> Runner:
        self._threads = number = self._threads + 1
        return Runner(
            self._format,
            self._create,
            lambda job, answer: self._answers.put((number, job, answer)),
            life=self._life,
            max_live=self._max_live,
            timeout_seconds=self._timeout_seconds,
        )

    def _blocked(self) -> bool:
        """Whether the thread has shown no sign of life for the time that a step may take."""
        now, beats = time.monotonic(), self._runner.beats
        looked = min(now - self._looked_at, LOOK_SECONDS)
        self._silent_seconds = self._silent_seconds + looked if self._in_flight and beats == self._beats else 0.0
        self._looked_at, self._beats = now, beats
        return self._silent_seconds > self._timeout_seconds

    def _move_on(self) -> list[tuple[Job, Answer]]:
        """Leave the blocked thread behind; what it was at fails, the rest is begun again in another."""
        culprit = self._runner.running()
        self._runner.abandon()
        metrics.BLOCKED.inc()
        self._silent_seconds = 0.0
        self._runner = self._new_runner()
        failed: list[tuple[Job, Answer]] = []
        for waiting in self._in_flight.values():
            waiting.blocked += culprit is None
            if waiting.job is culprit or waiting.blocked >= REPEATS:
                what = f"environment {waiting.job.environment} blocks its thread"
                failed.append((waiting.job, Failed(f"{what} for longer than {self._timeout_seconds:g} s")))
        for job, _ in failed:
            del self._in_flight[id(job)]
        log.error(
            "environments_blocked",
            trajectory=culprit and culprit.trajectory_id,
            failed=len(failed),
            again=len(self._in_flight),
        )
        self._runner.start([waiting.job for waiting in self._in_flight.values()])
        return failed
