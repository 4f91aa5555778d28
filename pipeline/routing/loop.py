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

from pipeline.routing.config import RouterConfig
from pipeline.routing.reign import Reign, Station
from pipeline.routing.seat import Seat, SeatLost, Seats
from topics.errors import BusError, TopicMissing
from topics.health import HEALTH
from topics.reader import Reader
from topics.records import Item
from topics.settings import BusSettings
from topics.writer import Writer

READ_LIMIT = 500
"""Records taken at once."""

IDLE_SECONDS = 0.02
"""How long to wait for records before looking whether anything else is due."""

FETCH_AHEAD = {"fetch.message.max.bytes": "1048576", "fetch.max.bytes": "8388608", "queued.max.messages.kbytes": "8192"}
"""8 MiB fetched ahead are about 9,000 turns of 150 tokens, which take about a second to decide on."""

WAIT_SECONDS = 0.2
"""How long one look for a seat lasts; also how soon a waiting router notices that it is to stop."""

RETRY_SECONDS = 1.0
"""Pause after trouble with the broker."""

MISSING_SECONDS = 30.0
"""How long a topic may be out of sight that was there."""


class RouterLoop:
    """One router, which serves its cells or waits for one."""

    def __init__(self, settings: BusSettings, config: RouterConfig, *, name: str = "router-0") -> None:
        """`name`: no two routers of a run have the same. Raises TopicMissing or BusError."""
        self._settings = settings
        self._config = config
        self._name = name
        self._log = structlog.get_logger("router").bind(router=name)
        self._seats = Seats(settings, name)
        self._station: Station | None = None
        """While it serves."""
        self.reigns: dict[Seat, Reign] = {}
        """Of the cells that it serves now."""
        self._serves = ""
        """Which cells, in words."""
        self._reads_as_it_should = True
        """What is read is what these reigns are to be told, and nothing that they were not told is passed over."""
        self._well_at: float | None = None
        """When it last turned over."""

    @property
    def cells(self) -> int:
        """How many there are, whoever serves them."""
        return self._seats.cells

    def run(self, stop: Event) -> None:
        """Until `stop` is set. Raises TopicMissing, or BusError for what time does not mend."""
        try:
            while not stop.is_set():
                try:
                    self.turn_over()
                except (BusError, TopicMissing) as error:
                    self._bear(error)
                    self._log.warning("beginning anew after trouble with the broker", error=str(error))
                    HEALTH.begins_anew(f"trouble with the broker: {error}")
                    self._forget()
                    stop.wait(RETRY_SECONDS)
                    self._seats.leave()
            self._finish()
        finally:
            self.close()

    def turn_over(self) -> None:
        """Serve its cells once, or wait a moment for one. Raises TopicMissing or BusError."""
        try:
            held = self._seats.held if self.reigns else self._seats.wait(WAIT_SECONDS)
            if held != self.reigns.keys() or not self._reads_as_it_should:
                self._serve(held)
            if self.reigns:
                self._serve_once()
                HEALTH.says(self._serves)
                self._well_at = time.monotonic()
            else:
                HEALTH.says("waits for a cell, to serve it when no other router does")
        except SeatLost as loss:
            self._log.warning("seat lost", reason=str(loss))
            self._let_go(self._seats.held)

    def close(self) -> None:
        """Leave the broker as it is: what it has not stored yet is not written any more."""
        self._forget()
        self._seats.close()

    def _serve(self, held: frozenset[Seat]) -> None:
        """Serve these seats' cells from now on. Raises SeatLost, TopicMissing or BusError."""
        self._let_go(held)
        if not held:
            return
        if self._station is None:
            settings, name = self._settings, self._name
            reader = Reader(settings.preferring(FETCH_AHEAD), name)
            self._station = Station(settings, self._config, name, self._seats, reader, Writer(settings, name))
        for seat in sorted(held - self.reigns.keys()):
            began = time.monotonic()
            HEALTH.says(f"takes cell {seat.cell}, and reads back the turns that are under way", ready=False)
            reign = Reign(self._station, seat)
            reign.begin()
            self.reigns = {**self.reigns, seat: reign}
            self._log.info("serving", cell=seat.cell, seconds=round(time.monotonic() - began, 3))
        self._serves = f"serves {_cells(self.reigns)} of {self.cells}"
        places = {place: at for reign in self.reigns.values() for place, at in reign.reads_from.items()}
        self._station.reader.assign(places)
        for reign in self.reigns.values():
            reign.reads_anew()
        self._reads_as_it_should = True

    def _let_go(self, held: frozenset[Seat]) -> None:
        """Know nothing any more of the cells that none of these seats is of."""
        self._reads_as_it_should = False
        # Another dictionary each time: a scrape may be looking at the one before.
        self.reigns = {seat: reign for seat, reign in self.reigns.items() if seat in held}
        if not self.reigns:
            self._forget()

    def _serve_once(self) -> None:
        """Take in what there is, waiting a moment for it. Raises SeatLost, TopicMissing or BusError."""
        assert self._station is not None
        found: defaultdict[int, list[Item]] = defaultdict(list)
        for item in self._station.reader.read(READ_LIMIT, IDLE_SECONDS):
            found[item.partition % self.cells].append(item)
        self._seats.hold()
        if self._seats.held != self.reigns.keys():
            raise SeatLost("the group has decided anew who serves what")
        for seat, reign in self.reigns.items():
            self._seats.hold(seat)  # the one before may have taken long
            reign.turn_over(found[seat.cell])
        self._station.writer.poll()

    def _finish(self) -> None:
        """See to it that all decisions are on the broker, and commit. Raises BusError."""
        if self._station is not None:
            self._station.writer.flush()
        for reign in self.reigns.values():
            reign.finish()

    def _forget(self) -> None:
        """Know nothing of any cell, and give up what is not stored by now."""
        self.reigns = {}
        if self._station is not None:
            self._station.close()
            self._station = None

    def _bear(self, error: BusError | TopicMissing) -> None:
        """Raise what time does not mend. A topic that was there may be out of sight while its leaders move."""
        if isinstance(error, TopicMissing):
            if self._well_at is None or time.monotonic() - self._well_at > MISSING_SECONDS:
                raise error
        elif error.lasting or error.code == KafkaError.FENCED_INSTANCE_ID:  # another router has this one's name
            raise error


def _cells(seats: Iterable[Seat]) -> str:
    numbers = sorted(seat.cell for seat in seats)
    return f"cell{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
