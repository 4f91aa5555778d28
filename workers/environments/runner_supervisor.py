"""Supervises the runners (threads or processes) of one kind of environment: handles their crashes and blocks.

Keeps true
- An environment that blocks or ends its runner fails only its own trajectory. The other jobs of the runner are repeated
  from their states. Their results were not used, so no step is applied twice.
- The job that ended a process is determined by repetition, not guessed: each suspect is repeated, at last alone.
- An environment is held by one runner at most: a trajectory that moves to another runner is released by the first.

    a job blocks its runner                   after a second the job keeps the runner; the others restart in another one
    it still blocks after `timeout_seconds`   the job fails, and its runner is abandoned
    others wait for a quarter of that time    the process is killed; each half of the others restarts in its own
                                              process, and so on; the blocking job restarts alone
    a process ends in a job's own code        that job restarts, alone
    a process ends otherwise                  all jobs restart in a new process; when that ends too, each half of them
                                              restarts in its own process, and so on, until a job is alone
    a process ends twice with one job alone   that job fails
    a process ends before it has started      it had no job: all jobs restart, later each time; a job that has waited
                                              longer than `timeout_seconds` by then fails
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from rose.schemas.errors import describe_error
from rose.topics.backoff import Backoff
from rose.workers.environments import metrics
from rose.workers.environments.jobs import EnvironmentFailure, Job, JobResult, Runner, RunnerLimits
from rose.workers.environments.thread_runner import CLOSE_SECONDS
from rose.workers.environments.transitions import FAILURE_CHARACTERS

LOOKS = 8
"""Least number of checks without a heartbeat that make a silence."""

APART_SECONDS = 1.0
"""Time after which a blocked runner is left to the job that blocks it."""

FIRST_SECONDS = 10.0
"""The same time for a runner without an answer so far, which may be loading what its environments need."""

HELD_PARTS = 4
"""A process is killed once a job has waited for other jobs for this part (1/HELD_PARTS) of the step limit."""

IDLE_SECONDS = 60.0
"""Time without a job after which an additional runner is stopped."""

MAX_LONE_EXITS = 2
"""Number of process ends with one job alone after which that job fails. A single end may have another cause."""

MAX_SHARED_EXITS = 2
"""Number of process ends during a job, outside of its own code, after which the job is started again by halves: the
cause is found, and long jobs are not repeated forever together with it."""

MOST_STUCK = 64
"""Number of threads with abandoned calls at which a process is replaced."""

BEGIN_SECONDS = 300.0
"""Time that a process may take to import what its environments need."""

TRY_SECONDS = 1.0
"""Time between two attempts to start a runner; it doubles with each failed attempt in a row."""

LONGEST_TRY_SECONDS = 30.0
"""Longest time between two attempts to start a runner."""

log = structlog.get_logger()

JobResults = list[tuple[Job, JobResult]]


@dataclass(slots=True, eq=False)
class InFlight:
    """A job that was started and has no answer yet."""

    job: Job
    deaths: int = 0
    """Number of processes that ended with this job alone in them."""
    ends: int = 0
    """Number of processes that ended during this job, for another or an unknown cause."""
    held_seconds: float = 0.0
    """Time for which other jobs have held this job up, since it last started apart."""
    waits_since: float = 0.0
    """Time when the job was first given to a runner that had not started, or had no runner; 0 once a runner has
    started with the job."""


@dataclass(slots=True, eq=False)
class RunnerSlot:
    """A runner, and the jobs that were started in it and have no answer."""

    number: int
    runner: Runner
    isolated: bool = False
    """Whether the runner is left to the jobs that are under way in it, until they are answered."""
    quarantined: bool = False
    """Whether the runner runs a list of quarantined jobs; it is stopped once they are answered."""
    began: bool = False
    """Whether the runner was ready at the last check."""
    warm: bool = False
    """Whether the runner has answered anything."""
    used_at: float = 0.0
    jobs: dict[int, InFlight] = field(default_factory=dict)
    """Jobs under way, by the identity of the job."""
    heartbeats: int = 0
    silent_seconds: float = 0.0
    silent_looks: int = 0
    exit_reason: str | None = None
    """How the runner had ended by the last check; all of its answers have been taken since."""
    began_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def kind(self) -> str:
        """Whether the runner is a process or a thread, in one word."""
        return "process" if self.runner.killable else "thread"

    def start(self, waiting: Sequence[InFlight]) -> None:
        """Start these jobs."""
        self.jobs.update((id(each.job), each) for each in waiting)
        self.used_at = time.monotonic()
        for each in waiting:  # one by one: a process takes no message of any size
            each.waits_since = 0.0 if self.runner.ready else each.waits_since or self.used_at
            self.runner.start([each.job])

    def on_check(self, seconds: float) -> None:
        """Note whether the runner has shown a heartbeat since the last check, `seconds` ago."""
        if self.runner.ready and not self.began:
            self.began = True
            for each in self.jobs.values():
                each.waits_since = 0.0
        silent = self.jobs and self.runner.ready and self.runner.heartbeats == self.heartbeats
        self.silent_seconds = self.silent_seconds + seconds if silent else 0.0
        self.silent_looks = self.silent_looks + 1 if silent else 0
        if silent:
            running = self.runner.current_job()
            for each in self.jobs.values():
                each.held_seconds += seconds * (each.job is not running)
        self.heartbeats = self.runner.heartbeats

    def blocking(self) -> tuple[bool, InFlight | None]:
        """Return whether the cause of a block is known, and the job that causes it; None if that job is answered."""
        running = self.runner.current_job()
        return running is not None, self.jobs.get(id(running))

    def blocks_others(self, timeout_seconds: float) -> bool:
        """Whether the runner has been silent for longer than other jobs may wait."""
        seconds = APART_SECONDS if self.warm else FIRST_SECONDS
        return self.silent_looks >= LOOKS and self.silent_seconds > min(seconds, timeout_seconds / 4)


class RunnerSupervisor:
    """Starts the jobs of one kind of environment in runners; repeats or fails those whose runner crashes or blocks."""

    def __init__(self, kind: str, new_slot: Callable[[], RunnerSlot], limits: RunnerLimits) -> None:
        self._log = log.bind(environment=kind)
        self._new_slot = new_slot
        self._timeout_seconds = limits.timeout_seconds
        self._most = limits.max_runners
        self.slots: dict[int, RunnerSlot] = {}
        """Slots by number. The oldest slot that is not isolated takes each job that belongs to no other slot."""
        self._slot_of: dict[str, int] = {}
        """Number of the slot that may hold a trajectory's environment, by trajectory. No other slot holds it."""
        self.quarantine: deque[list[InFlight]] = deque()
        """Lists of jobs to be started again, each list apart from all others."""
        self._stopping: list[tuple[float, Runner]] = []
        """Runners that were asked to end, with the time."""
        self._delayed: list[InFlight] = []
        """Jobs to be started once a runner can be made again."""
        self._backoff = Backoff(TRY_SECONDS, LONGEST_TRY_SECONDS, reset_seconds=math.inf)
        """Pauses between attempts to start a runner."""
        self._why = ""
        """Why a runner did not start, since the last check."""

    @property
    def in_flight(self) -> int:
        """Number of jobs that have no answer yet."""
        waiting = len(self._delayed) + sum(map(len, self.quarantine))
        return waiting + sum(len(place.jobs) for place in self.slots.values())

    @property
    def shared(self) -> RunnerSlot | None:
        """The oldest slot that is not isolated; None if there is none."""
        return next((place for place in self.slots.values() if not place.isolated), None)

    def begin(self) -> RunnerSlot:
        """Return the shared slot, with a new runner if there is none. Raises OSError or RuntimeError."""
        place = self.shared or self._new_slot()
        self.slots[place.number] = place
        return place

    def start(self, waiting: Sequence[InFlight]) -> None:
        """Start jobs in the slots that hold their environments, and all others in the shared slot."""
        chosen: dict[int, list[InFlight]] = {}
        for each in waiting:
            place = self._holder(each.job.trajectory_id)
            if place is None or place.isolated:
                place = self.shared
            chosen.setdefault(-1 if place is None else place.number, []).append(each)
        for number, these in chosen.items():
            if number >= 0:
                self._begin(self.slots[number], these)
            elif time.monotonic() < self._backoff.until:
                self._delayed += these
            else:
                try:
                    self._begin(self.begin(), these)
                except (OSError, RuntimeError) as error:
                    self._delayed += these
                    self._on_start_failure(describe_error(error), these)

    def release(self, trajectory_ids: list[str]) -> None:
        """Close the environments of ended trajectories."""
        for trajectory_id in trajectory_ids:
            self._slot_of.pop(trajectory_id, None)
        for place in self.slots.values():
            place.runner.release(trajectory_ids)

    def on_result(self, number: int, job: Job) -> bool:
        """Return whether an answer counts; late answers of a given-up runner do not, since their jobs are repeated."""
        place = self.slots.get(number)
        if place is None or place.jobs.pop(id(job), None) is None:
            return False
        place.warm = True
        self._backoff.succeeded()
        if not place.jobs:
            place.isolated = place.quarantined
            if place.quarantined:
                self._stop_slot(place)
        return True

    def _holder(self, trajectory_id: str) -> RunnerSlot | None:
        return self.slots.get(self._slot_of.get(trajectory_id, -1))

    def _begin(self, place: RunnerSlot, waiting: list[InFlight]) -> None:
        for each in waiting:
            name = each.job.trajectory_id
            holder = self._holder(name)
            if holder is not None and holder is not place:
                holder.runner.cancel([name])
            self._slot_of[name] = place.number
        place.start(waiting)

    def check(self, seconds: float) -> JobResults:
        """Handle ended, blocked and idle runners. Returns the jobs that fail, with their results."""
        failed: JobResults = []
        for place in list(self.slots.values()):
            place.on_check(seconds)
            if place.exit_reason:
                failed += self._on_exit(place)
            elif not place.runner.ready and time.monotonic() - place.began_at > BEGIN_SECONDS:
                place.exit_reason = f" did not begin within {BEGIN_SECONDS:g} s"
                failed += self._on_exit(place)
            elif place.silent_seconds > self._timeout_seconds:
                failed += self._on_blocked(place)
            elif place.blocks_others(self._timeout_seconds):
                self._isolate(place)
            elif place.runner.killable and place.runner.threads_stuck >= MOST_STUCK:
                self._log.warning("environment_threads_stuck", threads=place.runner.threads_stuck)
                self._kill_slot(place)
                self.start(list(place.jobs.values()))
            elif self._idles(place):
                self._stop_slot(place)
            place.exit_reason = place.runner.exit_reason
        self._try_again()
        failed += self._waited_long()
        while self._stopping and (
            self._stopping[0][1].exit_reason or time.monotonic() - self._stopping[0][0] > CLOSE_SECONDS
        ):
            self._stopping.pop(0)[1].kill()
        return failed

    def begin_generation(self, generation: int) -> None:
        """Forget all jobs."""
        self._delayed.clear()
        self.quarantine.clear()
        self._slot_of.clear()
        for place in list(self.slots.values()):
            place.jobs.clear()
            if place.isolated:
                self._stop_slot(place)
            else:
                place.runner.begin_generation(generation)

    def runners(self) -> list[Runner]:
        """Return all runners, also those that are asked to end."""
        return [place.runner for place in self.slots.values()] + [runner for _, runner in self._stopping]

    def _idles(self, place: RunnerSlot) -> bool:
        idle = not place.jobs and time.monotonic() - place.used_at > IDLE_SECONDS
        return idle and not place.isolated and place is not self.shared

    def _stop_slot(self, place: RunnerSlot) -> None:
        del self.slots[place.number]
        place.runner.stop()
        self._stopping.append((time.monotonic(), place.runner))

    def _kill_slot(self, place: RunnerSlot) -> None:
        del self.slots[place.number]
        place.runner.kill()

    def _isolate(self, place: RunnerSlot) -> None:
        """Leave a runner to the job that blocks it, and start its other jobs again in another runner.

        Once another job has been held up for long, the process is killed instead: the blocking job starts again alone,
        and the other jobs start again by halves. A job may block only because another job holds a lock.
        """
        known, culprit = place.blocking()
        others = [each for each in place.jobs.values() if each is not culprit]
        held_long = any(each.held_seconds > self._timeout_seconds / HELD_PARTS for each in others)
        apart = held_long and len(place.jobs) > 1 and place.runner.killable and place.warm  # a cold process may load
        no_room = culprit is not None and self.shared in (place, None) and len(self.slots) >= self._most
        if not others or not (apart or (known and not no_room)):
            return
        self._log.warning(
            "environment_isolated", trajectory=culprit and culprit.job.trajectory_id, restarted_jobs=len(others)
        )
        if apart:
            self._kill_slot(place)
            self._bisect(others)
            self._bisect([culprit] if culprit else [])
        elif culprit is None:  # an answered job blocks: the others may meet it again, but not forever
            self._stop_slot(place)
            self._start_again(others)
        else:
            place.isolated, place.jobs = True, {id(culprit.job): culprit}
            self.start(others)

    def _on_blocked(self, place: RunnerSlot) -> JobResults:
        """Give up a silent runner: the job that blocks it fails, and the others start again."""
        metrics.BLOCKED.inc()
        known, culprit = place.blocking()
        if len(place.jobs) == 1 and place.isolated:
            known, culprit = True, next(iter(place.jobs.values()))
        self._kill_slot(place)
        self._backoff.reset()  # it may have held what another runner needs, such as a port
        others = [each for each in place.jobs.values() if each is not culprit]
        at = culprit and culprit.job.trajectory_id
        self._log.error("environment_runner_blocked", trajectory=at, restarted_jobs=len(others))
        if not known:
            self._bisect(others)
            return []
        self.start(others)
        if culprit is None:
            return []
        reason = f"blocks its thread for longer than {self._timeout_seconds:g} s"
        return [(culprit.job, EnvironmentFailure(f"environment {culprit.job.environment} {reason}"))]

    def _on_exit(self, place: RunnerSlot) -> JobResults:
        """Handle the end of a process, whose cause is one job, or unknown."""
        metrics.PROCESSES_ENDED.inc()
        known, culprit = place.blocking()
        self._kill_slot(place)
        if place.runner.ready:
            self._backoff.reset()
        waiting = list(place.jobs.values())
        at = culprit and culprit.job.trajectory_id
        how = place.runner.load_error or (place.exit_reason or "").strip()
        self._log.error(
            "environment_runner_ended", kind=place.kind, trajectory=at, jobs_in_flight=len(waiting), reason=how
        )
        if not place.runner.ready:
            if place.quarantined:
                self.quarantine.append(waiting)
            else:
                self._delayed += waiting
            self._on_start_failure(how, waiting)
            return []
        by_answered_job = known and culprit is None  # for example in `close` after the answer
        if place.isolated and len(waiting) == 1 and not by_answered_job:
            return self._on_lone_exit(waiting[0], f"its {place.kind}{place.exit_reason or ''}")
        if culprit is not None:
            self.quarantine.append([culprit])
        others = [each for each in waiting if each is not culprit]
        self._start_again(others)
        return []

    def _start_again(self, jobs: Sequence[InFlight]) -> None:
        """Start jobs again whose runner was lost. Jobs that have lost several are bisected to find the cause."""
        for each in jobs:
            each.ends += 1
        self._bisect([each for each in jobs if each.ends >= MAX_SHARED_EXITS])
        self.start([each for each in jobs if each.ends < MAX_SHARED_EXITS])

    def _on_lone_exit(self, waiting: InFlight, reason: str) -> JobResults:
        waiting.deaths += 1
        if waiting.deaths < MAX_LONE_EXITS:
            self.quarantine.append([waiting])
            return []
        reason = f"{reason}, each of {MAX_LONE_EXITS} times that this trajectory was alone in it"
        return [(waiting.job, EnvironmentFailure(f"environment {waiting.job.environment}: {reason}"))]

    def _bisect(self, waiting: list[InFlight]) -> None:
        for each in waiting:
            each.held_seconds = 0.0
        half = (len(waiting) + 1) // 2
        self.quarantine += [part for part in (waiting[:half], waiting[half:]) if part]

    def _try_again(self) -> None:
        if self._delayed and time.monotonic() >= self._backoff.until:
            late, self._delayed = self._delayed, []
            self.start(late)
        while self.quarantine and time.monotonic() >= self._backoff.until:
            if sum(place.quarantined for place in self.slots.values()) >= max(1, self._most - 1):
                return
            try:
                place = self._new_slot()
            except (OSError, RuntimeError) as error:
                self._on_start_failure(describe_error(error), self.quarantine[0])
                return
            place.isolated = place.quarantined = True
            self.slots[place.number] = place
            self._begin(place, self.quarantine.popleft())

    def _waited_long(self) -> JobResults:
        """Fail the jobs that have waited longer than a job may take, after a failed attempt to start a runner."""
        why, self._why = self._why, ""
        since = time.monotonic() - self._timeout_seconds
        lists = [self._delayed, *self.quarantine]
        long = [each for waiting in lists for each in waiting if why and 0.0 < each.waits_since < since]
        if not long:
            return []
        self._delayed, *suspects = ([each for each in waiting if each not in long] for waiting in lists)
        self.quarantine = deque(filter(None, suspects))
        reason = f"nothing that runs it could begin within {self._timeout_seconds:g} s: {why}"
        return [
            (each.job, EnvironmentFailure(f"environment {each.job.environment}: {reason}"[:FAILURE_CHARACTERS]))
            for each in long
        ]

    def _on_start_failure(self, error: str, waiting: Sequence[InFlight]) -> None:
        """Start the waiting jobs later, when there may be processes, threads, memory or files again."""
        pause = self._backoff.failed(time.monotonic())
        self._why = error
        for each in waiting:
            each.waits_since = each.waits_since or time.monotonic()
        self._log.error("environment_runner_not_started", reason=error, retry_seconds=pause)
