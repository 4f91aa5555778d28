"""Ends the process when a call that should have returned long ago has not.

librdkafka's `send_offsets_to_transaction` ignores its timeout while the group's coordinator cannot be reached (#5456).
A worker that hangs in it would stay a member of its group, and keep its homes from the others.

Keeps true
- Only looks count that this process was awake for, so a process that was frozen is not ended for it.
- A process is not ended for a broker that is away: only one that answers others makes a hung call a lost one.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from topics.errors import BrokerUnreachable
from topics.settings import TRANSACTION_MILLISECONDS

LOOK_SECONDS = 1.0
"""Between two looks."""

HUNG_SECONDS = 1.5 * TRANSACTION_MILLISECONDS / 1000
"""The broker has long ended a transaction that lasts longer than this, and its homes stand still meanwhile."""

log = structlog.get_logger()


class Watchdog:
    """Watches one thread. `end` is called once, from the watchdog's own thread."""

    def __init__(
        self,
        end: Callable[[], object] = lambda: os._exit(1),
        *,
        reach: Callable[[], object],
        look_seconds: float = LOOK_SECONDS,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        """`reach` raises BrokerUnreachable while no broker answers."""
        self._end = end
        self._reach = reach
        self._look_seconds = look_seconds
        self._looks = hung_seconds / look_seconds
        self._doing = ""
        self._begun = 0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextmanager
    def watching(self, doing: str) -> Iterator[None]:
        """The block is to end in time."""
        self._begun += 1
        self._doing = doing
        try:
            yield
        finally:
            self._doing = ""

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        begun, looks = 0, 0
        while not self._closed.wait(self._look_seconds):
            looks = looks + 1 if self._doing and self._begun == begun else 0
            begun = self._begun
            if looks >= self._looks and self._answered():
                log.error("hung", doing=self._doing, seconds=looks * self._look_seconds, then="this process ends")
                self._end()
                return

    def _answered(self) -> bool:
        try:
            self._reach()
        except BrokerUnreachable:
            return False
        return True
