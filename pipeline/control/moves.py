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

from pipeline.control.config import ControlConfig
from pipeline.control.forecast import Share
from schemas.cells import CellSummary, ExecutorLine
from schemas.slack import ExecutorState

FACTOR = 2.0
"""So many times later all is done in a cell that is given a worker than in the one that it leaves."""

ALONE_SECONDS = 3.0
"""For which turns wait where nobody is at work, nor about to be, before a worker is told; else for the dwell."""

GONE_SECONDS = 10.0
"""A worker that no summary names for so long is on its way no more."""

TWICE_SECONDS = 3.0
"""Within which each cell that has a worker names it."""

LATE_SECONDS = 900.0
"""One that has not gone after so long is told to stay: it neither ends its turns nor gets a policy version."""

AGAIN_SECONDS = 10.0
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
class Crew:
    """A cell that is heard, and who is at work there."""

    summary: CellSummary
    shares: dict[str, Share]
    """By worker, of those who take part in its work."""
    spare: dict[str, ExecutorLine]
    """Those who may be told to go: open ones, and lenders that are parked and might be woken."""

    @property
    def busy(self) -> bool:
        """Whether it has work."""
        return self.summary.waiting_turns + self.summary.outstanding_turns > 0

    @property
    def alone(self) -> bool:
        """Whether nobody is at work there."""
        return not self.shares

    def seconds(self, without: str = "") -> float:
        """Until all that waits and runs is done, by the others where one is left out."""
        if not self.busy:
            return 0.0
        work = self.summary.waiting_turns + sum(each.rate * each.free_at for each in self.shares.values())
        rate = sum(each.rate for worker, each in self.shares.items() if worker != without)
        return work / rate if rate > NO_RATE else math.inf

    def can_do_without(self, worker: str) -> bool:
        """Whether somebody else is open there, or nobody has to be."""
        others = (each for each in self.summary.executors if each.open and each.worker != worker)
        return not self.busy or any(each.worker in self.shares for each in others)

    @property
    def comes(self) -> bool:
        """Whether somebody there starts, or catches up."""
        coming = (ExecutorState.STARTING, ExecutorState.READY)
        return any(each.state in coming for each in self.summary.executors)


@dataclass(slots=True)
class Worker:
    """One, as it was seen and told."""

    cell: int
    """Whose summary named it last."""
    heard_at: float
    twice_at: float = -math.inf
    """When two cells' summaries named it, one soon after the other: where it is nobody knows, for a while."""
    told: int | None = None
    """The cell on the log, or that will be there."""
    since: float = -math.inf
    """When it was told."""
    unread: Move | None = None
    """What was decided of it, until anything of it is read back from the log."""
    said_at: float = -math.inf
    """When that was said last."""


class Moves:
    """Who was told of which cell, and who is to be."""

    def __init__(self, config: ControlConfig) -> None:
        self.moved = 0
        """Times that one was told to go."""
        self._config = config
        self._workers: dict[str, Worker] = {}
        self._read: dict[str, tuple[int, float]] = {}
        """By worker that was not named yet: the cell on the log, and when it was read."""
        self._gave: dict[int, float] = {}
        """By cell, when one was told to leave it."""
        self._got: dict[int, float] = {}
        """By cell, when one was told to come."""
        self._worth: dict[int, float] = {}
        """By cell, since when a worker should come."""

    def heard(self, worker: str, cell: int, now: float) -> None:
        """A cell's summary names it."""
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = Worker(cell, now)
            known.told, known.since = self._read.pop(worker, (None, -math.inf))
        if known.cell != cell and now - known.heard_at < TWICE_SECONDS:
            known.twice_at = now
        known.cell, known.heard_at = cell, now

    def read(self, worker: str, cell: int | None, now: float) -> None:
        """What the log says of its cell; None where that says nothing any more."""
        known = self._workers.get(worker)
        if known is not None:
            known.unread = None
        if known is not None and known.told == cell:  # as what was decided here
            return
        if cell is not None:
            self._got[cell] = now
        if known is not None:
            known.told, known.since = cell, now
        elif cell is not None:
            self._read[worker] = cell, now
        else:
            self._read.pop(worker, None)

    def forget(self, now: float) -> list[str]:
        """Let go of what was seen of those that no summary has named for long; their names."""
        gone = [name for name, each in self._workers.items() if now - each.heard_at >= FORGET_SECONDS]
        for name in gone:
            told = self._workers.pop(name).told
            if told is not None:
                self._read[name] = told, now
        return gone

    def outdated(self, now: float) -> list[str]:
        """Let go of what the log says of those that nobody has named for long after it was read; their names."""
        gone = [name for name, (_, at) in self._read.items() if now - at >= FORGET_SECONDS]
        for name in gone:
            del self._read[name]
        return gone

    def going(self, now: float) -> dict[str, Worker]:
        """Those who are on their way, from their cell to the one that they were told of."""
        return {
            name: each
            for name, each in list(self._workers.items())  # others ask too
            if each.told not in (None, each.cell)
            and now - each.heard_at < GONE_SECONDS
            and now - each.twice_at >= GONE_SECONDS
        }

    def decide(self, crews: Mapping[int, Crew], now: float) -> Move | None:
        """The move that is due, of the cells that are heard."""
        going = self.going(now)
        _count_there(going, crews)
        for name, worker in sorted(going.items()):
            why = self._why_back(name, worker, crews, now)
            if why:
                return self._say(Move(name, worker.cell, why), now)
        again = self._again(crews, now)
        if again is not None:
            return again
        wanted = {number: self._wanted(number, crews, now) for number in crews}
        coming = {worker.told for worker in going.values()}
        worth = {number: move for number, move in wanted.items() if move is not None and number not in coming}
        self._worth = {number: self._worth.get(number, now) for number in worth}
        due = [number for number in worth if now - self._worth[number] >= self._patience(crews[number])]
        if not due:
            return None
        move = worth[min(due, key=lambda number: (-crews[number].seconds(), number))]
        self._gave[self._workers[move.worker].cell] = self._got[move.cell] = now
        self._worth.pop(move.cell)
        self.moved += 1
        return self._say(move, now)

    def _say(self, move: Move, now: float) -> Move:
        worker = self._workers[move.worker]
        worker.told, worker.since, worker.unread, worker.said_at = move.cell, now, move, now
        return move

    def _again(self, crews: Mapping[int, Crew], now: float) -> Move | None:
        """A word that is not on the log yet, of one that may still be told."""
        for name, worker in self._workers.items():
            if worker.unread is None or now - worker.said_at < AGAIN_SECONDS:
                continue
            if worker.cell in crews and name in crews[worker.cell].spare and worker.unread.cell in crews:
                worker.said_at = now
                return worker.unread
        return None

    def _why_back(self, name: str, worker: Worker, crews: Mapping[int, Crew], now: float) -> str:
        """Why one that is on its way is to stay; empty where it is not."""
        crew = crews.get(worker.cell)
        if crew is not None and name in crew.spare and crew.spare[name].open and not crew.can_do_without(name):
            return f"cell {worker.cell} has work and nobody else by now"
        return f"it has not gone for {LATE_SECONDS:.0f} s" if now - worker.since >= LATE_SECONDS else ""

    def _wanted(self, number: int, crews: Mapping[int, Crew], now: float) -> Move | None:
        """Who should come to a cell, from where it is needed least."""
        crew, dwell = crews[number], self._config.dwell_seconds
        if not crew.summary.waiting_turns or now - self._gave.get(number, -math.inf) < dwell:
            return None
        there = crew.seconds()
        found: list[tuple[bool, float, int, str]] = []
        for other, giver in crews.items():
            line = self._next(giver, now)
            if other == number or line is None or now - self._got.get(other, -math.inf) < dwell:
                continue
            here = giver.seconds(without=line.worker)
            fits = giver.can_do_without(line.worker) if line.open else crew.alone and not crew.spare
            if fits and there >= FACTOR * here and there - here > self._config.margin_seconds:
                found.append((not line.open, here, other, line.worker))
        if not found:
            return None
        _, here, other, worker = min(found)
        if crew.alone:
            return Move(worker, number, f"turns wait in cell {number}, and nobody is at work there")
        return Move(
            worker, number, f"all is done in {there:.0f} s there, and in {here:.0f} s in cell {other} without it"
        )

    def _next(self, crew: Crew, now: float) -> ExecutorLine | None:
        """Who would go: an open one before one that is parked, who holds least first."""
        may = [line for line in crew.spare.values() if self._rests(self._workers[line.worker], now)]
        return min(may, key=lambda line: (not line.open, line.held_turns, line.load_seconds, line.worker), default=None)

    def _rests(self, worker: Worker, now: float) -> bool:
        """Whether it is where it was told to be, for long enough."""
        return worker.told in (None, worker.cell) and now - worker.since >= self._config.dwell_seconds

    def _patience(self, crew: Crew) -> float:
        """Seconds for which a move has to be worth it."""
        return ALONE_SECONDS if crew.alone and not crew.comes else self._config.dwell_seconds


def _count_there(going: Mapping[str, Worker], crews: Mapping[int, Crew]) -> None:
    """Have those who are on their way take part where they go to, and not where they are."""
    for name, worker in going.items():
        here, there = crews.get(worker.cell), crews.get(-1 if worker.told is None else worker.told)
        share = None if here is None else here.shares.pop(name, None)
        if there is not None and share is not None:
            there.shares[name] = Share(0.0, share.rate)
