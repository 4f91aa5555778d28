"""A function in slices: it runs only while resumed, and never pauses with a lock that others need."""

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


def test_call_pauses_between_slices_and_ends_with_its_result() -> None:
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


def test_exception_of_the_call_is_raised_at_its_end() -> None:
    def fail() -> int:
        nothing()
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        finish(TimeSlicedCall(fail, "failing"))


def test_resuming_thread_can_log_and_import_during_every_pause(tmp_path: Path) -> None:
    """A log call and an import hold locks; a deadlock here would last forever."""
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


def test_resume_does_not_wait_inside_an_uninterruptible_call() -> None:
    pieces = TimeSlicedCall(lambda: time.sleep(0.3) or 1, "sleeping")  # type: ignore[func-returns-value]
    began = time.monotonic()
    assert not pieces.resume(PIECE_SECONDS)
    assert time.monotonic() - began < 0.25
    assert finish(pieces) == 1


def test_python_code_that_is_late_to_halt_does_not_run_beside_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code makes no call for longer than the caller's grace, as on a machine that runs other threads meanwhile."""
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


def test_call_that_ends_without_a_waiter_is_done() -> None:
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
