"""The newest grant of one lender, followed on a thread.

Keeps true
- The topic is compacted, so a grant from before this process began counts like one that comes now.
- A broker that is away changes nothing: the newest grant that was read counts.
"""

from threading import Event, Thread

import structlog
from confluent_kafka import OFFSET_BEGINNING

from schemas.capacity import CapacityGrant
from schemas.errors import RoseError
from topics.catalog import GRANTS
from topics.health import HEALTH
from topics.reader import Reader
from topics.records import EndOfPartition, Envelope
from topics.settings import BusSettings

READ_SECONDS = 0.2
"""Longest wait for a grant between two looks at whether to stop."""

AGAIN_SECONDS = 1.0
"""Before it reads anew after a failure of the bus."""

BATCH = 256
"""Grants taken at once."""

log = structlog.get_logger("lender")


class Grants:
    """Start it, ask for `newest`, stop it."""

    def __init__(self, settings: BusSettings, worker: str) -> None:
        self.newest: CapacityGrant | None = None
        """None while there is none, and once it was deleted."""
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
        try:
            reader.assign({(GRANTS, 0): OFFSET_BEGINNING})
            while not self._stopping.is_set():
                for item in reader.read(BATCH, READ_SECONDS):
                    if isinstance(item, EndOfPartition):
                        self._known.set()
                    elif isinstance(item, Envelope) and item.key == self._worker:
                        self._take(item)
        finally:
            reader.close()

    def _take(self, item: Envelope) -> None:
        grant = item.record if isinstance(item.record, CapacityGrant) else None
        if grant != self.newest:
            said = "none" if grant is None else "lend" if grant.lend else "park"
            log.info("grant", worker=self._worker, said=said, reason="" if grant is None else grant.reason)
        self.newest = grant
