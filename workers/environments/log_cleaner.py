"""Deletes records that a worker's homes do not need, on a thread.

Keeps true: only records before the given offsets and older than their retention are deleted. A failure is a warning.
"""

from collections.abc import Mapping
from contextlib import suppress
from threading import Thread

import structlog

from rose.schemas.errors import RoseError, ThreadRefused
from rose.topics.admin import delete_before
from rose.topics.processes import start_thread
from rose.topics.records import Place
from rose.topics.settings import BusSettings

EVERY_SECONDS = 600.0
"""Interval of sweeps."""

SOON_SECONDS = 30.0
"""Delay of a sweep after a recovery."""

log = structlog.get_logger()


class LogCleaner:
    """Runs one sweep at a time on its own thread."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._next_at: float | None = None
        self._soon = False
        self._thread: Thread | None = None

    def request_soon(self) -> None:
        """The homes have changed: sweep soon."""
        self._soon = True

    def is_due(self, now: float) -> bool:
        """Whether a sweep is due; if so, the next one is scheduled. `now` is monotonic seconds."""
        if self._next_at is None or self._soon:
            self._next_at, self._soon = now + SOON_SECONDS, False
        if now < self._next_at or (self._thread is not None and self._thread.is_alive()):
            return False
        self._next_at = now + EVERY_SECONDS
        return True

    def sweep(self, needed: Mapping[Place, int]) -> None:
        """Begin to delete the records before these offsets."""
        with suppress(ThreadRefused):  # the next sweep deletes the same records
            self._thread = start_thread(self._delete, dict(needed), name="sweeper")

    def join(self) -> None:
        """Wait for the sweep that is running."""
        if self._thread is not None:
            self._thread.join()

    def _delete(self, needed: dict[Place, int]) -> None:
        try:
            deleted = delete_before(self._settings, needed, client_id=f"rose-{self._name}-sweeper")
        except RoseError as error:
            log.warning("records_not_deleted", worker=self._name, reason=str(error))
            return
        begins = {f"{topic.name}/{partition}": offset for (topic, partition), offset in deleted.items()}
        if begins:
            log.info("records_deleted", worker=self._name, begins=begins)
