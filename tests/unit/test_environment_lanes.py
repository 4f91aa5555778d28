"""Who is to blame for the end of a process: a lane in front of runners that end when the test says so."""

from dataclasses import dataclass, field
from itertools import count

from tests.unit.stage_world import act
from workers.environments.jobs import NOBODY, Failed, Job, Limits
from workers.environments.lanes import ENDS, Answers, InFlight, Lane, Place

LIMITS = Limits(max_live=8, timeout_seconds=60.0, max_context_tokens=1024)


@dataclass(eq=False)
class Played:
    """A process that does nothing by itself."""

    killable: bool = True
    beats: int = 0
    threads_stuck: int = 0
    live: int = 0
    ready: bool = True
    unfit: str = ""
    ended: str = ""
    began: list[str] = field(default_factory=list)
    runs: Job | None = None

    def start(self, jobs: list[Job]) -> None:
        self.began += [job.trajectory_id for job in jobs]

    def let_go(self, trajectory_ids: list[str]) -> None: ...

    def withdraw(self, trajectory_ids: list[str]) -> None: ...

    def new_life(self, life: int) -> None: ...

    def running(self) -> Job | None:
        return self.runs

    def leave(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self, seconds: float) -> None: ...


class World:
    """A lane and its processes."""

    def __init__(self, *names: str) -> None:
        self.numbers = count()
        self.made: list[Played] = []
        self.lane = Lane("counter", self.place, LIMITS)
        self.jobs = {name: act(name, "go") for name in names}
        self.lane.start([InFlight(job) for job in self.jobs.values()])

    def place(self) -> Place:
        self.made.append(Played())
        return Place(next(self.numbers), self.made[-1])

    def holds(self, name: str) -> Place:
        (place,) = (place for place in self.lane.places.values() if id(self.jobs[name]) in place.jobs)
        return place

    def ends(self, name: str, *, runs: Job | None = None) -> Answers:
        """The process that has this job ends, in that job's code."""
        process = self.holds(name).runner
        assert isinstance(process, Played)
        process.runs, process.ended = runs, " was ended by SIGKILL"
        return self.lane.look(0.0) + self.lane.look(0.0)


def test_a_job_is_not_blamed_for_what_another_does_as_it_closes() -> None:
    world = World("long", "brief", "other")
    for _ in range(ENDS):
        assert world.ends("long") == []
    shared = world.holds("long")
    assert shared is world.holds("brief") and shared is not world.holds("other")
    assert world.lane.answered(shared.number, world.jobs["brief"])
    assert world.ends("long", runs=NOBODY) == []
    assert world.ends("long") == [], "once alone in it"
    ((job, answer),) = world.ends("long")
    assert job.trajectory_id == "long" and isinstance(answer, Failed) and "each of 2 times" in answer.failure


def test_a_job_in_whose_code_a_process_ends_is_begun_again_alone_and_the_others_together() -> None:
    world = World("bad", "a", "b")
    assert world.ends("bad", runs=world.jobs["bad"]) == []
    assert world.holds("a") is world.holds("b") and len(world.holds("a").jobs) == 2
    assert len(world.holds("bad").jobs) == 1
