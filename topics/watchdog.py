"""Ends the process when a call that should have returned long ago has not.

librdkafka's `send_offsets_to_transaction` ignores its timeout while the group's coordinator cannot be reached (#5456),
and nothing can call it off. Who hangs in it would keep what it owns from everybody else.

Keeps true
- Only looks count that this process was awake for, so a process that was frozen is not ended for it.
- A process is not ended for a broker that is away: what makes a hung call a lost one is that the broker has answered
  others for half of the time. Nor is it by whoever asks how it is (`topics/health.py`): a loop whose call waits for a
  broker that is away does not hang.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import structlog

from schemas.errors import RoseError
from topics.health import HEALTH
from topics.settings import TRANSACTION_MILLISECONDS

LOOK_SECONDS = 1.0
"""Between two looks."""

HUNG_SECONDS = 1.2 * TRANSACTION_MILLISECONDS / 1000
"""The broker has long ended a transaction that lasts longer than this."""

log = structlog.get_logger("bus")


@dataclass(slots=True, eq=False)
class _Call:
    """One that has not returned."""

    doing: str
    reach: Callable[[], object]
    looks: int = 0
    answered: int = 0
    """Of the looks in the second half, those at which the broker answered."""


class Watchdog:
    """Watches calls of any thread. `end` is called once, `excuse` at looks at which no broker answers, both from the
    watchdog's own thread."""

    def __init__(
        self,
        end: Callable[[], object] = lambda: os._exit(1),
        *,
        excuse: Callable[[], object] = HEALTH.turned_over,
        look_seconds: float = LOOK_SECONDS,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        self._end, self._excuse = end, excuse
        self._look_seconds = look_seconds
        self._looks = hung_seconds / look_seconds
        self._calls: set[_Call] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextmanager
    def watching(self, doing: str, reach: Callable[[], object]) -> Iterator[None]:
        """The block is to end in time. `reach` raises RoseError while no broker answers."""
        call = _Call(doing, reach)
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._look_seconds):
            for call in self._calls.copy():
                call.looks += 1
                if call.looks <= self._looks / 2:
                    continue
                if not _answers(call):
                    self._excuse()
                    continue
                call.answered += 1
                if call.answered >= self._looks / 2 and call in self._calls:
                    log.error("hung", doing=call.doing, looks=call.looks, then="this process ends")
                    self._end()
                    return


@cache
def watchdog() -> Watchdog:
    """This process's."""
    return Watchdog()


def _answers(call: _Call) -> bool:
    try:
        call.reach()
    except RoseError:
        return False
    return True
