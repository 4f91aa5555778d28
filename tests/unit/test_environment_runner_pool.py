"""The runner pool: a failing, hung or invalid environment harms only its own trajectory, and held environments are
bounded."""

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose.schemas.arrays import count, unpack_tokens
from rose.workers.environments import runner_pool as stage_module
from rose.workers.environments import runner_supervisor
from rose.workers.environments import thread_runner as runner_module
from rose.workers.environments.jobs import EnvironmentFailure, Job, ResetRefused, ResultCallback, RunnerLimits
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.protocol import Environment, JsonValue
from rose.workers.environments.runner_pool import RunnerPool
from rose.workers.environments.thread_runner import ThreadRunner
from rose.workers.environments.transitions import StepResult
from rose.workers.environments.turn_format import TurnFormat
from tests.support.environment_fixtures import (
    WAIT_SECONDS,
    Blocking,
    Counter,
    Freezing,
    Panic,
    UnprintableError,
    act,
    answers,
    answers_of,
    pool_of,
    reset,
)
from tests.support.scripted_executors import ACT, END, model_folder
from tests.support.signals import signals_come
from tests.support.waiting import until

END_BYTES = END.to_bytes(4, "little")

RAISED = [
    Panic("boom"),
    UnprintableError(),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    ValueError("\ud800"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


def test_signal_during_a_wait_for_results_does_not_prolong_the_wait(folder: Path) -> None:
    """A worker that was stopped while a step blocked its thread did not stop."""
    with pool_of(folder) as stage, signals_come():
        for _ in range(50):
            assert stage.results(0.002) == []


def test_task_continues_from_its_last_state(folder: Path) -> None:
    with pool_of(folder) as stage:
        reset_result = answers(stage, [reset("a")])["a"]
        assert isinstance(reset_result, ResetResult) and reset_result.state == b"0"
        assert reset_result.observation[-4:] == ACT.to_bytes(4, "little")
        for turn in range(3):
            stepped = answers(stage, [act("a", "go", b"77")])["a"]
            assert isinstance(stepped, StepResult) and stepped.state == str(turn + 1).encode()
        done = answers(stage, [act("a", "done")])["a"]
        assert isinstance(done, StepResult) and done.done and done.state == done.observation == b""
        assert stage.live == 0, "a task that is done is not held"


@pytest.mark.parametrize(
    ("action", "stop", "ended"),
    [("go", None, False), ("go", "", True), ("go.", ".", True)],
    ids=["by the model's own stop token", "by its length", "by a stop token of the prompt"],
)
def test_stop_token_is_left_out_of_the_action_and_kept_in_the_context(
    folder: Path, action: str, stop: str | None, *, ended: bool
) -> None:
    """An action of another text would fail: the counter accepts only `done`."""
    with pool_of(folder) as stage:
        stepped = answers(stage, [act("a", action, stop=stop)])["a"]
        assert isinstance(stepped, StepResult) and stepped.observation.startswith(END_BYTES) == ended
        done = answers(stage, [act("b", action.replace("go", "done"), stop=stop)])["b"]
        assert isinstance(done, StepResult) and done.done


def test_observation_with_a_lone_surrogate_fails_its_trajectory(folder: Path) -> None:
    with pool_of(folder) as stage:
        found = answers(stage, [act("bad", "half"), act("good", "go")])
        assert isinstance(found["bad"], EnvironmentFailure) and "half a surrogate pair" in found["bad"].failure
        assert isinstance(found["good"], StepResult)


def test_invalid_environment_value_fails_only_its_trajectory(folder: Path) -> None:
    with pool_of(folder) as stage:
        found = answers(stage, [act("bad", "lie"), act("good", "go")])
        assert isinstance(found["bad"], EnvironmentFailure) and "not a Step" in found["bad"].failure
        assert isinstance(found["good"], StepResult)


@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: type(raised).__name__)
def test_any_environment_exception_fails_only_its_trajectory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    """The environment raises in a step, and then in a close after the step, at an eviction, or at the end."""
    monkeypatch.setattr(Counter, "raises", raised)
    with pool_of(folder, max_live=1) as stage:
        found = answers(stage, [act("bad", "raise"), act("good", "go"), act("done", "done"), reset("begun")])
        failed = found.pop("bad")
        assert isinstance(failed, EnvironmentFailure) and failed.failure.startswith(
            f"environment counter: {type(raised).__name__}"
        )
        assert failed.failure.encode(), "it can be written"
        assert [type(found[name]) for name in ("good", "done", "begun")] == [StepResult, StepResult, ResetResult]
        assert stage.live == 1


@pytest.mark.parametrize("action", ["raise later", "stop"])
def test_environment_that_stops_its_event_loop_ends_no_thread(folder: Path, action: str) -> None:
    with pool_of(folder) as stage:
        found = answers(stage, [act("bad", action), act("good", "go")])
        assert [type(answer) for answer in found.values()] == [StepResult, StepResult]
        assert isinstance(answers(stage, [act("good", "go")])["good"], StepResult)


def test_jobs_with_tasks_cancelled_by_an_environment_are_answered(folder: Path) -> None:
    """Jobs that wait for room are answered too."""
    with pool_of(folder, max_live=2) as stage:
        found = answers(stage, [act("held", "hang"), act("bad", "cancel all"), *(act(name, "go") for name in "abc")])
        assert isinstance(found["held"], EnvironmentFailure) and "CancelledError" in found["held"].failure
        assert isinstance(answers(stage, [act("good", "go")])["good"], StepResult)


def test_hung_environment_is_aborted_at_its_timeout(folder: Path) -> None:
    with pool_of(folder, timeout_seconds=0.05) as stage:
        failed = answers(stage, [act("bad", "hang")])["bad"]
        assert isinstance(failed, EnvironmentFailure) and "longer than 0.05 s" in failed.failure


def test_environment_that_ignores_cancellation_is_aborted_and_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "CANCEL_SECONDS", 0.05)
    with pool_of(folder, max_live=1, timeout_seconds=0.5) as stage:
        found = answers(stage, [act("bad", "go on"), act("good", "go")])
        assert isinstance(found["bad"], EnvironmentFailure) and "longer than 0.5 s" in found["bad"].failure
        assert isinstance(found["good"], StepResult), "it keeps nobody from having room"
        assert Counter.held == 1


@pytest.mark.parametrize("looks", [0, int(WAIT_SECONDS) - 1], ids=["at first", "at last"])
def test_step_that_ends_during_a_process_freeze_is_not_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", Freezing)
    with pool_of(folder) as stage:
        assert isinstance(answers(stage, [act("a", f"freeze{looks}")])["a"], StepResult)


def test_long_step_is_late_also_by_number_of_checks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", Freezing)
    with pool_of(folder) as stage:
        failed = answers(stage, [act("a", f"freeze{int(WAIT_SECONDS) + 1}")])["a"]
        assert isinstance(failed, EnvironmentFailure) and "longer than 30 s" in failed.failure


@pytest.mark.parametrize("action", ["sleep", "spin"])
def test_thread_blocking_environment_fails_alone_and_the_others_are_retried(folder: Path, action: str) -> None:
    with pool_of(folder, lambda _name: Blocking(), timeout_seconds=0.5) as stage:
        answers(stage, [reset("a"), reset("b"), reset("bad")])
        answers(stage, [act(name, "go") for name in ("a", "b", "bad")])
        found = answers(stage, [act("a", "go", b"1"), act("bad", action, b"1"), act("b", "go", b"1"), reset("c")])
        failed = found.pop("bad")
        assert isinstance(failed, EnvironmentFailure) and "blocks its thread for longer than 0.5 s" in failed.failure
        assert isinstance(found.pop("c"), ResetResult)
        assert [answer.state for answer in found.values() if isinstance(answer, StepResult)] == [b"2", b"2"]
        more = answers(stage, [act("a", "go", b"2"), act("c", "go", b"0")])
        assert all(isinstance(answer, StepResult) for answer in more.values())


def test_environment_that_blocks_during_eviction_fails_no_trajectory(folder: Path) -> None:
    class BlocksAtLast(Blocking):
        async def close(self) -> None:
            await super().close()
            if self.steps == 1:
                self.block()

    with pool_of(folder, lambda _name: BlocksAtLast(), max_live=1, timeout_seconds=0.3) as stage:
        answers(stage, [act("bad", "go")])
        assert isinstance(answers(stage, [reset("good")])["good"], ResetResult)
        Counter.gate.set()


def test_trajectory_that_returns_to_a_worker_meets_no_old_state(folder: Path) -> None:
    def blocks(name: str, beside: dict[str, bytes]) -> dict[str, bytes]:
        """Return the states of environments that are stepped beside a blocking one, in another thread."""
        Counter.blocks.clear()
        stage.start([act(name, "block", b"3")])
        assert Counter.blocks.wait(WAIT_SECONDS)
        stage.start([act(each, "go", state) for each, state in beside.items()])
        found: dict[str, bytes] = {}
        while len(found) < len(beside):
            for job, answer in stage.results(WAIT_SECONDS):
                assert isinstance(answer, StepResult)
                found[job.trajectory_id] = answer.state
        Counter.gate.set()
        assert [job.trajectory_id for job, _ in stage.results(WAIT_SECONDS)] == [name], "its step counts"
        Counter.gate.clear()
        return found

    with pool_of(folder, lambda _name: Blocking(), timeout_seconds=60.0) as stage:
        answers(stage, [act(name, "go", b"1") for name in "abc"])
        assert blocks("c", {"a": b"2", "b": b"2"}) == {"a": b"3", "b": b"3"}
        answers(stage, [act("a", "go", b"3")])
        assert blocks("b", {"a": b"4"}) == {"a": b"5"}, "it is back in the first thread"
        Counter.gate.set()


def test_thread_blocking_environment_delays_no_other_environment_type(folder: Path) -> None:
    with pool_of(folder, lambda _name: Blocking(), timeout_seconds=60.0) as stage:
        stage.start([act("bad", "block", environment="blocking")])
        assert isinstance(answers_of(stage, [act("good", "go")])["good"], StepResult)
        assert stage.in_flight == 1
        Counter.gate.set()
        assert [job.trajectory_id for job, _ in stage.results(WAIT_SECONDS)] == ["bad"]


def test_finished_job_is_answered_although_its_environment_does_not_close(folder: Path) -> None:
    """The close of the environment hangs, or blocks its thread."""

    class NeverCloses(Blocking):
        async def close(self) -> None:
            await super().close()
            if self.steps == 2:
                await asyncio.Event().wait()
            elif self.steps == 3:
                self.block()

    with pool_of(folder, lambda _name: NeverCloses(), timeout_seconds=0.5) as stage:
        assert isinstance(answers(stage, [act("hangs", "done", b"1")])["hangs"], StepResult)
        assert isinstance(answers(stage, [act("blocks", "done", b"2")])["blocks"], StepResult)
        assert isinstance(answers(stage, [act("good", "go")])["good"], StepResult)
        Counter.gate.set()


def test_environment_that_blocks_its_thread_during_deletion_delays_no_other(folder: Path) -> None:
    class BlocksAtLast(Blocking):
        def __del__(self) -> None:
            if self.steps == 2:
                self.block()

    with pool_of(folder, lambda _name: BlocksAtLast()) as stage:
        assert isinstance(answers(stage, [act("blocks", "done", b"1")])["blocks"], StepResult)
        assert Counter.blocks.wait(WAIT_SECONDS)
        stage.start([act("good", "go")])
        (answer,) = stage.results(WAIT_SECONDS / 2)
        assert isinstance(answer[1], StepResult)
        Counter.gate.set()


def test_hung_pool_calls_take_no_thread_from_others_and_are_counted(folder: Path) -> None:
    """There are more hung calls than threads in the loop's own default pool."""
    many = 40
    with pool_of(folder, max_live=2 * many, timeout_seconds=0.5) as stage:
        found = answers(stage, [act(f"bad{number}", "pool") for number in range(many)])
        assert all(isinstance(answer, EnvironmentFailure) for answer in found.values())
        assert stage.threads_stuck == many
        Counter.gate.set()
        until(lambda: stage.threads_stuck == 0)
        assert isinstance(answers(stage, [act("good", "pool")])["good"], StepResult)


def test_object_given_to_two_trajectories_is_refused_until_it_is_closed(folder: Path) -> None:
    shared = Blocking()
    with pool_of(folder, lambda _name: shared) as stage:
        assert isinstance(answers(stage, [act("a", "go")])["a"], StepResult)
        refused = answers(stage, [act("b", "go")])["b"]
        assert isinstance(refused, EnvironmentFailure)
        assert "gave an object that another trajectory holds" in refused.failure
        assert isinstance(answers(stage, [act("a", "done", b"1")])["a"], StepResult)
        until(lambda: isinstance(answers(stage, [act("c", "go")])["c"], StepResult))


ENDS = """
import sys
from collections.abc import Mapping
from pathlib import Path
sys.path[:] = {path}
from tests.support.environment_fixtures import act, answers, pool_of
with pool_of(Path({folder!r}), timeout_seconds=0.2) as stage:
    answers(stage, [act("bad", "pool")])
"""


def test_process_exits_although_a_pool_call_hangs(folder: Path) -> None:
    program = ENDS.format(path=sys.path, folder=str(folder))
    subprocess.run([sys.executable, "-c", program], timeout=WAIT_SECONDS, check=True)


def test_observation_longer_than_any_context_is_not_fully_encoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, text = 1024, "a" * 3_000_000
    monkeypatch.setattr(Counter, "text", text)
    with pool_of(folder, max_context_tokens=limit) as stage:
        found = answers(stage, [act("long", "text"), reset("first", text=1)])
        assert isinstance(found["long"], StepResult)
        assert limit < count(found["long"].observation) < len(text) / 10, "no room is left, so the trajectory ends"
        failed = found["first"]
        assert isinstance(failed, EnvironmentFailure)
        assert "the 3000000 characters of its first observation leave no room in max_context" in failed.failure


def test_long_observation_that_may_fit_is_fully_encoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "text", "abc" * 7_000)
    with pool_of(folder, max_context_tokens=40_000) as stage:
        stepped = answers(stage, [act("long", "text")])["long"]
        assert isinstance(stepped, StepResult)
        expected = TurnFormat(folder).observation_tokens(Counter.text, first=False)
        assert list(unpack_tokens(stepped.observation)) == expected


def test_stop_cancels_running_steps_and_starts_none(folder: Path) -> None:
    with pool_of(folder, max_live=2) as stage:
        stage.start([act("held", "hang")])
        answers_of(stage, [act("good", "go")])  # the other job is in flight too
        stage.start([act("next", "hang"), act("waits", "hang")])


def test_jobs_of_an_earlier_incarnation_are_not_started(folder: Path) -> None:
    """Such a job would block the next thread, and every later one, without purpose."""
    with pool_of(folder, lambda _name: Blocking(), timeout_seconds=0.5) as stage:
        stage.start([act("bad", "block"), act("worse", "block")])
        stage.begin_generation(2)
        assert stage.in_flight == 0
        found = answers(stage, [act("good", "go", generation=2)])
        assert isinstance(found["good"], StepResult)
        Counter.gate.set()


def test_environment_with_a_blocking_callback_is_finally_aborted(folder: Path) -> None:
    with pool_of(folder, lambda _name: Blocking(), timeout_seconds=0.3) as stage:
        failed = answers(stage, [act("bad", "later")])["bad"]
        assert isinstance(failed, EnvironmentFailure) and "blocks its thread" in failed.failure
        assert isinstance(answers(stage, [act("good", "go")])["good"], StepResult)
        Counter.gate.set()


def test_blocked_thread_is_detected_by_rare_checks_and_not_after_a_freeze(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker checks between its transactions, each of which may take a second."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(stage_module, "time", clock)

    def looks(stage: RunnerPool, seconds: float) -> bool:
        clock.now += seconds
        return bool(stage.results(0.0))

    with pool_of(folder, lambda _name: Blocking(), timeout_seconds=8.0) as stage:
        stage.start([act("bad", "block", environment="blocking")])
        assert Counter.blocks.wait(WAIT_SECONDS)
        looks(stage, 0.0)  # its last heartbeat
        assert not looks(stage, 3600.0), "of a freeze no more counts than of any look"
        assert [looks(stage, 1.0) for _ in range(8)] == [*[False] * 7, True]
        Counter.gate.set()


def test_slow_environment_delays_no_other(folder: Path) -> None:
    with pool_of(folder) as stage:
        stage.start([act("slow", "wait")])
        assert isinstance(answers_of(stage, [act("quick", "go")])["quick"], StepResult)
        assert stage.in_flight == 1
        Counter.gate.set()
        assert [job.trajectory_id for job, _ in stage.results(WAIT_SECONDS)] == ["slow"]


def test_jobs_wait_for_a_runner_if_the_machine_cannot_start_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_supervisor, "TRY_SECONDS", 0.01)
    failures = [BlockingIOError("no more processes"), RuntimeError("can't start new thread")]
    turn_format, limits = (
        TurnFormat(folder),
        RunnerLimits(max_live=8, timeout_seconds=WAIT_SECONDS, max_context_tokens=1024),
    )

    def new_runner(_kind: str, answer: ResultCallback, generation: int) -> ThreadRunner:
        if failures:
            raise failures.pop()
        return ThreadRunner(turn_format, lambda _name: Counter(), answer, limits, generation=generation)

    stage = RunnerPool(new_runner, limits)
    stage.begin_generation(1)
    try:
        found = answers(stage, [act("a", "go", b"1"), act("b", "go", b"1")])
        assert [answer.state for answer in found.values() if isinstance(answer, StepResult)] == [b"2", b"2"]
        assert isinstance(answers(stage, [act("c", "go")])["c"], StepResult)
    finally:
        stage.close()


def test_refused_arguments_are_distinguished_from_a_failure(folder: Path) -> None:
    with pool_of(folder) as stage:
        found = answers(stage, [reset("refused", refuse=1), reset("mute", mute=1), reset("broken", **{"break": 1})])
        assert isinstance(found["mute"], ResetRefused)
        assert found["refused"] == ResetRefused("counter takes no refuse")
        assert isinstance(found["broken"], EnvironmentFailure) and "no container" in found["broken"].failure


def test_held_environments_are_bounded_and_the_others_are_restored(folder: Path) -> None:
    names = [f"t{number}" for number in range(12)]
    with pool_of(folder, max_live=3) as stage:
        answers(stage, [reset(name) for name in names])
        assert stage.live == Counter.held == 3
        for turn in range(4):
            found = answers(stage, [act(name, "go", str(turn).encode()) for name in names])
            assert {answer.state for answer in found.values() if isinstance(answer, StepResult)} == {
                str(turn + 1).encode()
            }
            assert Counter.held <= 3
        assert Counter.restored > 0


def test_environments_held_for_an_earlier_incarnation_are_not_used(folder: Path) -> None:
    with pool_of(folder) as stage:
        answers(stage, [reset("a")])
        answers(stage, [act("a", "go")])
        stage.begin_generation(2)
        stepped = answers(stage, [act("a", "go", b"40", generation=2)])["a"]
        assert isinstance(stepped, StepResult) and stepped.state == b"41"


@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: type(raised).__name__)
def test_environment_that_cannot_be_constructed_fails_its_trajectory(folder: Path, raised: BaseException) -> None:
    def create(name: str) -> Environment:
        raise raised

    with pool_of(folder, create) as stage:
        failed = answers(stage, [act("a", "go")])["a"]
        assert isinstance(failed, EnvironmentFailure) and type(raised).__name__ in failed.failure


class Told(Counter):
    """An environment whose state is what it was told of evaluations."""

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue], *, evaluation: str = "") -> str:
        self.evaluation = evaluation
        return await super().reset(seed, arguments)

    async def snapshot(self) -> bytes:
        return self.evaluation.encode()


def test_environment_that_takes_the_keyword_is_told_the_set_of_its_evaluation(folder: Path) -> None:
    with pool_of(folder, lambda _name: Told()) as stage:
        jobs: list[Job] = [dataclasses.replace(reset("a"), evaluation="held-out"), reset("b")]
        found = answers(stage, jobs)
    assert [result.state for result in found.values() if isinstance(result, ResetResult)] == [b"held-out", b""]


def test_environment_that_does_not_take_the_keyword_is_evaluated_all_the_same(folder: Path) -> None:
    with pool_of(folder) as stage:
        [result] = answers(stage, [dataclasses.replace(reset("a"), evaluation="held-out")]).values()
    assert isinstance(result, ResetResult)
