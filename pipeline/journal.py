"""The journal of a core: records its inputs and their times, so that `rose replay` can repeat its decisions.

Keeps true
- A batch is written once all of its decisions are stored, and after the batches before it. So the log never has a
  journal of decisions that a killed process did not store.
- The time of an input is a whole number of microseconds, so that the journal has exactly the time that the core saw.
- A core does not depend on its journal: if the journal cannot be written, that is logged once, and recording ends.
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
from rose.topics.catalog import JOURNAL
from rose.topics.writer import Writer

BATCH_SECONDS = 1.0
"""Time between two batches."""

BATCH_INPUTS = 4_096
"""Inputs after which a batch ends earlier."""

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

    def _end_batch(self, now: float) -> None:
        if self._records and (self._batch.inputs or self._batch.restored):
            self._pending.append(self._batch)
        self._batch = _Batch(now)

    def _write_stored(self) -> None:
        while self._pending and not self._pending[0].unstored:
            batch = self._pending.popleft()
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
    """Writes the records of journals with a client of its own, so that its errors are not the core's.

    The client is opened with the first record.
    """

    def __init__(self, open_writer: Callable[[], Writer]) -> None:
        """`open_writer` raises RoseError."""
        self._open = open_writer
        self._writer: Writer | None = None

    def __call__(self, record: CoreJournal) -> None:
        """Write a record. Raises RoseError, also for an earlier record that was not stored."""
        if self._writer is None:
            self._writer = self._open()
            self._writer.partition_count(JOURNAL)  # raises TopicMissing on the log of an earlier version
        self._writer.write(JOURNAL, record, key=record.core, partition=record.cell or 0)
        self._writer.poll()

    def flush(self) -> None:
        """Wait until all records are stored. Raises RoseError."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the client. Records that are not stored yet are dropped."""
        if self._writer is not None:
            self._writer.close()
