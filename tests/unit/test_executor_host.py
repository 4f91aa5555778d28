"""The engine's side of an executor, over an engine that the test plays: bounded ticks, and turns that go back."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schemas.arrays import pack_tokens
from schemas.prompts import Sampling
from workers.executor.host import EngineHost
from workers.executor.line import Line, LineFull
from workers.executor.step_cost import UNKNOWN, StepCost
from workers.executor.vllm.types import Finished
from workers.executor.wires import Wires
from workers.executor.words import REPORTS, Done, Outbox, Take

TAKE_SECONDS = 0.01
"""That a turn's context takes, at least."""


class PlayedEngine:
    version, wanted_tokens = 0, 1

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.steps: list[int] = []
        """Of each, how many turns were in it."""

    def __len__(self) -> int:
        return len(self.turns)

    def add(self, key: str, *_: Any, **__: Any) -> None:
        time.sleep(TAKE_SECONDS)
        self.turns.append(key)

    def abort(self, key: str) -> Finished | None:
        if key not in self.turns:
            return None
        self.turns.remove(key)
        return Finished(
            key=key,
            tokens=[],
            logprobs=np.zeros(0, np.float32),
            finish_reason="abort",
            spans=(),
            context_tokens=1,
            cached_tokens=0,
            added_at=0.0,
            scheduled_at=0.0,
            first_token_at=0.0,
            finished_at=0.0,
        )

    def step(self, _: int | None) -> Any:
        self.steps.append(len(self.turns))
        return SimpleNamespace(finished=[], tokens=0, seconds=0.001)

    def load(self) -> Any:
        figures = {"running": 0, "waiting": 0, "kv_bytes_total": 1, "kv_bytes_free": 1, "kv_bytes_per_token": 1}
        return SimpleNamespace(device="cpu", **figures)


@pytest.fixture
def engine() -> PlayedEngine:
    return PlayedEngine()


@pytest.fixture
def wires() -> Wires:
    return Wires.new()


@pytest.fixture
def host(engine: PlayedEngine, wires: Wires) -> EngineHost:
    played: Any = engine
    return EngineHost(played, wires, Outbox(Line(wires.reports)), StepCost(**UNKNOWN), tick_seconds=0.1)


def dispatch(wires: Wires, turns: int) -> None:
    orders = Outbox(Line(wires.orders))
    for number in range(turns):
        orders.say(Take(f"turn {number}", pack_tokens([1, 2]), Sampling(max_tokens=4), 0))


def test_turns_that_come_at_once_are_taken_in_over_several_ticks_of_a_guest(
    host: EngineHost, engine: PlayedEngine, wires: Wires
) -> None:
    dispatch(wires, 12)
    before = 0
    while len(engine) < 12:
        host.tick(64, 3 * TAKE_SECONDS)
        assert 0 < len(engine) - before <= 3 and host.busy
        before = len(engine)
    assert engine.steps == [], "nor was there a step beside them"
    host.tick(64, 3 * TAKE_SECONDS)
    assert engine.steps == [12]


def test_an_executor_of_its_own_takes_them_in_at_once(host: EngineHost, engine: PlayedEngine, wires: Wires) -> None:
    dispatch(wires, 4)
    host.tick()
    assert engine.steps == [4]


def test_turns_go_back_although_nobody_reads_and_are_told_in_the_end(
    host: EngineHost, engine: PlayedEngine, wires: Wires
) -> None:
    dispatch(wires, 2)
    host.tick()
    full = Line(wires.reports)
    with pytest.raises(LineFull):
        while True:
            full.write(bytes(1 << 12))
    while True:
        try:
            full.write(b"")
        except LineFull:
            break
    passes = 0
    while not host.hand_back():
        passes += 1
        assert passes < 10
    assert not len(engine) and not host.busy
    for _ in Line(wires.reports).read():
        pass
    host.tick()
    said = [REPORTS.decode(message) for message in Line(wires.reports).read()]
    assert {report.name for report in said if isinstance(report, Done)} == {"turn 0", "turn 1"}
