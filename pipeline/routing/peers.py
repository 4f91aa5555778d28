"""Peers: executors that are alike and as crowded, so that they differ in nothing but how long a turn would wait there;
and which of them has the least. All groups of them: `index`.

Keeps true
- Of two peers the one with the lesser wait is the cheaper for every turn. So a search looks at the first of each group
  of peers, not at every executor.
- A seat stands in one group by one entry, whose key is never above what the seat would wait. A search mends the first
  entry of a heap until it is exact. So a key has to be lowered at once, and may be raised when it comes up.
- A seat stands in no group whose turns are too big for it to be found: `most` of its group is never below its room, and
  no more is `roomiest`, so that a search passes over groups whose seats are all too full for its turn.

A wait has a part that is as long at any time, the seat's `load`, and the prefills before it, which end at `free_at`.
While they last `free_at + load` stays in order among the seats whose prefill is `busy`, and `load` among the `idle`.

Example, at 10 s
    idle: w1 has a load of 0.3 s   busy: w2 has none, and is free at 10.2 s        -> w2 is the first
    w2 is sent a prefill of 1 s: its key stays 10.2, below its 11.2              -> mended when it comes up: w1 is
    at 12 s w2 comes up among the busy                                            -> moved to the idle, and is the first
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import msgspec

from pipeline.routing.pace import Pace
from schemas.slack import SlackHeartbeat

SLACK_SECONDS = 1e-6
"""What a sum of times in unix seconds may be off by."""

CLOSED = -1
"""Room of an executor that may be sent nothing."""

FEWEST = 64
"""Entries that a heap may have before those that mean nothing are dropped; so it is with groups."""

Entry = tuple[float, int, "Seat"]
"""What the seat would wait at least (of the busy: until when), its number, and itself."""


class Kind(NamedTuple):
    """What peers have in common."""

    prefill: Pace
    step: Pace
    """Of a step, whatever it computes: `seconds` is what it takes beside those of its tokens."""
    frozen: bool
    seeded: bool


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A turn, as far as its place depends on it."""

    context_tokens: int
    new_tokens: float
    """Expected."""
    room_tokens: int
    """What it may come to hold: its context and the most that it may generate."""
    tie_key: str
    """Equal costs are settled by a hash of this."""
    cached: tuple[tuple[str, int], ...] = ()
    """Executors that have a prefix of the context in cache, and how many tokens of it; each at most once."""
    seeded: bool = False
    """Whether it draws by a seed."""


@dataclass(slots=True, eq=False)
class Seat:
    """One executor: what it offers, what it holds, and where it is found."""

    number: int
    """No two seats ever have the same."""
    hash: int
    beat: SlackHeartbeat
    kind: Kind
    price: float = 0.0
    """Seconds of a token of context that is not cached, and what that takes from others."""
    decode: float = 0.0
    """Seconds of a new token, and what that takes from others."""
    crowd: float = 0.0
    """Turns that it holds, as far as costs tell them apart."""
    open: bool = False
    budget: int = CLOSED
    """Tokens that it could hold if it held nothing; CLOSED where it may be sent nothing."""
    staleness_seconds: float = 0.0
    """Risk of its policy version."""
    risk_seconds: float = 0.0
    """Of a turn there, whatever its length."""
    again_tokens: float = 0.0
    """Tokens that were computed again elsewhere because it took a turn back: the running mean over its turns."""
    held_turns: int = 0
    held_tokens: int = 0
    held_new_tokens: float = 0.0
    """Expected of the turns that it holds."""
    room: int = CLOSED
    """Tokens that one more turn may hold; CLOSED when there is room for no turn."""
    load: float = 0.0
    """Seconds: what any turn there takes from those that it holds, and what it risks."""
    free_at: float = 0.0
    """When the prefills that it was sent are over."""
    peers: "Peers | None" = None
    entry: Entry | None = None
    """The one that counts; None where it would not be found."""
    is_busy: bool = False
    """Whether that is among the busy."""
    search: int = 0
    """The newest that has looked at it by itself."""

    @property
    def key(self) -> float:
        """Of an entry, among the busy or the idle, that is exact."""
        return self.free_at + self.load if self.is_busy else self.load

    def wait(self, now: float) -> float:
        """Seconds that a turn would wait, and what it risks there whatever its length."""
        return self.load if self.free_at <= now else self.load + (self.free_at - now)


@dataclass(slots=True, eq=False)
class Peers:
    """Seats that are alike, with room of about one size."""

    number: int
    """No two groups ever have the same."""
    price: float
    decode: float
    """Of each of its seats."""
    seeded: bool
    least: int
    """Room of the smallest that belongs here."""
    most: int
    """Room of the biggest."""
    enter: Callable[[Seat], None]
    """Have a seat stand where it belongs now, which is not here."""
    roomiest: int = CLOSED
    """What no seat that stands here has more room than; exact after a search that has looked at all of them."""
    seats: int = 0
    """That stand here."""
    most_entries: int = FEWEST
    """That a heap may have: at least twice those that count."""
    idle: list[Entry] = field(default_factory=list)
    busy: list[Entry] = field(default_factory=list)

    def first(self, need: int, now: float, search: int, limit: float) -> Seat | None:
        """Who waits least, of those with room that this search has not looked at yet; None if all wait for longer than
        `limit`.
        """
        idle, busy, best, least = self.idle, self.busy, None, limit
        while idle:
            entry = idle[0]
            key, number, seat = entry
            if key > limit:
                break
            if seat.entry is not entry:
                heappop(idle)
            elif seat.room < self.least and seat.room < need:
                heappop(idle)
                self.enter(seat)
            elif seat.free_at > now:
                heappop(idle)
                self.add(seat, now)
            elif seat.load > key:
                seat.entry = (seat.load, number, seat)
                heapreplace(idle, seat.entry)
            elif seat.search == search or seat.room < need:
                return self._deep(need, now, search, limit)
            else:
                best, least = seat, key
                break
        until = now + least + SLACK_SECONDS
        while busy:
            entry = busy[0]
            key, number, seat = entry
            if key > until:
                break
            if seat.entry is not entry:
                heappop(busy)
            elif seat.room < self.least and seat.room < need:
                heappop(busy)
                self.enter(seat)
            elif seat.free_at <= now:
                heappop(busy)
                self.add(seat, now)
                if seat.load < least and seat.search != search and seat.room >= need:
                    best, least = seat, seat.load
                    until = now + least + SLACK_SECONDS
            elif seat.free_at + seat.load > key:
                seat.entry = (seat.free_at + seat.load, number, seat)
                heapreplace(busy, seat.entry)
            elif seat.search == search or seat.room < need:
                return self._deep(need, now, search, limit)
            else:
                return seat if seat.load + (seat.free_at - now) < least else best
        return best

    def _deep(self, need: int, now: float, search: int, limit: float) -> Seat | None:
        """As `first`, where the first of a heap is of no use: down the heaps as far as keys allow."""
        best, least, roomiest = None, limit, CLOSED
        for heap, since, slack in ((self.idle, 0.0, 0.0), (self.busy, now, SLACK_SECONDS)):
            places = [0]
            while places:
                place = places.pop()
                if place >= len(heap):
                    continue
                if heap[place][0] - since >= least + slack:
                    roomiest = self.roomiest  # it does not look at what is below
                    continue
                entry = heap[place]
                seat = entry[2]
                if seat.entry is entry:
                    roomiest = max(roomiest, seat.room)
                    if seat.search != search and seat.room >= need:
                        wait = seat.wait(now)
                        if wait < least:
                            best, least = seat, wait
                places += (2 * place + 1, 2 * place + 2)
        self.roomiest = roomiest
        return best

    def within(self, base: float, most: float, need: int, now: float, many: int) -> list[Seat]:
        """Those with room where what costs `base` seconds costs `most` with the wait; no more than `many` are named.

        What comes up is mended, so that what has changed since is looked at once and not by every search.
        """
        found: list[Seat] = []
        looked_at: list[Entry] = []
        while len(found) < many and (entry := self._pop(need, now, most - base + SLACK_SECONDS)) is not None:
            looked_at.append(entry)
            seat = entry[2]
            if seat.room >= need and base + seat.wait(now) <= most:
                found.append(seat)
        for entry in looked_at:
            heappush(self.busy if entry[2].is_busy else self.idle, entry)
        return found

    def _pop(self, need: int, now: float, limit: float) -> Entry | None:
        """Take off a heap the next exact entry of a seat that waits for no longer than `limit`.

        Who got too full both for `need` and to stand here goes where it belongs: there nobody looks for it now.
        """
        while True:
            if self.idle and self.idle[0][0] <= limit:
                entry = heappop(self.idle)
            elif self.busy and self.busy[0][0] - now <= limit:
                entry = heappop(self.busy)
            else:
                return None
            key, _, seat = entry
            if seat.entry is not entry:
                continue
            if seat.room < self.least and seat.room < need:
                self.enter(seat)
            elif (seat.free_at > now) is seat.is_busy and key >= seat.key:
                return entry
            else:
                self.add(seat, now)

    def add(self, seat: Seat, now: float) -> None:
        """Have it found by what it would wait at `now`. What means nothing is dropped where it has become much."""
        seat.is_busy = seat.free_at > now
        seat.entry = (seat.key, seat.number, seat)
        heap = self.busy if seat.is_busy else self.idle
        heappush(heap, seat.entry)
        if len(heap) > self.most_entries:
            self.tidy()

    def tidy(self) -> None:
        """Drop the entries that mean nothing."""
        for heap in (self.idle, self.busy):
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)
        self.most_entries = max(FEWEST, 2 * len(self.idle), 2 * len(self.busy))
