"""Environments in processes: changes of its process by an environment fail only its own trajectory, and leave nothing
behind."""

import os
import signal
from pathlib import Path

import pytest

from rose.workers.environments import runner_supervisor
from rose.workers.environments.config import LEAST_MEMORY
from rose.workers.environments.jobs import EnvironmentFailure, JobResult
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.transitions import StepResult
from tests.support.environment_fixtures import WAIT_SECONDS, answers, answers_of
from tests.support.misbehaving_environment import CHANGES, FOLDER, FORKS, NAME
from tests.support.runner_processes import AWAY, processes, reset, step, stepped
from tests.support.scripted_executors import model_folder
from tests.support.waiting import has_ended, until

ENDINGS = {
    "end": "ended with status 3",
    "crash": "was ended by SIGSEGV",
    "kill": "was ended by SIGKILL",
    "end in a thread": "ended with status 3",
    "task: end": "ended with status 3",
    "gather: end": "ended with status 3",
    "close all files": "its process",
}


MOST_SNAPSHOT = 900_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return model_folder(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("deed", ENDINGS)
def test_environment_that_exits_fails_alone_and_is_reported(folder: Path, deed: str) -> None:
    healthy = [f"t{number}" for number in range(10)]
    with processes(folder) as stage:
        found = answers(stage, [*(step(name, "go", b"4") for name in healthy), step("bad", deed), reset("begun")])
        failed = found.pop("bad")
        assert isinstance(failed, EnvironmentFailure) and failed.failure.startswith(f"environment {NAME}: its process")
        assert ENDINGS[deed] in failed.failure
        assert isinstance(found.pop("begun"), ResetResult)
        assert {stepped(answer) for answer in found.values()} == {b"5"}
        found = answers(stage, [step(name, "go", b"5") for name in healthy])
        assert {stepped(answer) for answer in found.values()} == {b"6"}


@pytest.mark.slow
def test_environment_that_exits_between_jobs_is_found_among_many(folder: Path) -> None:
    healthy = [f"t{number}" for number in range(6)]
    with processes(folder) as stage:
        found = answers(stage, [*(step(name, "pause", b"4") for name in healthy), step("bad", "end meanwhile")])
        failed = found.pop("bad")
        assert isinstance(failed, EnvironmentFailure) and "alone in it" in failed.failure
        assert {stepped(answer) for answer in found.values()} == {b"5"}


@pytest.mark.slow
def test_snapshot_beyond_the_size_of_a_message_fails_its_trajectory_with_the_size(folder: Path) -> None:
    with processes(folder) as stage:
        found = answers(stage, [step("good", "go", b"4"), step("bad", "large snapshot", b"4")])
        assert stepped(found["good"]) == b"5"
        assert isinstance(found["bad"], EnvironmentFailure) and "it hands back 68157" in found["bad"].failure


@pytest.mark.slow
def test_reset_that_exits_fails_alone(folder: Path) -> None:
    with processes(folder) as stage:
        found = answers(stage, [reset("good"), reset("bad", deed="end")])
        assert isinstance(found["good"], ResetResult)
        assert isinstance(found["bad"], EnvironmentFailure) and "ended with status 3" in found["bad"].failure


@pytest.mark.slow
def test_environment_that_takes_all_memory_fails_alone(folder: Path) -> None:
    with processes(folder, memory_bytes=LEAST_MEMORY) as stage:
        answers(stage, [step("first", "go")])
        found = answers(stage, [*(step(name, "nap") for name in "ab"), step("bad", "all memory"), step("c", "nap")])
        assert [stepped(found[name]) for name in "abc"] == [b"1"] * 3
        failed = found["bad"]
        assert isinstance(failed, EnvironmentFailure) and "memory" in failed.failure.lower()
        assert stepped(answers(stage, [step("later", "go")])["later"]) == b"1"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may call chroot")
def test_process_whose_environment_called_chroot_is_replaced(folder: Path) -> None:
    with processes(folder) as stage:
        assert stepped(answers(stage, [step("bad", "chroot")])["bad"]) == b"1"
        found = answers(stage, [step(name, "go") for name in "abc"])
        assert [stepped(answer) for answer in found.values()] == [b"1"] * 3


BLOCKS = pytest.mark.parametrize("deed", ["sleep", "hold", "task: sleep", "gather: sleep"])
"""Deeds that block in the step, in native code that holds the interpreter, and in a task of the environment."""


@pytest.mark.slow
@BLOCKS
def test_others_are_answered_before_the_time_of_a_blocking_environment_is_over(folder: Path, deed: str) -> None:
    with processes(folder, timeout_seconds=10 * WAIT_SECONDS) as stage:
        answers(stage, [step("first", "go")])
        stage.start([step("bad", deed), *(step(name, "go") for name in "abc")])
        answered: set[str] = set()
        while len(answered) < 3:
            answered |= {job.trajectory_id for job, _ in stage.results(WAIT_SECONDS)}
        assert answered == set("abc")


@pytest.mark.slow
@BLOCKS
def test_blocking_environment_fails_at_its_timeout(folder: Path, deed: str) -> None:
    with processes(folder, timeout_seconds=1.0) as stage:
        failed = answers(stage, [step("bad", deed)])["bad"]
        assert isinstance(failed, EnvironmentFailure) and "blocks its thread for longer than 1 s" in failed.failure


@pytest.mark.slow
def test_long_step_beside_blocking_tasks_is_not_repeated_endlessly(folder: Path) -> None:
    with processes(folder) as stage:
        stage.start([step("long", "long", b"4")])
        ended: dict[str, JobResult] = {}
        for number in range(8):
            for name, action in ((f"t{number}", "leave a block"), (f"p{number}", "pause")):
                stage.start([step(name, action, b"4")])
                while name not in ended:
                    ended |= {job.trajectory_id: answer for job, answer in stage.results(WAIT_SECONDS)}
        while "long" not in ended:
            ended |= {job.trajectory_id: answer for job, answer in stage.results(WAIT_SECONDS)}
        assert {stepped(answer) for answer in ended.values()} == {b"5"}
    assert len((folder / "long").read_text()) <= runner_supervisor.MAX_SHARED_EXITS + 1


@pytest.mark.slow
def test_child_task_of_an_environment_can_be_inspected(folder: Path) -> None:
    with processes(folder) as stage:
        assert stepped(answers(stage, [step("a", "inspect", b"4")])["a"]) == b"5"


@pytest.mark.slow
@pytest.mark.parametrize(("deed", "timeout_seconds"), [("doze", 8.0), ("nap", 3.0)])
def test_briefly_blocking_steps_all_finish(folder: Path, deed: str, timeout_seconds: float) -> None:
    with processes(folder, timeout_seconds=timeout_seconds) as stage:
        found = answers(stage, [step(f"t{number}", deed, b"4") for number in range(12)])
        assert {stepped(answer) for answer in found.values()} == {b"5"}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_process_changes_by_an_environment_reach_no_other_trajectory(folder: Path, change: str) -> None:
    with processes(folder) as stage:
        answers(stage, [step("a", "use", b"3"), step("b", "use", b"3")])
        found = answers(stage, [step("a", "use", b"4"), step("bad", change, b"4"), step("b", "use", b"4")])
        assert {stepped(answer) for answer in found.values()} == {b"5"}
        found = answers(stage, [step("b", "use", b"5"), step("c", "use", b"5")])
        assert {stepped(answer) for answer in found.values()} == {b"6"}


@pytest.mark.slow
def test_output_captured_across_an_await_belongs_to_its_trajectory(folder: Path) -> None:
    with processes(folder) as stage:
        found = answers(stage, [step(name, "capture", b"4") for name in "abcde"])
        assert {stepped(answer) for answer in found.values()} == {b"5"}
        assert stepped(answers(stage, [step("a", "use", b"5")])["a"]) == b"6"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "thread: ", "task: "])
@pytest.mark.parametrize("how", FORKS)
def test_forked_child_that_returns_from_a_step_continues_no_trajectory(folder: Path, where: str, how: str) -> None:
    with processes(folder) as stage:
        stage.start([step(name, "wait", b"4") for name in "abc"])
        until(lambda: stage.results(0.0) == [] and any(folder.rglob("*.waits")))
        (waits,) = folder.rglob("*.waits")
        found = answers_of(stage, [step("forks", where + how, b"4")])
        assert stepped(found["forks"]) == b"5"
        (waits.parent / "gate").touch()
        while len(found) < 4:
            found |= {job.trajectory_id: answer for job, answer in stage.results(WAIT_SECONDS)}
        assert {stepped(answer) for answer in found.values()} == {b"5"}
        children = Path(f"/proc/{waits.stem}/task/{waits.stem}/children")
        until(lambda: all(has_ended(pid) for pid in children.read_text().split()))
        assert (waits.parent / "passed").read_text() == "xxx", "each step was taken once"


@pytest.mark.parametrize("end", ["sys.exit()", "raise OSError"])
def test_forked_child_that_returns_from_an_import_sends_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    name = f"forks_{len(end)}"
    (tmp_path / f"{name}.py").write_text(
        f"import os, sys\nif os.fork() == 0:\n    {end}\nfrom tests.support.misbehaving_environment import Wild\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with processes(folder) as stage:
        runner = stage.warm_up(f"{name}:Wild")
        assert stepped(answers(stage, [step("a", "use", kind=f"{name}:Wild")])["a"]) == b"1"
        assert runner.load_error is None


def test_step_may_use_an_alarm_signal(folder: Path) -> None:
    """Python delivers signals only to the main thread."""
    with processes(folder) as stage:
        found = answers(stage, [step(name, "bound", b"4") for name in "ab"])
        assert {stepped(answer) for answer in found.values()} == {b"5"}


def test_terminal_that_a_step_opens_and_closes_ends_no_process(folder: Path) -> None:
    with processes(folder) as stage:
        assert stepped(answers(stage, [step("a", "terminal", b"4")])["a"]) == b"5"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["late", "late in a callback"])
def test_signal_that_ends_the_loop_is_reported_as_the_cause(folder: Path, when: str) -> None:
    with processes(folder) as stage:
        failed = answers(stage, [step("a", when)])["a"]
    assert isinstance(failed, EnvironmentFailure)
    assert "its process lost its event loop (TookTooLong: it took too long)" in failed.failure


def test_module_that_ignores_sigchld_hides_no_exit_status(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ignores_children.py").write_text(
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from tests.support.misbehaving_environment import Wild\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with processes(folder) as stage:
        assert stepped(answers(stage, [step("a", "use", kind="ignores_children:Wild")])["a"]) == b"1"


@pytest.mark.slow
def test_externally_killed_process_fails_no_trajectory(folder: Path) -> None:
    with processes(folder) as stage:
        stage.start([step("a", "wait", b"3"), step("b", "wait", b"3")])
        until(lambda: any(folder.rglob("*.waits")))
        (waits,) = folder.rglob("*.waits")
        os.kill(int(waits.stem), signal.SIGKILL)
        until(lambda: stage.results(0.0) == [] and len(list(folder.rglob("*.waits"))) == 2)
        (waits.parent / "gate").touch()
        found: dict[str, JobResult] = {}
        while len(found) < 2:
            found |= {job.trajectory_id: answer for job, answer in stage.results(WAIT_SECONDS)}
        assert {stepped(answer) for answer in found.values()} == {b"4"}


def test_environment_that_exits_during_close_keeps_its_last_step(folder: Path) -> None:
    kind = NAME.replace("Wild", "EndsAtLast")
    with processes(folder) as stage:
        done = answers(stage, [step("bad", "done", kind=kind)])["bad"]
        assert isinstance(done, StepResult) and done.done
        assert stepped(answers(stage, [step("good", "go", kind=kind)])["good"]) == b"1"


@pytest.mark.slow
def test_temporary_process_start_failures_fail_no_trajectory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_supervisor, "TRY_SECONDS", 0.01)
    monkeypatch.setattr(runner_supervisor, "LONGEST_TRY_SECONDS", 0.01)
    (tmp_path / "away.py").write_text(AWAY)
    monkeypatch.syspath_prepend(tmp_path)
    kind, away, started_file = "away:Wild", tmp_path / "away", tmp_path / "begun"
    with processes(folder) as stage:
        assert stepped(answers(stage, [step("first", "go", kind=kind)])["first"]) == b"1"
        away.touch()
        started_file.unlink()
        found: dict[str, JobResult] = {}
        stage.start([*(step(name, "go", b"3", kind=kind) for name in "abc"), step("bad", "end", kind=kind)])

        def tries() -> int:
            found.update({job.trajectory_id: answer for job, answer in stage.results(0.0)})
            return started_file.stat().st_size if started_file.exists() else 0

        until(lambda: tries() >= 6)
        away.unlink()
        until(lambda: tries() > 0 and len(found) == 4)
        failed = found.pop("bad")
        assert isinstance(failed, EnvironmentFailure) and "ended with status 3, each of 2 times" in failed.failure
        assert [stepped(answer) for answer in found.values()] == [b"4"] * 3


@pytest.mark.parametrize(
    ("way", "says"), [("away", "RuntimeError: the share is away"), ("hangs", "did not begin within 0.5 s")]
)
def test_jobs_of_a_process_that_cannot_restart_fail_and_others_continue(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, says: str
) -> None:
    monkeypatch.setattr(runner_supervisor, "TRY_SECONDS", 0.01)
    (tmp_path / "away.py").write_text(AWAY)
    monkeypatch.syspath_prepend(tmp_path)
    kind = "away:Wild"
    with processes(folder, timeout_seconds=5.0) as stage:
        answers(stage, [step("first", "go", kind=kind), step("second", "go")])
        if way == "hangs":
            monkeypatch.setattr(runner_supervisor, "BEGIN_SECONDS", 0.5)
        (tmp_path / way).touch()
        found = answers(stage, [step("bad", "end", kind=kind), step("beside", "wait", kind=kind), step("other", "go")])
        assert stepped(found["other"]) == b"1"
        for name in ("bad", "beside"):
            failed = found[name]
            assert (
                isinstance(failed, EnvironmentFailure)
                and "could begin within 5 s" in failed.failure
                and says in failed.failure
            )


@pytest.mark.slow
def test_long_step_finishes_beside_environments_that_exit_during_close(folder: Path) -> None:
    kind = NAME.replace("Wild", "EndsAtLast")
    with processes(folder) as stage:
        stage.start([step("long", "wait", kind=kind)])

        def begun() -> int:
            assert stage.results(0.0) == []
            return len(list(folder.rglob("*.waits")))

        for times in range(1, runner_supervisor.MAX_SHARED_EXITS + 1):
            until(lambda times=times: begun() == times)  # type: ignore[misc]
            assert set(answers_of(stage, [step(f"brief{times}", "done", kind=kind)])) == {f"brief{times}"}
        until(lambda: begun() == runner_supervisor.MAX_SHARED_EXITS + 1)
        for times in range(3):
            assert set(answers_of(stage, [step(f"later{times}", "done", kind=kind)])) == {f"later{times}"}
        assert begun() == runner_supervisor.MAX_SHARED_EXITS + 1
        (next(folder.rglob("*.waits")).parent / "gate").touch()
        ((job, answer),) = stage.results(WAIT_SECONDS)
        assert job.trajectory_id == "long" and stepped(answer) == b"1"


def test_jobs_larger_than_a_message_end_no_process(folder: Path) -> None:
    with processes(folder) as stage:
        stage.start([step(f"t{number}", "wait", b" " * MOST_SNAPSHOT + b"4") for number in range(80)])
        until(lambda: stage.results(0.0) == [] and any(folder.rglob("*.waits")))
        (waits,) = folder.rglob("*.waits")
        (waits.parent / "gate").touch()
        found: dict[str, JobResult] = {}
        while len(found) < 80:
            found |= {job.trajectory_id: answer for job, answer in stage.results(WAIT_SECONDS)}
        assert {stepped(answer) for answer in found.values()} == {b"5"}
        assert len(list(folder.rglob("*.waits"))) == 1, "one process has done them all"


@pytest.mark.slow
def test_process_with_many_hung_threads_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_supervisor, "MOST_STUCK", 3)
    with processes(folder, timeout_seconds=0.5) as stage:
        answers(stage, [step("good", "go")])
        first = stage.warm_up(NAME)
        found = answers(stage, [step(name, "hang in a thread") for name in "abc"])
        assert all(isinstance(answer, EnvironmentFailure) for answer in found.values())
        until(lambda: stage.results(0.1) == [] and stage.warm_up(NAME) is not first)
        assert stepped(answers(stage, [step("good", "go", b"1")])["good"]) == b"2"


def test_step_that_finds_no_thread_is_repeated_in_another_process(folder: Path) -> None:
    with processes(folder) as stage:
        found = answers(stage, [step("a", "no thread at first", b"4"), step("b", "pause", b"4")])
        assert {stepped(answer) for answer in found.values()} == {b"5"}
