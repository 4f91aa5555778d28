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

from tests.descriptors import no_descriptor_left
from tests.waiting import WAIT_SECONDS, until
from workers.executor.line import Line
from workers.executor.step_cost import UNKNOWN, StepCost
from workers.executor.words import NO_LIMIT, REPORTS, Gone, Slack, Tick
from workers.lender.config import LendConfig
from workers.lender.feeder import Feeder
from workers.lender.life import State
from workers.lender.link import End, knock, listen, welcome
from workers.lender.pulse import Pulse
from workers.lender.vllm import building
from workers.lender.vllm import guest as room
from workers.lender.vllm.guest import FREE_SECONDS, Guest

MODEL = Path(__file__).parents[2] / "workers/models/calculator"


QUIET = Slack(0, 0, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {})


CONFIG = LendConfig(model_folder="", socket="")
LOG = logging.getLogger("guest")
BEAT_SECONDS = 0.05


def guest(feeder: Any) -> Guest:
    unused: Any = None
    return Guest(CONFIG, feeder, Pulse(None), StepCost(**UNKNOWN), lambda: QUIET, unused, LOG, unused)


def ended(end: End) -> bool:
    return bool(select.select([end.connection], [], [], 0)[0])


def test_a_link_that_cannot_be_taken_up_ends_and_the_next_one_is(tmp_path: Path) -> None:
    listener = listen(tmp_path / "socket")

    def met() -> tuple[End, End]:
        beside = knock(tmp_path / "socket")
        return beside, welcome(listener.accept()[0])

    first, link = met()
    feeder = SimpleNamespace(link=link, ended=[])
    one = guest(feeder)
    one.tick(seconds=0.02, tokens=1)
    second, feeder.link = met()
    feeder.ended.append(link)
    with no_descriptor_left():
        one.tick(seconds=0.02, tokens=1)
    assert ended(second)
    third, link = met()
    feeder.ended.append(feeder.link)
    feeder.link = link
    one.tick(seconds=0.02, tokens=1)
    one.beat(held=False)
    [tick] = [REPORTS.decode(message) for message in Line(third.wires.reports).read()]
    assert isinstance(tick, Tick) and "built again" in tick.parked and not ended(third)
    for end in (first, second, third, link, listener):
        end.close()


def test_what_was_poisoned_ends_the_link_of_a_guest_that_is_being_built_and_not_the_build(tmp_path: Path) -> None:
    listener = listen(tmp_path / "socket")
    beside = knock(tmp_path / "socket")
    link = welcome(listener.accept()[0])
    one: Any = guest(SimpleNamespace(link=link, ended=[]))
    one.tick(seconds=0.02, tokens=1)
    one._life.state, building = State.WAKING, object()
    one._building = building
    Line(beside.wires.orders).write(b"no order")
    one.tick(seconds=0.02, tokens=1)
    assert ended(beside) and not one.busy
    assert one._building is building and one._life.state is State.WAKING
    for end in (beside, link, listener):
        end.close()


@pytest.mark.parametrize("fails", ["engine_of", "guest_pool"])
def test_a_build_that_fails_at_its_end_holds_nothing_on_servings_ranks(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def no_room(*_: object) -> None:
        raise MemoryError

    for part in ("engine_of", "guest_pool"):
        monkeypatch.setattr(building, part, no_room if part == fails else lambda *_: None)
    asked: list[str] = []
    ranks: Any = SimpleNamespace(size=2, ask=asked.append)
    with pytest.raises(MemoryError):
        building.build(CONFIG, ranks, LOG)
    assert asked == ["release"]


class Untold(Exception):
    """An error of which nothing can be said."""

    def __str__(self) -> str:
        raise RuntimeError("nor of this")


def test_who_is_beside_hears_that_the_guest_is_gone_even_of_an_error_that_cannot_be_told(tmp_path: Path) -> None:
    """Else it would wait for its turns for ever."""
    listener = listen(tmp_path / "socket")
    beside = knock(tmp_path / "socket")
    link = welcome(listener.accept()[0])
    one: Any = guest(SimpleNamespace(link=link, ended=[]))
    one.tick(seconds=0.02, tokens=1)
    engine = Kept()
    one._life.state, one._engine, one._host, one._sharing = State.LENDING, engine, None, Kept()
    one._apart = SimpleNamespace(stepping=nullcontext)
    one.drop(Untold())
    reports = [REPORTS.decode(message) for message in Line(beside.wires.reports).read()]
    assert [report.reason for report in reports if isinstance(report, Gone)] == [
        "Untold: it does not let itself be told"
    ]
    assert engine.closed and one._life.state is State.DROPPED
    for end in (beside, link, listener):
        end.close()


class Kept:
    """An engine, and its share of the memory."""

    busy = grows = closed = False
    looks = 0

    def look(self, give_up: object, *, most_bytes: int, grow: bool) -> None:
        """Nobody is there to give a turn up to."""
        assert give_up is None and not grow
        self.looks += 1
        self.busy = self.looks == 1  # pages wait to go back

    def close(self) -> None:
        self.closed = True


def test_a_guest_that_nobody_knocks_for_is_kept_until_something_says_stop() -> None:
    one: Any = guest(SimpleNamespace(link=None, ended=[]))
    engine, sharing = Kept(), Kept()
    one._life.state, one._granted = State.LENDING, NO_LIMIT
    one._engine, one._sharing, one._apart = engine, sharing, SimpleNamespace(stepping=nullcontext)
    one.tick(seconds=0.02, tokens=1)
    assert not one.busy and not engine.closed
    one._pulse.look(stop=True)
    assert one.busy
    one.tick(seconds=0.02, tokens=1)
    assert engine.closed and sharing.closed and not one.busy
    one._pulse.look(stop=False)
    one.tick(seconds=0.02, tokens=1)
    assert not one.busy and one._life.state is State.PARKED, "nobody is there to build one for"


def test_a_guest_that_nobody_knocks_for_parks_also_where_serving_is_never_idle() -> None:
    """At once where it might compute, after a moment where it might not."""
    one: Any = guest(SimpleNamespace(link=None, ended=[]))
    engine, sharing = Kept(), Kept()
    one._life.state, one._granted = State.LENDING, NO_LIMIT
    one._engine, one._sharing, one._apart = engine, sharing, SimpleNamespace(stepping=nullcontext)
    one.beat(held=True)
    assert one._life.state is State.LENDING, "nothing says stop"
    one._pulse.look(stop=True)
    began = time.monotonic()
    while not engine.closed and time.monotonic() < began + 4 * FREE_SECONDS:
        one.beat(held=True)
    assert engine.closed and sharing.closed and not one.busy
    assert time.monotonic() - began > FREE_SECONDS / 2, "an idle moment would have been better"
    one.beat(held=True)
    assert one._life.state is State.PARKED


class Built(Kept):
    """An engine that has just been built."""

    def between_layers(self, _: object) -> None:
        """Nothing is computed."""

    def abort(self, _: str) -> None:
        """Nothing is in it."""


@pytest.mark.parametrize("priced", [True, False], ids=["lends", "makes its first steps"])
def test_a_guest_that_nobody_knocks_for_hears_of_a_stop_while_the_loop_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, priced: bool
) -> None:
    """And where there is no guest the loop sleeps on."""
    woken = threading.Semaphore(0)
    feeder = Feeder(tmp_path / "socket", woken.release, beat_seconds=BEAT_SECONDS, log=LOG)
    one: Any = guest(feeder)
    feeder.arm()
    assert not woken.acquire(timeout=4 * BEAT_SECONDS)

    beside = knock(tmp_path / "socket")
    assert woken.acquire(timeout=WAIT_SECONDS)
    one.tick(seconds=0.02, tokens=1)
    beside.close()
    until(lambda: feeder.link is None)
    one.tick(seconds=0.02, tokens=1)
    engine = Built()
    monkeypatch.setattr(room, "Sharing", lambda *_: Kept())
    monkeypatch.setattr(room, "Profile", lambda *_: SimpleNamespace(end=lambda: None))
    one._cost = SimpleNamespace(known=priced)
    one._apart = SimpleNamespace(stepping=nullcontext, building=nullcontext)
    done = SimpleNamespace(go_on=lambda _: True, result=lambda: (engine, None), pieces=1, longest_seconds=0.0)
    one._life.state, one._building, one._granted = State.WAKING, done, NO_LIMIT
    one._build(0.02)
    while woken.acquire(timeout=4 * BEAT_SECONDS):
        pass

    one._pulse.look(stop=True)
    feeder.arm()
    assert woken.acquire(timeout=WAIT_SECONDS) and one.busy
    one.tick(seconds=0.02, tokens=1)
    assert engine.closed and one._life.state is State.PARKED
    while woken.acquire(timeout=4 * BEAT_SECONDS):
        pass
    feeder.arm()
    assert not woken.acquire(timeout=4 * BEAT_SECONDS)


def test_the_memory_of_a_guest_that_nobody_knocks_for_goes_back() -> None:
    feeder = SimpleNamespace(link=None, ended=[])
    one: Any = guest(feeder)
    one._life.state, one._granted = State.LENDING, NO_LIMIT
    sharing = Kept()
    one._engine, one._sharing, one._apart = Kept(), sharing, SimpleNamespace(stepping=nullcontext)
    one._caller._link = object()
    assert one.busy
    one.tick(seconds=0.02, tokens=1)
    assert sharing.looks == 1 and one.busy, "the loop goes on until all is given back"
    one.make_room()
    assert sharing.looks == 2 and not one.busy


class Standing:
    """A host whose step stands still."""

    granted, busy = NO_LIMIT, True

    def __init__(self, meanwhile: Callable[[], bool]) -> None:
        self.meanwhile = meanwhile
        self.stood: list[bool] = []

    def tick(self, _: int, __: float) -> None:
        self.stood.append(self.meanwhile())


def standing(meanwhile: Callable[[Any], bool]) -> tuple[Any, Standing, Kept]:
    one: Any = guest(SimpleNamespace(link=None, ended=[]))
    host, engine = Standing(lambda: meanwhile(one)), Kept()
    one._life.state, one._granted = State.LENDING, NO_LIMIT
    one._engine, one._sharing, one._apart = engine, Kept(), SimpleNamespace(stepping=nullcontext)
    one._host = host
    return one, host, engine


@pytest.mark.parametrize("ends_for", ["nothing", "a turn", "a grant", "a file", "a link"])
def test_a_step_stands_still_until_something_waits_for_its_end(ends_for: str) -> None:
    def meanwhile(one: Any) -> bool:
        def patient(*, held: bool) -> bool:
            assert one._pulse.since, "who watches for a hang sees this too"
            return ends_for != "a turn"

        one._host.stands = patient
        if ends_for == "a grant":
            one._host.granted = 0
        one._pulse.look(stop=ends_for == "a file")
        if ends_for == "a link":
            one._caller._feeder.link = object()
        one._pulse.give()
        stands: bool = one.stands(held=True)
        assert not one._pulse.since
        return stands

    one, host, _ = standing(meanwhile)
    one.tick(seconds=0.02, tokens=1)
    assert host.stood == [ends_for == "nothing"]
    assert one._granted == (0 if ends_for == "a grant" else NO_LIMIT)


@pytest.mark.parametrize("what", ["its reports", "its memory"])
def test_what_fails_while_a_step_stands_still_drops_the_guest_once_the_step_is_made(what: str) -> None:
    """And is not taken for serving's. It does not stand still again."""

    def meanwhile(one: Any) -> bool:
        def fails(**_: object) -> bool:
            raise OSError("no line")

        def fine(**_: object) -> bool:
            return True

        one._host.stands = fails if what == "its reports" else fine
        one._sharing.look_within = fails if what == "its memory" else fine
        once = one.make_room_within() and one.stands(held=True)
        one._host.stands = fine
        assert one._life.state is State.LENDING and not one.stands(held=True)
        return bool(once)

    one, host, engine = standing(meanwhile)
    one.tick(seconds=0.02, tokens=1)
    assert host.stood == [False] and engine.closed and one._life.state is State.DROPPED
    one.tick(seconds=0.02, tokens=1)
    assert one._life.state is State.DROPPED and one._failed is None, "it is told of once"


class NoRoom:
    """A place that has no memory left at some moment of the building."""

    ranks = 2

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at
        self.holds = True

    def fit(self, *_: object) -> Any:
        self._take("fit")
        return SimpleNamespace(hold_spare=lambda: self._take("spare"))

    def cache_begins(self, _: object) -> None:
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
    monkeypatch.setattr("workers.executor.vllm.engine.start_core", lambda *_: core)
    place: Any = NoRoom(fails_at)
    monkeypatch.setattr(building, "Here", lambda: place)
    with pytest.raises(MemoryError, match=fails_at):
        building.build(LendConfig(model_folder=str(MODEL), socket=""), None, LOG)
    assert not place.holds
