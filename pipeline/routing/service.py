"""The router's loop: wait for seats, serve the cells that they are of, and again.

Keeps true
- A router that has lost a seat, or was away too long to be sure of it, decides nothing more for that cell and forgets
  what it knew of it. What it had decided is of a claim that the next one replaces. Its other cells go on.
- What was read and not taken in is read again when the cells that it serves are others.
- Little is fetched ahead, so that behind a backlog of turns heartbeats are still read well within their TTL.
- Trouble with the broker that time may mend does not end it: it begins anew, with all of its cells, as soon as it can.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from threading import Event

import structlog
from confluent_kafka import KafkaError

from rose.pipeline.routing.cell_session import CellSession, RouterContext
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.membership import CellOwnership, OwnershipLost, RouterMembership
from rose.pipeline.routing.metrics import export_metrics
from rose.topics.errors import BusError, TopicMissing
from rose.topics.health import HEALTH
from rose.topics.reader import Reader
from rose.topics.records import Item
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer


def run_router(settings: BusSettings, config: RouterConfig, stop: Event, name: str = "router-0") -> None:
    """Route turns until `stop` is set, then flush and commit. Several routers, by name, share the cells.

    Raises RoseError: an unreachable broker, a missing topic.
    """
    loop = RouterService(settings, config, name=name)
    with export_metrics(loop):
        loop.run(stop)


READ_LIMIT = 500
"""Records taken at once."""

IDLE_SECONDS = 0.02
"""How long to wait for records before looking whether anything else is due."""

FETCH_AHEAD = {"fetch.message.max.bytes": "1048576", "fetch.max.bytes": "8388608", "queued.max.messages.kbytes": "8192"}
"""8 MiB fetched ahead are about 9,000 turns of 150 tokens, which take about a second to decide on."""

OWNERSHIP_WAIT_SECONDS = 0.2
"""How long one look for a seat lasts; also how soon a waiting router notices that it is to stop."""

RETRY_SECONDS = 1.0
"""Pause after trouble with the broker."""

MISSING_TOPIC_SECONDS = 30.0
"""How long a topic may be out of sight that was there."""


class RouterService:
    """One router, which serves its cells or waits for one."""

    def __init__(self, settings: BusSettings, config: RouterConfig, *, name: str = "router-0") -> None:
        """`name`: no two routers of a run have the same. Raises TopicMissing or BusError."""
        self._settings = settings
        self._config = config
        self._name = name
        self._log = structlog.get_logger("router").bind(router=name)
        self._membership = RouterMembership(settings, name)
        self._context: RouterContext | None = None
        """While it serves."""
        self.sessions: dict[CellOwnership, CellSession] = {}
        """Of the cells that it serves now."""
        self._served_cells = ""
        """Which cells, in words."""
        self._positions_current = True
        """What is read is what these reigns are to be told, and nothing that they were not told is passed over."""
        self._last_success_at: float | None = None
        """When it last turned over."""

    @property
    def cells(self) -> int:
        """How many there are, whoever serves them."""
        return self._membership.cells

    def run(self, stop: Event) -> None:
        """Until `stop` is set. Raises TopicMissing, or BusError for what time does not mend."""
        try:
            while not stop.is_set():
                try:
                    self.run_once()
                except (BusError, TopicMissing) as error:
                    self._raise_unless_transient(error)
                    self._log.warning("beginning anew after trouble with the broker", error=str(error))
                    HEALTH.report_restart(f"trouble with the broker: {error}")
                    self._discard_sessions()
                    stop.wait(RETRY_SECONDS)
                    self._membership.rejoin()
            self._flush_and_commit()
        finally:
            self.close()

    def run_once(self) -> None:
        """Serve its cells once, or wait a moment for one. Raises TopicMissing or BusError."""
        try:
            owned = self._membership.owned if self.sessions else self._membership.poll(OWNERSHIP_WAIT_SECONDS)
            if owned != self.sessions.keys() or not self._positions_current:
                self._serve(owned)
            if self.sessions:
                self._serve_once()
                HEALTH.report(self._served_cells)
                self._last_success_at = time.monotonic()
            else:
                HEALTH.report("waits for a cell, to serve it when no other router does")
        except OwnershipLost as loss:
            self._log.warning("seat lost", reason=str(loss))
            self._end_sessions(self._membership.owned)

    def close(self) -> None:
        """Leave the broker as it is: what it has not stored yet is not written any more."""
        self._discard_sessions()
        self._membership.close()

    def _serve(self, owned: frozenset[CellOwnership]) -> None:
        """Serve these seats' cells from now on. Raises OwnershipLost, TopicMissing or BusError."""
        self._end_sessions(owned)
        if not owned:
            return
        if self._context is None:
            settings, name = self._settings, self._name
            reader = Reader(settings.with_defaults(FETCH_AHEAD), name)
            self._context = RouterContext(
                settings, self._config, name, self._membership, reader, Writer(settings, name)
            )
        for ownership in sorted(owned - self.sessions.keys()):
            started_at = time.monotonic()
            HEALTH.report(f"takes cell {ownership.cell}, and reads back the turns that are under way", ready=False)
            session = CellSession(self._context, ownership)
            session.start()
            self.sessions = {**self.sessions, ownership: session}
            self._log.info("serving", cell=ownership.cell, seconds=round(time.monotonic() - started_at, 3))
        self._served_cells = f"serves {_cells(self.sessions)} of {self.cells}"
        places = {place: at for session in self.sessions.values() for place, at in session.read_positions.items()}
        self._context.reader.assign(places)
        for session in self.sessions.values():
            session.on_reassigned()
        self._positions_current = True

    def _end_sessions(self, owned: frozenset[CellOwnership]) -> None:
        """Know nothing any more of the cells that none of these seats is of."""
        self._positions_current = False
        # Another dictionary each time: a scrape may be looking at the one before.
        self.sessions = {ownership: session for ownership, session in self.sessions.items() if ownership in owned}
        if not self.sessions:
            self._discard_sessions()

    def _serve_once(self) -> None:
        """Take in what there is, waiting a moment for it. Raises OwnershipLost, TopicMissing or BusError."""
        assert self._context is not None
        found: defaultdict[int, list[Item]] = defaultdict(list)
        for item in self._context.reader.read(READ_LIMIT, IDLE_SECONDS):
            found[item.partition % self.cells].append(item)
        self._membership.ensure_owner()
        if self._membership.owned != self.sessions.keys():
            raise OwnershipLost("the group has decided anew who serves what")
        for ownership, session in self.sessions.items():
            self._membership.ensure_owner(ownership)  # the one before may have taken long
            session.run_once(found[ownership.cell])
        self._context.writer.poll()

    def _flush_and_commit(self) -> None:
        """See to it that all decisions are on the broker, and commit. Raises BusError."""
        if self._context is not None:
            self._context.writer.flush()
        for session in self.sessions.values():
            session.finish()

    def _discard_sessions(self) -> None:
        """Know nothing of any cell, and give up what is not stored by now."""
        self.sessions = {}
        if self._context is not None:
            self._context.close()
            self._context = None

    def _raise_unless_transient(self, error: BusError | TopicMissing) -> None:
        """Raise what time does not mend. A topic that was there may be out of sight while its leaders move."""
        if isinstance(error, TopicMissing):
            if self._last_success_at is None or time.monotonic() - self._last_success_at > MISSING_TOPIC_SECONDS:
                raise error
        elif error.is_permanent or error.code == KafkaError.FENCED_INSTANCE_ID:  # another router has this one's name
            raise error


def _cells(ownerships: Iterable[CellOwnership]) -> str:
    numbers = sorted(ownership.cell for ownership in ownerships)
    return f"cell{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
