"""What hangs ends its process; what is slow, and whoever waits for a broker that is away, does not."""

import threading
import time

from tests.unit.test_health import Clock
from topics.errors import BrokerUnreachable
from topics.health import HUNG_SECONDS, Health
from topics.watchdog import Watchdog


def watchdog_of(ended: threading.Event) -> Watchdog:
    return Watchdog(ended.set, look_seconds=0.01, hung_seconds=0.05)


def test_what_never_returns_is_ended_and_what_does_is_left_alone() -> None:
    ended = threading.Event()
    watchdog = watchdog_of(ended)
    for _ in range(50):
        with watchdog.watching("a call that returns", lambda: None):
            time.sleep(0.002)
    assert not ended.is_set()
    with watchdog.watching("a call that does not", lambda: None):
        assert ended.wait(30.0)
    watchdog.close()


def test_one_call_that_hangs_is_seen_while_others_come_and_go() -> None:
    ended = threading.Event()
    watchdog = watchdog_of(ended)
    with watchdog.watching("a call that does not return", lambda: None):
        while not ended.is_set():
            with watchdog.watching("a call that returns", lambda: None):
                ended.wait(0.001)
    watchdog.close()


def test_it_waits_while_no_broker_answers_anybody_and_the_loop_does_not_count_as_hung() -> None:
    ended, back, often = threading.Event(), threading.Event(), threading.Event()
    clock, excused = Clock(), 0
    health = Health(clock)
    health.says("owns homes [0]")

    def reach() -> None:
        clock.now += HUNG_SECONDS
        if not back.is_set():
            raise BrokerUnreachable("127.0.0.1:9")

    def excuse() -> None:
        nonlocal excused
        health.turned_over()
        excused += 1
        if excused == 3:
            often.set()

    watchdog = Watchdog(ended.set, excuse=excuse, look_seconds=0.01, hung_seconds=0.05)
    with watchdog.watching("a call that waits for the broker", reach):
        assert often.wait(30.0) and not ended.is_set()
        assert health.standing.alive, health.standing
        back.set()
        assert ended.wait(30.0)
    watchdog.close()


def test_who_returns_once_the_broker_is_back_is_not_ended_however_long_it_was_away() -> None:
    ended, back, answered = threading.Event(), threading.Event(), threading.Event()
    asked = 0

    def reach() -> None:
        nonlocal asked
        asked += 1
        if not back.is_set():
            raise BrokerUnreachable("127.0.0.1:9")
        answered.set()

    watchdog = Watchdog(ended.set, look_seconds=0.01, hung_seconds=2.0)
    with watchdog.watching("a call that waits for the broker", reach):
        while asked < 200:  # as many looks as would have ended it
            ended.wait(0.01)
        back.set()
        assert answered.wait(30.0)
    assert not ended.is_set()
    watchdog.close()
