"""A function in pieces: it moves only while it is let, and never stands still with a lock that others need."""

import logging
import threading
import time
from pathlib import Path

import pytest

from rose.workers.lender.vllm import host_process
from rose.workers.lender.vllm.host_process import GRACE_SECONDS, TimeSlicedCall

PIECE_SECONDS = 0.001
WAIT_SECONDS = 30.0


def finish(pieces: TimeSlicedCall[int]) -> int:
    deadline = time.monotonic() + WAIT_SECONDS
    while not pieces.resume(PIECE_SECONDS):
        assert time.monotonic() < deadline
    return pieces.result()


def nothing() -> None:
    pass


def test_it_stands_still_between_two_pieces_and_ends_with_what_it_made() -> None:
    made = [0]

    def count() -> int:
        while made[0] < 200_000:
            made[0] += 1
            nothing()
        return made[0]

    pieces = TimeSlicedCall(count, "counting")
    time.sleep(0.02)
    assert made[0] == 0, "it began before it was let"
    assert not pieces.resume(PIECE_SECONDS)
    reached = made[0]
    time.sleep(0.05)
    assert made[0] == reached < 200_000
    assert finish(pieces) == 200_000
    assert pieces.slices > 2


def test_what_it_raises_is_raised_once_it_is_done() -> None:
    def fail() -> int:
        nothing()
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        finish(TimeSlicedCall(fail, "failing"))


def test_who_let_it_go_on_can_log_and_import_whenever_it_stands_still(tmp_path: Path) -> None:
    """A log line and an import hold locks; a deadlock here would last for ever."""
    log = logging.getLogger("test_lender_pieces")
    log.addHandler(logging.FileHandler(tmp_path / "log"))
    log.setLevel(logging.INFO)

    def talk() -> int:
        for number in range(2_000):
            log.info("piece %d", number)
        return 1

    pieces = TimeSlicedCall(talk, "talking")
    done = threading.Event()

    def host() -> None:
        while not pieces.resume(0.0):
            log.info("host")
        done.set()

    threading.Thread(target=host, daemon=True).start()
    assert done.wait(WAIT_SECONDS)
    assert pieces.slices > 1_000


def test_it_is_not_waited_for_inside_a_call_that_cannot_be_cut() -> None:
    pieces = TimeSlicedCall(lambda: time.sleep(0.3) or 1, "sleeping")  # type: ignore[func-returns-value]
    began = time.monotonic()
    assert not pieces.resume(PIECE_SECONDS)
    assert time.monotonic() - began < 0.25
    assert finish(pieces) == 1


def test_python_code_that_is_late_to_halt_does_not_run_beside_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the machine runs other threads meanwhile: here it makes no call for longer than the caller's grace."""
    monkeypatch.setattr(host_process, "LATE_SECONDS", WAIT_SECONDS)
    owner, seen = ["host"], set[str]()

    def look() -> int:
        for _ in range(20):
            nothing()
            for _ in range(200_000):
                if owner[0] != "guest":
                    seen.add("host")
        return 1

    pieces = TimeSlicedCall(look, "looking")
    done = False
    while not done:
        owner[0] = "guest"
        done = pieces.resume(0.0)
        owner[0] = "host"
        time.sleep(0.001)
    assert seen == set()
    assert pieces.longest_seconds > GRACE_SECONDS


def test_one_that_ends_while_nobody_waits_is_done() -> None:
    go = threading.Event()

    def wait() -> int:
        go.wait(WAIT_SECONDS)
        return 7

    pieces = TimeSlicedCall(wait, "waiting")
    assert not pieces.resume(PIECE_SECONDS)
    go.set()
    for _ in range(3):
        finish(pieces)
    assert finish(pieces) == 7
