"""Where environments run: beside the bus, each kind in a runner of its own (a thread or a process), and in another one
when something is wrong with that.

Keeps true
- Jobs go in and answers come out by value; the bus thread never touches an environment.
- Every job that was started is answered once, whatever environments do, unless its life is over: nobody waits then.
- An environment that blocks its runner, or ends it, fails its own trajectory alone. Those of its kind that were under
  way are done again from their states, as nobody has seen what came of them: so no step is taken in twice.
- Who ended a process is found out and not guessed: whoever may have done it is done again, in the end alone.

    a job blocks its runner                   that is left to it after a second; the others are begun again in a new one
    it still does after `timeout_seconds`     it fails, and its runner is given up
    a process ends in a job's own code        that job is begun again, alone; the others in a new one
    a process ends and nobody knows by whom   all are begun again in a new one; when that ends as well, each half of
                                              them in one of its own, and so on, until a job is alone
    a process ends twice with one job alone   that job fails
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import structlog

from workers.environments import metrics
from workers.environments.jobs import Answer, Answering, Failed, Job, Runs
from workers.environments.runner import CLOSE_SECONDS

LOOK_SECONDS = 0.1
"""The longest wait between two looks at whether a runner is silent."""

LOOKS = 8
"""So many looks at least make a silence: each counts for the time since the one before, but for no more than this part
of what a step may take. Who was frozen has not looked; who was busy with the bus for a second has, that late."""

APART_SECONDS = 1.0
"""A runner that one job has blocked for so long is left to that job."""

MOST_APART = 8
"""Runners of a kind beside the shared one, at most; further jobs that need one wait."""

DEATHS = 2
"""A process that ends so often with one job alone in it was ended by that job. Once may be somebody else's doing."""

ENDS = 2
"""Jobs that were under way so often when a process ended, nobody knows by whom, are begun again by halves."""

MOST_STUCK = 64
"""Threads that calls went on in after they were given up: a process with so many is replaced."""

BEGIN_SECONDS = 300.0
"""That a process may take to import what its environments need."""

log = structlog.get_logger()

Answers = list[tuple[Job, Answer]]

NewRunner = Callable[[str, Answering, int], Runs]
"""Of a kind of environments, by name: what it calls with each answer, and the life that it begins in."""


@dataclass(slots=True, eq=False)
class _InFlight:
    job: Job
    deaths: int = 0
    """Processes that ended with this job alone in them."""
    ends: int = 0
    """Processes that ended while it was under way beside others, nobody knows by whom."""


@dataclass(slots=True, eq=False)
class _Place:
    """A runner and what was started in it and not answered."""

    number: int
    runner: Runs
    apart: bool = False
    """For these jobs alone, and left with the last answer."""
    jobs: dict[int, _InFlight] = field(default_factory=dict)
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

    def start(self, waiting: Sequence[_InFlight]) -> None:
        """Begin with these."""
        self.jobs.update((id(each.job), each) for each in waiting)
        self.runner.start([each.job for each in waiting])

    def looked(self, seconds: float) -> None:
        """Take in whether it has shown a sign of life since the last look, of which so long has passed."""
        silent = self.jobs and self.runner.ready and self.runner.beats == self.beats
        self.silent_seconds = self.silent_seconds + seconds if silent else 0.0
        self.silent_looks = self.silent_looks + 1 if silent else 0
        self.beats = self.runner.beats

    def blocking(self) -> tuple[bool, _InFlight | None]:
        """Whether it is known what blocks it, and the job; none where that is answered, as when it closes."""
        running = self.runner.running()
        return running is not None, self.jobs.get(id(running))


class _Lane:
    """The jobs of one kind of environment, and the runners that they run in."""

    def __init__(self, kind: str, new_place: Callable[[], _Place], timeout_seconds: float) -> None:
        self._log = log.bind(environment=kind)
        self._new_place = new_place
        self._timeout_seconds = timeout_seconds
        self._shared: _Place | None = None
        self.places: dict[int, _Place] = {}
        """By number; the shared one and those apart."""
        self.suspects: deque[list[_InFlight]] = deque()
        """To be begun again, each list apart from all others."""
        self._left: list[tuple[float, Runs]] = []
        """Those that were asked to end, and when."""

    @property
    def in_flight(self) -> int:
        return sum(map(len, self.suspects)) + sum(len(place.jobs) for place in self.places.values())

    def start(self, waiting: Sequence[_InFlight]) -> None:
        """Begin with these in the shared runner."""
        if waiting:
            self.shared.start(waiting)

    @property
    def shared(self) -> _Place:
        if self._shared is None:
            self._shared = self._placed(self._new_place())
        return self._shared

    def answered(self, number: int, job: Job) -> bool:
        """Whether this answer counts: what a runner that was left says late is being done again."""
        place = self.places.get(number)
        if place is None or place.jobs.pop(id(job), None) is None:
            return False
        if place.apart and not place.jobs:
            self._leave(place)
        return True

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
            elif place.silent_looks >= LOOKS and place.silent_seconds > min(APART_SECONDS, self._timeout_seconds / 4):
                self._set_apart(place)
            elif place.runner.killable and place.runner.threads_stuck >= MOST_STUCK:
                self._log.warning("environment_threads_stuck", threads=place.runner.threads_stuck)
                self._give_up(place)
                self.start(list(place.jobs.values()))
            place.ended = place.runner.ended
        self._try_suspects()
        while self._left and (self._left[0][1].ended or time.monotonic() - self._left[0][0] > CLOSE_SECONDS):
            self._left.pop(0)[1].abandon()
        return failed

    def new_life(self, life: int) -> None:
        """Forget all jobs."""
        self.suspects.clear()
        for place in list(self.places.values()):
            place.jobs.clear()
            if place.apart:
                self._leave(place)
            else:
                place.runner.new_life(life)

    def runners(self) -> list[Runs]:
        return [place.runner for place in self.places.values()] + [runner for _, runner in self._left]

    def _placed(self, place: _Place) -> _Place:
        self.places[place.number] = place
        return place

    def _leave(self, place: _Place) -> None:
        del self.places[place.number]
        place.runner.leave()
        self._left.append((time.monotonic(), place.runner))

    def _give_up(self, place: _Place) -> None:
        del self.places[place.number]
        place.runner.abandon()
        if place is self._shared:
            self._shared = None

    def _set_apart(self, place: _Place) -> None:
        """Leave a runner to the job that blocks it, and begin the others again in the shared one."""
        known, culprit = place.blocking()
        others = [each for each in place.jobs.values() if each is not culprit]
        if not known or not others or (culprit and not place.apart and self._apart() >= MOST_APART):
            return
        self._log.warning("environment_blocks", trajectory=culprit and culprit.job.trajectory_id, again=len(others))
        if place is self._shared:
            self._shared = None
        if culprit is None:
            self._leave(place)
        else:
            place.apart, place.jobs = True, {id(culprit.job): culprit}
        self.start(others)

    def _blocked(self, place: _Place) -> Answers:
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
        reason = f"blocks its {place.what} for longer than {self._timeout_seconds:g} s"
        return [(culprit.job, Failed(f"environment {culprit.job.environment} {reason}"))]

    def _ended(self, place: _Place) -> Answers:
        """A process has ended: by the one job that was in it, by the one that it was in, or nobody knows by whom."""
        metrics.PROCESSES_ENDED.inc()
        known, culprit = place.blocking()
        self._give_up(place)
        waiting = list(place.jobs.values())
        at = culprit and culprit.job.trajectory_id
        how = place.ended.strip()
        self._log.error(f"environment_{place.what}_ended", how=how, trajectory=at, under_way=len(waiting))
        if place.apart and len(waiting) == 1:
            return self._died_alone(waiting[0], f"its {place.what}{place.ended}")
        if known:
            self.suspects += [[each] for each in waiting if each is culprit]
            self.start([each for each in waiting if each is not culprit])
            return []
        for each in waiting:
            each.ends += 1
        self._halve([each for each in waiting if each.ends >= ENDS])
        self.start([each for each in waiting if each.ends < ENDS])
        return []

    def _died_alone(self, waiting: _InFlight, how: str) -> Answers:
        waiting.deaths += 1
        if waiting.deaths < DEATHS:
            self.suspects.append([waiting])
            return []
        reason = f"{how}, each of {DEATHS} times that this trajectory was alone in it"
        return [(waiting.job, Failed(f"environment {waiting.job.environment}: {reason}"))]

    def _halve(self, waiting: list[_InFlight]) -> None:
        half = (len(waiting) + 1) // 2
        self.suspects += [part for part in (waiting[:half], waiting[half:]) if part]

    def _apart(self) -> int:
        return sum(place.apart for place in self.places.values())

    def _try_suspects(self) -> None:
        while self.suspects and self._apart() < MOST_APART:
            place = self._placed(self._new_place())
            place.apart = True
            place.start(self.suspects.popleft())


class Stage:
    """Runs jobs. Used by one thread."""

    def __init__(self, new_runner: NewRunner, *, timeout_seconds: float) -> None:
        self._new_runner = new_runner
        self._timeout_seconds = timeout_seconds
        self._life = 0
        self._lanes: dict[str, _Lane] = {}
        """By the environment's name."""
        self._answers: queue.Queue[tuple[int, Job, Answer]] = queue.Queue()
        """Each with the number of the runner that gave it. No SimpleQueue: a signal amid its wait can make that
        endless, as if no timeout had been given."""
        self._numbers = count()
        self._looked_at = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Jobs that were started and not answered."""
        return sum(lane.in_flight for lane in self._lanes.values())

    @property
    def live(self) -> int:
        """Environments that are held or stepped; as another thread sees it, so a figure for people."""
        return sum(runner.live for runner in self._runners())

    @property
    def threads_stuck(self) -> int:
        """Threads in which a call goes on that was given up."""
        return sum(runner.threads_stuck for runner in self._runners())

    def begin(self, kind: str) -> Runs:
        """The runner in which environments of this name will run, before there is anything to do."""
        return self._lane(kind).shared.runner

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin with these jobs."""
        kinds: dict[str, list[_InFlight]] = {}
        for job in jobs:
            kinds.setdefault(job.environment, []).append(_InFlight(job))
        for kind, of_kind in kinds.items():
            self._lane(kind).start(of_kind)

    def answers(self, timeout_seconds: float) -> Answers:
        """What has ended since the last call; waits for the first one, no longer than the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            answers = self._taken(min(left, LOOK_SECONDS))
            now = time.monotonic()
            looked, self._looked_at = min(now - self._looked_at, self._timeout_seconds / LOOKS), now
            for lane in self._lanes.values():
                answers += lane.look(looked)
            if answers or left <= LOOK_SECONDS:
                return answers

    def let_go(self, trajectory_ids: Iterable[str]) -> None:
        """Close the environments of trajectories that have ended."""
        ended = list(trajectory_ids)
        for lane in self._lanes.values():
            for place in lane.places.values():
                place.runner.let_go(ended)

    def new_life(self, life: int) -> None:
        """Close all environments, and forget all jobs: what was of earlier lives does not count any more."""
        self._life = life
        for lane in self._lanes.values():
            lane.new_life(life)

    def close(self) -> None:
        """Stop everything, within little more than environments may take to close."""
        runners = self._runners()
        for runner in runners:
            runner.leave()
        deadline = time.monotonic() + CLOSE_SECONDS
        for runner in runners:
            runner.close(max(0.0, deadline - time.monotonic()))

    def _runners(self) -> list[Runs]:
        return [runner for lane in self._lanes.values() for runner in lane.runners()]

    def _lane(self, kind: str) -> _Lane:
        if kind not in self._lanes:
            self._lanes[kind] = _Lane(kind, lambda: self._new_place(kind), self._timeout_seconds)
        return self._lanes[kind]

    def _taken(self, timeout_seconds: float) -> Answers:
        answers: Answers = []
        try:
            number, job, answer = self._answers.get(timeout_seconds > 0, timeout_seconds)
            while True:
                if self._lanes[job.environment].answered(number, job):
                    answers.append((job, answer))
                number, job, answer = self._answers.get_nowait()
        except queue.Empty:
            return answers

    def _new_place(self, kind: str) -> _Place:
        number = next(self._numbers)
        runner = self._new_runner(kind, lambda job, answer: self._answers.put((number, job, answer)), self._life)
        return _Place(number, runner)
