"""A reign: from taking a cell's seat to losing it, the cell's records in and decisions out.

Keeps true
- Before it decides anything it has claimed every inbox of the cell, so that executors drop what one before it sends
  yet, and has then read back every unfinished turn: from the low water on, requests, then dispatches, then results.
- Of what was read together, heartbeats come first, then results, then requests: who is alive, the freed room and the
  warm cache are known when it decides. The time is taken after the records are.
- An inbox that takes no claim amid a reign, as its leader is away, holds up none of the others: whoever reads it counts
  as silent until it does.
- All records of an unfinished turn (its request, dispatches, results) lie at or after the low water, and the low water
  only rises. A mark is the next offsets at one moment; a turn belongs to the epoch that the newest mark began.
- It is at-least-once: a dispatch, a FAILED result or a dead letter may be written twice around a restart, none is left
  out. The low water stays where it is until they are on the broker.

It decides nothing: the core does. Nothing of it outlives it: who takes the cell again begins anew.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from rose.pipeline.clock import steady_clock
from rose.pipeline.routing import metrics
from rose.pipeline.routing.cell_summary import summarize_cell
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.liveness import ClockSkews
from rose.pipeline.routing.membership import CellOwnership, RouterMembership
from rose.pipeline.routing.router import Decision, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.turns import FENCING_KEY, TurnDispatch, TurnRequest, TurnResult
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED, SUMMARIES, Topic, partitions_of_cell
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.errors import BusError
from rose.topics.log_reader import read_to_end
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, Item, Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

Offsets = Mapping[Place, int]


class LowWater:
    """The marks from the oldest that may still be read from to the newest."""

    def __init__(self, start: Offsets) -> None:
        """`start` is the mark of epoch 0."""
        self._marks: deque[tuple[int, Offsets]] = deque([(0, dict(start))])

    def mark(self, next_offsets: Offsets) -> int:
        """Note the next offsets; return the epoch that begins here."""
        epoch = self._marks[-1][0] + 1
        self._marks.append((epoch, dict(next_offsets)))
        return epoch

    def lowest(self, oldest_epoch: int) -> Offsets:
        """The low water while the oldest unfinished turn is of this epoch."""
        while self._marks[0][0] < oldest_epoch:
            self._marks.popleft()
        return self._marks[0][1]


MAX_MISPLACED_WARNINGS = 100
"""Executors without an inbox that are told of, each once."""

SUMMARY_SECONDS = 1.0
"""Between two summaries of the cell."""

IDLE_TICK_SECONDS = 0.05
"""Between two looks at the time while nothing comes."""

FENCING_SECONDS = 1.0
"""How long the cell waits for its inboxes to take a new claim amid its reign: theirs is the only time in which nothing
is decided, and it is short beside what a seat takes (`membership.MAX_UNPOLLED_SECONDS`)."""

INBOXES_SECONDS = 5.0
"""Between two looks for inboxes that were added, while an executor says that it has one which is not known."""


def valid_dispatches(envelopes: Iterable[Envelope]) -> Iterator[TurnDispatch]:
    """Of what lies in the inboxes, in order within each, the dispatches that executors do not drop for their claim."""
    newest: dict[int, int] = {}
    for envelope in envelopes:
        record, slot = envelope.record, envelope.partition
        if record is None and envelope.key == FENCING_KEY:
            newest[slot] = envelope.offset
        elif isinstance(record, TurnDispatch) and record.claim >= newest.get(slot, 0):
            newest[slot] = min(record.claim, envelope.offset)  # as executors count it
            yield record


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What all reigns of one router share: how it reaches the bus, and as whom."""

    settings: BusSettings
    config: RouterConfig
    name: str
    membership: RouterMembership
    reader: Reader
    """It reads what the reigns say, at the places that they say."""
    writer: Writer

    def close(self) -> None:
        """Leave the broker as it is: what it has not stored yet is not written any more."""
        self.writer.close()
        self.reader.close()


class CellSession:
    """Moves the records of one cell between the bus and a core of its own."""

    def __init__(self, context: RouterContext, ownership: CellOwnership) -> None:
        """Raises TopicMissing or BusError."""
        membership, reader = context.membership, context.reader
        self.router = Router(context.config)
        self.clock_skews = ClockSkews()
        self.ownership = ownership
        self._settings = context.settings
        self._config = context.config
        self._membership = membership
        self.clock = steady_clock()
        self._log = structlog.get_logger("router").bind(router=context.name, cell=ownership.cell)
        self._reader = reader
        self._writer = context.writer
        self._partitions: dict[Topic, list[Place]] = {
            topic: [
                (topic, each)
                for each in partitions_of_cell(ownership.cell, membership.cells, reader.partition_count(topic))
            ]
            for topic in (REQUESTED, DISPATCHED, COMPLETED)
        }
        self._next_offsets: dict[Place, int] = {}
        """Next offsets: to be read of requests and results, to be written of dispatches."""
        self._next_heartbeat = reader.watermarks((HEARTBEATS, ownership.cell))[1]
        """The offset of the next heartbeat: those before this reign tell of what has been."""
        self._low_water = LowWater({})
        self.committed: Offsets = {}
        """The low water as it was last given to be committed."""
        self._unstored = 0
        """FAILED results and dead letters on their way to the broker: until they are there the low water stays."""
        self._dead_lettered: dict[Topic, set[tuple[int, int]]] = {}
        """What is a dead letter already, of the topics in which something was spoiled."""
        self._next_tick = 0.0
        self._next_low_water = 0.0
        self._next_summary = 0.0
        self._name = context.name
        self._requests_paused = False
        self._fenced_at_lost = 0
        self._unfenced: set[int] = set()
        """Inboxes whose newest claim is on its way."""
        self._next_inboxes = 0.0
        self._misplaced: set[str] = set()

    @property
    def read_positions(self) -> dict[Place, int]:
        """What must be read for it, and from where."""
        inputs = self._partitions[REQUESTED] + self._partitions[COMPLETED]
        return {
            (HEARTBEATS, self.ownership.cell): self._next_heartbeat,
            **{place: self._next_offsets[place] for place in inputs},
        }

    def finish(self) -> None:
        """Commit, once all decisions are on the broker. Raises BusError."""
        self._commit_low_water()
        self._log.info("stopped", unfinished=len(self.router.turns))

    def start(self) -> None:
        """Claim the inboxes and read back what the core must know. Raises OwnershipLost or BusError."""
        started_at = time.monotonic()
        self._fence_inboxes(self._partitions[DISPATCHED])
        places = [place for topic in (REQUESTED, DISPATCHED, COMPLETED) for place in self._partitions[topic]]
        committed = self._membership.committed(places)
        self._ensure_owner()
        for place, (low, high) in self._reader.all_watermarks(places, on_wait=self._ensure_owner).items():
            self._next_offsets[place] = min(max(low, committed[place] or 0), high)
        self._low_water = LowWater(self._next_offsets)
        decisions = self.router.restore(
            (
                self._received(each)
                for each in self._read_to_end(REQUESTED)
                if isinstance(each.record, TurnRequest) and self._is_valid(each)
            ),
            valid_dispatches(self._read_to_end(DISPATCHED)),
            (each.record for each in self._read_to_end(COMPLETED) if isinstance(each.record, TurnResult)),
            self.clock,
        )
        self._ensure_owner()
        self._write_decisions(decisions)
        self._log.info(
            "started",
            waiting=len(self.router.queue),
            outstanding=self.router.outstanding,
            seconds=round(time.monotonic() - started_at, 3),
        )

    def on_reassigned(self) -> None:
        """All that `read_positions` names is read, whatever was paused."""
        self._requests_paused = False

    def run_once(self, found: Sequence[Item]) -> None:
        """Take in what was read of this cell, in any order, and write what the core decides.

        Raises OwnershipLost, TopicMissing or BusError.
        """
        started_at = time.monotonic()
        if not found and started_at < self._next_tick:
            return
        self._next_tick = started_at + IDLE_TICK_SECONDS
        for item in found:
            if (
                isinstance(item, InvalidMessage) and item.topic is not COMPLETED
            ):  # whoever waits for the results buries those
                self._dead_letter(item, item.reason)
        records = [each for each in found if isinstance(each, Envelope)]
        for envelope in records:
            if isinstance(envelope.record, SlackHeartbeat):
                self._on_heartbeat(envelope.record)
        for envelope in records:
            if isinstance(envelope.record, TurnResult):
                self._write_decisions(self.router.on_result(envelope.record, self.clock()))
        for envelope in records:
            if isinstance(envelope.record, TurnRequest) and self._is_valid(envelope):
                self._write_decisions(self.router.on_request(self._received(envelope), self.clock()))
        for item in found:
            if isinstance(item, Envelope | InvalidMessage):
                self._advance(item)
        self._write_decisions(self.router.tick(self.clock()))
        if records:
            metrics.BATCH_SECONDS.observe(time.monotonic() - started_at)
        if started_at >= self._next_low_water:
            self._commit_low_water()
        if started_at >= self._next_summary:
            self._next_summary = started_at + SUMMARY_SECONDS
            summary = summarize_cell(
                self.router, name=self._name, now=self.clock(), cell=self.ownership.cell, cells=self._membership.cells
            )
            self._writer.write(SUMMARIES, summary, key=str(summary.cell), partition=0)
        self._limit_waiting()
        if self.router.counters.lost > self._fenced_at_lost:
            self._renew_fencing()

    def _advance(self, item: Envelope | InvalidMessage) -> None:
        if item.topic is HEARTBEATS:
            self._next_heartbeat = item.offset + 1
        else:
            self._next_offsets[item.topic, item.partition] = item.offset + 1

    def _ensure_owner(self) -> None:
        self._membership.ensure_owner(self.ownership)

    def _fence_inboxes(self, inboxes: Sequence[Place]) -> None:
        """Make this router's the newest claim in these inboxes: executors drop what is sent under an older one."""
        self._ensure_owner()
        self._write_fencing_tokens(inboxes)
        self._writer.flush()
        self._ensure_owner()

    def _renew_fencing(self) -> None:
        """Once a dispatch is lost: a router that was stopped amid its own claim may have finished it since."""
        self._fenced_at_lost = self.router.counters.lost
        self._ensure_owner()
        slots = {slot for _, slot in self._partitions[DISPATCHED]} - self._unfenced
        self._write_fencing_tokens([(DISPATCHED, slot) for slot in slots])
        until = time.monotonic() + FENCING_SECONDS
        while slots & self._unfenced and (left_seconds := until - time.monotonic()) > 0:
            self._writer.poll(left_seconds)
        self.router.close_inboxes(self._unfenced)  # what is sent there now lies behind the claim, under an older one
        self._ensure_owner()

    def _write_fencing_tokens(self, inboxes: Sequence[Place]) -> None:
        tokens, unfenced = self.router.fencing_tokens, self._unfenced

        def claimed(slot: int, offset: int) -> None:
            tokens[slot] = max(offset, tokens.get(slot, 0))
            unfenced.discard(slot)

        for _, slot in inboxes:
            unfenced.add(slot)
            self._writer.tombstone(DISPATCHED, key=FENCING_KEY, partition=slot, on_delivery=claimed)

    def _on_heartbeat(self, heartbeat: SlackHeartbeat) -> None:
        skew = self.clock_skews.on_heartbeat(heartbeat.worker, heartbeat.sent_at, time.time())
        if skew is not None:
            self._log.warning("clock is wrong", worker=heartbeat.worker, seconds_behind=round(skew, 1))
        if heartbeat.slot in self._unfenced:
            return
        has_inbox = self._has_inbox(heartbeat.slot)
        if not has_inbox and time.monotonic() >= self._next_inboxes:
            self._add_new_inboxes()
            has_inbox = self._has_inbox(heartbeat.slot)
        if has_inbox:
            self._write_decisions(self.router.on_heartbeat(heartbeat, self.clock()))
        elif heartbeat.worker not in self._misplaced and len(self._misplaced) < MAX_MISPLACED_WARNINGS:
            self._misplaced.add(heartbeat.worker)
            self._log.error(
                "executor ignored: no such inbox in this cell", worker=heartbeat.worker, slot=heartbeat.slot
            )

    def _has_inbox(self, slot: int) -> bool:
        inboxes = self._partitions[DISPATCHED]
        return slot % self._membership.cells == self.ownership.cell and bool(inboxes) and slot <= inboxes[-1][1]

    def _add_new_inboxes(self) -> None:
        """Claim the inboxes of this cell that were added since this reign began. Raises OwnershipLost or BusError."""
        self._next_inboxes = time.monotonic() + INBOXES_SECONDS
        known, inbox_count = self._partitions[DISPATCHED], self._writer.partition_count(DISPATCHED)
        slots = partitions_of_cell(self.ownership.cell, self._membership.cells, inbox_count)[len(known) :]
        added: list[Place] = [(DISPATCHED, slot) for slot in slots]
        if added:
            known += added
            self._next_offsets |= dict.fromkeys(added, 0)
            self._fence_inboxes(added)
            self._log.info("inboxes added", slots=inbox_count)

    def _is_valid(self, envelope: Envelope) -> bool:
        """Whether the request makes sense; one that contradicts itself is buried."""
        error = envelope.record.validation_error if isinstance(envelope.record, TurnRequest) else ""
        if error:
            self._dead_letter(envelope, error)
        return not error

    def _dead_letter(self, message: Envelope | InvalidMessage, reason: str) -> None:
        """Make a dead letter of what is of no use, unless it is one already."""
        if message.topic not in self._dead_lettered:
            self._dead_lettered[message.topic] = dead_lettered_places(
                self._settings, message.topic, client_id="rose-router-letters", on_wait=self._ensure_owner
            )
        place = message.partition, message.offset
        if place not in self._dead_lettered[message.topic]:
            self._dead_lettered[message.topic].add(place)
            self._log.warning("buried", topic=message.topic.name, place=place, reason=reason)
            self._unstored += 1
            self._writer.dead_letter(message, reason, on_delivery=self._on_stored)

    def _received(self, envelope: Envelope) -> ReceivedRequest:
        """The request with the partition it lies in as its home, which is where its result is waited for."""
        request, wire = envelope.record, envelope.raw.value
        assert isinstance(request, TurnRequest) and wire is not None
        if request.home != envelope.partition:
            request = msgspec.structs.replace(request, home=envelope.partition)
        return ReceivedRequest(request, wire, envelope.offset)

    def _write_decisions(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, TurnDispatch):
                request = decision.request
                self._writer.write(
                    DISPATCHED,
                    decision,
                    key=request.trajectory_id,
                    partition=decision.slot,
                    trajectory_id=request.trajectory_id,
                    on_delivery=self._on_dispatch_stored,
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
                    on_delivery=self._on_stored,
                )

    def _on_dispatch_stored(self, slot: int, offset: int) -> None:
        self._next_offsets[DISPATCHED, slot] = offset + 1

    def _on_stored(self, _partition: int, _offset: int) -> None:
        self._unstored -= 1

    def _limit_waiting(self) -> None:
        """Leave requests on their topic while too many turns wait for room; an anchor that others wait for is one."""
        waiting, max_waiting = self.router.queue.waiting_for_room, self._config.max_waiting_turns
        if not self._requests_paused and waiting > max_waiting:
            self._reader.pause(self._partitions[REQUESTED])
            self._requests_paused = True
        elif self._requests_paused and waiting <= max_waiting // 2:
            self._reader.resume(self._partitions[REQUESTED])
            self._requests_paused = False

    def _commit_low_water(self) -> None:
        """Note where the log stands, and commit the low water if it has risen."""
        self._next_low_water = time.monotonic() + self._config.low_water_seconds
        if self._unstored:
            return
        self.router.epoch = self._low_water.mark(self._next_offsets)
        lowest = self._low_water.lowest(self.router.oldest_epoch)
        risen = {place: offset for place, offset in lowest.items() if self.committed.get(place) != offset}
        if not risen:
            return
        try:
            self._membership.commit(risen)
            self.committed = dict(lowest)
        except BusError as error:  # a restart reads a little more: no reason to stop routing
            self._log.warning("low water not committed", error=str(error))

    def _read_to_end(self, topic: Topic) -> Iterator[Envelope]:
        """The topic from its next offsets to its present end; moves the next offsets along."""
        begins = {place: self._next_offsets[place] for place in self._partitions[topic]}
        spoiled = (lambda found: self._dead_letter(found, found.reason)) if topic is REQUESTED else lambda found: None
        found = read_to_end(
            self._settings, begins, client_id="rose-router-restore", on_invalid=spoiled, on_wait=self._ensure_owner
        )
        for envelope in found:
            self._next_offsets[envelope.topic, envelope.partition] = envelope.offset + 1
            yield envelope
