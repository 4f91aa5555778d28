"""A reign: from taking the seat to losing it, a router's records in and decisions out.

Keeps true
- Before it decides anything it has claimed every inbox, so that executors drop what a router before it still sends, and
  has then read back every unfinished turn: from the low water on, requests, then dispatches, then results.
- Of what was read together, heartbeats come first, then results, then requests: who is alive, the freed room and the
  warm cache are known when it decides. The time is taken after the records are.
- Little is fetched ahead, so that behind a backlog of turns heartbeats are still read well within their TTL.
- It is at-least-once: a dispatch, a FAILED result or a dead letter may be written twice around a restart, none is left
  out. The low water stays where it is until they are on the broker.

It decides nothing: the core does. Nothing of it outlives it: a router that takes the seat again begins anew.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec
import structlog

from pipeline.clock import steady_clock
from pipeline.routing import metrics
from pipeline.routing.config import RouterConfig
from pipeline.routing.low_water import LowWater, Offsets
from pipeline.routing.router import Decision, Router
from pipeline.routing.seat import Seat
from pipeline.routing.skew import Skews
from pipeline.routing.summary import summary_of
from pipeline.routing.waiting import Asked
from schemas.slack import SlackHeartbeat
from schemas.turns import CLAIM_KEY, TurnDispatch, TurnRequest, TurnResult
from topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, SUMMARIES, Topic
from topics.errors import BusError
from topics.letters import buried
from topics.log import read_back
from topics.reader import Reader
from topics.records import Envelope, Place, Spoiled
from topics.settings import BusSettings
from topics.writer import Writer

READ_LIMIT = 500
"""Records taken at once."""

MISPLACED = 100
"""Executors without an inbox that are told of, each once."""

IDLE_SECONDS = 0.02
"""How long to wait for records before looking at the time."""

SUMMARY_SECONDS = 1.0
"""Between two summaries of the cell."""

INBOXES_SECONDS = 5.0
"""Between two looks for inboxes that were added, while an executor says that it has one which is not known."""

FETCH_AHEAD = {"fetch.message.max.bytes": "1048576", "fetch.max.bytes": "8388608", "queued.max.messages.kbytes": "8192"}
"""8 MiB fetched ahead are about 9,000 turns of 150 tokens, which take about a second to decide on."""


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


class Reign:
    """Moves records between the bus and a core of its own."""

    def __init__(self, settings: BusSettings, config: RouterConfig, seat: Seat, name: str) -> None:
        """Raises TopicMissing or BusError."""
        self.router = Router(config)
        self.skews = Skews()
        self._settings = settings
        self._config = config
        self._seat = seat
        self.clock = steady_clock()
        self._log = structlog.get_logger("router").bind(router=name)
        ahead = replace(settings, properties={**FETCH_AHEAD, **settings.properties})
        self._reader = Reader(ahead, name)
        self._writer = Writer(settings, name)
        self._places: dict[Topic, list[Place]] = {
            topic: [(topic, partition) for partition in range(self._reader.partitions(topic))]
            for topic in (REQUESTED, DISPATCHED, COMPLETED)
        }
        self._next: dict[Place, int] = {}
        """Next offsets: to be read of requests and results, to be written of dispatches."""
        self._low_water = LowWater({})
        self.committed: Offsets = {}
        """The low water as it was last given to be committed."""
        self._unstored = 0
        """FAILED results and dead letters on their way to the broker: until they are there the low water stays."""
        self._buried: dict[Topic, set[tuple[int, int]]] = {}
        """What is a dead letter already, of the topics in which something was spoiled."""
        self._next_mark = 0.0
        self._next_summary = 0.0
        self._name = name
        self._paused = False
        self._reclaimed = 0
        self._next_inboxes = 0.0
        self._misplaced: set[str] = set()

    def close(self) -> None:
        """Leave the broker as it is: what it has not stored yet is not written any more."""
        self._writer.close()
        self._reader.close()

    def finish(self) -> None:
        """See to it that all decisions are on the broker, and commit. Raises BusError."""
        self._writer.flush()
        self._mark()
        self._log.info("stopped", unfinished=len(self.router.turns))

    def begin(self) -> None:
        """Claim the inboxes, read back what the core must know, and read on from there. Raises SeatLost or BusError."""
        began = time.monotonic()
        self._claim(self._places[DISPATCHED])
        places = [place for topic in (REQUESTED, DISPATCHED, COMPLETED) for place in self._places[topic]]
        committed = self._seat.committed(places)
        for place in places:
            self._seat.hold()
            low, high = self._reader.watermarks(place)
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
        turns = {place: self._next[place] for place in self._places[REQUESTED] + self._places[COMPLETED]}
        beats = (HEARTBEATS, 0)
        self._reader.assign({**turns, beats: self._reader.watermarks(beats)[1]})
        self._seat.hold()
        self._carry_out(decisions)
        self._log.info(
            "started",
            waiting=len(self.router.waiting),
            outstanding=self.router.outstanding,
            seconds=round(time.monotonic() - began, 3),
        )

    def turn_over(self) -> None:
        """Take in what there is, waiting a moment for it, and write what the core decides.

        Raises SeatLost, TopicMissing or BusError.
        """
        found = self._reader.read(READ_LIMIT, IDLE_SECONDS)
        self._seat.hold()
        began = time.monotonic()
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
            if isinstance(item, Envelope | Spoiled) and item.topic is not HEARTBEATS:
                self._next[item.topic, item.partition] = item.offset + 1
        self._carry_out(self.router.tick(self.clock()))
        self._writer.poll()
        if records:
            metrics.BATCH_SECONDS.observe(time.monotonic() - began)
        if began >= self._next_mark:
            self._mark()
        if began >= self._next_summary:
            self._next_summary = began + SUMMARY_SECONDS
            summary = summary_of(self.router, name=self._name, now=self.clock())
            self._writer.write(SUMMARIES, summary, key=str(summary.cell), partition=0)
        self._hold_back()
        if self.router.counters.lost > self._reclaimed:
            self._claim(self._places[DISPATCHED])

    def _claim(self, inboxes: Sequence[Place]) -> None:
        """Make this router's the newest claim in these inboxes.

        Executors drop what is sent under an older one. Once a dispatch is lost it is done again: a router that was
        stopped in the midst of its own claim may have finished it since.
        """
        self._reclaimed = self.router.counters.lost
        claims = self.router.claims

        def claimed(slot: int, offset: int) -> None:
            claims[slot] = max(offset, claims.get(slot, 0))

        self._seat.hold()
        for _, slot in inboxes:
            self._writer.tombstone(DISPATCHED, key=CLAIM_KEY, partition=slot, on_delivery=claimed)
        self._writer.flush()

    def _hear(self, beat: SlackHeartbeat) -> None:
        skew = self.skews.heard(beat.worker, beat.sent_at, time.time())
        if skew is not None:
            self._log.warning("clock is wrong", worker=beat.worker, seconds_behind=round(skew, 1))
        slots = len(self._places[DISPATCHED])
        if beat.slot >= slots and time.monotonic() >= self._next_inboxes:
            slots = self._look_for_inboxes()
        if beat.slot < slots:
            self._carry_out(self.router.heard(beat, self.clock()))
        elif beat.worker not in self._misplaced and len(self._misplaced) < MISPLACED:
            self._misplaced.add(beat.worker)
            self._log.error("executor ignored: no such inbox", worker=beat.worker, slot=beat.slot, slots=slots)

    def _look_for_inboxes(self) -> int:
        """Claim the inboxes that were added since this reign began; how many there are. Raises SeatLost or BusError."""
        self._next_inboxes = time.monotonic() + INBOXES_SECONDS
        known, there = self._places[DISPATCHED], self._writer.partitions(DISPATCHED)
        added: list[Place] = [(DISPATCHED, slot) for slot in range(len(known), there)]
        if added:
            known += added
            self._next |= dict.fromkeys(added, 0)
            self._claim(added)
            self._log.info("inboxes added", slots=there)
        return len(known)

    def _sound(self, envelope: Envelope) -> bool:
        """Whether the request makes sense; one that contradicts itself is buried."""
        flaw = envelope.record.flaw if isinstance(envelope.record, TurnRequest) else ""
        if flaw:
            self._bury(envelope, flaw)
        return not flaw

    def _bury(self, found: Envelope | Spoiled, reason: str) -> None:
        """Make a dead letter of what is of no use, unless it is one already."""
        if found.topic not in self._buried:
            self._buried[found.topic] = buried(self._settings, found.topic, client_id="rose-router-letters")
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
            self._seat.commit(risen)
            self.committed = dict(lowest)
        except BusError as error:  # a restart reads a little more: no reason to stop routing
            self._log.warning("low water not committed", error=str(error))

    def _read_on(self, topic: Topic) -> Iterator[Envelope]:
        """The topic from its next offsets to its present end; moves the next offsets along."""
        begins = {place: self._next[place] for place in self._places[topic]}
        spoiled = (lambda found: self._bury(found, found.reason)) if topic is REQUESTED else lambda found: None
        found = read_back(
            self._settings, begins, client_id="rose-router-restore", spoiled=spoiled, meanwhile=self._seat.hold
        )
        for envelope in found:
            self._next[envelope.topic, envelope.partition] = envelope.offset + 1
            yield envelope
