"""The engine side of an executor over a scripted engine: bounded ticks, and returned turns."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rose.schemas.arrays import pack_tokens
from rose.schemas.prompts import Sampling
from rose.workers.executor.engine_loop import EngineLoop
from rose.workers.executor.ipc.messages import (
    REPORT_DECODER,
    AbortTurn,
    EngineStatus,
    MessageSender,
    ServingStats,
    StageWeights,
    SubmitTurn,
    Suspend,
    TurnFinished,
    WorkKind,
    aborted_before_start,
)
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer, RingBufferFull
from rose.workers.executor.step_cost import INITIAL_COST, StepCost
from rose.workers.executor.vllm.types import FinishedTurn

SLOW_SECONDS = 0.05
"""Seconds of a delayed staging piece."""

TAKE_SECONDS = 0.01
"""Least seconds to accept the context of a turn."""


class ScriptedEngine:
    version, devices = 0, 1

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.steps: list[int] = []
        """Number of turns in each step."""
        self.pieces: list[float] = []
        """Seconds of the staging pieces of a version."""

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def next_step_tokens(self) -> int:
        return len(self.turns)

    def add(self, key: str, *_: Any, **__: Any) -> None:
        time.sleep(TAKE_SECONDS)
        self.turns.append(key)

    def abort(self, key: str) -> FinishedTurn | None:
        if key not in self.turns:
            return None
        self.turns.remove(key)
        return aborted_before_start(key, 0.0).turn

    def step(self, _: int | None) -> Any:
        self.steps.append(len(self.turns))
        return SimpleNamespace(finished=[], tokens=0, seconds=0.001)

    def stage(self, _: object) -> Iterator[None]:
        for seconds in self.pieces:
            time.sleep(seconds)
            yield

    def load(self) -> Any:
        figures = {"running": 0, "waiting": 0, "kv_bytes_total": 1, "kv_bytes_free": 1, "kv_bytes_per_token": 1}
        return SimpleNamespace(device="cpu", **figures)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def channel() -> ChannelFds:
    return ChannelFds.create()


@pytest.fixture
def host(engine: ScriptedEngine, channel: ChannelFds) -> EngineLoop:
    played: Any = engine
    return EngineLoop(
        played, channel, MessageSender(RingBuffer(channel.reports)), StepCost(**INITIAL_COST), status_seconds=0.1
    )


def dispatch(channel: ChannelFds, turns: int) -> None:
    commands = MessageSender(RingBuffer(channel.commands))
    for number in range(turns):
        commands.send(SubmitTurn(f"turn {number}", pack_tokens([1, 2]), Sampling(max_tokens=4), 0))


def test_burst_of_turns_is_accepted_over_several_guest_ticks(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds
) -> None:
    dispatch(channel, 12)
    before = 0
    while len(engine) < 12:
        host.tick(64, 3 * TAKE_SECONDS)
        assert 0 < len(engine) - before <= 3 and host.busy
        before = len(engine)
    assert engine.steps == [], "nor was there a step beside them"
    host.tick(64, 3 * TAKE_SECONDS)
    assert engine.steps == [12]


def test_turn_for_an_earlier_guest_goes_back_untouched_without_a_failure(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds
) -> None:
    """The executor stopped while the earlier guest was parked and the next was built, which serves no version yet."""
    engine.version = -1
    dispatch(channel, 1)
    host.tick()
    [done, _] = map(REPORT_DECODER.decode, RingBuffer(channel.reports).read())
    assert isinstance(done, TurnFinished)
    assert done == aborted_before_start("turn 0", done.turn.times.finished_at, done.reason)
    assert done.reason == "version -1 serves, not 0" and engine.turns == []


def test_burst_of_turns_is_accepted_at_once_by_a_dedicated_executor(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds
) -> None:
    dispatch(channel, 4)
    host.tick()
    assert engine.steps == [4]


def test_turns_are_charged_for_every_device_of_their_steps(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds
) -> None:
    engine.devices = 2
    dispatch(channel, 2)
    for _ in range(3):
        host.tick()
    while not host.abort_one_turn():
        pass
    host.report_status()
    reports = [REPORT_DECODER.decode(report) for report in RingBuffer(channel.reports).read()]
    charged = [report.device_seconds for report in reports if isinstance(report, TurnFinished)]
    assert [report.devices for report in reports if isinstance(report, EngineStatus)][-1] == 2
    steps = len(engine.steps)
    assert charged == [pytest.approx(steps * 2 * 0.001 / 2)] * 2


def test_next_work_is_interruptible_with_a_pending_command_and_then_atomic(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds
) -> None:
    """Commands are handled without admission: without a permit neither a staging piece nor a step runs beside them."""
    engine.pieces = [0.0] * 2
    MessageSender(RingBuffer(channel.commands)).send(StageWeights(1, 0, ()))
    assert host.next_work.kind is WorkKind.INTERRUPTIBLE
    host.tick(0, 1.0)
    assert host.next_work.kind is WorkKind.ATOMIC
    dispatch(channel, 1)
    host.tick(0, 1.0)
    assert engine.steps == [] and host.next_work.kind is WorkKind.STEP
    host.tick(1, 1.0)
    assert engine.steps == [1]


def test_slow_staging_piece_does_not_raise_the_price_of_later_pieces(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds
) -> None:
    engine.pieces = [*[0.0] * 20, SLOW_SECONDS, *[0.0] * 60]
    MessageSender(RingBuffer(channel.commands)).send(StageWeights(1, 0, ()))
    priced = []
    while host.busy:
        host.tick()
        priced.append(host.next_work.seconds)
    assert 0.0 < priced[0] < SLOW_SECONDS
    assert priced[-2] < 0.1 * SLOW_SECONDS


def test_aborted_turns_are_reported_once_the_reader_returns(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds
) -> None:
    dispatch(channel, 2)
    host.tick()
    full = RingBuffer(channel.reports)
    with pytest.raises(RingBufferFull):
        while True:
            full.write(bytes(1 << 12))
    while True:
        try:
            full.write(b"")
        except RingBufferFull:
            break
    passes = 0
    while not host.abort_one_turn():
        passes += 1
        assert passes < 10
    assert not len(engine) and not host.busy
    for _ in RingBuffer(channel.reports).read():
        pass
    host.tick()
    decoded_reports = [REPORT_DECODER.decode(message) for message in RingBuffer(channel.reports).read()]
    assert {report.turn.name for report in decoded_reports if isinstance(report, TurnFinished)} == {"turn 0", "turn 1"}


def test_paused_step_sends_heartbeats_and_finishes_for_an_aborted_turn(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that arrives meanwhile waits for the end of the step, and ends nothing."""
    dispatch(channel, 1)
    host.tick()
    reports, commands = RingBuffer(channel.reports), MessageSender(RingBuffer(channel.commands))
    list(reports.read())
    stood: list[bool] = []
    later = time.monotonic()

    def step(_: int | None) -> Any:
        nonlocal later
        monkeypatch.setattr("rose.workers.executor.engine_loop.time.monotonic", lambda: later)
        for order in (
            None,
            SubmitTurn("later", pack_tokens([1, 2]), Sampling(max_tokens=4), 0),
            Suspend(),
            AbortTurn("turn 0"),
        ):
            later += 0.2
            if order is not None:
                commands.send(order)
            stood.append(host.tick_mid_step(blocked=True))
        return SimpleNamespace(finished=[], tokens=0, seconds=0.001)

    monkeypatch.setattr(engine, "step", step)
    host.tick()
    assert stood == [True, True, True, False] and host.granted_bytes == 0
    received = [REPORT_DECODER.decode(message) for message in reports.read()]
    assert sum(isinstance(report, EngineStatus) for report in received) == 4
    assert isinstance(received[-1], TurnFinished) and received[-1].turn.name == "turn 0", "as soon as the step is made"


@pytest.mark.parametrize("goes_on", [True, False])
def test_hold_time_of_a_paused_step_counts_from_its_last_chance_to_resume(
    host: EngineLoop, engine: ScriptedEngine, channel: ChannelFds, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Otherwise a guest that computes now and then would lose its turns, and a guest that never does would get more."""
    reports = RingBuffer(channel.reports)
    dispatch(channel, 1)
    host.tick()
    later = time.monotonic() + 4.0  # the time of the hold before
    monkeypatch.setattr("rose.workers.executor.engine_loop.time.monotonic", lambda: later)
    list(reports.read())

    def step(_: int | None) -> Any:
        nonlocal later
        for held in (True, True, not goes_on):
            later += 2.0
            host.tick_mid_step(blocked=held)
        later += 1.0
        return SimpleNamespace(finished=[], tokens=0, seconds=0.001)

    monkeypatch.setattr(engine, "step", step)
    host.tick()
    ticks = [REPORT_DECODER.decode(message) for message in reports.read()]
    held = [tick.blocked_seconds for tick in ticks if isinstance(tick, EngineStatus)]
    assert held == pytest.approx([2.0, 4.0, 0.0, 0.0] if goes_on else [2.0, 4.0, 6.0, 7.0])


@pytest.mark.parametrize("serving", [None, ServingStats(1, 0, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {})])
def test_rates_fall_while_a_guest_holds_turns_and_does_not_compute(
    channel: ChannelFds, engine: ScriptedEngine, serving: ServingStats | None
) -> None:
    played: Any = engine
    reports = MessageSender(RingBuffer(channel.reports))
    loop = EngineLoop(
        played, channel, reports, StepCost(**INITIAL_COST), status_seconds=0.0, serving_stats=lambda: serving
    )
    engine.turns = ["held"]
    for _ in range(3):
        loop.report_status()
    statuses = [REPORT_DECODER.decode(message) for message in RingBuffer(channel.reports).read()]
    first, *_, last = (each.decode_tokens_per_second for each in statuses if isinstance(each, EngineStatus))
    assert (last < first) is (serving is not None)
