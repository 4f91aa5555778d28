"""The grants of one lender, followed on a thread.

Keeps true
- The topic is compacted: what was granted before this process began is read back, and after trouble with the bus again.
  What lies before the end of the log as it was met then was not seen to come, so its lease has not begun (`lease`).
- A broker that is away changes nothing, until the lease of what was read ends.
"""

import time
from threading import Event, Thread

import structlog
from confluent_kafka import OFFSET_BEGINNING

from schemas.capacity import CapacityGrant, key_by_hand
from schemas.errors import RoseError
from topics.catalog import GRANTS
from topics.health import HEALTH
from topics.reader import Reader
from topics.records import EndOfPartition, Envelope
from topics.settings import BusSettings
from workers.executor.gate import Leave
from workers.lender.lease import Lease

READ_SECONDS = 0.2
"""Longest wait for a grant between two looks at whether to stop."""

AGAIN_SECONDS = 1.0
"""Before it reads anew after a failure of the bus."""

BATCH = 256
"""Grants taken at once."""

log = structlog.get_logger("lender")


class Grants:
    """Start it, ask for `leave`, stop it."""

    def __init__(self, settings: BusSettings, worker: str, lease: Lease) -> None:
        self._lease = lease
        self._settings = settings
        self._worker = worker
        self._known = Event()
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=f"{worker}-grants", daemon=True)
        self._thread.start()

    def known(self, stop: Event) -> None:
        """Wait until those that were there have been read, or `stop` is set."""
        while not self._known.wait(READ_SECONDS) and not stop.is_set():
            HEALTH.says("waits for its grants: the broker has not told them yet", ready=False)

    def leave(self) -> Leave:
        """What it may do now."""
        return self._lease.leave(time.monotonic())

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except RoseError as error:
                log.warning("reading grants anew", worker=self._worker, reason=str(error))
                self._stopping.wait(AGAIN_SECONDS)

    def _follow(self) -> None:
        reader = Reader(self._settings, f"{self._worker}-grants", ends=True)
        seen = False
        try:
            reader.assign({(GRANTS, 0): OFFSET_BEGINNING})
            while not self._stopping.is_set():
                for item in reader.read(BATCH, READ_SECONDS):
                    if isinstance(item, EndOfPartition):
                        seen = True
                        self._known.set()
                    elif isinstance(item, Envelope) and item.key in (self._worker, key_by_hand(self._worker)):
                        self._take(item, seen=seen)
        finally:
            reader.close()

    def _take(self, item: Envelope, *, seen: bool) -> None:
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        if self._lease.take(grant, time.monotonic(), by_hand=item.key != self._worker, seen=seen):
            said = "none" if grant is None else "lend" if grant.lend else "park"
            log.info("grant", worker=self._worker, said=said, reason="" if grant is None else grant.reason)
