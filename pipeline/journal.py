"""The journal of a core: records its inputs and their times, so that `rose replay` can repeat its decisions.

Keeps true
- A batch is written once all of its decisions are stored, and after the batches before it. So the log never has a
  journal of decisions that a killed process did not store.
- The time of an input is a whole number of microseconds, so that the journal has exactly the time that the core saw.
- A core does not depend on its journal. No call here waits for the broker. If the journal cannot be written, or more
  of it waits than may be in memory, that is logged once and recording ends.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec
import structlog

from rose.schemas.errors import RoseError
from rose.schemas.journal import (
    MAX_ENTRIES,
    CoreJournal,
    EntryKind,
    JournalDecision,
    JournalInput,
    RestoredRange,
)
from rose.schemas.wire import encoded
from rose.topics.catalog import JOURNAL
from rose.topics.errors import UNKNOWN_PARTITION_CODES, BusError, TopicMissing
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

BATCH_SECONDS = 1.0
"""Time between two batches."""

BATCH_INPUTS = 4_096
"""Inputs after which a batch ends earlier."""

MAX_WAITING_INPUTS = 500_000
"""Most inputs of batches whose decisions are not stored yet; about 100 MB. An inbox without a partition leader does not
stop the other inboxes, and its dispatches may wait for hours."""

MAX_UNSTORED_BYTES = 64 * 1024 * 1024
"""Most bytes of journals that the broker has not stored yet. More might fill the client's queue, and a write would
wait. A busy cell writes about 100 KiB a second."""

FLUSH_SECONDS = 2.0
"""How long the end of a router waits for its last records of journals."""

MICROSECONDS = 1_000_000

OnDelivery = Callable[[int, int], None]
"""Called with partition and offset of a stored record."""


def numeric_settings(config: Any) -> dict[str, float]:
    """Return the settings of a core's configuration, a dataclass, that are numbers."""
    return {name: value for name, value in asdict(config).items() if isinstance(value, int | float)}


@dataclass(slots=True)
class _Batch:
    """Inputs and decisions since the batch before."""

    began: float
    """Monotonic seconds."""
    restored: list[RestoredRange] = field(default_factory=list)
    inputs: list[JournalInput] = field(default_factory=list)
    decisions: list[JournalDecision | None] = field(default_factory=list)
    """None for a decision that is not stored yet."""
    unstored: int = 0

    def on_stored(self, index: int, kind: EntryKind, then: OnDelivery, where: int, offset: int) -> None:
        """Note the place of the decision with this index, and call `then`."""
        self.decisions[index] = JournalDecision(kind, where, offset)
        self.unstored -= 1
        then(where, offset)


class JournalRecorder:
    """Gives a core the time of each input, and records the input with this time."""

    def __init__(
        self,
        clock: Callable[[], float],
        sink: Callable[[CoreJournal], None],
        first: CoreJournal,
        *,
        seconds: float = BATCH_SECONDS,
    ) -> None:
        """`clock`: unix seconds that never jump. `sink` writes a record, or raises RoseError.

        `first`: the names and settings of the core. Its `began_at` is set here.
        """
        self._clock = clock
        self._sink = sink
        self._seconds = seconds
        self._last = int(clock() * MICROSECONDS)
        self._next_record = msgspec.structs.replace(first, began_at=self._last)
        """The next record, without its entries."""
        self._batch = _Batch(time.monotonic())
        self._pending: deque[_Batch] = deque()
        """Batches that have ended, oldest first."""
        self._waiting_inputs = 0
        """Inputs of the batches in `_pending`."""
        self._records = True
        """Whether inputs are recorded."""

    def take(self, kind: EntryKind, partition: int = 0, offset: int = 0) -> float:
        """Record an input; return its time in unix seconds."""
        now = int(self._clock() * MICROSECONDS)
        self._batch.inputs.append(JournalInput(kind, partition, offset, now - self._last))
        self._last = now
        return now / MICROSECONDS

    def restore(self, kind: EntryKind, partition: int, begin: int, end: int) -> None:
        """Record that the records from `begin` to before `end` were read at the start."""
        ranges = self._batch.restored
        last = ranges[-1] if ranges else None
        if last is not None and (last.kind, last.partition, last.end) == (kind, partition, begin):
            ranges[-1] = RestoredRange(kind, partition, last.begin, end)
        else:
            ranges.append(RestoredRange(kind, partition, begin, end))

    def decide(self, kind: EntryKind, then: OnDelivery = lambda where, offset: None) -> OnDelivery:
        """Record a decision; return the function to call with the decision's place once it is stored."""
        batch = self._batch
        batch.decisions.append(None)
        batch.unstored += 1
        return partial(batch.on_stored, len(batch.decisions) - 1, kind, then)

    def write_due(self) -> None:
        """End the batch if it is due, and write the batches whose decisions are stored. Call this between inputs."""
        batch, now = self._batch, time.monotonic()
        if len(batch.inputs) >= BATCH_INPUTS or now - batch.began >= self._seconds:
            self._end_batch(now)
        self._write_stored()

    def finish(self) -> None:
        """Write the last batch. Call this once all decisions are stored."""
        self._end_batch(time.monotonic())
        self._write_stored()

    def end(self, reason: str) -> None:
        """Log the reason and record nothing more, for example because the place of a decision is not known."""
        if self._records:
            structlog.get_logger("bus").warning("journal_ended", core=self._next_record.core, reason=reason)
        self._records = False
        self._pending.clear()
        self._waiting_inputs = 0

    @property
    def awaits_decisions(self) -> bool:
        """Whether the places of some decisions are not known yet."""
        return any(batch.unstored for batch in (*self._pending, self._batch))

    def _end_batch(self, now: float) -> None:
        if self._records and (self._batch.inputs or self._batch.restored):
            self._pending.append(self._batch)
            self._waiting_inputs += len(self._batch.inputs)
            if self._waiting_inputs > MAX_WAITING_INPUTS:
                self.end("a decision is not stored, and the inputs after it are too many to keep")
        self._batch = _Batch(now)

    def _write_stored(self) -> None:
        while self._pending and not self._pending[0].unstored:
            batch = self._pending.popleft()
            self._waiting_inputs -= len(batch.inputs)
            try:
                for record in self._records_of(batch):
                    self._sink(record)
            except RoseError as error:
                self.end(str(error))

    def _records_of(self, batch: _Batch) -> Sequence[CoreJournal]:
        """The records of a batch."""
        decisions = [decision for decision in batch.decisions if decision is not None]
        entries = _parts(batch.restored), _parts(batch.inputs), _parts(decisions)
        parts = list(zip_longest(*entries, fillvalue=()))
        found = []
        for number, (restored, inputs, places) in enumerate(parts, 1):
            found.append(
                msgspec.structs.replace(
                    self._next_record, restored=restored, inputs=inputs, decisions=places, continued=number < len(parts)
                )
            )
            sequence = self._next_record.sequence + 1
            self._next_record = msgspec.structs.replace(self._next_record, sequence=sequence, settings={}, job="")
        return found


def _parts(entries: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [tuple(entries[at : at + MAX_ENTRIES]) for at in range(0, len(entries), MAX_ENTRIES)]


class JournalWriter:
    """Writes the records of the journals of a process with a client of its own, so that its errors are not the cores'.

    The client is opened with the first record. After an error nothing more is written: the log of an earlier version
    lacks the topic, and a client without the right to write will not get it.
    """

    def __init__(self, settings: BusSettings, client_id: str) -> None:
        self._settings = settings
        self._client_id = client_id
        self._writer: Writer | None = None
        self._unstored_bytes = 0
        self._failure: RoseError | None = None

    def __call__(self, record: CoreJournal) -> None:
        """Write a record without waiting for the broker. Raises RoseError, also for an earlier record."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._writer is None:
                self._writer = Writer(self._settings, self._client_id)
            self._writer.poll()
            ready = encoded(record)
            size = len(ready.wire)
            if self._unstored_bytes + size > MAX_UNSTORED_BYTES:
                raise RoseError(f"the broker has not stored the last {self._unstored_bytes} bytes of {JOURNAL.name}")
            stored = partial(self._on_stored, size)
            self._writer.write(JOURNAL, ready, key=record.core, partition=record.cell or 0, on_delivery=stored)
            self._unstored_bytes += size
        except RoseError as error:
            missing = isinstance(error, BusError) and error.code in UNKNOWN_PARTITION_CODES
            self._failure = TopicMissing(self._settings.topic(JOURNAL)) if missing else error
            raise self._failure from error

    def flush(self) -> None:
        """Wait up to FLUSH_SECONDS until all records are stored."""
        until = time.monotonic() + FLUSH_SECONDS
        try:
            while self._writer is not None and self._failure is None and self._unstored_bytes:
                left_seconds = until - time.monotonic()
                if left_seconds <= 0.0:
                    left = f"the last {self._unstored_bytes} bytes of {JOURNAL.name}"
                    raise RoseError(f"the broker has not stored {left} within {FLUSH_SECONDS:g} s")
                self._writer.poll(left_seconds)
        except RoseError as error:
            self._failure = error
            structlog.get_logger("bus").warning("journal_ended", core=self._client_id, reason=str(error))

    def close(self) -> None:
        """Close the client. Records that are not stored yet are dropped."""
        if self._writer is not None:
            self._writer.close()

    def _on_stored(self, size: int, _partition: int, _offset: int) -> None:
        self._unstored_bytes -= size
