"""All grants on the log, followed on a thread: what was granted before this began, by whom, and what is now.

Keeps true: everybody who asks sees the whole topic, from its beginning; no consumer group has a part in it.
"""

import queue
from threading import Event, Thread
from typing import NamedTuple

import structlog
from confluent_kafka import OFFSET_BEGINNING

from schemas.capacity import BY_HAND, CapacityGrant
from schemas.errors import RoseError
from topics.catalog import GRANTS
from topics.errors import lasting
from topics.reader import Reader
from topics.records import EndOfPartition, Envelope
from topics.settings import BusSettings

READ_SECONDS = 0.2
AGAIN_SECONDS = 1.0
"""Before it reads anew after a failure of the bus."""

BATCH = 1_000


class Told(NamedTuple):
    """The newest of a worker, under one of its two keys."""

    worker: str
    grant: CapacityGrant | None
    by_hand: bool


class GrantLog:
    """Start it, take what came, stop it."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self.known = Event()
        """What was there has been read."""
        self.failure: RoseError | None = None
        """What time does not mend."""
        self._settings = settings
        self._name = f"{name}-grants"
        self._came: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def take(self) -> list[Told]:
        """What came since this was last asked, in order."""
        return [self._came.get() for _ in range(self._came.qsize())]

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except RoseError as error:
                if lasting(error):
                    self.failure = error
                    return
                structlog.get_logger("control").warning("reading grants anew", reason=str(error))
                self._stopping.wait(AGAIN_SECONDS)

    def _follow(self) -> None:
        reader = Reader(self._settings, self._name, ends=True)
        try:
            reader.assign({(GRANTS, 0): OFFSET_BEGINNING})
            while not self._stopping.is_set():
                for item in reader.read(BATCH, READ_SECONDS):
                    if isinstance(item, EndOfPartition):
                        self.known.set()
                    elif isinstance(item, Envelope):
                        grant = item.record if isinstance(item.record, CapacityGrant) else None
                        by_hand = item.key.endswith(BY_HAND)
                        self._came.put(Told(item.key.removesuffix(BY_HAND), grant, by_hand))
        finally:
            reader.close()
