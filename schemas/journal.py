"""The journal of a deciding core: its inputs in the order and at the times at which it took them, and its decisions.

Router and control app each run a pure core, so the inputs and their times determine all decisions. The records of the
inputs are on the log already. The journal names them by offset, and adds what no other record says.

Example, a router that reads one heartbeat and one request, and dispatches the turn:
    inputs     (HEARTBEAT, 0, 812, 31 us)  (REQUEST, 5, 77, 12 us)  (TICK, 0, 0, 240 us)
    decisions  (DISPATCH, 3, 401)
"""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.cells import Cell
from rose.schemas.grants import Job
from rose.schemas.limits import Count, Id
from rose.schemas.record import Record
from rose.schemas.turns import Partition

MAX_ENTRIES = 8_192
"""Most entries of one kind in one record. A batch with more entries takes several records."""

MAX_SETTINGS = 64
"""Most settings of a core."""


class EntryKind(Enum):
    """Meaning of an entry of a journal."""

    HEARTBEAT = 0
    RESULT = 1
    REQUEST = 2
    TICK = 3
    """A call without a record: only time has passed."""
    FENCED = 4
    """A fencing token is stored: its inbox and offset."""
    CLOSED = 5
    """An inbox has no stored fencing token, so the router dispatches nothing to it until the next heartbeat."""
    RESTORING = 6
    """A router begins to restore its state from the restored ranges."""
    RESTORED = 7
    """A router has read the restored ranges."""
    DISPATCH = 8
    """A dispatch, in a restored range or as a decision."""
    SUMMARY = 9
    GRANT = 10
    """A grant on the log, as an input or as a decision."""


class JournalInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call of the core; on the wire a list of values, to which more values may be appended."""

    kind: EntryKind
    partition: Partition
    """Partition of the record; 0 for an input without a record."""
    offset: Count
    """Offset of the record; 0 for an input without a record."""
    microseconds: Count
    """Time since the input before; of the first input since `began_at`."""


class RestoredRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records that a router read at its start, in the order of the ranges."""

    kind: EntryKind
    """REQUEST, DISPATCH or RESULT."""
    partition: Partition
    begin: Count
    """Offset of the first record."""
    end: Count
    """Offset behind the last record."""


class JournalDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of a decision on the log."""

    kind: EntryKind
    """DISPATCH, RESULT for a turn that was given up, or GRANT."""
    partition: Partition
    offset: Count


class CoreJournal(Record, frozen=True, kw_only=True):
    """A batch of a core's inputs and decisions. It is written once all of its decisions are stored."""

    SCHEMA: ClassVar[str] = "core-journal/1"

    core: Id
    """Name of the router or of the control app."""
    cell: Cell | None = None
    """The cell of a router's core; None for a control app."""
    began_at: Count
    """Start of the core in microseconds since 1970, by its own clock. It names the core together with `core` and
    `cell`."""
    sequence: Count
    """Number of this record among the records of its core, from 0 on."""
    continued: bool = False
    """Whether the next record belongs to the same batch."""
    settings: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[float, Meta(ge=-1e15, le=1e15)]],
        Meta(max_length=MAX_SETTINGS),
    ] = {}
    """Settings of the core that are numbers, in its first record."""
    job: Job = ""
    """RL job of a control app's core."""
    restored: Annotated[tuple[RestoredRange, ...], Meta(max_length=MAX_ENTRIES)] = ()
    inputs: Annotated[tuple[JournalInput, ...], Meta(max_length=MAX_ENTRIES)] = ()
    decisions: Annotated[tuple[JournalDecision, ...], Meta(max_length=MAX_ENTRIES)] = ()
    """In the order in which the core made them."""
