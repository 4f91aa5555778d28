"""The grants of one executor, followed on a thread.

Keeps true
- The topic is compacted: what was granted before this process began is read back, and after trouble with the bus again.
  What lies before the end of the log as it was met then was not seen to come, so its lease has not begun (`lease`).
- A broker that is away changes nothing, until the lease of what was read ends.
"""

import time
from threading import Event

import structlog

from schemas.capacity import CapacityGrant, Voice, spoken_in
from topics.catalog import GRANTS
from topics.following import Following
from topics.health import HEALTH, START_SECONDS
from topics.records import Envelope
from topics.settings import BusSettings
from workers.executor.gate import Leave
from workers.executor.lease import Lease

LOOK_SECONDS = 0.2
"""Between two looks at whether to stop."""

log = structlog.get_logger("executor")


class Grants:
    """Ask for `leave`, stop it."""

    def __init__(self, settings: BusSettings, worker: str, lease: Lease) -> None:
        self._lease = lease
        self._worker = worker
        self._following = Following(settings, GRANTS, f"{worker}-grants", self._take)

    def known(self, stop: Event) -> None:
        """Wait until those that were there have been read, or `stop` is set. Raises RoseError for what lasts."""
        while not self._following.known.wait(LOOK_SECONDS) and not stop.is_set():
            if self._following.failure is not None:
                raise self._following.failure
            waits = "waits for its grants: the broker has not told them yet"
            HEALTH.says(waits, ready=False, lasts_seconds=START_SECONDS)

    def leave(self) -> Leave:
        """What it may do now."""
        return self._lease.leave(time.monotonic())

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._following.stop()

    def _take(self, item: Envelope, seen: bool) -> None:
        worker, voice = spoken_in(item.key)
        if worker != self._worker or voice is None:
            return
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        if self._lease.take(grant, time.monotonic(), voice=voice, seen=seen):
            said = "none" if grant is None else _in_short(grant, voice)
            log.info("grant", worker=self._worker, said=said, reason="" if grant is None else grant.reason)


def _in_short(grant: CapacityGrant, voice: Voice) -> str:
    if voice is Voice.CELL:
        return f"cell {grant.cell}"
    if voice is Voice.DRAIN:
        return "drain"
    return "lend" if grant.lend else "park"
