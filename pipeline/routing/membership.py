"""Router membership: which router owns which cell.

Keeps true
- The router to which the consumer group assigns partition c of the heartbeats owns cell c. The membership fetches no
  records.
- A cell ownership is one unbroken time. A router that loses a cell and gets it back has a new ownership.
- During a rebalance no router decides anything. A router that is assigned its cells again keeps its ownerships if it is
  still the same member of the group: then no other router can have owned them meanwhile.
- The low water is committed as a member of the group, so the broker refuses the commit of a router that was replaced.
- A router that did not poll for MAX_UNPOLLED_SECONDS, because the process or the machine was stopped, gives its cells
  up: the broker may have assigned them to another router, and this router would learn of that too late. A router that
  waited for MAX_REBALANCE_SECONDS gives its cells up, too. On Apache Kafka both then join as a new member.

On Apache Kafka a router that dies is replaced within SESSION_SECONDS. The embedded broker never evicts a member: the
cells of a dead router wait for a router of the same name, and a router that was stopped still has its cells.
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
"""Session timeout of the group: the broker then assigns the cells of a silent member to others. The least that Apache
Kafka allows by default."""

MAX_UNPOLLED_SECONDS = SESSION_SECONDS / 2
"""Longest time between two polls before a router gives its cells up. The client's heartbeats are a second apart, so the
broker has not ended the session within half of it."""

MAX_REBALANCE_SECONDS = 2 * SESSION_SECONDS
"""Longest wait for a rebalance. A frozen member delays a rebalance for its session timeout."""

POLL_SECONDS = 0.2
"""Duration of one poll during a rebalance."""

POLL_VALID_SECONDS = 0.05
"""How long the outcome of a poll is relied on. Within a session no rebalance ends before this member has polled."""

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats of the Kafka client to the group."""

SESSION: dict[str, Any] = {
    "session.timeout.ms": int(SESSION_SECONDS * 1000),
    "heartbeat.interval.ms": int(HEARTBEAT_SECONDS * 1000),
}


class OwnershipLost(RoseError):
    """The router may not own a cell any more; the message says why."""


class CellOwnership(NamedTuple):
    """One unbroken time in which a router owns a cell."""

    cell: int
    term: int
    """Differs between two ownerships of one cell by the same router."""


class RouterMembership:
    """One router's membership of the consumer group, and the cells that it owns by it."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        """Raises TopicMissing or BusError."""
        self._settings = settings
        self._name = name
        self.owned: frozenset[CellOwnership] = frozenset()
        self._terms = 0
        self._rebalancing = False
        """Whether a rebalance has revoked cells and has not assigned any yet."""
        self._member_name = ""
        """This router's member id at the last assignment."""
        self._polled_at = time.monotonic()
        self._reader = self._join()
        for topic in (REQUESTED, DISPATCHED, COMPLETED):
            self._reader.partition_count(topic)
        self.cells = self._reader.partition_count(HEARTBEATS)

    def poll(self, seconds: float) -> frozenset[CellOwnership]:
        """Poll the group for `seconds`; return the ownerships of this router, none during a rebalance.

        Raises OwnershipLost if the router was stopped during the poll.
        """
        asked_at = time.monotonic()
        self._reader.read(1, seconds)
        self._polled_at = time.monotonic()
        self._give_up_after(self._polled_at - asked_at - seconds)
        return frozenset() if self._rebalancing else self.owned

    def ensure_owner(self, ownership: CellOwnership | None = None) -> None:
        """Check that this router still has its cells, and `ownership` among them. Call this before each decision.

        Waits for the end of a rebalance. Raises OwnershipLost.
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
                    self.rejoin()  # every session has timed out by now, so the rebalance may never end
                raise OwnershipLost(f"the rebalance has not ended within {MAX_REBALANCE_SECONDS:g} s")
        if ownership is not None and ownership not in self.owned:
            raise OwnershipLost(f"another router serves cell {ownership.cell}")

    def _give_up_after(self, unpolled_seconds: float) -> None:
        """Give the cells up and raise OwnershipLost if `unpolled_seconds` is more than MAX_UNPOLLED_SECONDS."""
        if unpolled_seconds <= MAX_UNPOLLED_SECONDS:
            return
        if self._settings.embedded:
            self._set_cells([each.cell for each in self.owned], renew=True)
            self._polled_at = time.monotonic()
        else:
            self.rejoin()
        raise OwnershipLost(f"away for {unpolled_seconds:.1f} s: another router may have taken over")

    def rejoin(self) -> None:
        """Give all cells up and join the group as a new member."""
        self.close()
        self._reader = self._join()

    def committed(self, places: Sequence[Place]) -> dict[Place, int | None]:
        """The committed low water of each place; None if there is none. Raises BusError."""
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
        """Own these cells and no others. Keeps the present ownerships unless `renew`."""
        self._terms += 1
        kept = {} if renew else {ownership.cell: ownership for ownership in self.owned}
        self.owned = frozenset(kept.get(cell, CellOwnership(cell, self._terms)) for cell in cells)
