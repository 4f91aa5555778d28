"""The router's loop: records in, decisions out.

Keeps true
- Before it decides anything it has read back every unfinished turn: from the low water it committed last, requests,
  then dispatches, then results.
- Of what was read together, heartbeats and policy versions come first, then results, then requests: who is alive, the
  freed room and the warm cache are known when it decides.
- Little is fetched ahead, so that behind a backlog of turns heartbeats are still read well within their TTL.
- It is at-least-once: a dispatch may be written twice around a restart, none is left out.

It decides nothing: the core does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Event

import msgspec
import structlog
from confluent_kafka import OFFSET_BEGINNING

from pipeline.routing import metrics
from pipeline.routing.config import RouterConfig
from pipeline.routing.low_water import LowWater, Offsets
from pipeline.routing.router import Decision, Router
from schemas.slack import SlackHeartbeat
from schemas.turns import TurnDispatch, TurnRequest, TurnResult
from schemas.weights import WeightManifest
from topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, MANIFESTS, REQUESTED, Topic
from topics.errors import BusError
from topics.log import read_back
from topics.reader import Reader
from topics.records import Envelope, Place
from topics.settings import BusSettings
from topics.writer import Writer

GROUP = "router"
"""The consumer group under which the low water is committed."""

READ_LIMIT = 500
"""Records taken at once."""

IDLE_SECONDS = 0.02
"""How long to wait for records before looking at the time."""

FETCH_AHEAD = {"fetch.message.max.bytes": "1048576", "fetch.max.bytes": "8388608", "queued.max.messages.kbytes": "8192"}
"""8 MiB fetched ahead are about 9,000 turns of 150 tokens, which take about a second to decide on."""

ABSENCE_SECONDS = 0.5
"""A pause of the loop longer than this (a stopped process, a starved machine) counts as nobody's silence."""


class RouterLoop:
    """Moves records between the bus and a core."""

    def __init__(self, settings: BusSettings, config: RouterConfig, *, clock: Callable[[], float] = time.time) -> None:
        """Raises TopicMissing or BusError."""
        self.router = Router(config)
        self._settings = settings
        self._config = config
        self._clock = clock
        self._log = structlog.get_logger("router")
        ahead = replace(settings, properties={**FETCH_AHEAD, **settings.properties})
        self._reader = Reader(ahead, "rose-router", group=GROUP)
        self._writer = Writer(settings, "rose-router")
        self._places: dict[Topic, list[Place]] = {
            topic: [(topic, partition) for partition in range(self._reader.partitions(topic))]
            for topic in (REQUESTED, DISPATCHED, COMPLETED)
        }
        self._next: dict[Place, int] = {}
        """Next offsets: to be read of requests and results, to be written of dispatches."""
        self._low_water = LowWater({})
        self.committed: Offsets = {}
        """The low water as it was last given to be committed."""
        self._next_mark = 0.0
        self._read_at = 0.0
        self._paused = False
        self._misplaced: set[str] = set()

    def run(self, stop: Event) -> None:
        """Until `stop` is set. Raises TopicMissing or BusError."""
        try:
            self.restore()
            while not stop.is_set():
                self.turn_over()
            self._writer.flush()
            self._mark()
            self._log.info("stopped", unfinished=len(self.router.turns))
        finally:
            self.close()

    def close(self) -> None:
        """Leave the broker as it is."""
        self._reader.close()

    def restore(self) -> None:
        """Read back what the core must know, and begin to read on from there."""
        began = time.monotonic()
        places = [place for topic in (REQUESTED, DISPATCHED, COMPLETED) for place in self._places[topic]]
        committed = self._reader.committed(places)
        for place in places:
            low, high = self._reader.watermarks(place)
            self._next[place] = min(max(low, committed[place] or 0), high)
        self._low_water = LowWater(self._next)
        next_manifest = OFFSET_BEGINNING
        for envelope in self._read_back({(MANIFESTS, 0): OFFSET_BEGINNING}):
            next_manifest = envelope.offset + 1
            if isinstance(envelope.record, WeightManifest):
                self.router.published(envelope.record.version, self._clock())
        decisions = self.router.restore(
            (self._at_home(each) for each in self._read_on(REQUESTED) if isinstance(each.record, TurnRequest)),
            (each.record for each in self._read_on(DISPATCHED) if isinstance(each.record, TurnDispatch)),
            (each.record for each in self._read_on(COMPLETED) if isinstance(each.record, TurnResult)),
            self._clock(),
        )
        turns = {place: self._next[place] for place in self._places[REQUESTED] + self._places[COMPLETED]}
        beats = (HEARTBEATS, 0)
        self._reader.assign({**turns, beats: self._reader.watermarks(beats)[1], (MANIFESTS, 0): next_manifest})
        self._read_at = self._clock()
        self._carry_out(decisions)
        self._log.info(
            "started",
            version=self.router.liveness.current_version,
            waiting=len(self.router.waiting),
            outstanding=self.router.outstanding,
            seconds=round(time.monotonic() - began, 3),
        )

    def turn_over(self) -> None:
        """Take in what there is, waiting a moment for it, and write what the core decides."""
        found = self._reader.read(READ_LIMIT, IDLE_SECONDS)
        now = self._clock()
        if now - self._read_at > ABSENCE_SECONDS:
            self.router.excuse(now - self._read_at)
        self._read_at = now
        records = [each for each in found if isinstance(each, Envelope)]
        for envelope in records:
            self._take_signal(envelope)
        for envelope in records:
            if isinstance(envelope.record, TurnResult):
                self._next[envelope.topic, envelope.partition] = envelope.offset + 1
                self._carry_out(self.router.completed(envelope.record, self._clock()))
        for envelope in records:
            if isinstance(envelope.record, TurnRequest):
                self._next[envelope.topic, envelope.partition] = envelope.offset + 1
                self._carry_out(self.router.requested(self._at_home(envelope), self._clock()))
        self._carry_out(self.router.tick(self._clock()))
        self._writer.poll()
        if records:
            metrics.BATCH_SECONDS.observe(self._clock() - now)
        if now >= self._next_mark:
            self._mark()
        self._hold_back()

    def _take_signal(self, envelope: Envelope) -> None:
        record = envelope.record
        if isinstance(record, WeightManifest):
            self._carry_out(self.router.published(record.version, self._clock()))
        elif isinstance(record, SlackHeartbeat):
            if record.slot < len(self._places[DISPATCHED]):
                self._carry_out(self.router.heard(record, self._clock()))
            elif record.worker not in self._misplaced:
                self._misplaced.add(record.worker)
                slots = len(self._places[DISPATCHED])
                self._log.error("executor ignored: no such inbox", worker=record.worker, slot=record.slot, slots=slots)

    def _at_home(self, envelope: Envelope) -> TurnRequest:
        """The request with the partition it lies in as its home, which is where its result is waited for."""
        request = envelope.record
        assert isinstance(request, TurnRequest)
        if request.home == envelope.partition:
            return request
        return msgspec.structs.replace(request, home=envelope.partition)

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
                metrics.DISPATCH_SECONDS.observe(decision.dispatched_at - request.requested_at)
            else:
                name = decision.trajectory_id
                self._log.warning("turn given up", trajectory=name, turn=decision.turn, reason=decision.reason)
                self._writer.write(COMPLETED, decision, key=name, partition=decision.home, trajectory_id=name)

    def _delivered(self, slot: int, offset: int) -> None:
        self._next[DISPATCHED, slot] = offset + 1

    def _hold_back(self) -> None:
        """Leave requests on their topic while too many turns wait."""
        waiting, most = len(self.router.waiting), self._config.max_waiting_turns
        if not self._paused and waiting > most:
            self._reader.pause(self._places[REQUESTED])
            self._paused = True
        elif self._paused and waiting <= most // 2:
            self._reader.resume(self._places[REQUESTED])
            self._paused = False

    def _mark(self) -> None:
        """Note where the log stands, and commit the low water if it has risen."""
        self._next_mark = self._clock() + self._config.low_water_seconds
        self.router.epoch = self._low_water.mark(self._next)
        lowest = self._low_water.lowest(self.router.oldest_epoch)
        risen = {place: offset for place, offset in lowest.items() if self.committed.get(place) != offset}
        if not risen:
            return
        try:
            self._reader.commit(risen)
            self.committed = dict(lowest)
        except BusError as error:  # a restart reads a little more: no reason to stop routing
            self._log.warning("low water not committed", error=str(error))

    def _read_on(self, topic: Topic) -> Iterator[Envelope]:
        """The topic from its next offsets to its present end; moves the next offsets along."""
        for envelope in self._read_back({place: self._next[place] for place in self._places[topic]}):
            self._next[envelope.topic, envelope.partition] = envelope.offset + 1
            yield envelope

    def _read_back(self, begins: Offsets) -> Iterator[Envelope]:
        """What does not decode is buried: nobody may have read it before."""
        return read_back(self._settings, begins, client_id="rose-router-restore", group=GROUP, bury=True)
