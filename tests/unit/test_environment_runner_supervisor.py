"""Attribution of a process exit: a supervisor with runners that exit on command."""

from dataclasses import dataclass, field
from itertools import count

from rose.workers.environments.jobs import NO_JOB, EnvironmentFailure, Job, RunnerLimits
from rose.workers.environments.runner_supervisor import (
    LOOKS,
    MAX_SHARED_EXITS,
    InFlight,
    JobResults,
    RunnerSlot,
    RunnerSupervisor,
)
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


class RunnerSupervisorFixture:
    """A supervisor and its processes."""

    def __init__(self, *names: str) -> None:
        self.numbers = count()
        self.made: list[ScriptedProcess] = []
        self.lane = RunnerSupervisor("counter", self.place, LIMITS)
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
    supervised = RunnerSupervisorFixture("long", "brief", "other")
    for _ in range(MAX_SHARED_EXITS):
        assert supervised.ends("long") == []
    shared = supervised.holds("long")
    assert shared is supervised.holds("brief") and shared is not supervised.holds("other")
    assert supervised.lane.on_result(shared.number, supervised.jobs["brief"])
    assert supervised.ends("long", runs=NO_JOB) == []
    assert supervised.ends("long") == [], "once alone in it"
    ((job, answer),) = supervised.ends("long")
    assert (
        job.trajectory_id == "long" and isinstance(answer, EnvironmentFailure) and "each of 2 times" in answer.failure
    )


def test_job_suspected_of_an_exit_is_retried_alone_and_the_others_together() -> None:
    supervised = RunnerSupervisorFixture("bad", "a", "b")
    assert supervised.ends("bad", runs=supervised.jobs["bad"]) == []
    assert supervised.holds("a") is supervised.holds("b") and len(supervised.holds("a").jobs) == 2
    assert len(supervised.holds("bad").jobs) == 1


def test_jobs_held_up_for_a_quarter_of_the_step_limit_are_repeated_apart() -> None:
    """Each may block only because it waits for a lock that another one holds across an await."""
    supervised = RunnerSupervisorFixture("first", "waits", "holds", "other")
    first = supervised.holds("first")
    assert supervised.lane.on_result(first.number, supervised.jobs.pop("first"))
    process = hold_up(supervised, "waits")
    assert len({supervised.holds(name).number for name in supervised.jobs}) == len(supervised.jobs)
    assert process not in supervised.lane.runners(), "it was killed, and nothing is left in it"


def test_process_without_an_answer_so_far_is_not_killed_for_a_job_that_holds_others_up() -> None:
    supervised = RunnerSupervisorFixture("loads", "a", "b")
    process = hold_up(supervised, "loads")
    assert process in supervised.lane.runners() and supervised.holds("loads").runner is process
    assert supervised.holds("a") is supervised.holds("b") is not supervised.holds("loads")


def hold_up(supervised: RunnerSupervisorFixture, name: str) -> ScriptedProcess:
    """Let this job block its process for a quarter of the step limit; return the process."""
    process = supervised.holds(name).runner
    assert isinstance(process, ScriptedProcess)
    process.runs = supervised.jobs[name]
    for _ in range(LOOKS):
        assert supervised.lane.check(LIMITS.timeout_seconds / 4 / (LOOKS - 1)) == []
    return process
