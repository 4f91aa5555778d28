"""The stage: a failing, hanging or lying environment harms its own trajectory alone, and few are held at once."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.scripted_executors import ACT, CHARACTERS, END, FIRST_CHARACTER, model_folder
from tests.signals import signals_come
from workers.environments import stage as stage_module
from workers.environments.home import Begun
from workers.environments.protocol import Environment, EnvironmentArgumentError, JsonValue, Step
from workers.environments.runner import Advance, Answer, Failed, Job, Refused, Reset
from workers.environments.stage import Stage
from workers.environments.steps import Stepped
from workers.environments.turn_format import TurnFormat

WAIT_SECONDS = 30.0


class Counter:
    """Counts its steps; the action says how it behaves. An environment as a user might write it."""

    held = 0
    restored = 0
    gate = threading.Event()
    blocks = threading.Event()

    def __init__(self) -> None:
        self.steps = 0
        type(self).held += 1

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        if "refuse" in arguments:
            raise EnvironmentArgumentError("counter takes no refuse")
        if "break" in arguments:
            raise RuntimeError("no container")
        return f"seed {seed}"

    async def step(self, action: str) -> Step:
        if action == "hang":
            await asyncio.Event().wait()
        if action == "wait":
            await asyncio.get_running_loop().run_in_executor(None, self.gate.wait, WAIT_SECONDS)
        if action == "sleep":
            time.sleep(3600)
        if action == "block":
            self.block()
        if action == "spin":
            while True:
                pass
        if action == "later":
            asyncio.get_running_loop().call_soon(self.block)
            await asyncio.Event().wait()
        if action == "raise":
            raise ValueError("boom")
        if action == "exit":
            raise SystemExit(3)
        if action == "cancel":
            raise asyncio.CancelledError
        if action == "lie":
            return "no step"  # type: ignore[return-value]
        self.steps += 1
        done = action == "done"
        return Step(observation=f"{self.steps}", reward=1.0, done=done, success=done)

    def block(self) -> None:
        self.blocks.set()
        while not self.gate.is_set():
            pass

    async def snapshot(self) -> bytes:
        return str(self.steps).encode()

    async def restore(self, state: bytes) -> None:
        type(self).restored += 1
        self.steps = int(state)

    async def close(self) -> None:
        type(self).held -= 1


class Blocking(Counter):
    """Counted apart: what was left behind may still be closing while the next test runs."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


@contextmanager
def stage_of(
    folder: Path, create: Callable[[str], Environment] = lambda _name: Counter(), **limits: Any
) -> Iterator[Stage]:
    Counter.held = Counter.restored = 0
    Counter.gate.clear()
    Counter.blocks.clear()
    stage = Stage(TurnFormat(folder), create, **{"max_live": 8, "timeout_seconds": WAIT_SECONDS, **limits})
    stage.new_life(1)
    try:
        yield stage
    finally:
        stage.close()
    assert Counter.held == 0, "every environment was closed"


def reset(name: str, **arguments: Any) -> Reset:
    return Reset(life=1, trajectory_id=name, environment="counter", ticket=name, seed=7, arguments=arguments)


def act(name: str, action: str, state: bytes = b"0", *, life: int = 1, environment: str = "counter") -> Advance:
    tokens = [FIRST_CHARACTER + CHARACTERS.index(character) for character in action] + [END]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return Advance(life=life, trajectory_id=name, environment=environment, ticket=name, tokens=packed, state=state)


def answers(stage: Stage, jobs: list[Job]) -> dict[str, Answer]:
    """What each job was answered."""
    stage.start(jobs)
    found: dict[str, Answer] = {}
    while len(found) < len(jobs):
        ended = stage.answers(WAIT_SECONDS)
        assert ended, f"only {sorted(found)} answered"
        found.update({job.trajectory_id: answer for job, answer in ended})
    assert stage.in_flight == 0
    return found


def test_a_signal_amid_a_wait_for_answers_does_not_make_it_endless(folder: Path) -> None:
    """A worker that was asked to leave while a step blocked its thread did not leave."""
    with stage_of(folder) as stage, signals_come():
        for _ in range(50):
            assert stage.answers(0.002) == []


def test_a_task_goes_on_from_where_it_was(folder: Path) -> None:
    with stage_of(folder) as stage:
        begun = answers(stage, [reset("a")])["a"]
        assert isinstance(begun, Begun) and begun.state == b"0"
        assert begun.observation[-4:] == ACT.to_bytes(4, "little")
        for turn in range(3):
            stepped = answers(stage, [act("a", "go", b"77")])["a"]
            assert isinstance(stepped, Stepped) and stepped.state == str(turn + 1).encode()
        done = answers(stage, [act("a", "done")])["a"]
        assert isinstance(done, Stepped) and done.done and done.state == done.observation == b""
        assert stage.live == 0, "a task that is done is not held"


@pytest.mark.parametrize("action", ["raise", "exit", "cancel", "lie"])
def test_whatever_an_environment_raises_fails_its_trajectory_alone(folder: Path, action: str) -> None:
    with stage_of(folder) as stage:
        found = answers(stage, [act("bad", action), act("good", "go")])
        assert isinstance(found["bad"], Failed) and "counter" in found["bad"].failure
        assert isinstance(found["good"], Stepped)


def test_a_hanging_environment_is_given_up_after_the_time_allowed(folder: Path) -> None:
    with stage_of(folder, timeout_seconds=0.05) as stage:
        failed = answers(stage, [act("bad", "hang")])["bad"]
        assert isinstance(failed, Failed) and "longer than 0.05 s" in failed.failure


@pytest.mark.parametrize("action", ["sleep", "spin"])
def test_an_environment_that_blocks_its_thread_fails_alone_and_the_others_are_done_again(
    folder: Path, action: str
) -> None:
    with stage_of(folder, lambda _name: Blocking(), timeout_seconds=0.5) as stage:
        answers(stage, [reset("a"), reset("b"), reset("bad")])
        answers(stage, [act(name, "go") for name in ("a", "b", "bad")])
        found = answers(stage, [act("a", "go", b"1"), act("bad", action, b"1"), act("b", "go", b"1"), reset("c")])
        failed = found.pop("bad")
        assert isinstance(failed, Failed) and "blocks its thread for longer than 0.5 s" in failed.failure
        assert isinstance(found.pop("c"), Begun)
        assert [answer.state for answer in found.values() if isinstance(answer, Stepped)] == [b"2", b"2"]
        more = answers(stage, [act("a", "go", b"2"), act("c", "go", b"0")])
        assert all(isinstance(answer, Stepped) for answer in more.values())


def test_an_environment_that_blocks_its_thread_holds_up_no_other_kind(folder: Path) -> None:
    with stage_of(folder, lambda _name: Blocking(), timeout_seconds=60.0) as stage:
        stage.start([act("bad", "block", environment="blocking")])
        assert isinstance(answers_of(stage, [act("good", "go")])["good"], Stepped)
        assert stage.in_flight == 1
        Counter.gate.set()
        assert [job.trajectory_id for job, _ in stage.answers(WAIT_SECONDS)] == ["bad"]


def test_what_an_earlier_life_left_behind_is_not_begun_again(folder: Path) -> None:
    """It would block the next thread too, and the one after it, for nobody."""
    with stage_of(folder, lambda _name: Blocking(), timeout_seconds=0.5) as stage:
        stage.start([act("bad", "block"), act("worse", "block")])
        stage.new_life(2)
        assert stage.in_flight == 0
        found = answers(stage, [act("good", "go", life=2)])
        assert isinstance(found["good"], Stepped)
        Counter.gate.set()


def test_an_environment_whose_callback_blocks_the_thread_is_given_up_in_the_end(folder: Path) -> None:
    with stage_of(folder, lambda _name: Blocking(), timeout_seconds=0.3) as stage:
        failed = answers(stage, [act("bad", "later")])["bad"]
        assert isinstance(failed, Failed) and "blocks its thread" in failed.failure
        assert isinstance(answers(stage, [act("good", "go")])["good"], Stepped)
        Counter.gate.set()


def test_a_blocked_thread_is_noticed_in_time_by_who_looks_seldom_and_not_by_who_was_frozen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker looks between its transactions, each of which may take a second."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(stage_module, "time", clock)

    def looks(stage: Stage, seconds: float) -> bool:
        clock.now += seconds
        return bool(stage.answers(0.0))

    with stage_of(folder, lambda _name: Blocking(), timeout_seconds=8.0) as stage:
        stage.start([act("bad", "block", environment="blocking")])
        assert Counter.blocks.wait(WAIT_SECONDS)
        looks(stage, 0.0)  # its last beat
        assert not looks(stage, 3600.0), "of a freeze no more counts than of any look"
        assert [looks(stage, 1.0) for _ in range(8)] == [*[False] * 7, True]
        Counter.gate.set()


def test_a_slow_environment_holds_nobody_up(folder: Path) -> None:
    with stage_of(folder) as stage:
        stage.start([act("slow", "wait")])
        assert isinstance(answers_of(stage, [act("quick", "go")])["quick"], Stepped)
        assert stage.in_flight == 1
        Counter.gate.set()
        assert [job.trajectory_id for job, _ in stage.answers(WAIT_SECONDS)] == ["slow"]


def answers_of(stage: Stage, jobs: list[Job]) -> dict[str, Answer]:
    """As `answers`, while others are in flight."""
    stage.start(jobs)
    return {job.trajectory_id: answer for job, answer in stage.answers(WAIT_SECONDS)}


def test_refused_arguments_are_told_from_a_failure(folder: Path) -> None:
    with stage_of(folder) as stage:
        found = answers(stage, [reset("refused", refuse=1), reset("broken", **{"break": 1})])
        assert found["refused"] == Refused("counter takes no refuse")
        assert isinstance(found["broken"], Failed) and "no container" in found["broken"].failure


def test_no_more_are_held_than_allowed_and_the_others_are_restored(folder: Path) -> None:
    names = [f"t{number}" for number in range(12)]
    with stage_of(folder, max_live=3) as stage:
        answers(stage, [reset(name) for name in names])
        assert stage.live == Counter.held == 3
        for turn in range(4):
            found = answers(stage, [act(name, "go", str(turn).encode()) for name in names])
            assert {answer.state for answer in found.values() if isinstance(answer, Stepped)} == {
                str(turn + 1).encode()
            }
            assert Counter.held <= 3
        assert Counter.restored > 0


def test_what_was_held_for_an_earlier_life_is_not_used(folder: Path) -> None:
    with stage_of(folder) as stage:
        answers(stage, [reset("a")])
        answers(stage, [act("a", "go")])
        stage.new_life(2)
        stepped = answers(stage, [act("a", "go", b"40", life=2)])["a"]
        assert isinstance(stepped, Stepped) and stepped.state == b"41"


def test_an_environment_that_cannot_be_made_fails_its_trajectory(folder: Path) -> None:
    def create(name: str) -> Environment:
        raise OSError("no image")

    with stage_of(folder, create) as stage:
        failed = answers(stage, [act("a", "go")])["a"]
        assert isinstance(failed, Failed) and "no image" in failed.failure
