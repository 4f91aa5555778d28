"""A lender that waits for its grants is alive during any broker outage."""

from threading import Event, Thread

import pytest

from rose.topics import health, reader
from rose.topics.settings import BusSettings
from rose.workers.executor import grants
from rose.workers.executor.grants import GrantFollower, Lease
from tests.support.waiting import until


def test_executor_that_waits_for_grants_is_alive_and_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stop = 0.0, Event()
    monkeypatch.setattr(grants, "HEALTH", of_process := health.Health(lambda: now))
    monkeypatch.setattr(reader, "WATERMARKS_SECONDS", 0.1)  # a stop waits for an answer as long as one query takes
    lender = GrantFollower(BusSettings("127.0.0.1:1"), "executor-3", Lease("job", grant_required=False))
    waiting = Thread(target=lender.wait_until_read, args=(stop,))
    waiting.start()
    until(lambda: "waits for its grants" in of_process.status.sentence)
    now = 10 * health.HUNG_SECONDS
    until(lambda: of_process.status.alive)
    assert not of_process.status.ready
    stop.set()
    waiting.join()
    lender.stop()
