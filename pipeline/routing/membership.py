"""Seats: which router serves which cell.

Keeps true
- Whoever is assigned partition c of the heartbeats in the routers' group serves cell c. Nothing is fetched by it.
- A seat is one unbroken time of serving a cell: who has lost a cell and comes by it again has another seat.
- While the group decides anew who serves what, nobody decides anything. Who is given again what it had goes on, if the
  group still knows it as the same member: it has not been given up meanwhile, so nobody else can have had it.
- The low water is committed as a member of the group, so the broker refuses it from a router that was replaced.
- A router that did not look for LET_GO_SECONDS (it was stopped, or the machine was) gives its seats up: the broker may
  have given them to another, which it would learn too late. So does one that the broker says has lost them, and one
  that waited for DECIDED_SECONDS: it stands in line as a new member.

On Apache Kafka a router that dies is replaced within SESSION_SECONDS. The embedded broker never evicts: there its cells
wait for the router of the same name to come back, and who was away still has them.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rose.schemas.errors import RoseError
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, ROUTER_GROUP
from rose.topics.health import HEALTH
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings

SESSION_SECONDS = 6.0
"""After so much silence the broker gives the cells to another; the least that Apache Kafka allows by default."""

MAX_UNPOLLED_SECONDS = SESSION_SECONDS / 2
"""Half a session: the client's own heartbeats are a second apart, so until then the broker has surely not given up."""

MAX_REBALANCE_SECONDS = 2 * SESSION_SECONDS
"""How long the group may take to decide anew who serves what: one that is frozen keeps it for its session."""

POLL_SECONDS = 0.2
"""How long one look lasts while the group decides."""

POLL_VALID_SECONDS = 0.05
"""For so long a look counts: within a session the group decides nothing anew before this member has looked."""

HEARTBEAT_SECONDS = 1.0
"""Between two heartbeats of the client itself."""

SESSION: dict[str, Any] = {
    "session.timeout.ms": int(SESSION_SECONDS * 1000),
    "heartbeat.interval.ms": int(HEARTBEAT_SECONDS * 1000),
}


class OwnershipLost(RoseError):
    """A cell must not be served on as it was; the message says why."""


class CellOwnership(NamedTuple):
    """One unbroken time in which a router serves a cell."""

    cell: int
    term: int


class RouterMembership:
    """One router's membership of the group, and the seats that it has by it."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        """Raises TopicMissing or BusError."""
        self._settings = settings
        self._name = name
        self.owned: frozenset[CellOwnership] = frozenset()
        self._terms = 0
        self._rebalancing = False
        """The group decides anew who serves what."""
        self._member_name = ""
        """As whom the group knew this router when it gave it these seats."""
        self._polled_at = time.monotonic()
        self._reader = self._join()
        for topic in (REQUESTED, DISPATCHED, COMPLETED):
            self._reader.partition_count(topic)
        self.cells = self._reader.partition_count(HEARTBEATS)

    def poll(self, seconds: float) -> frozenset[CellOwnership]:
        """Wait for news for so long; the seats that this router has now. None can be used while the group decides.

        Raises OwnershipLost for one that was stopped meanwhile.
        """
        asked_at = time.monotonic()
        self._reader.read(1, seconds)
        self._polled_at = time.monotonic()
        self._give_up_after(self._polled_at - asked_at - seconds)
        return frozenset() if self._rebalancing else self.owned

    def ensure_owner(self, ownership: CellOwnership | None = None) -> None:
        """Look whether this router still has its seats, this one among them: call it before each decision.

        Waits while the group decides anew. Raises OwnershipLost.
        """
        HEALTH.report_progress()
        absent = time.monotonic() - self._polled_at
        if absent > POLL_VALID_SECONDS:
            self._give_up_after(absent)
            self.poll(0.0)
        undecided_until = self._polled_at + MAX_REBALANCE_SECONDS
        while self._rebalancing:
            self.poll(POLL_SECONDS)
            if self._polled_at > undecided_until:
                if self._settings.embedded:
                    self._set_cells([], renew=True)
                else:
                    self.rejoin()  # by now every session is over: what is still waited for may never come
                raise OwnershipLost(f"the group has not decided within {MAX_REBALANCE_SECONDS:g} s who serves what")
        if ownership is not None and ownership not in self.owned:
            raise OwnershipLost(f"another router serves cell {ownership.cell}")

    def _give_up_after(self, unpolled_seconds: float) -> None:
        """Give the seats up after so many seconds without a look, if they are too many. Raises OwnershipLost."""
        if unpolled_seconds <= MAX_UNPOLLED_SECONDS:
            return
        if self._settings.embedded:
            self._set_cells([each.cell for each in self.owned], renew=True)
            self._polled_at = time.monotonic()
        else:
            self.rejoin()
        raise OwnershipLost(f"away for {unpolled_seconds:.1f} s: another router may have taken over")

    def rejoin(self) -> None:
        """Give all seats up and stand in line again."""
        self.close()
        self._reader = self._join()

    def committed(self, places: Sequence[Place]) -> dict[Place, int | None]:
        """The low water as it was committed last. Raises BusError."""
        return self._reader.committed(places)

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit the low water, if this router is still a member. Raises BusError."""
        self._reader.commit(offsets)

    def close(self) -> None:
        """Leave the group."""
        self._rebalancing = False
        self._set_cells([])
        self._reader.close()

    def _join(self) -> Reader:
        # librdkafka's own heartbeats keep the membership up while the loop is busy.
        reader = Reader(self._settings, self._name, group=ROUTER_GROUP, member_id=self._name, **SESSION)
        reader.subscribe([HEARTBEATS], on_assigned=self._on_assigned, on_revoked=self._on_revoked)
        return reader

    def _on_assigned(self, places: list[Place]) -> dict[Place, int]:
        self._rebalancing = False
        former, self._member_name = self._member_name, self._reader.member_id
        self._set_cells([cell for _, cell in places], renew=former != self._member_name)
        return {}

    def _on_revoked(self, _places: list[Place]) -> None:
        self._rebalancing = bool(self.owned)

    def _set_cells(self, cells: Sequence[int], *, renew: bool = False) -> None:
        """Have seats in these cells and no others, those that it has already unless it is to begin `renew`."""
        self._terms += 1
        kept = {} if renew else {ownership.cell: ownership for ownership in self.owned}
        self.owned = frozenset(kept.get(cell, CellOwnership(cell, self._terms)) for cell in cells)
