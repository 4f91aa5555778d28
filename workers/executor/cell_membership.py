"""The inbox and the cell of an executor, and the move of an executor to another cell.

Keeps true
- Without a target cell, an executor reads the inbox of its configuration, or the inbox that follows from its name. With
  a target cell, the executor reads the same inbox if this inbox lies in the cell. Otherwise it reads an inbox of the
  cell that also follows from its name, so a restarted executor finds the same inbox.
- An executor leaves a cell when leaving costs least: at once while it holds no turn, otherwise when its engine has
  changed to another policy version. A leaving executor accepts no turns, and moves when it has returned all turns. It
  holds a turn until the answer is stored.
- A move begins with a marker record in the new inbox, and the executor gets a new incarnation. Until the marker and
  the answers to all turns that arrived meanwhile are stored, the executor belongs to the old cell. An unreachable
  broker therefore only delays a move.
- A target cell that does not exist is ignored.

Example: an executor in cell 0 with target cell 1
    holds two turns          -> stays, and accepts turns
    serves version 8         -> leaves: its turns go back, and it accepts no turns
    holds no turn            -> writes its marker into an inbox of cell 1
    the marker is stored     -> belongs to cell 1
"""

import secrets

from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import MOVING_REASON
from rose.topics.catalog import DISPATCHED, HEARTBEATS, inbox_slot, partitions_of_cell
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.writer import Writer
from rose.workers.executor.config import ExecutorConfig

INCARNATION_RANDOM_BITS = 16
"""Random bits of an incarnation, below the offset: a broker that lost its newest records may assign an offset twice."""


def inbox_of(config: ExecutorConfig, target_cell: int | None, *, slots: int, cells: int) -> Place:
    """Return the inbox of an executor whose target cell is `target_cell`; None is no target cell.

    `slots`: number of inboxes. `cells`: number of cells. Raises UsageError if the configured slot does not exist.
    """
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
    """Membership of one executor. The executor's loop calls `advance` with the target cell and learns of each move."""

    def __init__(self, reader: Reader, writer: Writer, config: ExecutorConfig, target_cell: int | None) -> None:
        """Write the first marker and assign the inbox. Raises UsageError, TopicMissing or BusError."""
        self._reader = reader
        self._writer = writer
        self._config = config
        self._slots, self._cells = reader.partition_count(DISPATCHED), reader.partition_count(HEARTBEATS)
        self._next_inbox = inbox_of(config, target_cell, slots=self._slots, cells=self._cells)
        """The inbox of the newest marker."""
        self._marker_offset: int | None = None
        """Offset of the newest marker; None until the marker is stored."""
        self._next_cell: int | None = None
        """The cell that the executor is leaving for."""
        self._joining = False
        """Whether a marker in another cell's inbox is written and the move is not complete."""
        reader.watermarks(self._next_inbox)
        self._write_marker()
        writer.flush()
        self._enter_cell()

    @property
    def leaving_for(self) -> str | None:
        """Pause reason that names the next cell; None while the executor stays."""
        return None if self._next_cell is None else f"{MOVING_REASON} {self._next_cell}"

    def on_version_change(self, target_cell: int | None) -> None:
        """Start to leave for the target cell: the engine has changed to another policy version."""
        if self._is_other_cell(target_cell):
            self._next_cell = target_cell

    def advance(self, target_cell: int | None, *, held_turns: int) -> bool:
        """Advance the move. Return whether the executor has entered another inbox in this call.

        `held_turns`: turns of this inbox that the executor holds, or whose answers are not stored.
        """
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
        """Write a tombstone with the executor's name as key into the next inbox: the marker of a start."""

        def marked(_: int, offset: int) -> None:
            self._marker_offset = offset

        self._marker_offset = None
        self._writer.tombstone(DISPATCHED, key=self._config.worker, partition=self._next_inbox[1], on_delivery=marked)

    def _enter_cell(self) -> None:
        """Read the inbox from the marker on: the router dispatches only after a heartbeat, which follows the marker."""
        assert self._marker_offset is not None
        self.inbox = self._next_inbox
        self.cell = self.inbox[1] % self._cells
        """The cell whose router reads the heartbeats."""
        self.incarnation = self._marker_offset << INCARNATION_RANDOM_BITS | secrets.randbits(INCARNATION_RANDOM_BITS)
        self._next_cell, self._joining = None, False
        self._reader.assign({self.inbox: self._marker_offset + 1})
