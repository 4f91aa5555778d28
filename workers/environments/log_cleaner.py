"""Deletes what the homes of a worker do not need any more, beside its loop.

Keeps true: it is told what is needed, and what is younger than the age given stays. A failure is a warning.
"""

from collections.abc import Mapping
from threading import Thread

import structlog

from rose.schemas.errors import RoseError
from rose.topics.catalog import RETENTION_SECONDS
from rose.topics.records import Place
from rose.topics.retention import delete_before
from rose.topics.settings import BusSettings

EVERY_SECONDS = 600.0
"""Between two sweeps."""

SOON_SECONDS = 30.0
"""From a recovery to the next sweep."""

log = structlog.get_logger()


class LogCleaner:
    """One sweep at a time, in a thread of its own."""

    def __init__(self, settings: BusSettings, name: str, *, keep_seconds: float = RETENTION_SECONDS) -> None:
        self._settings = settings
        self._name = name
        self._keep_seconds = keep_seconds
        self._next_at: float | None = None
        self._soon = False
        self._thread: Thread | None = None

    def request_soon(self) -> None:
        """There are new homes: do not wait for the whole time."""
        self._soon = True

    def is_due(self, now: float) -> bool:
        """Whether to sweep. `now` is monotonic seconds."""
        if self._next_at is None or self._soon:
            self._next_at, self._soon = now + SOON_SECONDS, False
        if now < self._next_at or (self._thread is not None and self._thread.is_alive()):
            return False
        self._next_at = now + EVERY_SECONDS
        return True

    def sweep(self, needed: Mapping[Place, int]) -> None:
        """Begin to delete what lies before these offsets."""
        self._thread = Thread(target=self._delete, args=(dict(needed),), name="sweeper", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the sweep under way."""
        if self._thread is not None:
            self._thread.join()

    def _delete(self, needed: dict[Place, int]) -> None:
        try:
            deleted = delete_before(
                self._settings, needed, keep_seconds=self._keep_seconds, client_id=f"rose-{self._name}-sweeper"
            )
        except RoseError as error:
            log.warning("not_deleted", worker=self._name, reason=str(error))
            return
        begins = {f"{topic.name}/{partition}": offset for (topic, partition), offset in deleted.items()}
        if begins:
            log.info("deleted", worker=self._name, begins=begins)
