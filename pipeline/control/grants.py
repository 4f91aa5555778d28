"""All grants on the log, followed on a thread: what was granted before this began, by whom, and what is now.

Keeps true: everybody who asks sees the whole topic, from its beginning; no consumer group has a part in it.
"""

import queue
from typing import NamedTuple

from schemas.capacity import CapacityGrant, Voice, spoken_in
from schemas.errors import RoseError
from topics.catalog import GRANTS
from topics.following import Following
from topics.records import Envelope
from topics.settings import BusSettings


class Told(NamedTuple):
    """The newest of a worker, under one of its keys."""

    worker: str
    grant: CapacityGrant | None
    voice: Voice


class GrantLog:
    """Take what came, stop it."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._came: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._following = Following(settings, GRANTS, f"{name}-grants", self._take)

    @property
    def known(self) -> bool:
        """Whether what was there has been read."""
        return self._following.known.is_set()

    @property
    def failure(self) -> RoseError | None:
        """What time does not mend."""
        return self._following.failure

    def take(self) -> list[Told]:
        """What came since this was last asked, in order."""
        return [self._came.get() for _ in range(self._came.qsize())]

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._following.stop()

    def _take(self, item: Envelope, _seen: bool) -> None:
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        worker, voice = spoken_in(item.key)
        if voice is not None:
            self._came.put(Told(worker, grant, voice))
