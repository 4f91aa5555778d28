"""Which executor is to be in another cell: from where it is needed least to where it is needed most.

Keeps true
- A move is worth it: in the cell that it goes to turns wait, and all is done there FACTOR times later than it will be
  in the cell that it leaves, and later by more than the margin; or nobody there does anything, which comes first. That
  has been so for a while.
- Nobody leaves a cell that has work and no other open executor. One that was told to go is told to stay where it would.
- Of a cell that is not heard nothing is decided. The core says who may be told at all.
- It settles. A move leaves both cells better off than the worse one was, so under a constant load moves end. A worker
  that was told stays for the dwell; for as long a cell that got one gives none, and one that gave one gets none.
- What was said is on the log: a word that is not read back from there is said again as it was, until it is. What is
  read counts, whoever wrote it.
- To each cell one is on its way at a time. It counts there, and not where it comes from: it goes once it holds nothing,
  or with its next policy version.

Pure; `now` as in the core.

Example
    cell 0: w1 and w2 are open, 3 s of work; cell 1: nobody, 5 turns wait   -> 3 s later w2 is to be in cell 1
    cell 0: w1 is open, 3 s of work; cell 1: nobody, 5 turns wait           -> nobody moves before cell 0 has no work
    cell 0: 4 are open, 10 s of work; cell 1: w5 is open, 90 s of work      -> one moves: 13 s here, 45 s there
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
"""So many times later all is done in a cell that is given a worker than in the one that it leaves."""

UNSERVED_SECONDS = 3.0
"""For which turns wait where nobody is at work, nor about to be, before a worker is told; else for the dwell."""

UNNAMED_SECONDS = 10.0
"""A worker that no summary names for so long is on its way no more."""

AMBIGUOUS_SECONDS = 3.0
"""Within which each cell that has a worker names it."""

MAX_MOVE_SECONDS = 900.0
"""One that has not gone after so long is told to stay: it neither ends its turns nor gets a policy version."""

REPEAT_SECONDS = 10.0
"""A word that was not read back for so long is said again: it may have been lost on its way to the log."""

FORGET_SECONDS = 600.0
"""What was seen of a worker is forgotten so long after it was named last."""

NO_RATE = 1e-9
"""Turns a second that are none: what is left of a sum once all that was added is taken away."""


class Move(NamedTuple):
    """What is decided."""

    worker: str
    cell: int
    """That it is to be in."""
    reason: str


@dataclass(slots=True)
class CellCrew:
    """A cell that is heard, and who is at work there."""

    summary: CellSummary
    shares: dict[str, WorkShare]
    """By worker, of those who take part in its work."""
    movable: dict[str, ExecutorLine]
    """Those who may be told to go: open ones, and lenders that are parked and might be woken."""

    @property
    def has_work(self) -> bool:
        """Whether it has work."""
        return self.summary.waiting_turns + self.summary.outstanding_turns > 0

    @property
    def is_unserved(self) -> bool:
        """Whether nobody is at work there."""
        return not self.shares

    def finish_seconds(self, without: str = "") -> float:
        """Until all that waits and runs is done, by the others where one is left out."""
        if not self.has_work:
            return 0.0
        work = self.summary.waiting_turns + sum(each.rate * each.free_at for each in self.shares.values())
        rate = sum(each.rate for worker, each in self.shares.items() if worker != without)
        return work / rate if rate > NO_RATE else math.inf

    def can_do_without(self, worker: str) -> bool:
        """Whether somebody else is open there, or nobody has to be."""
        others = (each for each in self.summary.executors if each.open and each.worker != worker)
        return not self.has_work or any(each.worker in self.shares for each in others)

    @property
    def has_arrivals(self) -> bool:
        """Whether somebody there starts, or catches up."""
        coming = (ExecutorState.STARTING, ExecutorState.READY)
        return any(each.state in coming for each in self.summary.executors)


@dataclass(slots=True)
class TrackedWorker:
    """One, as it was seen and told."""

    cell: int
    """Whose summary named it last."""
    named_at: float
    ambiguous_at: float = -math.inf
    """When two cells' summaries named it, one soon after the other: where it is nobody knows, for a while."""
    target_cell: int | None = None
    """The cell on the log, or that will be there."""
    target_since: float = -math.inf
    """When it was told."""
    unread_move: Move | None = None
    """What was decided of it, until anything of it is read back from the log."""
    announced_at: float = -math.inf
    """When that was said last."""


class Rebalancer:
    """Who was told of which cell, and who is to be."""

    def __init__(self, config: ControlConfig) -> None:
        self.moves = 0
        """Times that one was told to go."""
        self._config = config
        self._workers: dict[str, TrackedWorker] = {}
        self._targets_read: dict[str, tuple[int, float]] = {}
        """By worker that was not named yet: the cell on the log, and when it was read."""
        self._last_gave: dict[int, float] = {}
        """By cell, when one was told to leave it."""
        self._last_received: dict[int, float] = {}
        """By cell, when one was told to come."""
        self._worth_since: dict[int, float] = {}
        """By cell, since when a worker should come."""

    def on_worker_named(self, worker: str, cell: int, now: float) -> None:
        """A cell's summary names it."""
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = TrackedWorker(cell, now)
            known.target_cell, known.target_since = self._targets_read.pop(worker, (None, -math.inf))
        if known.cell != cell and now - known.named_at < AMBIGUOUS_SECONDS:
            known.ambiguous_at = now
        known.cell, known.named_at = cell, now

    def on_target_read(self, worker: str, cell: int | None, now: float) -> None:
        """What the log says of its cell; None where that says nothing any more."""
        known = self._workers.get(worker)
        if known is not None:
            known.unread_move = None
        if known is not None and known.target_cell == cell:  # as what was decided here
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
        """Let go of what was seen of those that no summary has named for long; their names."""
        gone = [name for name, each in self._workers.items() if now - each.named_at >= FORGET_SECONDS]
        for name in gone:
            target = self._workers.pop(name).target_cell
            if target is not None:
                self._targets_read[name] = target, now
        return gone

    def expired_targets(self, now: float) -> list[str]:
        """Let go of what the log says of those that nobody has named for long after it was read; their names."""
        gone = [name for name, (_, at) in self._targets_read.items() if now - at >= FORGET_SECONDS]
        for name in gone:
            del self._targets_read[name]
        return gone

    def moving_workers(self, now: float) -> dict[str, TrackedWorker]:
        """Those who are on their way, from their cell to the one that they were told of."""
        return {
            name: each
            for name, each in list(self._workers.items())  # others ask too
            if each.target_cell not in (None, each.cell)
            and now - each.named_at < UNNAMED_SECONDS
            and now - each.ambiguous_at >= UNNAMED_SECONDS
        }

    def decide(self, crews: Mapping[int, CellCrew], now: float) -> Move | None:
        """The move that is due, of the cells that are heard."""
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
        """A word that is not on the log yet, of one that may still be told."""
        for name, worker in self._workers.items():
            if worker.unread_move is None or now - worker.announced_at < REPEAT_SECONDS:
                continue
            if worker.cell in crews and name in crews[worker.cell].movable and worker.unread_move.cell in crews:
                worker.announced_at = now
                return worker.unread_move
        return None

    def _return_reason(self, name: str, worker: TrackedWorker, crews: Mapping[int, CellCrew], now: float) -> str:
        """Why one that is on its way is to stay; empty where it is not."""
        crew = crews.get(worker.cell)
        if crew is not None and name in crew.movable and crew.movable[name].open and not crew.can_do_without(name):
            return f"cell {worker.cell} has work and nobody else by now"
        return f"it has not gone for {MAX_MOVE_SECONDS:.0f} s" if now - worker.target_since >= MAX_MOVE_SECONDS else ""

    def _needed_move(self, number: int, crews: Mapping[int, CellCrew], now: float) -> Move | None:
        """Who should come to a cell, from where it is needed least."""
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
            return Move(worker, number, f"turns wait in cell {number}, and nobody is at work there")
        return Move(
            worker,
            number,
            f"all is done in {taker_seconds:.0f} s there, and in {giver_seconds:.0f} s in cell {giver_cell} without it",
        )

    def _next_to_move(self, crew: CellCrew, now: float) -> ExecutorLine | None:
        """Who would go: an open one before one that is parked, who holds least first."""
        settled = [line for line in crew.movable.values() if self._is_settled(self._workers[line.worker], now)]
        return min(
            settled, key=lambda line: (not line.open, line.held_turns, line.load_seconds, line.worker), default=None
        )

    def _is_settled(self, worker: TrackedWorker, now: float) -> bool:
        """Whether it is where it was told to be, for long enough."""
        return worker.target_cell in (None, worker.cell) and now - worker.target_since >= self._config.dwell_seconds

    def _patience_seconds(self, crew: CellCrew) -> float:
        """Seconds for which a move has to be worth it."""
        return UNSERVED_SECONDS if crew.is_unserved and not crew.has_arrivals else self._config.dwell_seconds


def _count_at_target(moving: Mapping[str, TrackedWorker], crews: Mapping[int, CellCrew]) -> None:
    """Have those who are on their way take part where they go to, and not where they are."""
    for name, worker in moving.items():
        source, target = crews.get(worker.cell), crews.get(-1 if worker.target_cell is None else worker.target_cell)
        share = None if source is None else source.shares.pop(name, None)
        if target is not None and share is not None:
            target.shares[name] = WorkShare(0.0, share.rate)
