"""A cell session: reads the records of one cell and writes the router's decisions during one cell ownership.

Keeps true
- Before the first decision the session has written a fencing token into every inbox of the cell, so executors drop
  later dispatches of the previous owner. After that it has read back every unfinished turn: from the low water on,
  requests, then dispatches, then results.
- Within one batch of records, heartbeats are handled first, then results, then requests. So a decision knows which
  executors are live, which room is free and which caches are warm. The time is taken after the records are read.
- An inbox whose partition leader is away does not take a new fencing token. It does not delay the other inboxes: its
  executor counts as silent until the token is stored.
- All records of an unfinished turn (request, dispatches, results) lie at or after the low water, and the low water
  only rises. A mark is the next offsets at one moment; a turn belongs to the epoch that the newest mark began.
- Every call of the core is in the journal, with its time (`pipeline/journal.py`).
- Writes are at-least-once: a dispatch, a FAILED result or a dead letter may be written twice around a restart, and
  none is left out. The low water is not committed before FAILED results and dead letters are on the broker.

The router's core decides; the session decides nothing. No state outlives the session: the next owner of the cell reads
the log again.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from rose.pipeline.clock import steady_clock
from rose.pipeline.journal import JournalRecorder, JournalWriter, numeric_settings
from rose.pipeline.routing import metrics
from rose.pipeline.routing.cell_summary import summarize_cell
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.liveness import ClockSkews
from rose.pipeline.routing.membership import CellOwnership, RouterMembership
from rose.pipeline.routing.router import Decision, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.journal import CoreJournal, EntryKind
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
    """The marks that may still be needed, from the oldest to the newest; each mark begins an epoch."""

    def __init__(self, start: Offsets) -> None:
        """`start` is the mark of epoch 0."""
        self._marks: deque[tuple[int, Offsets]] = deque([(0, dict(start))])

    def mark(self, next_offsets: Offsets) -> int:
        """Add a mark; return the epoch that it begins."""
        epoch = self._marks[-1][0] + 1
        self._marks.append((epoch, dict(next_offsets)))
        return epoch

    def lowest(self, oldest_epoch: int) -> Offsets:
        """The low water if the oldest unfinished turn belongs to this epoch. Drops older marks."""
        while self._marks[0][0] < oldest_epoch:
            self._marks.popleft()
        return self._marks[0][1]


MAX_MISPLACED_WARNINGS = 100
"""Executors without an inbox that are logged, each once."""

SUMMARY_SECONDS = 1.0
"""Time between two summaries of the cell."""

IDLE_TICK_SECONDS = 0.05
"""Time between two ticks of the router while no records arrive."""

FENCING_SECONDS = 1.0
"""How long the cell waits for its inboxes to store a renewed fencing token. The cell decides nothing while it waits, so
the wait is short in comparison with `membership.MAX_UNPOLLED_SECONDS`."""

INBOXES_SECONDS = 5.0
"""Time between two checks for added inboxes, while heartbeats name an inbox that is not known."""


RESTORED_KINDS = {
    REQUESTED: EntryKind.REQUEST,
    DISPATCHED: EntryKind.DISPATCH,
    COMPLETED: EntryKind.RESULT,
}
"""Kinds of the ranges that are read at a start, by topic."""


def valid_dispatches(envelopes: Iterable[Envelope]) -> Iterator[TurnDispatch]:
    """The dispatches that executors do not drop because of their fencing token.

    `envelopes`: the records of the inboxes, in offset order within each inbox.
    """
    newest: dict[int, int] = {}
    for envelope in envelopes:
        record, slot = envelope.record, envelope.partition
        if record is None and envelope.key == FENCING_KEY:
            newest[slot] = envelope.offset
        elif isinstance(record, TurnDispatch) and record.claim >= newest.get(slot, 0):
            newest[slot] = min(record.claim, envelope.offset)  # as executors compute it
            yield record


def received_request(envelope: Envelope) -> ReceivedRequest:
    """The received request, with its partition as its home: its result is expected in that partition."""
    request, wire = envelope.record, envelope.raw.value
    assert isinstance(request, TurnRequest) and wire is not None
    if request.home != envelope.partition:
        request = msgspec.structs.replace(request, home=envelope.partition)
    return ReceivedRequest(request, wire, envelope.offset)


@dataclass(frozen=True, slots=True)
class RouterContext:
    """Objects that all cell sessions of one router share: settings, name, membership, reader and writer."""

    settings: BusSettings
    config: RouterConfig
    name: str
    membership: RouterMembership
    reader: Reader
    """Reads the partitions of all sessions, from their `read_positions`."""
    writer: Writer
    journal: JournalWriter

    def close(self) -> None:
        """Close the writers and the reader. Records that the broker has not stored yet are dropped."""
        self.writer.close()
        self.journal.close()
        self.reader.close()


class CellSession:
    """Moves the records of one cell between the bus and a `Router`, which belongs to this session alone."""

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
        settings = numeric_settings(context.config)
        first = CoreJournal(core=context.name, cell=ownership.cell, began_at=0, sequence=0, settings=settings)
        self._journal = JournalRecorder(self.clock, context.journal, first)
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
        """Next offset to read of requests and results, and next offset to be written of dispatches."""
        self._next_heartbeat = reader.watermarks((HEARTBEATS, ownership.cell))[1]
        """Offset of the next heartbeat to read. Heartbeats from before the session are not read: they are out of
        date."""
        self._low_water = LowWater({})
        self.committed: Offsets = {}
        """The low water that was committed last."""
        self._unstored = 0
        """FAILED results and dead letters that the broker has not stored yet. The low water waits for them."""
        self._dead_lettered: dict[Topic, set[tuple[int, int]]] = {}
        """Partition and offset of messages that are dead letters already, for each topic that had an invalid
        message."""
        self._next_tick = 0.0
        self._next_low_water = 0.0
        self._next_summary = 0.0
        self._name = context.name
        self._requests_paused = False
        self._fenced_at_lost = 0
        self._unfenced: set[int] = set()
        """Slots of inboxes whose newest fencing token is not stored yet."""
        self._next_inboxes = 0.0
        self._misplaced: set[str] = set()

    @property
    def read_positions(self) -> dict[Place, int]:
        """Partitions that this session reads, with the next offset of each."""
        inputs = self._partitions[REQUESTED] + self._partitions[COMPLETED]
        return {
            (HEARTBEATS, self.ownership.cell): self._next_heartbeat,
            **{place: self._next_offsets[place] for place in inputs},
        }

    def finish(self) -> None:
        """Commit the low water and write the end of the journal. Call this once all decisions are on the broker.

        Raises BusError.
        """
        self._commit_low_water()
        self._journal.finish()
        self._log.info("cell_session_ended", unfinished_turns=len(self.router.turns))

    def start(self) -> None:
        """Fence the inboxes and restore the router's state from the log. Raises OwnershipLost or BusError."""
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
                received_request(each)
                for each in self._read_to_end(REQUESTED)
                if isinstance(each.record, TurnRequest) and self._is_valid(each)
            ),
            valid_dispatches(self._read_to_end(DISPATCHED)),
            (each.record for each in self._read_to_end(COMPLETED) if isinstance(each.record, TurnResult)),
            self._restore_times(),
        )
        self._ensure_owner()
        self._write_decisions(decisions)
        self._log.info(
            "cell_session_started",
            waiting_turns=len(self.router.queue),
            assigned_turns=self.router.outstanding,
            seconds=round(time.monotonic() - started_at, 3),
        )

    def on_reassigned(self) -> None:
        """Note that the reader was assigned `read_positions` again, which ends every pause."""
        self._requests_paused = False

    def run_once(self, found: Sequence[Item]) -> None:
        """Pass the records that were read of this cell to the router, and write its decisions.

        `found` may be in any order of partitions. Raises OwnershipLost, TopicMissing or BusError.
        """
        started_at = time.monotonic()
        if not found and started_at < self._next_tick:
            return
        self._next_tick = started_at + IDLE_TICK_SECONDS
        for item in found:
            if (
                isinstance(item, InvalidMessage) and item.topic is not COMPLETED
            ):  # the environment worker that reads a result makes the dead letter
                self._dead_letter(item, item.reason)
        records = [each for each in found if isinstance(each, Envelope)]
        for envelope in records:
            if isinstance(envelope.record, SlackHeartbeat):
                self._on_heartbeat(envelope.record, envelope.offset)
        for envelope in records:
            if isinstance(envelope.record, TurnResult):
                now = self._journal.take(EntryKind.RESULT, envelope.partition, envelope.offset)
                self._write_decisions(self.router.on_result(envelope.record, now))
        for envelope in records:
            if isinstance(envelope.record, TurnRequest) and self._is_valid(envelope):
                now = self._journal.take(EntryKind.REQUEST, envelope.partition, envelope.offset)
                self._write_decisions(self.router.on_request(received_request(envelope), now))
        for item in found:
            if isinstance(item, Envelope | InvalidMessage):
                self._advance(item)
        self._write_decisions(self.router.tick(self._journal.take(EntryKind.TICK)))
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
        self._journal.write_due()

    def _advance(self, item: Envelope | InvalidMessage) -> None:
        if item.topic is HEARTBEATS:
            self._next_heartbeat = item.offset + 1
        else:
            self._next_offsets[item.topic, item.partition] = item.offset + 1

    def _ensure_owner(self) -> None:
        self._membership.ensure_owner(self.ownership)

    def _fence_inboxes(self, inboxes: Sequence[Place]) -> None:
        """Write fencing tokens into these inboxes and wait until they are stored.

        Executors drop dispatches with an older token. Raises OwnershipLost or BusError.
        """
        self._ensure_owner()
        self._write_fencing_tokens(inboxes)
        self._writer.flush()
        self._ensure_owner()

    def _renew_fencing(self) -> None:
        """Write new fencing tokens after a dispatch was lost.

        A router that was stopped while it wrote its own tokens may have written them since.
        """
        self._fenced_at_lost = self.router.counters.lost
        self._ensure_owner()
        slots = {slot for _, slot in self._partitions[DISPATCHED]} - self._unfenced
        self._write_fencing_tokens([(DISPATCHED, slot) for slot in slots])
        until = time.monotonic() + FENCING_SECONDS
        while slots & self._unfenced and (left_seconds := until - time.monotonic()) > 0:
            self._writer.poll(left_seconds)
        # A dispatch to these inboxes would lie behind the new token and carry an older token.
        for slot in sorted(self._unfenced):
            self._journal.take(EntryKind.CLOSED, slot)
        self.router.close_inboxes(self._unfenced)
        self._ensure_owner()

    def _write_fencing_tokens(self, inboxes: Sequence[Place]) -> None:
        tokens, unfenced = self.router.fencing_tokens, self._unfenced

        def claimed(slot: int, offset: int) -> None:
            self._journal.take(EntryKind.FENCED, slot, offset)
            tokens[slot] = max(offset, tokens.get(slot, 0))
            unfenced.discard(slot)

        for _, slot in inboxes:
            unfenced.add(slot)
            self._writer.tombstone(DISPATCHED, key=FENCING_KEY, partition=slot, on_delivery=claimed)

    def _on_heartbeat(self, heartbeat: SlackHeartbeat, offset: int) -> None:
        skew = self.clock_skews.on_heartbeat(heartbeat.worker, heartbeat.sent_at, time.time())
        if skew is not None:
            self._log.warning("clock_skew_detected", worker=heartbeat.worker, seconds_behind=round(skew, 1))
        if heartbeat.slot in self._unfenced:
            return
        has_inbox = self._has_inbox(heartbeat.slot)
        if not has_inbox and time.monotonic() >= self._next_inboxes:
            self._add_new_inboxes()
            has_inbox = self._has_inbox(heartbeat.slot)
        if has_inbox:
            now = self._journal.take(EntryKind.HEARTBEAT, self.ownership.cell, offset)
            self._write_decisions(self.router.on_heartbeat(heartbeat, now))
        elif heartbeat.worker not in self._misplaced and len(self._misplaced) < MAX_MISPLACED_WARNINGS:
            self._misplaced.add(heartbeat.worker)
            reason = "no such inbox in this cell"
            self._log.error("executor_ignored", worker=heartbeat.worker, slot=heartbeat.slot, reason=reason)

    def _has_inbox(self, slot: int) -> bool:
        inboxes = self._partitions[DISPATCHED]
        return slot % self._membership.cells == self.ownership.cell and bool(inboxes) and slot <= inboxes[-1][1]

    def _add_new_inboxes(self) -> None:
        """Fence the inboxes of this cell that were added since the session began. Raises OwnershipLost or BusError."""
        self._next_inboxes = time.monotonic() + INBOXES_SECONDS
        known, inbox_count = self._partitions[DISPATCHED], self._writer.partition_count(DISPATCHED)
        slots = partitions_of_cell(self.ownership.cell, self._membership.cells, inbox_count)[len(known) :]
        added: list[Place] = [(DISPATCHED, slot) for slot in slots]
        if added:
            known += added
            self._next_offsets |= dict.fromkeys(added, 0)
            self._fence_inboxes(added)
            self._log.info("inboxes_added", inboxes=inbox_count)

    def _is_valid(self, envelope: Envelope) -> bool:
        """Whether the request is consistent; an inconsistent request becomes a dead letter."""
        error = envelope.record.validation_error if isinstance(envelope.record, TurnRequest) else ""
        if error:
            self._dead_letter(envelope, error)
        return not error

    def _dead_letter(self, message: Envelope | InvalidMessage, reason: str) -> None:
        """Make a dead letter of an unusable message, unless it is a dead letter already."""
        if message.topic not in self._dead_lettered:
            self._dead_lettered[message.topic] = dead_lettered_places(
                self._settings, message.topic, client_id="rose-router-letters", on_wait=self._ensure_owner
            )
        place = message.partition, message.offset
        if place not in self._dead_lettered[message.topic]:
            self._dead_lettered[message.topic].add(place)
            self._log.warning(
                "dead_lettered",
                topic=message.topic.name,
                partition=message.partition,
                offset=message.offset,
                reason=reason,
            )
            self._unstored += 1
            self._writer.dead_letter(message, reason, on_delivery=self._on_stored)

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
                    on_delivery=self._journal.decide(EntryKind.DISPATCH, self._on_dispatch_stored),
                )
                if not decision.withdrawn:
                    metrics.DISPATCH_SECONDS.observe(decision.dispatched_at - decision.queued_at)
            else:
                name = decision.trajectory_id
                self._log.warning("turn_failed", trajectory=name, turn=decision.turn, reason=decision.reason)
                self._unstored += 1
                self._writer.write(
                    COMPLETED,
                    decision,
                    key=name,
                    partition=decision.home,
                    trajectory_id=name,
                    on_delivery=self._journal.decide(EntryKind.RESULT, self._on_stored),
                )

    def _on_dispatch_stored(self, slot: int, offset: int) -> None:
        self._next_offsets[DISPATCHED, slot] = offset + 1

    def _on_stored(self, _partition: int, _offset: int) -> None:
        self._unstored -= 1

    def _limit_waiting(self) -> None:
        """Pause the requests while more than `max_waiting_turns` turns wait for room; resume at half of it.

        Turns that wait for an anchor do not count: a pause would keep their anchors on the topic.
        """
        waiting, max_waiting = self.router.queue.waiting_for_room, self._config.max_waiting_turns
        if not self._requests_paused and waiting > max_waiting:
            self._reader.pause(self._partitions[REQUESTED])
            self._requests_paused = True
        elif self._requests_paused and waiting <= max_waiting // 2:
            self._reader.resume(self._partitions[REQUESTED])
            self._requests_paused = False

    def _commit_low_water(self) -> None:
        """Add a mark, which begins an epoch, and commit the low water if it has risen."""
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
        except BusError as error:  # routing goes on: a restart only reads a little more
            self._log.warning("offsets_not_committed", reason=str(error))

    def _read_to_end(self, topic: Topic) -> Iterator[Envelope]:
        """Read a topic from the next offsets to its present end; advances the next offsets."""
        begins = {place: self._next_offsets[place] for place in self._partitions[topic]}
        spoiled = (lambda found: self._dead_letter(found, found.reason)) if topic is REQUESTED else lambda found: None
        found = read_to_end(
            self._settings, begins, client_id="rose-router-restore", on_invalid=spoiled, on_wait=self._ensure_owner
        )
        for envelope in found:
            place, end = (topic, envelope.partition), envelope.offset + 1
            self._journal.restore(RESTORED_KINDS[topic], envelope.partition, self._next_offsets[place], end)
            self._next_offsets[place] = end
            yield envelope

    def _restore_times(self) -> Callable[[], float]:
        """The clock of the core's `restore`, which reads the clock at the begin and at the end."""
        kinds = iter((EntryKind.RESTORING, EntryKind.RESTORED))
        return lambda: self._journal.take(next(kinds))
