"""The grants on the log, followed on a thread: earlier grants and new ones, with their sources.

Keeps true: every `GrantLog` reads the whole topic from its beginning, without a consumer group.
"""

import queue
from typing import NamedTuple

from rose.schemas.errors import RoseError
from rose.schemas.grants import CapacityGrant, GrantSource, parse_grant_key
from rose.topics.catalog import GRANTS
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.table_follower import TableFollower


class GrantUpdate(NamedTuple):
    """The newest grant of a worker from one source; None if it was deleted."""

    worker: str
    grant: CapacityGrant | None
    source: GrantSource


class GrantLog:
    """Follows the grants topic from construction to `stop`; `take_updates` returns the changes."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._updates: queue.SimpleQueue[GrantUpdate] = queue.SimpleQueue()
        self._follower = TableFollower(settings, GRANTS, f"{name}-grants", self._on_record)

    @property
    def is_loaded(self) -> bool:
        """Whether all grants from before the start have been read."""
        return self._follower.is_caught_up.is_set()

    @property
    def failure(self) -> RoseError | None:
        """The permanent error that keeps the thread from reading; None if there is none."""
        return self._follower.failure

    def take_updates(self) -> list[GrantUpdate]:
        """The updates since the last call, in order."""
        return [self._updates.get() for _ in range(self._updates.qsize())]

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._follower.stop()

    def _on_record(self, item: Envelope, _caught_up: bool) -> None:
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        worker, source = parse_grant_key(item.key)
        if source is not None:
            self._updates.put(GrantUpdate(worker, grant, source))
