"""A process of environments that holds too many threads or children is given up."""

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rose.workers.environments import process_integrity
from rose.workers.environments.process_integrity import FEW_LEFT, ProcessIntegrity
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _timer_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_integrity, "TIMERS", ())  # pytest's timer for the length of a test is no change


@contextmanager
def threads(count: int) -> Iterator[None]:
    done = threading.Event()
    started = [threading.Thread(target=done.wait, daemon=True) for _ in range(count)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in started:
            thread.join()


@contextmanager
def children(count: int) -> Iterator[None]:
    started = [subprocess.Popen(["sleep", "3600"]) for _ in range(count)]
    try:
        yield
    finally:
        for child in started:
            child.kill()
            child.wait()


def shared(most: int) -> tuple[ProcessIntegrity, list[str]]:
    """Return the integrity of this process, with two trajectories in it, and the changes that it is given up for."""
    changes: list[str] = []
    integrity = ProcessIntegrity(changes.append, most=most)
    integrity.on_use("a")
    integrity.on_use("b")
    integrity.check()
    assert changes == []
    return integrity, changes


def given_up(integrity: ProcessIntegrity, changes: list[str]) -> str:
    def found() -> bool:
        integrity.check()
        return bool(changes)

    until(found)
    return changes[0]


@pytest.mark.parametrize("leak", [threads, children])
def test_process_with_many_threads_or_children_is_given_up(leak: type) -> None:
    integrity, changes = shared(most=5)
    with leak(12):
        assert re.fullmatch(r"left \d+ threads and child processes \(5 are allowed\)", given_up(integrity, changes))


def test_process_with_some_threads_is_given_up_once_no_further_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    integrity, changes = shared(most=1000)
    with threads(2 * FEW_LEFT):
        integrity.check()
        assert changes == []
        monkeypatch.setattr(process_integrity, "start_new_thread", refuse)
        assert given_up(integrity, changes).startswith("left no room for further threads (")
