"""A reign: from taking a cell's seat to losing it, the cell's records in and decisions out.

Keeps true
- Before it decides anything it has claimed every inbox of the cell, so that executors drop what one before it sends
  yet, and has then read back every unfinished turn: from the low water on, requests, then dispatches, then results.
- Of what was read together, heartbeats come first, then results, then requests: who is alive, the freed room and the
  warm cache are known when it decides. The time is taken after the records are.
- An inbox that takes no claim amid a reign, as its leader is away, holds up none of the others: whoever reads it counts
  as silent until it does.
- It is at-least-once: a dispatch, a FAILED result or a dead letter may be written twice around a restart, none is left
  out. The low water stays where it is until they are on the broker.

It decides nothing: the core does. Nothing of it outlives it: who takes the cell again begins anew.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from pipeline.clock import steady_clock
from pipeline.routing import metrics
from pipeline.routing.config import RouterConfig
from pipeline.routing.low_water import LowWater, Offsets
from pipeline.routing.router import Decision, Router
from pipeline.routing.seat import Seat, Seats
from pipeline.routing.skew import Skews
from pipeline.routing.summary import summary_of
from pipeline.routing.waiting import Asked
from schemas.slack import SlackHeartbeat
from schemas.turns import CLAIM_KEY, TurnDispatch, TurnRequest, TurnResult
from topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, SUMMARIES, Topic, of_cell
from topics.errors import BusError
from topics.letters import buried
from topics.log import read_back
from topics.reader import Reader
from topics.records import Envelope, Item, Place, Spoiled
from topics.settings import BusSettings
from topics.writer import Writer

MISPLACED = 100
"""Executors without an inbox that are told of, each once."""

SUMMARY_SECONDS = 1.0
"""Between two summaries of the cell."""

QUIET_SECONDS = 0.05
"""Between two looks at the time while nothing comes."""

CLAIM_SECONDS = 1.0
"""How long the cell waits for its inboxes to take a new claim amid its reign: theirs is the only time in which nothing
is decided, and it is short beside what a seat takes (`seat.LET_GO_SECONDS`)."""

INBOXES_SECONDS = 5.0
"""Between two looks for inboxes that were added, while an executor says that it has one which is not known."""


def valid(envelopes: Iterable[Envelope]) -> Iterator[TurnDispatch]:
    """Of what lies in the inboxes, in order within each, the dispatches that executors do not drop for their claim."""
    newest: dict[int, int] = {}
    for envelope in envelopes:
        record, slot = envelope.record, envelope.partition
        if record is None and envelope.key == CLAIM_KEY:
            newest[slot] = envelope.offset
        elif isinstance(record, TurnDispatch) and record.claim >= newest.get(slot, 0):
            newest[slot] = min(record.claim, envelope.offset)  # as executors count it
            yield record


@dataclass(frozen=True, slots=True)
class Station:
    """What all reigns of one router share: how it reaches the bus, and as whom."""

    settings: BusSettings
    config: RouterConfig
    name: str
    seats: Seats
    reader: Reader
    """It reads what the reigns say, at the places that they say."""
    writer: Writer

    def close(self) -> None:
        """Leave the broker as it is: what it has not stored yet is not written any more."""
        self.writer.close()
        self.reader.close()


class Reign:
    """Moves the records of one cell between the bus and a core of its own."""

    def __init__(self, station: Station, seat: Seat) -> None:
        """Raises TopicMissing or BusError."""
        seats, reader = station.seats, station.reader
        self.router = Router(station.config)
        self.skews = Skews()
        self.seat = seat
        self._settings = station.settings
        self._config = station.config
        self._seats = seats
        self.clock = steady_clock()
        self._log = structlog.get_logger("router").bind(router=station.name, cell=seat.cell)
        self._reader = reader
        self._writer = station.writer
        self._places: dict[Topic, list[Place]] = {
            topic: [(topic, each) for each in of_cell(seat.cell, seats.cells, reader.partitions(topic))]
            for topic in (REQUESTED, DISPATCHED, COMPLETED)
        }
        self._next: dict[Place, int] = {}
        """Next offsets: to be read of requests and results, to be written of dispatches."""
        self._beats = reader.watermarks((HEARTBEATS, seat.cell))[1]
        """The offset of the next heartbeat: those before this reign tell of what has been."""
        self._low_water = LowWater({})
        self.committed: Offsets = {}
        """The low water as it was last given to be committed."""
        self._unstored = 0
        """FAILED results and dead letters on their way to the broker: until they are there the low water stays."""
        self._buried: dict[Topic, set[tuple[int, int]]] = {}
        """What is a dead letter already, of the topics in which something was spoiled."""
        self._next_look = 0.0
        self._next_mark = 0.0
        self._next_summary = 0.0
        self._name = station.name
        self._paused = False
        self._reclaimed = 0
        self._unclaimed: set[int] = set()
        """Inboxes whose newest claim is on its way."""
        self._next_inboxes = 0.0
        self._misplaced: set[str] = set()

    @property
    def reads_from(self) -> dict[Place, int]:
        """What must be read for it, and from where."""
        inputs = self._places[REQUESTED] + self._places[COMPLETED]
        return {(HEARTBEATS, self.seat.cell): self._beats, **{place: self._next[place] for place in inputs}}

    def finish(self) -> None:
        """Commit, once all decisions are on the broker. Raises BusError."""
        self._mark()
        self._log.info("stopped", unfinished=len(self.router.turns))

    def begin(self) -> None:
        """Claim the inboxes and read back what the core must know. Raises SeatLost or BusError."""
        began = time.monotonic()
        self._claim(self._places[DISPATCHED])
        places = [place for topic in (REQUESTED, DISPATCHED, COMPLETED) for place in self._places[topic]]
        committed = self._seats.committed(places)
        self._hold()
        for place, (low, high) in self._reader.all_watermarks(places, meanwhile=self._hold).items():
            self._next[place] = min(max(low, committed[place] or 0), high)
        self._low_water = LowWater(self._next)
        decisions = self.router.restore(
            (
                self._asked(each)
                for each in self._read_on(REQUESTED)
                if isinstance(each.record, TurnRequest) and self._sound(each)
            ),
            valid(self._read_on(DISPATCHED)),
            (each.record for each in self._read_on(COMPLETED) if isinstance(each.record, TurnResult)),
            self.clock,
        )
        self._hold()
        self._carry_out(decisions)
        self._log.info(
            "started",
            waiting=len(self.router.waiting),
            outstanding=self.router.outstanding,
            seconds=round(time.monotonic() - began, 3),
        )

    def reads_anew(self) -> None:
        """All that `reads_from` names is read, whatever was paused."""
        self._paused = False

    def turn_over(self, found: Sequence[Item]) -> None:
        """Take in what was read of this cell, in any order, and write what the core decides.

        Raises SeatLost, TopicMissing or BusError.
        """
        began = time.monotonic()
        if not found and began < self._next_look:
            return
        self._next_look = began + QUIET_SECONDS
        for item in found:
            if isinstance(item, Spoiled) and item.topic is not COMPLETED:  # whoever waits for the results buries those
                self._bury(item, item.reason)
        records = [each for each in found if isinstance(each, Envelope)]
        for envelope in records:
            if isinstance(envelope.record, SlackHeartbeat):
                self._hear(envelope.record)
        for envelope in records:
            if isinstance(envelope.record, TurnResult):
                self._carry_out(self.router.completed(envelope.record, self.clock()))
        for envelope in records:
            if isinstance(envelope.record, TurnRequest) and self._sound(envelope):
                self._carry_out(self.router.requested(self._asked(envelope), self.clock()))
        for item in found:
            if isinstance(item, Envelope | Spoiled):
                self._pass(item)
        self._carry_out(self.router.tick(self.clock()))
        if records:
            metrics.BATCH_SECONDS.observe(time.monotonic() - began)
        if began >= self._next_mark:
            self._mark()
        if began >= self._next_summary:
            self._next_summary = began + SUMMARY_SECONDS
            summary = summary_of(
                self.router, name=self._name, now=self.clock(), cell=self.seat.cell, cells=self._seats.cells
            )
            self._writer.write(SUMMARIES, summary, key=str(summary.cell), partition=0)
        self._hold_back()
        if self.router.counters.lost > self._reclaimed:
            self._claim_anew()

    def _pass(self, item: Envelope | Spoiled) -> None:
        if item.topic is HEARTBEATS:
            self._beats = item.offset + 1
        else:
            self._next[item.topic, item.partition] = item.offset + 1

    def _hold(self) -> None:
        self._seats.hold(self.seat)

    def _claim(self, inboxes: Sequence[Place]) -> None:
        """Make this router's the newest claim in these inboxes: executors drop what is sent under an older one."""
        self._hold()
        self._write_claims(inboxes)
        self._writer.flush()
        self._hold()

    def _claim_anew(self) -> None:
        """Once a dispatch is lost: a router that was stopped amid its own claim may have finished it since."""
        self._reclaimed = self.router.counters.lost
        self._hold()
        slots = {slot for _, slot in self._places[DISPATCHED]} - self._unclaimed
        self._write_claims([(DISPATCHED, slot) for slot in slots])
        until = time.monotonic() + CLAIM_SECONDS
        while slots & self._unclaimed and (left := until - time.monotonic()) > 0:
            self._writer.poll(left)
        self.router.shut(self._unclaimed)  # what is sent there now lies behind the claim, under an older one
        self._hold()

    def _write_claims(self, inboxes: Sequence[Place]) -> None:
        claims, unclaimed = self.router.claims, self._unclaimed

        def claimed(slot: int, offset: int) -> None:
            claims[slot] = max(offset, claims.get(slot, 0))
            unclaimed.discard(slot)

        for _, slot in inboxes:
            unclaimed.add(slot)
            self._writer.tombstone(DISPATCHED, key=CLAIM_KEY, partition=slot, on_delivery=claimed)

    def _hear(self, beat: SlackHeartbeat) -> None:
        skew = self.skews.heard(beat.worker, beat.sent_at, time.time())
        if skew is not None:
            self._log.warning("clock is wrong", worker=beat.worker, seconds_behind=round(skew, 1))
        if beat.slot in self._unclaimed:
            return
        there = self._has(beat.slot)
        if not there and time.monotonic() >= self._next_inboxes:
            self._look_for_inboxes()
            there = self._has(beat.slot)
        if there:
            self._carry_out(self.router.heard(beat, self.clock()))
        elif beat.worker not in self._misplaced and len(self._misplaced) < MISPLACED:
            self._misplaced.add(beat.worker)
            self._log.error("executor ignored: no such inbox in this cell", worker=beat.worker, slot=beat.slot)

    def _has(self, slot: int) -> bool:
        inboxes = self._places[DISPATCHED]
        return slot % self._seats.cells == self.seat.cell and bool(inboxes) and slot <= inboxes[-1][1]

    def _look_for_inboxes(self) -> None:
        """Claim the inboxes of this cell that were added since this reign began. Raises SeatLost or BusError."""
        self._next_inboxes = time.monotonic() + INBOXES_SECONDS
        known, there = self._places[DISPATCHED], self._writer.partitions(DISPATCHED)
        slots = of_cell(self.seat.cell, self._seats.cells, there)[len(known) :]
        added: list[Place] = [(DISPATCHED, slot) for slot in slots]
        if added:
            known += added
            self._next |= dict.fromkeys(added, 0)
            self._claim(added)
            self._log.info("inboxes added", slots=there)

    def _sound(self, envelope: Envelope) -> bool:
        """Whether the request makes sense; one that contradicts itself is buried."""
        flaw = envelope.record.flaw if isinstance(envelope.record, TurnRequest) else ""
        if flaw:
            self._bury(envelope, flaw)
        return not flaw

    def _bury(self, found: Envelope | Spoiled, reason: str) -> None:
        """Make a dead letter of what is of no use, unless it is one already."""
        if found.topic not in self._buried:
            self._buried[found.topic] = buried(
                self._settings, found.topic, client_id="rose-router-letters", meanwhile=self._hold
            )
        place = found.partition, found.offset
        if place not in self._buried[found.topic]:
            self._buried[found.topic].add(place)
            self._log.warning("buried", topic=found.topic.name, place=place, reason=reason)
            self._unstored += 1
            self._writer.dead_letter(found, reason, on_delivery=self._stored)

    def _asked(self, envelope: Envelope) -> Asked:
        """The request with the partition it lies in as its home, which is where its result is waited for."""
        request, wire = envelope.record, envelope.raw.value
        assert isinstance(request, TurnRequest) and wire is not None
        if request.home != envelope.partition:
            request = msgspec.structs.replace(request, home=envelope.partition)
        return Asked(request, wire, envelope.offset)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, TurnDispatch):
                request = decision.request
                self._writer.write(
                    DISPATCHED,
                    decision,
                    key=request.trajectory_id,
                    partition=decision.slot,
                    trajectory_id=request.trajectory_id,
                    on_delivery=self._delivered,
                )
                metrics.DISPATCH_SECONDS.observe(decision.dispatched_at - decision.queued_at)
            else:
                name = decision.trajectory_id
                self._log.warning("turn given up", trajectory=name, turn=decision.turn, reason=decision.reason)
                self._unstored += 1
                self._writer.write(
                    COMPLETED,
                    decision,
                    key=name,
                    partition=decision.home,
                    trajectory_id=name,
                    on_delivery=self._stored,
                )

    def _delivered(self, slot: int, offset: int) -> None:
        self._next[DISPATCHED, slot] = offset + 1

    def _stored(self, _partition: int, _offset: int) -> None:
        self._unstored -= 1

    def _hold_back(self) -> None:
        """Leave requests on their topic while too many turns wait for room; an anchor that others wait for is one."""
        waiting, most = self.router.waiting.for_room, self._config.max_waiting_turns
        if not self._paused and waiting > most:
            self._reader.pause(self._places[REQUESTED])
            self._paused = True
        elif self._paused and waiting <= most // 2:
            self._reader.resume(self._places[REQUESTED])
            self._paused = False

    def _mark(self) -> None:
        """Note where the log stands, and commit the low water if it has risen."""
        self._next_mark = time.monotonic() + self._config.low_water_seconds
        if self._unstored:
            return
        self.router.epoch = self._low_water.mark(self._next)
        lowest = self._low_water.lowest(self.router.oldest_epoch)
        risen = {place: offset for place, offset in lowest.items() if self.committed.get(place) != offset}
        if not risen:
            return
        try:
            self._seats.commit(risen)
            self.committed = dict(lowest)
        except BusError as error:  # a restart reads a little more: no reason to stop routing
            self._log.warning("low water not committed", error=str(error))

    def _read_on(self, topic: Topic) -> Iterator[Envelope]:
        """The topic from its next offsets to its present end; moves the next offsets along."""
        begins = {place: self._next[place] for place in self._places[topic]}
        spoiled = (lambda found: self._bury(found, found.reason)) if topic is REQUESTED else lambda found: None
        found = read_back(
            self._settings, begins, client_id="rose-router-restore", spoiled=spoiled, meanwhile=self._hold
        )
        for envelope in found:
            self._next[envelope.topic, envelope.partition] = envelope.offset + 1
            yield envelope
