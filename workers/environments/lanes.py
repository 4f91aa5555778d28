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

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from schemas.errors import describe_error
from workers.environments import metrics
from workers.environments.jobs import Answer, Failed, Job, Limits, Runs
from workers.environments.runner import CLOSE_SECONDS
from workers.environments.steps import FAILURE_CHARACTERS

LOOKS = 8
"""So many looks at least make a silence."""

APART_SECONDS = 1.0
"""A runner that one job has blocked for so long is left to that job."""

FIRST_SECONDS = 10.0
"""The same of one that has answered nothing yet: it may be loading what all of its environments need."""

IDLE_SECONDS = 60.0
"""A further runner that has had nothing to do for so long is left."""

DEATHS = 2
"""A process that ends so often with one job alone in it was ended by that job. Once may be somebody else's doing."""

ENDS = 2
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

Answers = list[tuple[Job, Answer]]


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
class Place:
    """A runner and what was started in it and not answered."""

    number: int
    runner: Runs
    apart: bool = False
    """For the jobs that are under way in it alone, until they are answered."""
    suspected: bool = False
    """Left then."""
    began: bool = False
    """Whether it was ready when it was last looked at."""
    warm: bool = False
    """Whether it has answered anything."""
    used_at: float = 0.0
    jobs: dict[int, InFlight] = field(default_factory=dict)
    """By identity of the job."""
    beats: int = 0
    silent_seconds: float = 0.0
    silent_looks: int = 0
    ended: str = ""
    """How the runner had ended by the last look: all that it has said was taken since."""
    began_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def what(self) -> str:
        return "process" if self.runner.killable else "thread"

    def start(self, waiting: Sequence[InFlight]) -> None:
        """Begin with these."""
        self.jobs.update((id(each.job), each) for each in waiting)
        self.used_at = time.monotonic()
        for each in waiting:  # one by one: a process takes no message of any size
            each.waits_since = 0.0 if self.runner.ready else each.waits_since or self.used_at
            self.runner.start([each.job])

    def looked(self, seconds: float) -> None:
        """Take in whether it has shown a sign of life since the last look, of which so long has passed."""
        if self.runner.ready and not self.began:
            self.began = True
            for each in self.jobs.values():
                each.waits_since = 0.0
        silent = self.jobs and self.runner.ready and self.runner.beats == self.beats
        self.silent_seconds = self.silent_seconds + seconds if silent else 0.0
        self.silent_looks = self.silent_looks + 1 if silent else 0
        self.beats = self.runner.beats

    def blocking(self) -> tuple[bool, InFlight | None]:
        """Whether it is known what blocks it, and the job; none where that is answered, as when it closes."""
        running = self.runner.running()
        return running is not None, self.jobs.get(id(running))

    def holds_up(self, timeout_seconds: float) -> bool:
        """Whether it has been silent for longer than others of its kind are to wait."""
        seconds = APART_SECONDS if self.warm else FIRST_SECONDS
        return self.silent_looks >= LOOKS and self.silent_seconds > min(seconds, timeout_seconds / 4)


class Lane:
    """The jobs of one kind of environment, and the runners that they run in."""

    def __init__(self, kind: str, new_place: Callable[[], Place], limits: Limits) -> None:
        self._log = log.bind(environment=kind)
        self._new_place = new_place
        self._timeout_seconds = limits.timeout_seconds
        self._most = limits.max_runners
        self.places: dict[int, Place] = {}
        """By number. The oldest of those that are not apart takes what no other holds."""
        self._held: dict[str, int] = {}
        """By trajectory: the place that may hold its environment. No other does."""
        self.suspects: deque[list[InFlight]] = deque()
        """To be begun again, each list apart from all others."""
        self._left: list[tuple[float, Runs]] = []
        """Those that were asked to end, and when."""
        self._late: list[InFlight] = []
        """To be begun once a runner may be made again."""
        self._try_at = 0.0
        self._why = ""
        """Why a runner did not begin, since the last look."""
        self._pause = TRY_SECONDS

    @property
    def in_flight(self) -> int:
        waiting = len(self._late) + sum(map(len, self.suspects))
        return waiting + sum(len(place.jobs) for place in self.places.values())

    @property
    def shared(self) -> Place | None:
        return next((place for place in self.places.values() if not place.apart), None)

    def begin(self) -> Place:
        """The shared place, made anew if there is none. Raises OSError or RuntimeError."""
        place = self.shared or self._new_place()
        self.places[place.number] = place
        return place

    def start(self, waiting: Sequence[InFlight]) -> None:
        """Begin with these where their environments are held, or else in the shared runner."""
        chosen: dict[int, list[InFlight]] = {}
        for each in waiting:
            place = self._holder(each.job.trajectory_id)
            if place is None or place.apart:
                place = self.shared
            chosen.setdefault(-1 if place is None else place.number, []).append(each)
        for number, these in chosen.items():
            if number >= 0:
                self._begin(self.places[number], these)
            elif time.monotonic() < self._try_at:
                self._late += these
            else:
                try:
                    self._begin(self.begin(), these)
                except (OSError, RuntimeError) as error:
                    self._late += these
                    self._not_made(describe_error(error), these)

    def let_go(self, trajectory_ids: list[str]) -> None:
        """Close the environments of trajectories that have ended."""
        for trajectory_id in trajectory_ids:
            self._held.pop(trajectory_id, None)
        for place in self.places.values():
            place.runner.let_go(trajectory_ids)

    def answered(self, number: int, job: Job) -> bool:
        """Whether this answer counts: what a runner that was left says late is being done again."""
        place = self.places.get(number)
        if place is None or place.jobs.pop(id(job), None) is None:
            return False
        place.warm = True
        self._pause = TRY_SECONDS
        if not place.jobs:
            place.apart = place.suspected
            if place.suspected:
                self._leave(place)
        return True

    def _holder(self, trajectory_id: str) -> Place | None:
        return self.places.get(self._held.get(trajectory_id, -1))

    def _begin(self, place: Place, waiting: list[InFlight]) -> None:
        for each in waiting:
            name = each.job.trajectory_id
            holder = self._holder(name)
            if holder is not None and holder is not place:
                holder.runner.withdraw([name])
            self._held[name] = place.number
        place.start(waiting)

    def look(self, seconds: float) -> Answers:
        """Mend what is wrong with a runner; the jobs that fail by that."""
        failed: Answers = []
        for place in list(self.places.values()):
            place.looked(seconds)
            if place.ended:
                failed += self._ended(place)
            elif not place.runner.ready and time.monotonic() - place.began_at > BEGIN_SECONDS:
                place.ended = f" did not begin within {BEGIN_SECONDS:g} s"
                failed += self._ended(place)
            elif place.silent_seconds > self._timeout_seconds:
                failed += self._blocked(place)
            elif place.holds_up(self._timeout_seconds):
                self._set_apart(place)
            elif place.runner.killable and place.runner.threads_stuck >= MOST_STUCK:
                self._log.warning("environment_threads_stuck", threads=place.runner.threads_stuck)
                self._give_up(place)
                self.start(list(place.jobs.values()))
            elif self._idles(place):
                self._leave(place)
            place.ended = place.runner.ended
        self._try_again()
        failed += self._waited_long()
        while self._left and (self._left[0][1].ended or time.monotonic() - self._left[0][0] > CLOSE_SECONDS):
            self._left.pop(0)[1].abandon()
        return failed

    def new_life(self, life: int) -> None:
        """Forget all jobs."""
        self._late.clear()
        self.suspects.clear()
        self._held.clear()
        for place in list(self.places.values()):
            place.jobs.clear()
            if place.apart:
                self._leave(place)
            else:
                place.runner.new_life(life)

    def runners(self) -> list[Runs]:
        return [place.runner for place in self.places.values()] + [runner for _, runner in self._left]

    def _idles(self, place: Place) -> bool:
        idle = not place.jobs and time.monotonic() - place.used_at > IDLE_SECONDS
        return idle and not place.apart and place is not self.shared

    def _leave(self, place: Place) -> None:
        del self.places[place.number]
        place.runner.leave()
        self._left.append((time.monotonic(), place.runner))

    def _give_up(self, place: Place) -> None:
        del self.places[place.number]
        place.runner.abandon()

    def _set_apart(self, place: Place) -> None:
        """Leave a runner to the job that blocks it, and begin the others again in another one."""
        known, culprit = place.blocking()
        others = [each for each in place.jobs.values() if each is not culprit]
        other = self.shared if self.shared is not place else None
        if not known or not others or (culprit and other is None and len(self.places) >= self._most):
            return
        self._log.warning("environment_blocks", trajectory=culprit and culprit.job.trajectory_id, again=len(others))
        if culprit is None:
            self._leave(place)
        else:
            place.apart, place.jobs = True, {id(culprit.job): culprit}
        self.start(others)

    def _blocked(self, place: Place) -> Answers:
        """Give a silent runner up: who blocks it fails, the rest is begun again."""
        metrics.BLOCKED.inc()
        known, culprit = place.blocking()
        if len(place.jobs) == 1 and place.apart:
            known, culprit = True, next(iter(place.jobs.values()))
        self._give_up(place)
        others = [each for each in place.jobs.values() if each is not culprit]
        at = culprit and culprit.job.trajectory_id
        self._log.error("environments_blocked", trajectory=at, again=len(others))
        if not known:
            self._halve(others)
            return []
        self.start(others)
        if culprit is None:
            return []
        reason = f"blocks its thread for longer than {self._timeout_seconds:g} s"
        return [(culprit.job, Failed(f"environment {culprit.job.environment} {reason}"))]

    def _ended(self, place: Place) -> Answers:
        """A process has ended: by the one job that was in it, by the one that it was in, or nobody knows by whom."""
        metrics.PROCESSES_ENDED.inc()
        known, culprit = place.blocking()
        self._give_up(place)
        waiting = list(place.jobs.values())
        at = culprit and culprit.job.trajectory_id
        how = place.runner.unfit or place.ended.strip()
        self._log.error(f"environment_{place.what}_ended", how=how, trajectory=at, under_way=len(waiting))
        if not place.runner.ready:
            if place.suspected:
                self.suspects.append(waiting)
            else:
                self._late += waiting
            self._not_made(how, waiting)
            return []
        by_nobody = known and culprit is None  # in code of what was answered before, as when it closes
        if place.apart and len(waiting) == 1 and not by_nobody:
            return self._died_alone(waiting[0], f"its {place.what}{place.ended}")
        if culprit is not None:
            self.suspects.append([culprit])
        others = [each for each in waiting if each is not culprit]
        for each in others:
            each.ends += 1
        self._halve([each for each in others if each.ends >= ENDS])
        self.start([each for each in others if each.ends < ENDS])
        return []

    def _died_alone(self, waiting: InFlight, how: str) -> Answers:
        waiting.deaths += 1
        if waiting.deaths < DEATHS:
            self.suspects.append([waiting])
            return []
        reason = f"{how}, each of {DEATHS} times that this trajectory was alone in it"
        return [(waiting.job, Failed(f"environment {waiting.job.environment}: {reason}"))]

    def _halve(self, waiting: list[InFlight]) -> None:
        half = (len(waiting) + 1) // 2
        self.suspects += [part for part in (waiting[:half], waiting[half:]) if part]

    def _try_again(self) -> None:
        if self._late and time.monotonic() >= self._try_at:
            late, self._late = self._late, []
            self.start(late)
        while self.suspects and time.monotonic() >= self._try_at:
            if sum(place.suspected for place in self.places.values()) >= max(1, self._most - 1):
                return
            try:
                place = self._new_place()
            except (OSError, RuntimeError) as error:
                self._not_made(describe_error(error), self.suspects[0])
                return
            place.apart = place.suspected = True
            self.places[place.number] = place
            self._begin(place, self.suspects.popleft())

    def _waited_long(self) -> Answers:
        """After an attempt that came to nothing, fail those that have waited for longer than a job may take."""
        why, self._why = self._why, ""
        since = time.monotonic() - self._timeout_seconds
        lists = [self._late, *self.suspects]
        long = [each for waiting in lists for each in waiting if why and 0.0 < each.waits_since < since]
        if not long:
            return []
        self._late, *suspects = ([each for each in waiting if each not in long] for waiting in lists)
        self.suspects = deque(filter(None, suspects))
        reason = f"nothing that runs it could begin within {self._timeout_seconds:g} s: {why}"
        return [
            (each.job, Failed(f"environment {each.job.environment}: {reason}"[:FAILURE_CHARACTERS])) for each in long
        ]

    def _not_made(self, error: str, waiting: Sequence[InFlight]) -> None:
        """Whoever waits is begun a little later: there may be processes, threads, memory or files again by then."""
        self._try_at = time.monotonic() + self._pause
        self._why = error
        for each in waiting:
            each.waits_since = each.waits_since or time.monotonic()
        self._log.error("environment_runner_not_made", error=error, seconds_to_next=self._pause)
        self._pause = min(2 * self._pause, LONGEST_TRY_SECONDS)
