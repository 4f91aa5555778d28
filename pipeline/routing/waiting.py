"""Turns that wait for room.

Keeps true
- They leave in the order of (due, progress): who was asked for first with the least patience, then the turn that is
  furthest on. To be issued again costs a turn nothing of its place, and nothing of what was generated of it.
- Nobody overtakes: a turn behind the first one is not tried while the first one could run on some executor. So small
  turns cannot starve a big one.
- A turn that no executor could run even if it were idle is set aside, and comes back when the fleet has changed.
- A turn whose context is torn waits for its anchor, whoever else waits.
- What has left is not held: neither the turn nor what it appends.
"""

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from schemas.arrays import count
from schemas.turns import Part, TurnKey, TurnRequest
from schemas.wire import encode

KEPT_BYTES = 1024
"""Of a request: one that is larger goes whole with its first dispatch, and by its place with those that may follow."""


class Asked(NamedTuple):
    """A request, its bytes as they came, and its offset in its home."""

    request: TurnRequest
    wire: bytes
    offset: int

    @classmethod
    def anew(cls, request: TurnRequest, offset: int = 0) -> "Asked":
        """As its writer would send it."""
        return cls(request, encode(request), offset)


_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
"""A record's fields by name, none of them looked into: who decoded the record has passed over what it does not know."""

NO_TOKENS = msgspec.Raw(msgspec.msgpack.encode(b""))


def without_tokens(wire: bytes) -> bytes:
    """The request's bytes less what it appends: all else, known here or not, is as it came, and takes no more room."""
    return msgspec.msgpack.encode({**_fields.decode(wire), "appended": NO_TOKENS})


def without_context(request: TurnRequest) -> TurnRequest:
    """What the router keeps of it: neither what it appends nor its chain, which may take more than all the rest."""
    return msgspec.structs.replace(request, appended=b"", chain=())


@dataclass(slots=True, eq=False)
class Turn:
    """One unfinished turn. Times are the router's own, in seconds."""

    request: TurnRequest
    """As `without_context` leaves it."""
    anchors: bool
    """Whether it was asked for with its context whole."""
    wire: bytes
    """The request as it came, for its dispatches."""
    offset: int
    """Of the request in its home."""
    epoch: int
    """The router's epoch in which it was asked for."""
    room_tokens: int
    """Context and the most that it may generate; of a turn at an executor, as it was sent there."""
    due: float
    """When its first patience ends: its place in the order."""
    queued_at: float
    """Since when it waits, or waited before it was dispatched."""
    attempt: int = 0
    """The one that runs or is to run next."""
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
    begun: Part | None = None
    """The most that any attempt handed back of it: the next one goes on from there."""
    cut: bool = False
    """`wire` lacks what the request appends."""
    torn: bool = False
    """It waits for its anchor: no executor can read its context back."""

    @property
    def context_tokens(self) -> int:
        return self.request.context_tokens

    def asked_by(self, asked: Asked) -> None:
        """It is asked for by this from now on."""
        self.request, self.anchors = without_context(asked.request), asked.request.anchors
        self.wire, self.offset, self.cut = asked.wire, asked.offset, False

    def sent(self) -> None:
        """What it appends is with an executor, and on the log."""
        if len(self.wire) > KEPT_BYTES and not self.cut:
            self.wire, self.cut = without_tokens(self.wire), True

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.request.trajectory_id, self.request.turn, self.attempt)

    @property
    def begun_tokens(self) -> int:
        return 0 if self.begun is None else count(self.begun.tokens)

    def keep(self, part: Part) -> None:
        """Go on from this if it is sound, leaves something to sample, and is more than what is known."""
        longer = self.begun_tokens < count(part.tokens) < self.request.sampling.max_tokens
        if longer and not part.flaw:
            self.begun = part

    @property
    def gives_up_at(self) -> float:
        """When it has been without progress for as long as its environment worker has patience."""
        return (self.seen_at if self.worker else self.queued_at) + self.request.patience_seconds


Place = tuple[float, int, int]
"""In the order: when it is due, how far it is on (negative), its ticket."""


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
        heapq.heappush(self.heap, (turn.due, -turn.request.turn, turn.ticket))

    def first(self) -> Turn | None:
        """The turn whose move it is; None when nobody waits who is not set aside."""
        while self.heap:
            turn = self.turns.get(self.heap[0][2])
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
        self.aside[place[2]] = place

    def recall(self) -> None:
        """Bring back those set aside."""
        for place in self.aside.values():
            heapq.heappush(self.heap, place)
        self.aside.clear()

    def _enter(self, turn: Turn) -> None:
        self.tickets += 1
        turn.ticket = self.tickets
        self.turns[turn.ticket] = turn
