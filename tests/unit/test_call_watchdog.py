"""Hung calls are aborted; slow calls and waits for an unreachable broker are not."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
from confluent_kafka import KafkaException, Producer

from rose.schemas.errors import ThreadRefused
from rose.topics.errors import BrokerUnreachable
from rose.topics.health import HUNG_SECONDS, Health
from rose.topics.processes import start_thread
from rose.topics.transactions import CallWatchdog, HungCall, poll_until_done, run_guarded
from tests.support.signals import signals_come
from tests.support.waiting import until
from tests.unit.test_health import Clock


def soon(call: Callable[[], object], reach: Callable[[], object]) -> None:
    run_guarded(call, CallWatchdog(reach, check_seconds=0.01, seconds=0.05))


class UnreachableBroker:
    """A broker that does not answer until it is back."""

    def __init__(self) -> None:
        self.calls = 0
        self.back = threading.Event()

    def reach(self) -> None:
        self.calls += 1
        if not self.back.is_set():
            raise BrokerUnreachable("127.0.0.1:9")


def test_call_that_never_returns_is_aborted_and_a_returning_call_is_not() -> None:
    never = threading.Event()
    for _ in range(50):
        soon(lambda: never.wait(0.002), lambda: None)
    with pytest.raises(HungCall, match="though the broker answers others"):
        soon(never.wait, lambda: None)
    never.set()


def test_call_after_the_first_one_needs_no_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    used: list[threading.Thread] = []
    soon(lambda: used.append(threading.current_thread()), lambda: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    soon(lambda: used.append(threading.current_thread()), lambda: None)
    assert used[0] is used[1] is not threading.current_thread()
    with pytest.raises(ThreadRefused, match="ulimit -u"):
        start_thread(print, name="refused")


def test_signal_during_a_check_does_not_prolong_the_call() -> None:
    never = threading.Event()
    with signals_come(), pytest.raises(HungCall, match="though the broker answers others"):
        run_guarded(never.wait, CallWatchdog(lambda: None, check_seconds=0.002, seconds=0.1))
    never.set()


def test_exception_of_the_call_is_raised() -> None:
    def fail() -> None:
        raise LookupError("of its own")

    with pytest.raises(LookupError, match="of its own"):
        soon(fail, lambda: None)


def test_call_waits_while_no_broker_answers_and_the_loop_is_not_hung() -> None:
    never, away, clock = threading.Event(), UnreachableBroker(), Clock()
    health = Health(clock)
    health.report("owns homes [0]")

    def reach() -> None:
        clock.now += HUNG_SECONDS
        with suppress(BrokerUnreachable):
            away.reach()
            return
        assert health.status.alive, health.status
        if away.calls == 100:  # far more checks than the limit
            away.back.set()
        raise BrokerUnreachable("127.0.0.1:9")

    with pytest.raises(HungCall):
        wait = CallWatchdog(reach, on_broker_away=health.report_progress, check_seconds=0.01, seconds=0.05)
        run_guarded(never.wait, wait)
    assert away.calls > 100
    never.set()


def test_exception_during_a_check_keeps_no_reference_to_the_call() -> None:
    """confluent-kafka never releases the handled exception when it raises, nor the frames of that exception."""
    client, never = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}), threading.Event()

    class Held:
        def __call__(self) -> None:
            never.wait()

    def reach() -> None:
        with suppress(KafkaException):
            client.list_topics(timeout=0.001)
        raise BrokerUnreachable("127.0.0.1:9")

    held = Held()
    gone = weakref.ref(held)
    with pytest.raises(HungCall):
        run_guarded(held, CallWatchdog(reach, still_needed=lambda: False, check_seconds=0.01, seconds=0.05))
    never.set()
    del held
    until(lambda: gc.collect() >= 0 and gone() is None)


def test_stopping_process_does_not_wait_for_an_unreachable_broker() -> None:
    never, away = threading.Event(), UnreachableBroker()

    def wait() -> CallWatchdog:  # stopped at the tenth check without an answer of the broker
        begins = away.calls
        still_needed = lambda: away.calls - begins < 10  # noqa: E731
        return CallWatchdog(
            away.reach, on_broker_away=lambda: None, still_needed=still_needed, check_seconds=LOOK, seconds=0.05
        )

    with pytest.raises(HungCall, match="answers no client"):
        run_guarded(never.wait, wait())
    with pytest.raises(HungCall, match="answers no client"):
        poll_until_done(lambda seconds: never.wait(seconds), wait())
    assert away.calls == 20
    never.set()


def test_call_that_returns_after_a_long_broker_outage_is_not_aborted() -> None:
    away = UnreachableBroker()

    def call() -> None:
        away.back.wait()

    def reach() -> None:
        if away.calls == 100:
            away.back.set()
        away.reach()

    run_guarded(call, CallWatchdog(reach, on_broker_away=lambda: None, check_seconds=0.01, seconds=2.0))
    assert away.calls >= 100


class SlowCoordinator:
    """A coordinator that answers during the given check. After half of the checks, the checks query the broker."""

    def __init__(self, looks: int) -> None:
        self.left = looks
        self._answer = threading.Event()
        self._returned = threading.Event()

    def call(self) -> None:
        self._answer.wait()
        self._returned.set()

    def reach(self) -> None:
        self.left -= 1
        if not self.left:
            self._answer.set()
            self._returned.wait()


def test_call_that_returns_during_the_last_check_is_not_aborted() -> None:
    slow = SlowCoordinator(looks=2)
    run_guarded(slow.call, CallWatchdog(slow.reach, check_seconds=0.2, seconds=1.0))
    assert not slow.left


def test_stopping_process_waits_for_a_shorter_time() -> None:
    never, away = threading.Event(), UnreachableBroker()

    def leaving(reach: Callable[[], object]) -> CallWatchdog:
        return CallWatchdog(reach, still_needed=lambda: False, check_seconds=LOOK, seconds=60.0, leaving_seconds=0.05)

    with pytest.raises(HungCall, match="answers no client"):
        run_guarded(never.wait, leaving(away.reach))
    with pytest.raises(HungCall, match="though the broker answers others"):
        run_guarded(never.wait, leaving(lambda: None))
    assert away.calls == 1
    never.set()


def test_call_is_aborted_after_twelve_checks_if_the_broker_answered_others_at_five() -> None:
    calls: list[int] = []
    wait = CallWatchdog(lambda: calls.append(looks))
    for looks in range(1, 12):  # noqa: B007
        wait.check()
    with pytest.raises(HungCall, match="for 12 s"):
        wait.check()
    assert calls == [7, 8, 9, 10, 11]


LOOK = 0.01


class Transaction:
    """A commit that is done after the given number of polls."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    def commit(self, seconds: float) -> bool:
        assert seconds == LOOK
        self.left -= 1
        return self.left == 0


def test_resumable_call_is_polled_until_it_is_done_or_aborted() -> None:
    slow = Transaction(turns=5)
    poll_until_done(slow.commit, CallWatchdog(lambda: None, check_seconds=LOOK, seconds=0.05))
    assert not slow.left
    with pytest.raises(HungCall, match="though the broker answers others"):
        poll_until_done(Transaction(turns=100).commit, CallWatchdog(lambda: None, check_seconds=LOOK, seconds=0.05))


def test_callback_runs_during_a_call_and_may_end_it() -> None:
    met: list[int] = []
    poll_until_done(Transaction(turns=3).commit, CallWatchdog(lambda: None, check_seconds=LOOK), lambda: met.append(1))
    assert met == [1, 1]

    def ends() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        poll_until_done(Transaction(turns=3).commit, CallWatchdog(lambda: None, check_seconds=LOOK), ends)


def test_commit_waits_for_a_broker_that_answers_no_client() -> None:
    away, slow = UnreachableBroker(), Transaction(turns=100)
    wait = CallWatchdog(away.reach, on_broker_away=lambda: None, check_seconds=LOOK, seconds=0.05)
    poll_until_done(slow.commit, wait)
    assert not slow.left and away.calls > 90
