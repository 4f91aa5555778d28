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

from schemas.errors import UsageError
from schemas.homes import slot_of
from schemas.slack import MOVING
from topics.catalog import DISPATCHED, HEARTBEATS, of_cell
from topics.reader import Reader
from topics.records import Place
from topics.writer import Writer
from workers.executor.config import ExecutorConfig

START_BITS = 16
"""Random bits of an incarnation, below the offset: a broker that lost its newest records may give an offset twice."""


def inbox_of(config: ExecutorConfig, told: int | None, *, slots: int, cells: int) -> Place:
    """The inbox of an executor that is told of this cell, or of none. Raises UsageError where there is none."""
    slot = slot_of(config.worker, slots) if config.slot is None else config.slot
    if not 0 <= slot < slots:
        raise UsageError(
            f"executor.slot is {slot} and the last inbox {slots - 1}: leave it out, and it follows from the name; or "
            "with more topics.inbox_slots, `rose topics create` adds some"
        )
    if told is not None and told < min(cells, slots) and slot % cells != told:
        there = of_cell(told, cells, slots)
        slot = there[slot_of(config.worker, len(there))]
    return DISPATCHED, slot


class Stay:
    """Of one executor in its inbox. Its loop says what it is told, and is told when it has come elsewhere."""

    def __init__(self, reader: Reader, writer: Writer, config: ExecutorConfig, told: int | None) -> None:
        """Begin. Raises UsageError, TopicMissing or BusError."""
        self._reader = reader
        self._writer = writer
        self._config = config
        self._slots, self._cells = reader.partitions(DISPATCHED), reader.partitions(HEARTBEATS)
        self._next = inbox_of(config, told, slots=self._slots, cells=self._cells)
        """Where it begins, or began last."""
        self._mark: int | None = None
        """The offset there of what says so, once it is stored."""
        self._leaving: int | None = None
        """The cell that it leaves for."""
        self._begins = False
        """It has begun to begin elsewhere."""
        reader.watermarks(self._next)
        self._begin()
        writer.flush()
        self._arrive()

    @property
    def leaving(self) -> str:
        """For where, to people; empty while it stays."""
        return "" if self._leaving is None else f"{MOVING} {self._leaving}"

    def changed(self, told: int | None) -> None:
        """The engine has changed to another policy version."""
        if self._elsewhere(told):
            self._leaving = told

    def follow(self, told: int | None, *, held: int) -> bool:
        """Go on with leaving; whether it is elsewhere now. `held`: turns that it holds here."""
        if self._begins:
            if self._mark is None or held:
                return False
            self._arrive()
            return True
        if not self._elsewhere(told):
            self._leaving = None
        elif not held:
            self._leaving, self._begins = told, True
            self._next = inbox_of(self._config, told, slots=self._slots, cells=self._cells)
            self._begin()
        elif self._leaving is not None:
            self._leaving = told
        return False

    def _elsewhere(self, told: int | None) -> bool:
        return told is not None and told != self.cell and told < min(self._cells, self._slots)

    def _begin(self) -> None:
        """Mark a start in the next inbox."""

        def marked(_: int, offset: int) -> None:
            self._mark = offset

        self._mark = None
        self._writer.tombstone(DISPATCHED, key=self._config.worker, partition=self._next[1], on_delivery=marked)

    def _arrive(self) -> None:
        """Read on from the mark: what is dispatched after a heartbeat is read."""
        assert self._mark is not None
        self.place = self._next
        self.cell = self.place[1] % self._cells
        """Whose router it is heard by."""
        self.incarnation = self._mark << START_BITS | secrets.randbits(START_BITS)
        self._leaving, self._begins = None, False
        self._reader.assign({self.place: self._mark + 1})
