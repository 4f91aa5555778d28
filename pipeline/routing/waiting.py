"""Turns that wait for room.

Keeps true
- They leave in the order of their `urgency`, which is the whole policy. To be issued again costs a turn nothing of its
  place, and nothing of what was generated of it.
- Nobody overtakes: a turn behind the first one is not tried while the first one could run on some executor. So small
  turns cannot starve a big one.
- A turn that no executor could run even if it were idle is set aside, and comes back when the fleet has changed.
- A turn whose context is torn waits for its anchor, whoever else waits.
- What has left is not held: neither the turn nor what it appends.
"""

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.routing.turn import Turn
from schemas.turns import TurnRequest
from schemas.wire import encode


class Asked(NamedTuple):
    """A request, its bytes as they came, and its offset in its home."""

    request: TurnRequest
    wire: bytes
    offset: int

    @classmethod
    def anew(cls, request: TurnRequest, offset: int = 0) -> "Asked":
        """As its writer would send it."""
        return cls(request, encode(request), offset)


Urgency = tuple[float, int]
"""The least goes first."""


def urgency(turn: Turn) -> Urgency:
    """The policy: who was asked for first with the least patience, then the turn that is furthest on. A step of the
    trainer ends with its longest trajectories, so theirs are the turns that must not wait.
    """
    return turn.due, -turn.turn


Place = tuple[Urgency, int]
"""In the order: of equally urgent turns the one goes first that has waited longer, by its ticket."""


@dataclass(slots=True)
class Waiting:
    """The waiting turns. A place whose turn has left holds nothing of it, and is dropped when it comes up."""

    turns: dict[int, Turn] = field(default_factory=dict)
    """All that wait, by ticket."""
    heap: list[Place] = field(default_factory=list)
    aside: dict[int, Place] = field(default_factory=dict)
    """By ticket, those that wait and are set aside."""
    torn: set[int] = field(default_factory=set)
    """By ticket, those that wait for their anchor."""
    tickets: int = 0
    """Given out so far."""

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def for_room(self) -> int:
        """How many wait for an executor, and not for a request that is still to be read."""
        return len(self.turns) - len(self.torn)

    def push(self, turn: Turn) -> None:
        self._enter(turn)
        heapq.heappush(self.heap, (urgency(turn), turn.ticket))

    def first(self) -> Turn | None:
        """The turn whose move it is; None when nobody waits who is not set aside."""
        while self.heap:
            turn = self.turns.get(self.heap[0][1])
            if turn is not None:
                return turn
            heapq.heappop(self.heap)
        return None

    def hold(self, turn: Turn) -> None:
        """Let a turn wait for its anchor; `remove` it to push it."""
        self._enter(turn)
        turn.torn = True
        self.torn.add(turn.ticket)

    def remove(self, turn: Turn) -> None:
        """Take a waiting turn out, wherever it stands."""
        del self.turns[turn.ticket]
        self.aside.pop(turn.ticket, None)
        self.torn.discard(turn.ticket)
        turn.ticket, turn.torn = 0, False

    def set_aside(self) -> None:
        """Let the others pass the first one."""
        place = heapq.heappop(self.heap)
        self.aside[place[1]] = place

    def recall(self) -> None:
        """Bring back those set aside."""
        for place in self.aside.values():
            heapq.heappush(self.heap, place)
        self.aside.clear()

    def _enter(self, turn: Turn) -> None:
        self.tickets += 1
        turn.ticket = self.tickets
        self.turns[turn.ticket] = turn
