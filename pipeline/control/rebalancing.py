"""The rebalancer: which executor moves to another cell, from the cell that needs it least to the cell in most need.

Keeps true
- A move is worthwhile: turns wait in the target cell, and its work would be done MIN_GAIN_FACTOR times later than the
  work of the source cell after the move, and later by more than `margin_seconds`. An unserved cell counts as infinitely
  late, so it comes first. The condition has held for some time before the move.
- No executor leaves a cell that has work and no other open executor. A worker on its way is ordered to stay if its
  cell would be left so.
- Nothing is decided about a cell without summaries. The elasticity core selects the workers that may move.
- Hysteresis: a move leaves both cells better off than the worse of them was, so under a constant load moves end. After
  a move, the worker stays for `dwell_seconds`, its new cell gives no worker away, and its old cell receives none.
- A move that is not read back from the log is written again unchanged until it is read. The cell on the log counts,
  whichever control app wrote it.
- One worker at a time is on its way to each cell. The worker counts in its target cell. It moves once it holds no
  turns, or with its next policy version.

Pure: `now` is the time of the elasticity core.

Example:
    cell 0: w1 and w2 are open, 3 s of work; cell 1: unserved, 5 turns wait  -> after 3 s w2 is moved to cell 1
    cell 0: w1 is open, 3 s of work; cell 1: unserved, 5 turns wait          -> no move before cell 0 has no work
    cell 0: 4 are open, 10 s of work; cell 1: w5 is open, 90 s of work       -> one move: 13 s here, 45 s there
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.forecast import WorkShare
from rose.schemas.cells import CellSummary, ExecutorLine
from rose.schemas.heartbeats import ExecutorState

MIN_GAIN_FACTOR = 2.0
"""Least ratio of the target cell's finish time to the source cell's finish time after the move."""

UNSERVED_SECONDS = 3.0
"""How long a move to an unserved cell without arrivals must be worthwhile; for other cells it is `dwell_seconds`."""

UNNAMED_SECONDS = 10.0
"""A worker that no summary names for this time does not count as on its way any more."""

AMBIGUOUS_SECONDS = 3.0
"""Within this time every cell that has a worker names it in a summary."""

MAX_MOVE_SECONDS = 900.0
"""A worker that has not moved after this time is ordered to stay: it neither finishes its turns nor gets a policy
version."""

REPEAT_SECONDS = 10.0
"""A move that was not read back for this time is written again: its record may be lost."""

FORGET_SECONDS = 600.0
"""A worker that no summary has named for this time is forgotten."""

NO_RATE = 1e-9
"""Turns a second that count as none: the rounding error of a sum from which all its terms were subtracted."""


class Move(NamedTuple):
    """A decision about the cell of one worker."""

    worker: str
    cell: int
    """The cell that the worker shall be in."""
    reason: str


@dataclass(slots=True)
class CellCrew:
    """A cell with summaries, and the workers that take part in its work."""

    summary: CellSummary
    shares: dict[str, WorkShare]
    """Work shares by worker."""
    movable: dict[str, ExecutorLine]
    """Workers that may move: open executors, and parked lenders that may be woken."""

    @property
    def has_work(self) -> bool:
        """Whether turns wait or run in the cell."""
        return self.summary.waiting_turns + self.summary.outstanding_turns > 0

    @property
    def is_unserved(self) -> bool:
        """Whether no worker takes part in the cell's work."""
        return not self.shares

    def finish_seconds(self, without: str = "") -> float:
        """Seconds until all waiting and running turns are done; infinite if no worker does them.

        `without`: a worker whose part the others would do.
        """
        if not self.has_work:
            return 0.0
        work = self.summary.waiting_turns + sum(each.rate * each.free_at for each in self.shares.values())
        rate = sum(each.rate for worker, each in self.shares.items() if worker != without)
        return work / rate if rate > NO_RATE else math.inf

    def can_do_without(self, worker: str) -> bool:
        """Whether the cell has no work, or another open executor takes part in its work."""
        others = (each for each in self.summary.executors if each.open and each.worker != worker)
        return not self.has_work or any(each.worker in self.shares for each in others)

    @property
    def has_arrivals(self) -> bool:
        """Whether an executor in the cell is starting or ready, so it may soon take part."""
        coming = (ExecutorState.STARTING, ExecutorState.READY)
        return any(each.state in coming for each in self.summary.executors)


@dataclass(slots=True)
class TrackedWorker:
    """A worker's cell, and the cell that it was ordered to be in."""

    cell: int
    """The cell whose summary named the worker last."""
    named_at: float
    """When a summary named it last."""
    ambiguous_at: float = -math.inf
    """When the summaries of two cells last named the worker within AMBIGUOUS_SECONDS: its cell is then unknown for some
    time."""
    target_cell: int | None = None
    """The worker's cell on the log, or in the move that is being written."""
    target_since: float = -math.inf
    """When the target cell was decided, or read."""
    unread_move: Move | None = None
    """The decided move, until a cell grant of the worker is read back from the log."""
    announced_at: float = -math.inf
    """When the move was last returned for writing."""


class Rebalancer:
    """Tracks the cells of workers and decides moves."""

    def __init__(self, config: ControlConfig) -> None:
        self.moves = 0
        """Number of moves decided, without orders to stay and repetitions."""
        self._config = config
        self._workers: dict[str, TrackedWorker] = {}
        self._targets_read: dict[str, tuple[int, float]] = {}
        """The cell on the log, and when it was read, for each worker that no summary has named yet."""
        self._last_gave: dict[int, float] = {}
        """When a worker was last ordered to leave, by cell."""
        self._last_received: dict[int, float] = {}
        """When a worker was last ordered to come, by cell."""
        self._worth_since: dict[int, float] = {}
        """Since when a move to the cell is worthwhile, by cell."""

    def on_worker_named(self, worker: str, cell: int, now: float) -> None:
        """Record that a cell's summary names a worker."""
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = TrackedWorker(cell, now)
            known.target_cell, known.target_since = self._targets_read.pop(worker, (None, -math.inf))
        if known.cell != cell and now - known.named_at < AMBIGUOUS_SECONDS:
            known.ambiguous_at = now
        known.cell, known.named_at = cell, now

    def on_target_read(self, worker: str, cell: int | None, now: float) -> None:
        """Record a worker's cell on the log; None if the cell grant was deleted."""
        known = self._workers.get(worker)
        if known is not None:
            known.unread_move = None
        if known is not None and known.target_cell == cell:  # the move that was decided here
            return
        if cell is not None:
            self._last_received[cell] = now
        if known is not None:
            known.target_cell, known.target_since = cell, now
        elif cell is not None:
            self._targets_read[worker] = cell, now
        else:
            self._targets_read.pop(worker, None)

    def forget(self, now: float) -> list[str]:
        """Forget the workers that no summary has named for FORGET_SECONDS, and return their names.

        Their cell on the log is kept.
        """
        gone = [name for name, each in self._workers.items() if now - each.named_at >= FORGET_SECONDS]
        for name in gone:
            target = self._workers.pop(name).target_cell
            if target is not None:
                self._targets_read[name] = target, now
        return gone

    def expired_targets(self, now: float) -> list[str]:
        """Forget the cells on the log of workers that no summary has named for FORGET_SECONDS; return their names."""
        gone = [name for name, (_, at) in self._targets_read.items() if now - at >= FORGET_SECONDS]
        for name in gone:
            del self._targets_read[name]
        return gone

    def moving_workers(self, now: float) -> dict[str, TrackedWorker]:
        """Workers that are on their way from their cell to their target cell, by name."""
        return {
            name: each
            for name, each in list(self._workers.items())  # a copy: the metrics thread calls this, too
            if each.target_cell not in (None, each.cell)
            and now - each.named_at < UNNAMED_SECONDS
            and now - each.ambiguous_at >= UNNAMED_SECONDS
        }

    def decide(self, crews: Mapping[int, CellCrew], now: float) -> Move | None:
        """The move, order to stay or repetition that is due now, if there is one.

        `crews`: the cells with summaries, by number. Their shares are changed: workers on their way count at their
        target.
        """
        moving = self.moving_workers(now)
        _count_at_target(moving, crews)
        for name, worker in sorted(moving.items()):
            reason = self._return_reason(name, worker, crews, now)
            if reason:
                return self._announce(Move(name, worker.cell, reason), now)
        repeated = self._repeat_unread(crews, now)
        if repeated is not None:
            return repeated
        needed = {number: self._needed_move(number, crews, now) for number in crews}
        coming = {worker.target_cell for worker in moving.values()}
        worthwhile = {number: move for number, move in needed.items() if move is not None and number not in coming}
        self._worth_since = {number: self._worth_since.get(number, now) for number in worthwhile}
        due = [
            number for number in worthwhile if now - self._worth_since[number] >= self._patience_seconds(crews[number])
        ]
        if not due:
            return None
        move = worthwhile[min(due, key=lambda number: (-crews[number].finish_seconds(), number))]
        self._last_gave[self._workers[move.worker].cell] = self._last_received[move.cell] = now
        self._worth_since.pop(move.cell)
        self.moves += 1
        return self._announce(move, now)

    def _announce(self, move: Move, now: float) -> Move:
        worker = self._workers[move.worker]
        worker.target_cell, worker.target_since, worker.unread_move, worker.announced_at = move.cell, now, move, now
        return move

    def _repeat_unread(self, crews: Mapping[int, CellCrew], now: float) -> Move | None:
        """A move to write again, because it was not read back from the log and its worker may still move."""
        for name, worker in self._workers.items():
            if worker.unread_move is None or now - worker.announced_at < REPEAT_SECONDS:
                continue
            if worker.cell in crews and name in crews[worker.cell].movable and worker.unread_move.cell in crews:
                worker.announced_at = now
                return worker.unread_move
        return None

    def _return_reason(self, name: str, worker: TrackedWorker, crews: Mapping[int, CellCrew], now: float) -> str | None:
        """The reason why a worker on its way has to stay; None if it may go on."""
        crew = crews.get(worker.cell)
        if crew is not None and name in crew.movable and crew.movable[name].open and not crew.can_do_without(name):
            return f"cell {worker.cell} has work and no other executor now"
        if now - worker.target_since >= MAX_MOVE_SECONDS:
            return f"it has not gone for {MAX_MOVE_SECONDS:.0f} s"
        return None

    def _needed_move(self, number: int, crews: Mapping[int, CellCrew], now: float) -> Move | None:
        """The worthwhile move to a cell, from the cell that needs the worker least; None if there is none."""
        crew, dwell = crews[number], self._config.dwell_seconds
        if not crew.summary.waiting_turns or now - self._last_gave.get(number, -math.inf) < dwell:
            return None
        taker_seconds = crew.finish_seconds()
        found: list[tuple[bool, float, int, str]] = []
        for giver_cell, giver in crews.items():
            line = self._next_to_move(giver, now)
            if giver_cell == number or line is None or now - self._last_received.get(giver_cell, -math.inf) < dwell:
                continue
            giver_seconds = giver.finish_seconds(without=line.worker)
            can_give = giver.can_do_without(line.worker) if line.open else crew.is_unserved and not crew.movable
            if (
                can_give
                and taker_seconds >= MIN_GAIN_FACTOR * giver_seconds
                and taker_seconds - giver_seconds > self._config.margin_seconds
            ):
                found.append((not line.open, giver_seconds, giver_cell, line.worker))
        if not found:
            return None
        _, giver_seconds, giver_cell, worker = min(found)
        if crew.is_unserved:
            return Move(worker, number, f"turns wait in cell {number}, and no executor works there")
        return Move(
            worker,
            number,
            f"all is done in {taker_seconds:.0f} s there, and in {giver_seconds:.0f} s in cell {giver_cell} without it",
        )

    def _next_to_move(self, crew: CellCrew, now: float) -> ExecutorLine | None:
        """The worker that would leave a cell: open executors before parked ones, then the one with the fewest turns."""
        settled = [line for line in crew.movable.values() if self._is_settled(self._workers[line.worker], now)]
        return min(
            settled, key=lambda line: (not line.open, line.held_turns, line.load_seconds, line.worker), default=None
        )

    def _is_settled(self, worker: TrackedWorker, now: float) -> bool:
        """Whether a worker is in its target cell and was not moved for `dwell_seconds`."""
        return worker.target_cell in (None, worker.cell) and now - worker.target_since >= self._config.dwell_seconds

    def _patience_seconds(self, crew: CellCrew) -> float:
        """How long a move to the cell has to be worthwhile, in seconds."""
        return UNSERVED_SECONDS if crew.is_unserved and not crew.has_arrivals else self._config.dwell_seconds


def _count_at_target(moving: Mapping[str, TrackedWorker], crews: Mapping[int, CellCrew]) -> None:
    """Move the shares of workers on their way from their present cell to their target cell."""
    for name, worker in moving.items():
        source, target = crews.get(worker.cell), crews.get(-1 if worker.target_cell is None else worker.target_cell)
        share = None if source is None else source.shares.pop(name, None)
        if target is not None and share is not None:
            target.shares[name] = WorkShare(0.0, share.rate)
