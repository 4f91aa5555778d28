"""The records of unfinished turns of one simulated cell: what a router that takes the cell over reads back.

Keeps true: a turn is kept from its request until a result ends it, as the low water of a cell does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rose.pipeline.routing.router import Decision, Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.record import Record
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnResult


@dataclass(slots=True)
class _Turn:
    """The records of one turn, each kind in the order of the log."""

    request: ReceivedRequest
    dispatches: list[TurnDispatch] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)


class CellLog:
    """Folds the records of a cell."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        """The unfinished turn of each trajectory, oldest request first."""

    def add(self, record: Record | ReceivedRequest) -> None:
        """Add a request, dispatch or result; other records are not read back."""
        if isinstance(record, ReceivedRequest):
            name = record.request.trajectory_id
            self._turns.pop(name, None)
            self._turns[name] = _Turn(record)
        elif isinstance(record, TurnDispatch):
            name = record.request.trajectory_id
            turn = self._turns.get(name)
            if turn is not None and turn.request.request.turn == record.request.turn:
                turn.dispatches.append(record)
        elif isinstance(record, TurnResult):
            turn = self._turns.get(record.trajectory_id)
            if turn is None or turn.request.request.turn != record.turn:
                return
            turn.results.append(record)
            if record.outcome in (TurnOutcome.COMPLETED, TurnOutcome.FAILED):
                del self._turns[record.trajectory_id]

    def restore(self, router: Router, clock: Callable[[], float]) -> list[Decision]:
        """Let a new router read the records back; return its decisions."""
        turns = list(self._turns.values())
        return router.restore(
            [turn.request for turn in turns],
            [dispatch for turn in turns for dispatch in turn.dispatches],
            [result for turn in turns for result in turn.results],
            clock,
        )
