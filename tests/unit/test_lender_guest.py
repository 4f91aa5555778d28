"""Tests of a guest and its sidecar link: no error of either reaches serving, and an abandoned guest is suspended."""

import logging
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.workers.executor.ipc.messages import (
    REPORT_DECODER,
    AbortTurn,
    Command,
    EngineLost,
    EngineStatus,
    MessageSender,
    Report,
    Resume,
    ServingStats,
    Suspend,
)
from rose.workers.executor.ipc.shared_memory import RingBuffer
from rose.workers.executor.step_cost import INITIAL_COST, StepCost
from rose.workers.lender.config import LendConfig
from rose.workers.lender.guest_lifecycle import Building, Dropped, Lending, Profiling, Suspended
from rose.workers.lender.sidecar_link import Connection, SidecarListener, accept, connect, listen
from rose.workers.lender.status_page import StatusPage
from rose.workers.lender.vllm import guest_build
from rose.workers.lender.vllm.guest import FREE_SECONDS, Guest
from rose.workers.lender.vllm.guest_build import BuiltGuest, GuestBuild
from rose.workers.lender.vllm.guest_device import GuestDevice
from tests.support.file_descriptors import no_descriptor_left
from tests.support.waiting import WAIT_SECONDS, until

QUIET = ServingStats(0, 0, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {})
CONFIG = LendConfig(model_folder="", socket="", heartbeat_seconds=0.01)
SERVING: Any = SimpleNamespace(layout=None, runner=None, zero=lambda _: None)
"""Serving whose cache a guest cannot have a view of."""

LOG = logging.getLogger("guest")
BEAT_SECONDS = 0.05


class ScriptedEngine:
    """An engine with at most one turn, which `step` continues."""

    devices = 1
    version = -1
    steps = 0
    cache = SimpleNamespace(groups=[(32, 8)])
    next_step_tokens = 1
    suspended_seconds = 0.0

    def __init__(self) -> None:
        self.closed = False
        self.turns = 0
        self.step_action: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self.turns

    def abort(self, _: str) -> None:
        """There is no turn of this name."""

    def set_layer_hook(self, _: Callable[[], None]) -> None:
        """No layer is computed."""

    def step(self, _: int | None) -> Any:
        self.step_action()
        self.turns = 0
        return SimpleNamespace(finished=[], tokens=0, seconds=0.001)

    def load(self) -> Any:
        counts = {"running": 0, "waiting": 0, "kv_bytes_total": 1, "kv_bytes_free": 1, "kv_bytes_per_token": 1}
        return SimpleNamespace(device="cpu", **counts)

    def close(self) -> None:
        self.closed = True


class ScriptedSharing:
    """KV memory that a pass without a sidecar gives back."""

    can_grow = closed = False
    room_tokens = 0

    def __init__(self) -> None:
        self.passes_without_sidecar = 0
        self.error: Exception | None = None

    def rebalance(self, give_up: object, *, most_bytes: int, grow: bool) -> None:
        if give_up is None:
            self.passes_without_sidecar += 1

    def rebalance_mid_step(self, *, most_bytes: int) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def take_changed(self) -> bool:
        return False

    def take_stats(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


class ScriptedBuild:
    """A build that ends when `finished` is set."""

    def __init__(self, guest: BuiltGuest) -> None:
        self.is_running = True
        self.finished = True
        self._guest = guest

    def resume(self, _: float) -> BuiltGuest | None:
        self.is_running = not self.finished
        return self._guest if self.finished else None


class Fixture:
    """A guest with a scripted build, and the sidecars that connect to it."""

    def __init__(self, folder: Path, *, profiles: bool = False, listener: Any = None) -> None:
        parts: tuple[Any, Any, Any, Any] = (
            ScriptedEngine(),
            ScriptedSharing(),
            SimpleNamespace(as_guest=nullcontext, as_host=nullcontext, close=lambda: None),
            SimpleNamespace(close=lambda: None, step=lambda *_: None, done=False, needs_memory=lambda _: False),
        )
        self.engine, self.sharing = parts[:2]
        self.build: Any = ScriptedBuild(BuiltGuest(*parts))
        self.page = StatusPage(None)
        cost = StepCost(**INITIAL_COST)
        if not profiles:
            cost.observe(1, 0.001)
        self._socket = None if listener else listen(folder / "guest")
        self._folder = folder
        if listener is None:
            listener = SimpleNamespace(connection=None, closed=[])
        self.listener = listener
        self.guest = Guest(CONFIG, self.listener, self.page, cost, lambda: QUIET, LOG, lambda: self.build)
        self._open: list[Connection] = []

    def connect(self) -> Connection:
        """Connect a sidecar, which replaces the one before, and return its end."""
        assert self._socket is not None
        sidecar = connect(self._folder / "guest")
        self.disconnect()
        self.listener.connection = accept(self._socket.accept()[0])
        self._open += [sidecar, self.listener.connection]
        return sidecar

    def disconnect(self) -> None:
        if self.listener.connection is not None:
            self.listener.closed.append(self.listener.connection)
            self._open.remove(self.listener.connection)
        self.listener.connection = None

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.guest.tick(seconds=0.02, tokens=1)

    def lend(self) -> Connection:
        """Bring the guest to lending, for a new sidecar."""
        sidecar = self.connect()
        send(sidecar, Resume())
        self.tick(4)  # switch, read the command, start the build, end it
        assert self.guest.state is Lending
        return sidecar

    def lend_alone(self) -> None:
        """Bring the guest to lending, without a sidecar."""
        self.lend()
        self.disconnect()
        self.tick()

    def close(self) -> None:
        for end in (*self._open, self._socket):
            if end is not None:
                end.close()


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    made = Fixture(tmp_path)
    yield made
    made.close()


def send(sidecar: Connection, command: Command) -> None:
    MessageSender(RingBuffer(sidecar.channel.commands)).send(command)


def reports_of(sidecar: Connection) -> list[Report]:
    return [REPORT_DECODER.decode(message) for message in RingBuffer(sidecar.channel.reports).read()]


def ended(end: Connection) -> bool:
    return bool(select.select([end.connection], [], [], 0)[0])


def test_unusable_link_ends_and_the_next_link_is_used(fixture: Fixture) -> None:
    fixture.connect()
    fixture.tick()
    second = fixture.connect()
    with no_descriptor_left():
        fixture.tick()
    assert ended(second)
    third = fixture.connect()
    fixture.tick()
    fixture.guest.tick_idle(blocked=False)
    [status] = reports_of(third)
    assert isinstance(status, EngineStatus) and "built again" in status.suspended_reason and not ended(third)


def test_invalid_command_during_a_build_ends_the_link_and_not_the_build(fixture: Fixture) -> None:
    fixture.build.finished = False
    sidecar = fixture.connect()
    send(sidecar, Resume())
    fixture.tick(3)
    RingBuffer(sidecar.channel.commands).write(b"no order")
    fixture.tick()
    assert ended(sidecar) and not fixture.guest.busy and fixture.guest.state is Building
    fixture.build.finished = True
    following = fixture.connect()
    fixture.tick(2)
    assert fixture.guest.state is Lending and not ended(following)


def test_failed_build_drops_the_guest_and_ends_the_link_after_the_report(fixture: Fixture) -> None:
    def fail(_: float) -> None:
        fixture.build.is_running = False
        raise MemoryError("no room")

    fixture.build.resume = fail
    sidecar = fixture.connect()
    send(sidecar, Resume())
    fixture.tick(3)
    assert fixture.guest.state is Dropped
    assert [report.reason for report in reports_of(sidecar) if isinstance(report, EngineLost)] == [
        "MemoryError: no room"
    ]
    assert ended(sidecar)


@pytest.mark.parametrize("fails", ["build_engine", "_check_longest_turn"])
def test_failed_build_releases_all_ranks(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def no_room(*_: object) -> None:
        raise MemoryError

    for part in ("build_engine", "_check_longest_turn"):
        monkeypatch.setattr(guest_build, part, no_room if part == fails else lambda *_: None)
    commands: list[str] = []
    ranks: Any = SimpleNamespace(size=2, call=commands.append)
    with pytest.raises(MemoryError):
        guest_build.build_guest(CONFIG, None, ranks, GuestDevice(), LOG)
    assert commands == ["release"]


@pytest.mark.parametrize("fails", [False, True])
def test_engine_whose_memory_cannot_be_shared_is_closed(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def share(*_: object, shared: bool) -> Any:
        assert shared
        if fails:
            raise MemoryError("no room")
        return ScriptedSharing()

    engine = ScriptedEngine()
    monkeypatch.setattr(guest_build, "build_guest", lambda *_: (engine, None, True))
    monkeypatch.setattr(guest_build, "KvSharing", share)
    build = GuestBuild(CONFIG, SERVING, StepCost(**INITIAL_COST), lambda: None, None, GuestDevice(), LOG)
    built: list[BuiltGuest] = []

    def resumed() -> bool:
        built[:] = filter(None, [build.resume(0.02)])
        return bool(built)

    with pytest.raises(MemoryError) if fails else nullcontext():
        until(resumed)
    assert engine.closed is fails and not build.is_running
    assert fails or built[0].engine is engine


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_sidecar_is_told_of_a_dropped_guest_even_if_the_error_has_no_text(fixture: Fixture) -> None:
    """Otherwise the sidecar would wait for its turns forever."""
    sidecar = fixture.lend()
    fixture.guest.drop(UnprintableError())
    assert [report.reason for report in reports_of(sidecar) if isinstance(report, EngineLost)] == [
        "UnprintableError: its text cannot be read"
    ]
    assert fixture.engine.closed and fixture.sharing.closed and fixture.guest.state is Dropped


def test_frames_of_an_error_do_not_hold_the_engine_that_is_closed(fixture: Fixture) -> None:
    """A guest's model would stay in memory until the error is forgotten, and its pool could not go back to the GPU."""
    held: list[object] = []

    def fail() -> None:
        model = {"weights"}
        close_with(weakref.ref(model))
        raise OSError("a kernel")

    def close_with(model: "weakref.ref[set[str]]") -> None:
        fixture.engine.close = lambda: held.append(model())

    fixture.lend()
    try:
        fail()
    except OSError as error:
        fixture.guest.drop(error)
    assert held == [None]


def test_error_of_the_memory_pool_does_not_keep_a_dropped_engine_alive(fixture: Fixture) -> None:
    def fail() -> None:
        raise RuntimeError("pool")

    fixture.lend()
    fixture.sharing.close = fail
    fixture.guest.drop(OSError("a step"))
    assert fixture.engine.closed and fixture.guest.state is Dropped


def test_guest_without_sidecar_is_kept_until_a_stop(fixture: Fixture) -> None:
    fixture.lend_alone()
    fixture.guest.make_room()
    fixture.tick()
    assert not fixture.guest.busy and not fixture.engine.closed
    fixture.page.on_poll(stop=True)
    assert fixture.guest.busy
    fixture.tick()
    assert fixture.engine.closed and fixture.sharing.closed and not fixture.guest.busy
    fixture.page.on_poll(stop=False)
    fixture.tick()
    assert not fixture.guest.busy and fixture.guest.state is Suspended, "there is no sidecar to build a guest for"


def test_guest_without_sidecar_is_suspended_although_serving_is_never_idle(fixture: Fixture) -> None:
    """A guest that may not compute is suspended after FREE_SECONDS."""
    fixture.lend_alone()
    fixture.guest.tick_idle(blocked=True)
    assert fixture.guest.state is Lending, "nothing says stop"
    fixture.page.on_poll(stop=True)
    began = time.monotonic()

    def freed() -> bool:
        fixture.guest.tick_idle(blocked=True)
        return bool(fixture.engine.closed)

    until(freed)
    assert fixture.sharing.closed and not fixture.guest.busy
    assert time.monotonic() - began > FREE_SECONDS / 2, "an idle moment would have been better"
    fixture.guest.tick_idle(blocked=True)
    assert fixture.guest.state is Suspended


@pytest.mark.parametrize("profiles", [False, True], ids=["lends", "makes its first steps"])
def test_guest_without_sidecar_learns_of_a_stop_while_the_loop_sleeps(tmp_path: Path, profiles: bool) -> None:
    """A stop wakes the loop only while there is a guest."""
    woken = threading.Semaphore(0)
    listener = SidecarListener(tmp_path / "socket", woken.release, heartbeat_seconds=BEAT_SECONDS, log=LOG)
    fixture = Fixture(tmp_path, profiles=profiles, listener=listener)
    listener.arm_wakeup()
    assert not woken.acquire(timeout=4 * BEAT_SECONDS)

    sidecar = connect(tmp_path / "socket")
    assert woken.acquire(timeout=WAIT_SECONDS)
    send(sidecar, Resume())
    fixture.tick(4)
    assert fixture.guest.state is (Profiling if profiles else Lending)
    sidecar.close()
    until(lambda: listener.connection is None)
    fixture.tick()
    fixture.guest.make_room()
    while woken.acquire(timeout=4 * BEAT_SECONDS):
        pass

    fixture.page.on_poll(stop=True)
    listener.arm_wakeup(has_guest=fixture.guest.exists)
    assert woken.acquire(timeout=WAIT_SECONDS) and fixture.guest.busy
    fixture.tick()
    assert fixture.engine.closed and fixture.guest.state is Suspended
    while woken.acquire(timeout=4 * BEAT_SECONDS):
        pass
    listener.arm_wakeup(has_guest=fixture.guest.exists)
    assert not woken.acquire(timeout=4 * BEAT_SECONDS)


def test_memory_of_a_guest_without_sidecar_is_given_back(fixture: Fixture) -> None:
    fixture.lend()
    fixture.disconnect()
    assert fixture.guest.busy
    fixture.tick()
    assert fixture.sharing.passes_without_sidecar == 1 and not fixture.guest.busy


def test_second_suspension_of_a_guest_frees_the_second_engine(fixture: Fixture) -> None:
    sidecar = fixture.lend()
    send(sidecar, Suspend())
    fixture.tick(2)
    assert fixture.guest.state is Suspended and fixture.engine.closed
    fixture.engine.closed = False
    send(sidecar, Resume())
    fixture.tick(3)
    assert fixture.guest.state is Lending
    send(sidecar, Suspend())
    fixture.tick(2)
    assert fixture.guest.state is Suspended and fixture.engine.closed


def pause_step(fixture: Fixture, action: Callable[[], None]) -> list[bool]:
    """Run a step that calls `action` and is then paused. Return whether the step could stay paused."""
    paused = list[bool]()

    def step() -> None:
        with fixture.guest.as_host():
            action()
            may_stay = fixture.guest.make_room_mid_step() and fixture.guest.tick_mid_step(blocked=True)
            assert not fixture.page.guest_since, "the watchdog sees no hang while the host has the thread"
        assert fixture.page.guest_since
        paused.append(may_stay)

    fixture.engine.turns, fixture.engine.step_action = 1, step
    fixture.tick()
    return paused


@pytest.mark.parametrize("end", ["nothing", "abort", "suspend", "stop file", "sidecar"])
def test_paused_step_must_continue_if_something_waits_for_its_end(fixture: Fixture, end: str) -> None:
    sidecar = fixture.lend()

    def action() -> None:
        match end:
            case "abort":
                send(sidecar, AbortTurn("turn"))
            case "suspend":
                send(sidecar, Suspend())
            case "stop file":
                fixture.page.on_poll(stop=True)
            case "sidecar":
                fixture.connect()

    assert pause_step(fixture, action) == [end == "nothing"]
    fixture.tick(2)
    assert (fixture.guest.state is Lending) == (end in ("nothing", "abort", "sidecar"))


@pytest.mark.parametrize("part", ["reports", "memory"])
def test_error_during_a_pause_drops_the_guest_after_the_step_and_once(fixture: Fixture, part: str) -> None:
    """The error is not taken for an error of serving, and the step is not paused again."""
    sidecar = fixture.lend()

    def action() -> None:
        if part == "memory":
            fixture.sharing.error = MemoryError("no room")
        else:
            RingBuffer(sidecar.channel.commands).write(b"no order")

    assert pause_step(fixture, action) == [False]
    assert fixture.engine.closed and fixture.guest.state is Dropped
    fixture.tick(2)
    assert fixture.guest.state is Dropped
    assert sum(isinstance(report, EngineLost) for report in reports_of(sidecar)) == 1
