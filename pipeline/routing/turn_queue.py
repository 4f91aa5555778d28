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

from rose.pipeline.routing.turn import Turn
from rose.schemas.turns import TurnRequest
from rose.schemas.wire import encode


class ReceivedRequest(NamedTuple):
    """A request, its bytes as they came, and its offset in its home."""

    request: TurnRequest
    request_bytes: bytes
    offset: int

    @classmethod
    def from_record(cls, request: TurnRequest, offset: int = 0) -> "ReceivedRequest":
        """As its writer would send it."""
        return cls(request, encode(request), offset)


Urgency = tuple[float, int]
"""The least goes first."""


def urgency(turn: Turn) -> Urgency:
    """The policy: who was asked for first with the least patience, then the turn that is furthest on. A step of the
    trainer ends with its longest trajectories, so theirs are the turns that must not wait.
    """
    return turn.due, -turn.turn


QueueEntry = tuple[Urgency, int]
"""In the order: of equally urgent turns the one goes first that has waited longer, by its ticket."""


@dataclass(slots=True)
class TurnQueue:
    """The waiting turns. A place whose turn has left holds nothing of it, and is dropped when it comes up."""

    turns: dict[int, Turn] = field(default_factory=dict)
    """All that wait, by ticket."""
    heap: list[QueueEntry] = field(default_factory=list)
    skipped: dict[int, QueueEntry] = field(default_factory=dict)
    """By ticket, those that wait and are set aside."""
    awaiting_anchor: set[int] = field(default_factory=set)
    """By ticket, those that wait for their anchor."""
    tickets: int = 0
    """Given out so far."""

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def waiting_for_room(self) -> int:
        """How many wait for an executor, and not for a request that is still to be read."""
        return len(self.turns) - len(self.awaiting_anchor)

    def push(self, turn: Turn) -> None:
        self._push_entry(turn)
        heapq.heappush(self.heap, (urgency(turn), turn.ticket))

    def first(self) -> Turn | None:
        """The turn whose move it is; None when nobody waits who is not set aside."""
        while self.heap:
            turn = self.turns.get(self.heap[0][1])
            if turn is not None:
                return turn
            heapq.heappop(self.heap)
        return None

    def await_anchor(self, turn: Turn) -> None:
        """Let a turn wait for its anchor; `remove` it to push it."""
        self._push_entry(turn)
        turn.context_missing = True
        self.awaiting_anchor.add(turn.ticket)

    def remove(self, turn: Turn) -> None:
        """Take a waiting turn out, wherever it stands."""
        del self.turns[turn.ticket]
        self.skipped.pop(turn.ticket, None)
        self.awaiting_anchor.discard(turn.ticket)
        turn.ticket, turn.context_missing = 0, False

    def skip_first(self) -> None:
        """Let the others pass the first one."""
        place = heapq.heappop(self.heap)
        self.skipped[place[1]] = place

    def restore_skipped(self) -> None:
        """Bring back those set aside."""
        for place in self.skipped.values():
            heapq.heappush(self.heap, place)
        self.skipped.clear()

    def _push_entry(self, turn: Turn) -> None:
        self.tickets += 1
        turn.ticket = self.tickets
        self.turns[turn.ticket] = turn
