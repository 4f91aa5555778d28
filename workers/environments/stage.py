"""Where environments run: in threads beside the bus, one for each kind, and in another one when that is blocked.

Keeps true
- Jobs go in and answers come out by value; the bus thread never touches an environment.
- Every job that was started is answered once, whatever environments do, unless its life is over: nobody waits then.
- An environment that blocks its thread fails its own trajectory, and holds up no environment of another kind. Those of
  its own kind that were under way are done again from their states: nobody has seen what came of them.
"""

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import structlog

from workers.environments import metrics
from workers.environments.protocol import Environment
from workers.environments.runner import Answer, Failed, Job, Runner
from workers.environments.turn_format import TurnFormat

LOOK_SECONDS = 0.1
"""The longest wait between two looks at whether a thread is silent."""

LOOKS = 8
"""So many looks at least make a silence: each counts for the time since the one before, but for no more than this part
of what a step may take. Who was frozen has not looked; who was busy with the bus for a second has, that late."""

REPEATS = 3
"""A job that was under way so often when its thread was blocked by nobody knows whom is taken to be who did it."""

log = structlog.get_logger()

Answers = list[tuple[Job, Answer]]


@dataclass(slots=True)
class _InFlight:
    job: Job
    blocked: int = 0
    """Times that it was under way when its thread was blocked by nobody knows whom."""


class _Lane:
    """The jobs of one kind of environment, and the thread that they run in."""

    def __init__(self, new_runner: Callable[[], tuple[int, Runner]], timeout_seconds: float) -> None:
        self._new_runner = new_runner
        self._timeout_seconds = timeout_seconds
        self.thread, self.runner = new_runner()
        self.in_flight: dict[int, _InFlight] = {}
        """By identity of the job."""
        self._beats = 0
        self._silent_seconds = 0.0

    def start(self, jobs: Sequence[Job]) -> None:
        self.in_flight.update((id(job), _InFlight(job)) for job in jobs)
        self.runner.start(jobs)

    def blocked(self, looked_seconds: float) -> bool:
        """Whether the thread has shown no sign of life for the time that a step may take, of which this is new."""
        beats = self.runner.beats
        silent = self.in_flight and beats == self._beats
        self._silent_seconds = self._silent_seconds + looked_seconds if silent else 0.0
        self._beats = beats
        return self._silent_seconds > self._timeout_seconds

    def move_on(self) -> Answers:
        """Leave the blocked thread behind; what it was at fails, the rest is begun again in another."""
        culprit = self.runner.running()
        self.runner.abandon()
        metrics.BLOCKED.inc()
        self._silent_seconds = 0.0
        self.thread, self.runner = self._new_runner()
        failed: Answers = []
        for waiting in self.in_flight.values():
            waiting.blocked += culprit is None
            if waiting.job is culprit or waiting.blocked >= REPEATS:
                what = f"environment {waiting.job.environment} blocks its thread"
                failed.append((waiting.job, Failed(f"{what} for longer than {self._timeout_seconds:g} s")))
        for job, _ in failed:
            del self.in_flight[id(job)]
        log.error(
            "environments_blocked",
            trajectory=culprit and culprit.trajectory_id,
            failed=len(failed),
            again=len(self.in_flight),
        )
        self.runner.start([waiting.job for waiting in self.in_flight.values()])
        return failed


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
        """`create` makes a new environment of a name. `max_live`: of each kind."""
        self._format = turn_format
        self._create = create
        self._max_live = max_live
        self._timeout_seconds = timeout_seconds
        self._life = 0
        self._lanes: dict[str, _Lane] = {}
        """By the environment's name."""
        self._answers: queue.Queue[tuple[int, Job, Answer]] = queue.Queue()
        """Each with the number of the thread that gave it. No SimpleQueue: a signal amid its wait can make that
        endless, as if no timeout had been given."""
        self._threads = count()
        self._looked_at = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Jobs that were started and not answered."""
        return sum(len(lane.in_flight) for lane in self._lanes.values())

    @property
    def live(self) -> int:
        """Environments that are held or stepped; as another thread sees it, so a figure for people."""
        return sum(lane.runner.live for lane in self._lanes.values())

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin with these jobs."""
        kinds: dict[str, list[Job]] = {}
        for job in jobs:
            kinds.setdefault(job.environment, []).append(job)
        for kind, of_kind in kinds.items():
            if kind not in self._lanes:
                self._lanes[kind] = _Lane(self._new_runner, self._timeout_seconds)
            self._lanes[kind].start(of_kind)

    def answers(self, timeout_seconds: float) -> Answers:
        """What has ended since the last call; waits for the first one, no longer than the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            answers = self._taken(min(left, LOOK_SECONDS))
            now = time.monotonic()
            looked, self._looked_at = min(now - self._looked_at, self._timeout_seconds / LOOKS), now
            for lane in self._lanes.values():
                if lane.blocked(looked):
                    answers += lane.move_on()
            if answers or left <= LOOK_SECONDS:
                return answers

    def let_go(self, trajectory_ids: Iterable[str]) -> None:
        """Close the environments of trajectories that have ended."""
        ended = list(trajectory_ids)
        for lane in self._lanes.values():
            lane.runner.let_go(ended)

    def new_life(self, life: int) -> None:
        """Close all environments, and forget all jobs: what was of earlier lives does not count any more."""
        self._life = life
        for lane in self._lanes.values():
            lane.in_flight.clear()
            lane.runner.new_life(life)

    def close(self) -> None:
        """Stop everything. An environment that blocks its thread is left behind."""
        for lane in self._lanes.values():
            lane.runner.close()

    def _taken(self, timeout_seconds: float) -> Answers:
        answers: Answers = []
        try:
            thread, job, answer = self._answers.get(timeout_seconds > 0, timeout_seconds)
            while True:
                lane = self._lanes[job.environment]
                # What a thread that was left behind says late is being done again; of an earlier life nobody asks.
                if thread == lane.thread and lane.in_flight.pop(id(job), None) is not None:
                    answers.append((job, answer))
                thread, job, answer = self._answers.get_nowait()
        except queue.Empty:
            return answers

    def _new_runner(self) -> tuple[int, Runner]:
        number = next(self._threads)
        runner = Runner(
            self._format,
            self._create,
            lambda job, answer: self._answers.put((number, job, answer)),
            life=self._life,
            max_live=self._max_live,
            timeout_seconds=self._timeout_seconds,
        )
        return number, runner
