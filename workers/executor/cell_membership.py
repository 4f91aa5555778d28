"""Where an executor is: its inbox, and with that its cell; and how it goes to another one.

Keeps true
- Who is told of no cell has the inbox that it was told of, or that follows from its name. Who is told of one has that
  inbox if it lies there, else one of the cell's, which follows from its name as well: who starts again finds it.
- It leaves when that costs least: at once while it holds nothing, else when its engine has changed to another policy
  version. From then on it takes nothing on, and it goes once all that it held is given back. It holds a turn until the
  answer is stored.
- It begins there before it ends here, as one that starts: under an incarnation of its own. Until that is stored, and
  the answer to what came meanwhile, it is here, so a broker that is away only makes it later.
- A cell that there is not changes nothing.

Example, told of cell 1 in cell 0
    holds two turns       -> it stays, and takes turns
    serves version 8      -> leaves: they go back, nothing is taken on
    holds nothing         -> its mark is written into an inbox of cell 1
    the mark is stored    -> it is there
"""

import secrets

from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import MOVING_REASON
from rose.schemas.partitioning import inbox_slot
from rose.topics.catalog import DISPATCHED, HEARTBEATS, partitions_of_cell
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.writer import Writer
from rose.workers.executor.config import ExecutorConfig

INCARNATION_RANDOM_BITS = 16
"""Random bits of an incarnation, below the offset: a broker that lost its newest records may give an offset twice."""


def inbox_of(config: ExecutorConfig, target_cell: int | None, *, slots: int, cells: int) -> Place:
    """The inbox of an executor that is told of this cell, or of none. Raises UsageError where there is none."""
    slot = inbox_slot(config.worker, slots) if config.slot is None else config.slot
    if not 0 <= slot < slots:
        raise UsageError(
            f"executor.slot is {slot} and the last inbox {slots - 1}: leave it out, and it follows from the name; or "
            "with more topics.inbox_slots, `rose topics create` adds some"
        )
    if target_cell is not None and target_cell < min(cells, slots) and slot % cells != target_cell:
        cell_slots = partitions_of_cell(target_cell, cells, slots)
        slot = cell_slots[inbox_slot(config.worker, len(cell_slots))]
    return DISPATCHED, slot


class CellMembership:
    """Of one executor in its inbox. Its loop says what it is told, and is told when it has come elsewhere."""

    def __init__(self, reader: Reader, writer: Writer, config: ExecutorConfig, target_cell: int | None) -> None:
        """Begin. Raises UsageError, TopicMissing or BusError."""
        self._reader = reader
        self._writer = writer
        self._config = config
        self._slots, self._cells = reader.partition_count(DISPATCHED), reader.partition_count(HEARTBEATS)
        self._next_inbox = inbox_of(config, target_cell, slots=self._slots, cells=self._cells)
        """Where it begins, or began last."""
        self._marker_offset: int | None = None
        """The offset there of what says so, once it is stored."""
        self._next_cell: int | None = None
        """The cell that it leaves for."""
        self._joining = False
        """It has begun to begin elsewhere."""
        reader.watermarks(self._next_inbox)
        self._write_marker()
        writer.flush()
        self._enter_cell()

    @property
    def leaving_for(self) -> str:
        """For where, to people; empty while it stays."""
        return "" if self._next_cell is None else f"{MOVING_REASON} {self._next_cell}"

    def on_version_change(self, target_cell: int | None) -> None:
        """The engine has changed to another policy version."""
        if self._is_other_cell(target_cell):
            self._next_cell = target_cell

    def advance(self, target_cell: int | None, *, held_turns: int) -> bool:
        """Go on with leaving; whether it is elsewhere now. `held_turns`: turns that it holds here."""
        if self._joining:
            if self._marker_offset is None or held_turns:
                return False
            self._enter_cell()
            return True
        if not self._is_other_cell(target_cell):
            self._next_cell = None
        elif not held_turns:
            self._next_cell, self._joining = target_cell, True
            self._next_inbox = inbox_of(self._config, target_cell, slots=self._slots, cells=self._cells)
            self._write_marker()
        elif self._next_cell is not None:
            self._next_cell = target_cell
        return False

    def _is_other_cell(self, target_cell: int | None) -> bool:
        return target_cell is not None and target_cell != self.cell and target_cell < min(self._cells, self._slots)

    def _write_marker(self) -> None:
        """Mark a start in the next inbox."""

        def marked(_: int, offset: int) -> None:
            self._marker_offset = offset

        self._marker_offset = None
        self._writer.tombstone(DISPATCHED, key=self._config.worker, partition=self._next_inbox[1], on_delivery=marked)

    def _enter_cell(self) -> None:
        """Read on from the mark: what is dispatched after a heartbeat is read."""
        assert self._marker_offset is not None
        self.inbox = self._next_inbox
        self.cell = self.inbox[1] % self._cells
        """Whose router it is heard by."""
        self.incarnation = self._marker_offset << INCARNATION_RANDOM_BITS | secrets.randbits(INCARNATION_RANDOM_BITS)
        self._next_cell, self._joining = None, False
        self._reader.assign({self.inbox: self._marker_offset + 1})
