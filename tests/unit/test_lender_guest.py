"""A guest and its link: serving's loop hears nothing of one that cannot be taken up, and who is left alone parks."""

import logging
import select
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.workers.executor.ipc.messages import NO_LIMIT, REPORT_DECODER, EngineLost, EngineStatus, ServingStats
from rose.workers.executor.ipc.shared_memory import RingBuffer
from rose.workers.executor.step_cost import INITIAL_COST, StepCost
from rose.workers.lender.config import LendConfig
from rose.workers.lender.lifecycle import GuestState
from rose.workers.lender.sidecar_link import Connection, SidecarListener, accept, connect, listen
from rose.workers.lender.vllm import guest as room
from rose.workers.lender.vllm import guest_build
from rose.workers.lender.vllm.guest import FREE_SECONDS, Guest
from rose.workers.lender.watchdog_page import StatusPage
from tests.support.file_descriptors import no_descriptor_left
from tests.support.waiting import WAIT_SECONDS, until

MODEL = Path(__file__).parents[2] / "workers/models/calculator"


QUIET = ServingStats(0, 0, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {})


CONFIG = LendConfig(model_folder="", socket="")
LOG = logging.getLogger("guest")
BEAT_SECONDS = 0.05


def guest(feeder: Any) -> Guest:
    unused: Any = None
    return Guest(CONFIG, feeder, StatusPage(None), StepCost(**INITIAL_COST), lambda: QUIET, unused, LOG, unused)


def ended(end: Connection) -> bool:
    return bool(select.select([end.connection], [], [], 0)[0])


def test_a_link_that_cannot_be_taken_up_ends_and_the_next_one_is(tmp_path: Path) -> None:
    listener = listen(tmp_path / "socket")

    def met() -> tuple[Connection, Connection]:
        beside = connect(tmp_path / "socket")
        return beside, accept(listener.accept()[0])

    first, link = met()
    feeder = SimpleNamespace(connection=link, closed=[])
    one = guest(feeder)
    one.tick(seconds=0.02, tokens=1)
    second, feeder.connection = met()
    feeder.closed.append(link)
    with no_descriptor_left():
        one.tick(seconds=0.02, tokens=1)
    assert ended(second)
    third, link = met()
    feeder.closed.append(feeder.connection)
    feeder.connection = link
    one.tick(seconds=0.02, tokens=1)
    one.tick_idle(blocked=False)
    [tick] = [REPORT_DECODER.decode(message) for message in RingBuffer(third.channel.reports).read()]
    assert isinstance(tick, EngineStatus) and "built again" in tick.suspended_reason and not ended(third)
    for end in (first, second, third, link, listener):
        end.close()


def test_what_was_poisoned_ends_the_link_of_a_guest_that_is_being_built_and_not_the_build(tmp_path: Path) -> None:
    listener = listen(tmp_path / "socket")
    beside = connect(tmp_path / "socket")
    link = accept(listener.accept()[0])
    one: Any = guest(SimpleNamespace(connection=link, closed=[]))
    one.tick(seconds=0.02, tokens=1)
    one._lifecycle.state, building = GuestState.RESUMING, object()
    one._build_call = building
    RingBuffer(beside.channel.commands).write(b"no order")
    one.tick(seconds=0.02, tokens=1)
    assert ended(beside) and not one.busy
    assert one._build_call is building and one._lifecycle.state is GuestState.RESUMING
    for end in (beside, link, listener):
        end.close()


@pytest.mark.parametrize("fails", ["build_engine", "guest_pool"])
def test_a_build_that_fails_at_its_end_holds_nothing_on_servings_ranks(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def no_room(*_: object) -> None:
        raise MemoryError

    for part in ("build_engine", "guest_pool"):
        monkeypatch.setattr(guest_build, part, no_room if part == fails else lambda *_: None)
    asked: list[str] = []
    ranks: Any = SimpleNamespace(size=2, call=asked.append)
    with pytest.raises(MemoryError):
        guest_build.build_guest(CONFIG, ranks, LOG)
    assert asked == ["release"]


class Untold(Exception):
    """An error of which nothing can be said."""

    def __str__(self) -> str:
        raise RuntimeError("nor of this")


def test_who_is_beside_hears_that_the_guest_is_gone_even_of_an_error_that_cannot_be_told(tmp_path: Path) -> None:
    """Else it would wait for its turns for ever."""
    listener = listen(tmp_path / "socket")
    beside = connect(tmp_path / "socket")
    link = accept(listener.accept()[0])
    one: Any = guest(SimpleNamespace(connection=link, closed=[]))
    one.tick(seconds=0.02, tokens=1)
    engine = Kept()
    one._lifecycle.state, one._engine, one._engine_loop, one._sharing = GuestState.LENDING, engine, None, Kept()
    one._globals = SimpleNamespace(as_guest=nullcontext)
    one.drop(Untold())
    reports = [REPORT_DECODER.decode(message) for message in RingBuffer(beside.channel.reports).read()]
    assert [report.reason for report in reports if isinstance(report, EngineLost)] == [
        "Untold: it does not let itself be told"
    ]
    assert engine.closed and one._lifecycle.state is GuestState.DROPPED
    for end in (beside, link, listener):
        end.close()


class Kept:
    """An engine, and its share of the memory."""

    busy = can_grow = closed = False
    looks = 0

    def rebalance(self, give_up: object, *, most_bytes: int, grow: bool) -> None:
        """Nobody is there to give a turn up to."""
        assert give_up is None and not grow
        self.looks += 1
        self.busy = self.looks == 1  # pages wait to go back

    def close(self) -> None:
        self.closed = True


def test_a_guest_that_nobody_knocks_for_is_kept_until_something_says_stop() -> None:
    one: Any = guest(SimpleNamespace(connection=None, closed=[]))
    engine, sharing = Kept(), Kept()
    one._lifecycle.state, one._granted_bytes = GuestState.LENDING, NO_LIMIT
    one._engine, one._sharing, one._globals = engine, sharing, SimpleNamespace(as_guest=nullcontext)
    one.tick(seconds=0.02, tokens=1)
    assert not one.busy and not engine.closed
    one._page.on_poll(stop=True)
    assert one.busy
    one.tick(seconds=0.02, tokens=1)
    assert engine.closed and sharing.closed and not one.busy
    one._page.on_poll(stop=False)
    one.tick(seconds=0.02, tokens=1)
    assert not one.busy and one._lifecycle.state is GuestState.SUSPENDED, "nobody is there to build one for"


def test_a_guest_that_nobody_knocks_for_parks_also_where_serving_is_never_idle() -> None:
    """At once where it might compute, after a moment where it might not."""
    one: Any = guest(SimpleNamespace(connection=None, closed=[]))
    engine, sharing = Kept(), Kept()
    one._lifecycle.state, one._granted_bytes = GuestState.LENDING, NO_LIMIT
    one._engine, one._sharing, one._globals = engine, sharing, SimpleNamespace(as_guest=nullcontext)
    one.tick_idle(blocked=True)
    assert one._lifecycle.state is GuestState.LENDING, "nothing says stop"
    one._page.on_poll(stop=True)
    began = time.monotonic()
    while not engine.closed and time.monotonic() < began + 4 * FREE_SECONDS:
        one.tick_idle(blocked=True)
    assert engine.closed and sharing.closed and not one.busy
    assert time.monotonic() - began > FREE_SECONDS / 2, "an idle moment would have been better"
    one.tick_idle(blocked=True)
    assert one._lifecycle.state is GuestState.SUSPENDED


class Built(Kept):
    """An engine that has just been built."""

    def set_layer_hook(self, _: object) -> None:
        """Nothing is computed."""

    def abort(self, _: str) -> None:
        """Nothing is in it."""


@pytest.mark.parametrize("priced", [True, False], ids=["lends", "makes its first steps"])
def test_a_guest_that_nobody_knocks_for_hears_of_a_stop_while_the_loop_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, priced: bool
) -> None:
    """And where there is no guest the loop sleeps on."""
    woken = threading.Semaphore(0)
    feeder = SidecarListener(tmp_path / "socket", woken.release, heartbeat_seconds=BEAT_SECONDS, log=LOG)
    one: Any = guest(feeder)
    feeder.arm_wakeup()
    assert not woken.acquire(timeout=4 * BEAT_SECONDS)

    beside = connect(tmp_path / "socket")
    assert woken.acquire(timeout=WAIT_SECONDS)
    one.tick(seconds=0.02, tokens=1)
    beside.close()
    until(lambda: feeder.connection is None)
    one.tick(seconds=0.02, tokens=1)
    engine = Built()
    monkeypatch.setattr(room, "KvSharing", lambda *_: Kept())
    monkeypatch.setattr(room, "StepProfile", lambda *_: SimpleNamespace(close=lambda: None))
    one._cost = SimpleNamespace(has_observed=priced)
    one._globals = SimpleNamespace(as_guest=nullcontext, as_guest_build=nullcontext)
    done = SimpleNamespace(resume=lambda _: True, result=lambda: (engine, None), slices=1, longest_seconds=0.0)
    one._lifecycle.state, one._build_call, one._granted_bytes = GuestState.RESUMING, done, NO_LIMIT
    one._build(0.02)
    while woken.acquire(timeout=4 * BEAT_SECONDS):
        pass

    one._page.on_poll(stop=True)
    feeder.arm_wakeup()
    assert woken.acquire(timeout=WAIT_SECONDS) and one.busy
    one.tick(seconds=0.02, tokens=1)
    assert engine.closed and one._lifecycle.state is GuestState.SUSPENDED
    while woken.acquire(timeout=4 * BEAT_SECONDS):
        pass
    feeder.arm_wakeup()
    assert not woken.acquire(timeout=4 * BEAT_SECONDS)


def test_the_memory_of_a_guest_that_nobody_knocks_for_goes_back() -> None:
    feeder = SimpleNamespace(connection=None, closed=[])
    one: Any = guest(feeder)
    one._lifecycle.state, one._granted_bytes = GuestState.LENDING, NO_LIMIT
    sharing = Kept()
    one._engine, one._sharing, one._globals = Kept(), sharing, SimpleNamespace(as_guest=nullcontext)
    one._sidecar._connection = object()
    assert one.busy
    one.tick(seconds=0.02, tokens=1)
    assert sharing.looks == 1 and one.busy, "the loop goes on until all is given back"
    one.make_room()
    assert sharing.looks == 2 and not one.busy


class Standing:
    """A host whose step stands still."""

    granted_bytes, busy = NO_LIMIT, True

    def __init__(self, meanwhile: Callable[[], bool]) -> None:
        self.meanwhile = meanwhile
        self.stood: list[bool] = []

    def tick(self, _: int, __: float) -> None:
        self.stood.append(self.meanwhile())


def standing(meanwhile: Callable[[Any], bool]) -> tuple[Any, Standing, Kept]:
    one: Any = guest(SimpleNamespace(connection=None, closed=[]))
    host, engine = Standing(lambda: meanwhile(one)), Kept()
    one._lifecycle.state, one._granted_bytes = GuestState.LENDING, NO_LIMIT
    one._engine, one._sharing, one._globals = engine, Kept(), SimpleNamespace(as_guest=nullcontext)
    one._engine_loop = host
    return one, host, engine


@pytest.mark.parametrize("ends_for", ["nothing", "a turn", "a grant", "a file", "a link"])
def test_a_step_stands_still_until_something_waits_for_its_end(ends_for: str) -> None:
    def meanwhile(one: Any) -> bool:
        def patient(*, blocked: bool) -> bool:
            assert one._page.guest_since, "who watches for a hang sees this too"
            return ends_for != "a turn"

        one._engine_loop.tick_mid_step = patient
        if ends_for == "a grant":
            one._engine_loop.granted_bytes = 0
        one._page.on_poll(stop=ends_for == "a file")
        if ends_for == "a link":
            one._sidecar._listener.connection = object()
        one._page.guest_left()
        stands: bool = one.tick_mid_step(blocked=True)
        assert not one._page.guest_since
        return stands

    one, host, _ = standing(meanwhile)
    one.tick(seconds=0.02, tokens=1)
    assert host.stood == [ends_for == "nothing"]
    assert one._granted_bytes == (0 if ends_for == "a grant" else NO_LIMIT)


@pytest.mark.parametrize("what", ["its reports", "its memory"])
def test_what_fails_while_a_step_stands_still_drops_the_guest_once_the_step_is_made(what: str) -> None:
    """And is not taken for serving's. It does not stand still again."""

    def meanwhile(one: Any) -> bool:
        def fails(**_: object) -> bool:
            raise OSError("no line")

        def fine(**_: object) -> bool:
            return True

        one._engine_loop.tick_mid_step = fails if what == "its reports" else fine
        one._sharing.rebalance_mid_step = fails if what == "its memory" else fine
        once = one.make_room_mid_step() and one.tick_mid_step(blocked=True)
        one._engine_loop.tick_mid_step = fine
        assert one._lifecycle.state is GuestState.LENDING and not one.tick_mid_step(blocked=True)
        return bool(once)

    one, host, engine = standing(meanwhile)
    one.tick(seconds=0.02, tokens=1)
    assert host.stood == [False] and engine.closed and one._lifecycle.state is GuestState.DROPPED
    one.tick(seconds=0.02, tokens=1)
    assert one._lifecycle.state is GuestState.DROPPED and one._failure is None, "it is told of once"


class NoRoom:
    """A place that has no memory left at some moment of the building."""

    ranks = 2

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at
        self.holds = True

    def patch_model(self, *_: object) -> Any:
        self._take("fit")
        return SimpleNamespace(allocate_spare=lambda: self._take("spare"))

    def cache_address(self, _: object) -> None:
        return None

    def release(self) -> None:
        self.holds = False

    def _take(self, what: str) -> None:
        if what == self._fails_at:
            raise MemoryError(what)


@pytest.mark.parametrize("fails_at", ["fit", "spare"])
def test_a_guest_whose_building_fails_at_its_end_leaves_no_model_behind(
    fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks would hold it as long as serving lives, and another beside it after the next try."""
    scheduler = SimpleNamespace(
        block_size=16,
        kv_cache_config=SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=64)], num_blocks=4),
        kv_cache_manager=SimpleNamespace(block_pool=None, coordinator=SimpleNamespace(single_type_managers=())),
        shutdown=lambda: None,
    )
    core = SimpleNamespace(scheduler=scheduler, structured_output_manager=SimpleNamespace(clear_backend=lambda: None))
    monkeypatch.setattr("rose.workers.executor.vllm.engine.start_core", lambda *_: core)
    place: Any = NoRoom(fails_at)
    monkeypatch.setattr(guest_build, "InProcessBackend", lambda: place)
    with pytest.raises(MemoryError, match=fails_at):
        guest_build.build_guest(LendConfig(model_folder=str(MODEL), socket=""), None, LOG)
    assert not place.holds
