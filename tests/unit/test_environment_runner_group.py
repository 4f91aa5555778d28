"""Attribution of a process exit: a runner group with runners that exit on command."""

from dataclasses import dataclass, field
from itertools import count

from rose.workers.environments.jobs import NO_JOB, EnvironmentFailure, Job, RunnerLimits
from rose.workers.environments.runner_group import MAX_SHARED_EXITS, InFlight, JobResults, RunnerGroup, RunnerSlot
from tests.support.environment_fixtures import act

LIMITS = RunnerLimits(max_live=8, timeout_seconds=60.0, max_context_tokens=1024)


@dataclass(eq=False)
class ScriptedProcess:
    """A passive process."""

    killable: bool = True
    heartbeats: int = 0
    threads_stuck: int = 0
    live: int = 0
    ready: bool = True
    load_error: str = ""
    exit_reason: str = ""
    began: list[str] = field(default_factory=list)
    runs: Job | None = None

    def start(self, jobs: list[Job]) -> None:
        self.began += [job.trajectory_id for job in jobs]

    def release(self, trajectory_ids: list[str]) -> None: ...

    def cancel(self, trajectory_ids: list[str]) -> None: ...

    def begin_generation(self, generation: int) -> None: ...

    def current_job(self) -> Job | None:
        return self.runs

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def close(self, seconds: float) -> None: ...


class RunnerGroupFixture:
    """A runner group and its processes."""

    def __init__(self, *names: str) -> None:
        self.numbers = count()
        self.made: list[ScriptedProcess] = []
        self.lane = RunnerGroup("counter", self.place, LIMITS)
        self.jobs = {name: act(name, "go") for name in names}
        self.lane.start([InFlight(job) for job in self.jobs.values()])

    def place(self) -> RunnerSlot:
        self.made.append(ScriptedProcess())
        return RunnerSlot(next(self.numbers), self.made[-1])

    def holds(self, name: str) -> RunnerSlot:
        (place,) = (place for place in self.lane.slots.values() if id(self.jobs[name]) in place.jobs)
        return place

    def ends(self, name: str, *, runs: Job | None = None) -> JobResults:
        """End the process of this job, in the code of this job."""
        process = self.holds(name).runner
        assert isinstance(process, ScriptedProcess)
        process.runs, process.exit_reason = runs, " was ended by SIGKILL"
        return self.lane.check(0.0) + self.lane.check(0.0)


def test_job_is_not_blamed_for_an_exit_during_another_close() -> None:
    group_fixture = RunnerGroupFixture("long", "brief", "other")
    for _ in range(MAX_SHARED_EXITS):
        assert group_fixture.ends("long") == []
    shared = group_fixture.holds("long")
    assert shared is group_fixture.holds("brief") and shared is not group_fixture.holds("other")
    assert group_fixture.lane.on_result(shared.number, group_fixture.jobs["brief"])
    assert group_fixture.ends("long", runs=NO_JOB) == []
    assert group_fixture.ends("long") == [], "once alone in it"
    ((job, answer),) = group_fixture.ends("long")
    assert (
        job.trajectory_id == "long" and isinstance(answer, EnvironmentFailure) and "each of 2 times" in answer.failure
    )


def test_job_suspected_of_an_exit_is_retried_alone_and_the_others_together() -> None:
    group_fixture = RunnerGroupFixture("bad", "a", "b")
    assert group_fixture.ends("bad", runs=group_fixture.jobs["bad"]) == []
    assert group_fixture.holds("a") is group_fixture.holds("b") and len(group_fixture.holds("a").jobs) == 2
    assert len(group_fixture.holds("bad").jobs) == 1
