"""The seat: which router serves. One does; any others wait for its place.

Keeps true
- Whoever is assigned the one partition of the heartbeats in the routers' group has the seat. Nothing is fetched by it.
- The low water is committed as a member of the group, so the broker refuses it from a router that was replaced.
- A router that did not look at its seat for LET_GO_SECONDS (it was stopped, or the machine was) gives it up: the broker
  may have given it to another, which it would learn too late. So does one that the broker says has lost it.

On Apache Kafka a router that dies is replaced within SESSION_SECONDS. The embedded broker never evicts: there the seat
waits for the router of the same name to come back, and who was away still has it.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import RoseError
from topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, ROUTER_GROUP
from topics.health import HEALTH
from topics.reader import Reader
from topics.records import Place
from topics.settings import BusSettings

SESSION_SECONDS = 6.0
"""After so much silence the broker gives the seat to another; the least that Apache Kafka allows by default."""

LET_GO_SECONDS = SESSION_SECONDS / 2
"""Half a session: the client's own heartbeats are a second apart, so until then the broker has surely not given up."""

SESSION: dict[str, Any] = {"session.timeout.ms": int(SESSION_SECONDS * 1000), "heartbeat.interval.ms": 1000}


class SeatLost(RoseError):
    """This router must not go on as it was; the message says why."""


class Seat:
    """One router's membership of the group."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        """Raises TopicMissing or BusError."""
        self._settings = settings
        self._name = name
        self._taken = False
        self._looked_at = 0.0
        self._reader = self._join()
        for topic in (REQUESTED, DISPATCHED, COMPLETED, HEARTBEATS):
            self._reader.partitions(topic)

    def wait(self, seconds: float) -> bool:
        """Wait for the seat for so long; whether this router has it now."""
        self._reader.read(1, 0.0 if self._taken else seconds)
        self._looked_at = time.monotonic()
        return self._taken

    def hold(self) -> None:
        """Look whether this router still has the seat: call it before each decision. Raises SeatLost."""
        HEALTH.turned_over()
        absent = time.monotonic() - self._looked_at
        if absent > LET_GO_SECONDS:
            if not self._settings.embedded:
                self.leave()
            raise SeatLost(f"away for {absent:.1f} s: another router may have taken over")
        if not self.wait(0.0):
            raise SeatLost("another router takes over")

    def leave(self) -> None:
        """Give the seat up and stand in line again."""
        self.close()
        self._reader = self._join()

    def committed(self, places: Sequence[Place]) -> dict[Place, int | None]:
        """The low water as it was committed last. Raises BusError."""
        return self._reader.committed(places)

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit the low water, if this router still has the seat. Raises BusError."""
        self._reader.commit(offsets)

    def close(self) -> None:
        """Leave the group."""
        self._taken = False
        self._reader.close()

    def _join(self) -> Reader:
        # librdkafka's own heartbeats keep the membership up while the loop is busy.
        reader = Reader(self._settings, self._name, group=ROUTER_GROUP, member=self._name, **SESSION)
        reader.subscribe([HEARTBEATS], assigned=self._assigned, revoked=self._revoked)
        return reader

    def _assigned(self, places: list[Place]) -> dict[Place, int]:
        self._taken = bool(places)
        return {}

    def _revoked(self, places: list[Place]) -> None:
        self._taken = False
