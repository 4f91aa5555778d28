"""The jobs of one kind of environment, and the runners (threads or processes) that they run in.

Keeps true
- An environment that blocks its runner, or ends it, fails its own trajectory alone. Those that were under way beside it
  are done again from their states, as nobody has seen what came of them: so no step is taken in twice.
- Who ended a process is found out and not guessed: whoever may have done it is done again, in the end alone.
- An environment is held in one runner at most: a trajectory that goes on in another leaves nothing behind.

    a job blocks its runner                   that is left to it after a second; the others are begun again in another
    it still does after `timeout_seconds`     it fails, and its runner is given up
    a process ends in a job's own code        that job is begun again, alone
    a process ends otherwise                  all others are begun again in a new one; when that ends as well, each half
                                              of them in one of its own, and so on, until a job is alone
    a process ends twice with one job alone   that job fails
    a process ends before it has begun        no job was in it: all are begun again, later each time; whoever has waited
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
"""So many looks at least make a silence."""

APART_SECONDS = 1.0
"""A runner that one job has blocked for so long is left to that job."""

FIRST_SECONDS = 10.0
"""The same of one that has answered nothing yet: it may be loading what all of its environments need."""

IDLE_SECONDS = 60.0
"""A further runner that has had nothing to do for so long is left."""

MAX_LONE_EXITS = 2
"""A process that ends so often with one job alone in it was ended by that job. Once may be somebody else's doing."""

MAX_SHARED_EXITS = 2
"""Jobs that were under way so often when a process ended, and not in their own code, are begun again by halves: so who
has done it is found, and who needs long is not begun again for ever beside others who do it, as when they close."""

MOST_STUCK = 64
"""Threads that calls went on in after they were given up: a process with so many is replaced."""

BEGIN_SECONDS = 300.0
"""That a process may take to import what its environments need."""

TRY_SECONDS = 1.0
"""Between two attempts to make a runner that begins; doubled with each in a row that comes to nothing."""

LONGEST_TRY_SECONDS = 30.0
"""Not beyond this."""

log = structlog.get_logger()

JobResults = list[tuple[Job, JobResult]]


@dataclass(slots=True, eq=False)
class InFlight:
    """A job that was started and not answered."""

    job: Job
    deaths: int = 0
    """Processes that ended with this job alone in them."""
    ends: int = 0
    """Processes that ended while it was under way, by another or nobody knows by whom."""
    waits_since: float = 0.0
    """When it was first given to a runner that had not begun, or there was none; 0 where one has begun with it."""


@dataclass(slots=True, eq=False)
class RunnerSlot:
    """A runner and what was started in it and not answered."""

    number: int
    runner: Runner
    isolated: bool = False
    """For the jobs that are under way in it alone, until they are answered."""
    quarantined: bool = False
    """Left then."""
    began: bool = False
    """Whether it was ready when it was last looked at."""
    warm: bool = False
    """Whether it has answered anything."""
    used_at: float = 0.0
    jobs: dict[int, InFlight] = field(default_factory=dict)
    """By identity of the job."""
    heartbeats: int = 0
    silent_seconds: float = 0.0
    silent_looks: int = 0
    exit_reason: str | None = None
    """How the runner had ended by the last look: all that it has said was taken since."""
    began_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def kind(self) -> str:
        return "process" if self.runner.killable else "thread"

    def start(self, waiting: Sequence[InFlight]) -> None:
        """Begin with these."""
        self.jobs.update((id(each.job), each) for each in waiting)
        self.used_at = time.monotonic()
        for each in waiting:  # one by one: a process takes no message of any size
            each.waits_since = 0.0 if self.runner.ready else each.waits_since or self.used_at
            self.runner.start([each.job])

    def on_check(self, seconds: float) -> None:
        """Take in whether it has shown a sign of life since the last look, of which so long has passed."""
        if self.runner.ready and not self.began:
            self.began = True
            for each in self.jobs.values():
                each.waits_since = 0.0
        silent = self.jobs and self.runner.ready and self.runner.heartbeats == self.heartbeats
        self.silent_seconds = self.silent_seconds + seconds if silent else 0.0
        self.silent_looks = self.silent_looks + 1 if silent else 0
        self.heartbeats = self.runner.heartbeats

    def blocking(self) -> tuple[bool, InFlight | None]:
        """Whether it is known what blocks it, and the job; none where that is answered, as when it closes."""
        running = self.runner.current_job()
        return running is not None, self.jobs.get(id(running))

    def blocks_others(self, timeout_seconds: float) -> bool:
        """Whether it has been silent for longer than others of its kind are to wait."""
        seconds = APART_SECONDS if self.warm else FIRST_SECONDS
        return self.silent_looks >= LOOKS and self.silent_seconds > min(seconds, timeout_seconds / 4)


class RunnerGroup:
    """The jobs of one kind of environment, and the runners that they run in."""

    def __init__(self, kind: str, new_slot: Callable[[], RunnerSlot], limits: RunnerLimits) -> None:
        self._log = log.bind(environment=kind)
        self._new_slot = new_slot
        self._timeout_seconds = limits.timeout_seconds
        self._most = limits.max_runners
        self.slots: dict[int, RunnerSlot] = {}
        """By number. The oldest of those that are not apart takes what no other holds."""
        self._slot_of: dict[str, int] = {}
        """By trajectory: the place that may hold its environment. No other does."""
        self.quarantine: deque[list[InFlight]] = deque()
        """To be begun again, each list apart from all others."""
        self._stopping: list[tuple[float, Runner]] = []
        """Those that were asked to end, and when."""
        self._delayed: list[InFlight] = []
        """To be begun once a runner may be made again."""
        self._backoff = Backoff(TRY_SECONDS, LONGEST_TRY_SECONDS, reset_seconds=math.inf)
        """Of making a runner that begins."""
        self._why = ""
        """Why a runner did not begin, since the last look."""

    @property
    def in_flight(self) -> int:
        waiting = len(self._delayed) + sum(map(len, self.quarantine))
        return waiting + sum(len(place.jobs) for place in self.slots.values())

    @property
    def shared(self) -> RunnerSlot | None:
        return next((place for place in self.slots.values() if not place.isolated), None)

    def begin(self) -> RunnerSlot:
        """The shared place, made anew if there is none. Raises OSError or RuntimeError."""
        place = self.shared or self._new_slot()
        self.slots[place.number] = place
        return place

    def start(self, waiting: Sequence[InFlight]) -> None:
        """Begin with these where their environments are held, or else in the shared runner."""
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
        """Close the environments of trajectories that have ended."""
        for trajectory_id in trajectory_ids:
            self._slot_of.pop(trajectory_id, None)
        for place in self.slots.values():
            place.runner.release(trajectory_ids)

    def on_result(self, number: int, job: Job) -> bool:
        """Whether this answer counts: what a runner that was left says late is being done again."""
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
        """Mend what is wrong with a runner; the jobs that fail by that."""
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
        """Leave a runner to the job that blocks it, and begin the others again in another one."""
        known, culprit = place.blocking()
        others = [each for each in place.jobs.values() if each is not culprit]
        other = self.shared if self.shared is not place else None
        if not known or not others or (culprit and other is None and len(self.slots) >= self._most):
            return
        self._log.warning("environment_blocks", trajectory=culprit and culprit.job.trajectory_id, again=len(others))
        if culprit is None:
            self._stop_slot(place)
        else:
            place.isolated, place.jobs = True, {id(culprit.job): culprit}
        self.start(others)

    def _on_blocked(self, place: RunnerSlot) -> JobResults:
        """Give a silent runner up: who blocks it fails, the rest is begun again."""
        metrics.BLOCKED.inc()
        known, culprit = place.blocking()
        if len(place.jobs) == 1 and place.isolated:
            known, culprit = True, next(iter(place.jobs.values()))
        self._kill_slot(place)
        others = [each for each in place.jobs.values() if each is not culprit]
        at = culprit and culprit.job.trajectory_id
        self._log.error("environments_blocked", trajectory=at, again=len(others))
        if not known:
            self._bisect(others)
            return []
        self.start(others)
        if culprit is None:
            return []
        reason = f"blocks its thread for longer than {self._timeout_seconds:g} s"
        return [(culprit.job, EnvironmentFailure(f"environment {culprit.job.environment} {reason}"))]

    def _on_exit(self, place: RunnerSlot) -> JobResults:
        """A process has ended: by the one job that was in it, by the one that it was in, or nobody knows by whom."""
        metrics.PROCESSES_ENDED.inc()
        known, culprit = place.blocking()
        self._kill_slot(place)
        waiting = list(place.jobs.values())
        at = culprit and culprit.job.trajectory_id
        how = place.runner.load_error or (place.exit_reason or "").strip()
        self._log.error(f"environment_{place.kind}_ended", how=how, trajectory=at, under_way=len(waiting))
        if not place.runner.ready:
            if place.quarantined:
                self.quarantine.append(waiting)
            else:
                self._delayed += waiting
            self._on_start_failure(how, waiting)
            return []
        by_nobody = known and culprit is None  # in code of what was answered before, as when it closes
        if place.isolated and len(waiting) == 1 and not by_nobody:
            return self._on_lone_exit(waiting[0], f"its {place.kind}{place.exit_reason or ''}")
        if culprit is not None:
            self.quarantine.append([culprit])
        others = [each for each in waiting if each is not culprit]
        for each in others:
            each.ends += 1
        self._bisect([each for each in others if each.ends >= MAX_SHARED_EXITS])
        self.start([each for each in others if each.ends < MAX_SHARED_EXITS])
        return []

    def _on_lone_exit(self, waiting: InFlight, reason: str) -> JobResults:
        waiting.deaths += 1
        if waiting.deaths < MAX_LONE_EXITS:
            self.quarantine.append([waiting])
            return []
        reason = f"{reason}, each of {MAX_LONE_EXITS} times that this trajectory was alone in it"
        return [(waiting.job, EnvironmentFailure(f"environment {waiting.job.environment}: {reason}"))]

    def _bisect(self, waiting: list[InFlight]) -> None:
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
        """After an attempt that came to nothing, fail those that have waited for longer than a job may take."""
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
        """Whoever waits is begun a little later: there may be processes, threads, memory or files again by then."""
        pause = self._backoff.failed(time.monotonic())
        self._why = error
        for each in waiting:
            each.waits_since = each.waits_since or time.monotonic()
        self._log.error("environment_runner_not_made", error=error, seconds_to_next=pause)
