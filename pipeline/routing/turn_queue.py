"""The turn queue: turns that wait for room, in order of urgency.

Keeps true
- Turns leave in the order of their `urgency`, which is the whole policy. A reissued turn keeps its place and its
  partial.
- Turns do not overtake: a turn behind the first turn is not tried while the first turn could run on some executor. So
  small turns cannot starve a big turn.
- A turn that no executor could run even if the executor were idle is skipped, and returns to the queue when the fleet
  has changed.
- A turn whose context is missing waits for its anchor, and a turn on hold for another request, apart from the order of
  urgency.
- The queue holds no reference to a turn that has left.
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
        """A received request, encoded here as its writer would encode it."""
        return cls(request, encode(request), offset)


Urgency = tuple[float, int]
"""Sort key of a turn; the least key leaves first."""


def urgency(turn: Turn) -> Urgency:
    """The turn's sort key: the earliest due time first, then the highest turn number.

    A step of the trainer ends with its longest trajectories, so their turns must not wait.
    """
    return turn.due, -turn.turn


QueueEntry = tuple[Urgency, int]
"""Urgency and ticket. Of equally urgent turns, the turn with the lower ticket, which waited longer, leaves first."""


@dataclass(slots=True)
class TurnQueue:
    """The queued turns. The heap entry of a turn that has left is dropped when the entry comes up."""

    turns: dict[int, Turn] = field(default_factory=dict)
    """All queued turns, by ticket."""
    heap: list[QueueEntry] = field(default_factory=list)
    skipped: dict[int, QueueEntry] = field(default_factory=dict)
    """Heap entries of the skipped turns, by ticket."""
    parked: set[int] = field(default_factory=set)
    """Tickets of the turns that wait for another request: for their anchor, or because they are on hold."""
    tickets: int = 0
    """Number of tickets given out; the newest ticket."""

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def waiting_for_room(self) -> int:
        """Number of turns that wait for an executor, without the turns that wait for another request."""
        return len(self.turns) - len(self.parked)

    def push(self, turn: Turn) -> None:
        """Add a turn."""
        self._push_entry(turn)
        heapq.heappush(self.heap, (urgency(turn), turn.ticket))

    def first(self) -> Turn | None:
        """The most urgent turn; None if no turn waits that is neither skipped nor waiting for another request."""
        while self.heap:
            turn = self.turns.get(self.heap[0][1])
            if turn is not None:
                return turn
            heapq.heappop(self.heap)
        return None

    def await_anchor(self, turn: Turn) -> None:
        """Let a turn wait for its anchor. Call `remove` before the turn is pushed."""
        self._push_entry(turn)
        turn.context_missing = True
        self.parked.add(turn.ticket)

    def hold(self, turn: Turn) -> None:
        """Put a turn on hold. Call `remove` before the turn is pushed."""
        self._push_entry(turn)
        turn.on_hold = True
        self.parked.add(turn.ticket)

    def remove(self, turn: Turn) -> None:
        """Remove a queued turn, also if it is skipped or waits for another request."""
        del self.turns[turn.ticket]
        self.skipped.pop(turn.ticket, None)
        self.parked.discard(turn.ticket)
        turn.ticket, turn.context_missing, turn.on_hold = 0, False, False

    def skip_first(self) -> None:
        """Skip the first turn until `restore_skipped`. The heap must not be empty."""
        place = heapq.heappop(self.heap)
        self.skipped[place[1]] = place

    def restore_skipped(self) -> None:
        """Return the skipped turns to the heap."""
        for place in self.skipped.values():
            heapq.heappush(self.heap, place)
        self.skipped.clear()

    def _push_entry(self, turn: Turn) -> None:
        self.tickets += 1
        turn.ticket = self.tickets
        self.turns[turn.ticket] = turn
