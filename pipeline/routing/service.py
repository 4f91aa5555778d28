"""The router's loop: waits for cells and serves the cells that the router owns.

Keeps true
- A router that has lost a cell, or was away too long to be sure that it owns it, decides nothing more for that cell and
  discards the cell session. Its dispatches carry a fencing token that the next owner replaces. Its other cells go on.
- Records that were read but not handled are read again after a change of the owned cells.
- Little is fetched ahead, so that heartbeats behind a backlog of turns are still read well within their TTL.
- A transient error of the broker does not end the router: it discards all sessions, joins the group again and restores
  its cells from the log.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from threading import Event

import structlog

from rose.pipeline.journal import JournalWriter
from rose.pipeline.routing.cell_session import CellSession, RouterContext
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.membership import CellOwnership, OwnershipLost, RouterMembership
from rose.pipeline.routing.metrics import export_metrics
from rose.topics.errors import BusError, RetryPolicy, TopicMissing
from rose.topics.health import HEALTH
from rose.topics.reader import Reader
from rose.topics.records import Item
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer


def run_router(settings: BusSettings, config: RouterConfig, stop: Event, name: str = "router-0") -> None:
    """Route turns until `stop` is set, then flush and commit. Several routers of different names share the cells.

    Raises RoseError, for example if the broker is unreachable or a topic is missing.
    """
    loop = RouterService(settings, config, name=name)
    with export_metrics(loop):
        loop.run(stop)


READ_LIMIT = 500
"""Records in one batch."""

IDLE_SECONDS = 0.02
"""How long a read waits for records before the router's other work."""

FETCH_AHEAD = {"fetch.message.max.bytes": "1048576", "fetch.max.bytes": "8388608", "queued.max.messages.kbytes": "8192"}
"""Limits of the fetch queue. 8 MiB are about 9,000 turns of 150 tokens, which take about a second to decide on."""

OWNERSHIP_WAIT_SECONDS = 0.2
"""Duration of one poll for a cell; a waiting router notices within this time that it is to stop."""

RETRY_SECONDS = 1.0
"""Pause after a transient error of the broker."""


class RouterService:
    """One router process: serves the cells that it owns, or waits for one."""

    def __init__(self, settings: BusSettings, config: RouterConfig, *, name: str = "router-0") -> None:
        """`name`: unique among the routers of a run. Raises TopicMissing or BusError."""
        self._settings = settings
        self._config = config
        self._name = name
        self._log = structlog.get_logger("router").bind(router=name)
        self._membership = RouterMembership(settings, name)
        self._context: RouterContext | None = None
        """The reader and writer of the sessions; None while there is no session."""
        self.sessions: dict[CellOwnership, CellSession] = {}
        """The sessions of the cells that the router serves now."""
        self._served_cells = ""
        """The served cells, as text for the health report."""
        self._positions_current = True
        """Whether the reader reads the positions of exactly these sessions, so that no record is skipped."""
        self._retry_policy = RetryPolicy(RETRY_SECONDS, RETRY_SECONDS)

    @property
    def cells(self) -> int:
        """Number of cells of the run."""
        return self._membership.cells

    def run(self, stop: Event) -> None:
        """Serve until `stop` is set, then flush and commit. Raises TopicMissing, or BusError for a permanent error."""
        try:
            while not stop.is_set():
                try:
                    self.run_once()
                except (BusError, TopicMissing) as error:
                    wait = self._retry_policy.on_error(error, time.monotonic())
                    self._log.warning("restarting", reason=str(error))
                    HEALTH.report_restart(f"trouble with the broker: {error}")
                    self._discard_sessions()
                    stop.wait(wait)
                    self._membership.rejoin()
            self._flush_and_commit()
        finally:
            self.close()

    def run_once(self) -> None:
        """Serve each owned cell once, or poll for a cell. Raises TopicMissing or BusError."""
        try:
            owned = self._membership.owned if self.sessions else self._membership.poll(OWNERSHIP_WAIT_SECONDS)
            if owned != self.sessions.keys() or not self._positions_current:
                self._serve(owned)
            if self.sessions:
                self._serve_once()
                HEALTH.report(self._served_cells)
                self._retry_policy.on_success()
            else:
                HEALTH.report("waits for a cell, to serve it when no other router does")
        except OwnershipLost as loss:
            self._log.warning("cell_ownership_lost", reason=str(loss))
            self._end_sessions(self._membership.owned)

    def close(self) -> None:
        """Discard the sessions and leave the group. Records that the broker has not stored yet are dropped."""
        self._discard_sessions()
        self._membership.close()

    def _serve(self, owned: frozenset[CellOwnership]) -> None:
        """Begin sessions for newly owned cells, and end the others. Raises OwnershipLost, TopicMissing or BusError."""
        self._end_sessions(owned)
        if not owned:
            return
        if self._context is None:
            settings, name = self._settings, self._name
            reader = Reader(settings.with_defaults(FETCH_AHEAD), name)
            journal = JournalWriter(settings, f"{name}-journal")
            self._context = RouterContext(
                settings, self._config, name, self._membership, reader, Writer(settings, name), journal
            )
        for ownership in sorted(owned - self.sessions.keys()):
            HEALTH.report(f"takes cell {ownership.cell}, and reads back the turns that are under way", ready=False)
            session = CellSession(self._context, ownership)
            session.start()
            self.sessions = {**self.sessions, ownership: session}
        self._served_cells = f"serves {_cells(self.sessions)} of {self.cells}"
        places = {place: at for session in self.sessions.values() for place, at in session.read_positions.items()}
        self._context.reader.assign(places)
        for session in self.sessions.values():
            session.on_reassigned()
        self._positions_current = True

    def _end_sessions(self, owned: frozenset[CellOwnership]) -> None:
        """End the sessions whose ownership is not among `owned`."""
        self._positions_current = False
        # A new dictionary each time, because a metrics scrape may iterate over the old one.
        self.sessions = {ownership: session for ownership, session in self.sessions.items() if ownership in owned}
        if not self.sessions:
            self._discard_sessions()

    def _serve_once(self) -> None:
        """Read one batch and pass it to the sessions. Raises OwnershipLost, TopicMissing or BusError."""
        assert self._context is not None
        found: defaultdict[int, list[Item]] = defaultdict(list)
        for item in self._context.reader.read(READ_LIMIT, IDLE_SECONDS):
            found[item.partition % self.cells].append(item)
        self._membership.ensure_owner()
        if self._membership.owned != self.sessions.keys():
            raise OwnershipLost("the consumer group was rebalanced")
        for ownership, session in self.sessions.items():
            self._membership.ensure_owner(ownership)  # the session before may have taken long
            session.run_once(found[ownership.cell])
        self._context.writer.poll()

    def _flush_and_commit(self) -> None:
        """Wait until all decisions are stored on the broker, and commit the low water. Raises BusError."""
        if self._context is not None:
            self._context.writer.flush()
        for session in self.sessions.values():
            session.finish()
        if self._context is not None:
            self._context.journal.flush()

    def _discard_sessions(self) -> None:
        """Discard all sessions, and drop the records that are not stored yet."""
        self.sessions = {}
        if self._context is not None:
            self._context.close()
            self._context = None


def _cells(ownerships: Iterable[CellOwnership]) -> str:
    numbers = sorted(ownership.cell for ownership in ownerships)
    return f"cell{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
