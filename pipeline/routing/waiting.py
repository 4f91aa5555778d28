"""Turns that wait for room.

Keeps true
- They leave in the order of (due, progress): who was asked for first with the least patience, then the turn that is
  furthest on. To be issued again costs a turn nothing of its place.
- Nobody overtakes: a turn behind the first one is not tried while the first one could run on some executor. So small
  turns cannot starve a big one.
- A turn that no executor could run even if it were idle is set aside, and comes back when the fleet has changed.
"""

import heapq
from dataclasses import dataclass, field

from schemas.turns import TurnRequest


@dataclass(slots=True, eq=False)
class Turn:
    """One unfinished turn. Times are the router's own, in seconds."""

    request: TurnRequest
    """With the attempt that runs or is to run next."""
    epoch: int
    """The router's epoch in which it was asked for."""
    room_tokens: int
    """Context and the most that it may generate."""
    due: float
    """When its first patience ends: its place in the order."""
    queued_at: float
    """Since when it waits, or waited before it was dispatched."""
    next_attempt: int = 0
    """Above that of every dispatch of it."""
    failures: int = 0
    """Attempts that ended by somebody's fault."""
    worker: str = ""
    """The executor that holds it; empty while it waits."""
    execution: int = 0
    """`held_hash` of the dispatch that is outstanding."""
    new_tokens: float = 0.0
    """Expected when it was dispatched."""
    seen_at: float = 0.0
    """When it was dispatched, or its executor last said that it holds it."""
    seen_clock: float = 0.0
    """The same, on the clock of `Liveness`."""
    ticket: int = 0
    """Its place in the waiting order, 0 when it does not wait."""

    @property
    def gives_up_at(self) -> float:
        """When it has been without progress for as long as its environment worker has patience."""
        return (self.seen_at if self.worker else self.queued_at) + self.request.patience_seconds


Entry = tuple[float, int, int, Turn]


@dataclass(slots=True)
class Waiting:
    """The waiting turns; entries of turns that have left are dropped when they come up."""

    heap: list[Entry] = field(default_factory=list)
    aside: list[Entry] = field(default_factory=list)
    turns: int = 0
    """How many wait, those set aside included."""
    tickets: int = 0
    """Given out so far."""

    def __len__(self) -> int:
        return self.turns

    def push(self, turn: Turn) -> None:
        self.tickets += 1
        turn.ticket = self.tickets
        heapq.heappush(self.heap, (turn.due, -turn.request.turn, turn.ticket, turn))
        self.turns += 1

    def first(self) -> Turn | None:
        """The turn whose move it is; None when nobody waits who is not set aside."""
        while self.heap:
            _, _, ticket, turn = self.heap[0]
            if turn.ticket == ticket:
                return turn
            heapq.heappop(self.heap)
        return None

    def remove(self, turn: Turn) -> None:
        """Take a waiting turn out, wherever it stands."""
        turn.ticket = 0
        self.turns -= 1

    def set_aside(self) -> None:
        """Let the others pass the first one."""
        self.aside.append(heapq.heappop(self.heap))

    def recall(self) -> None:
        """Bring back those set aside."""
        for entry in self.aside:
            if entry[3].ticket == entry[2]:
                heapq.heappush(self.heap, entry)
        self.aside.clear()
