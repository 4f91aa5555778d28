"""Turns that wait for room.

Keeps true
- They leave in the order of (deadline, progress): the earliest deadline first, then the turn that is furthest on.
- Nobody overtakes: a turn behind the first one is not tried while the first one could run on some executor. So small
  turns cannot starve a big one.
- A turn that no executor could run even if it were idle is set aside, and comes back when the fleet has changed.
"""

import heapq
from dataclasses import dataclass, field

from schemas.turns import TurnRequest


@dataclass(slots=True, eq=False)
class Turn:
    """One unfinished turn."""

    request: TurnRequest
    """With the attempt that runs or is to run next."""
    epoch: int
    """The router's epoch in which it was asked for."""
    room_tokens: int
    """Context and the most that it may generate."""
    queued_at: float
    """Unix seconds; since when it waits, or waited before it was dispatched."""
    worker: str = ""
    """The executor that holds it; empty while it waits."""
    new_tokens: float = 0.0
    """Expected when it was dispatched."""
    lease_until: float = 0.0
    """Seconds; a dispatch older than this is taken for lost."""
    ticket: int = 0
    """Its place in the waiting order, 0 when it does not wait."""


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
        heapq.heappush(self.heap, (turn.request.deadline, -turn.request.turn, turn.ticket, turn))
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
