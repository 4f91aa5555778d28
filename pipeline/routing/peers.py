"""Peers: executors that are alike and as crowded, so that they differ in nothing but how long a turn would wait there;
and which of them has the least.

Keeps true
- Of two peers the one with the lesser wait is the cheaper for every turn. So a search looks at the first of each group
  of peers, not at every executor.
- A seat stands in one group by one entry, whose key is never above what the seat would wait. A search mends the first
  entry of a heap until it is exact. So a key has to be lowered at once, and may be raised when it comes up.
- A seat stands in no group whose turns are too big for it to be found: `most` of its group is never below its room.
- A search looks at groups with seats alone, by their price of a token of context, and ends where the context costs too
  much by itself, with what its new tokens cost anywhere at least.
- A group that has no seat any more holds nothing of those that it had, and groups are no more than a few times as many
  as have seats: so it costs nothing that executors come, go, or tell of other rates each time.

A wait has a part that is as long at any time, the seat's `load`, and the prefills before it, which end at `free_at`.
While they last `free_at + load` stays in order among the seats whose prefill is `busy`, and `load` among the `idle`.

Example, at 10 s
    idle: w1 has a load of 0.3 s   busy: w2 has none, and is free at 10.2 s        -> w2 is the first
    w2 is sent a prefill of 1 s: its key stays 10.2, below its 11.2              -> mended when it comes up: w1 is
    at 12 s w2 comes up among the busy                                            -> moved to the idle, and is the first
"""

import math
from bisect import bisect_left, insort
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
"""Entries that a heap may have before those that mean nothing are dropped."""

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
    index: "Index"
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
                self.index.enter(seat)
            elif seat.free_at > now:
                heappop(idle)
                seat.entry, seat.is_busy = (seat.free_at + seat.load, number, seat), True
                heappush(busy, seat.entry)
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
                self.index.enter(seat)
            elif seat.free_at <= now:
                heappop(busy)
                seat.entry, seat.is_busy = (seat.load, number, seat), False
                heappush(idle, seat.entry)
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
        best, least = None, limit
        for heap, since in ((self.idle, 0.0), (self.busy, now)):
            places = [0]
            while places:
                place = places.pop()
                if place >= len(heap) or heap[place][0] - since > least + SLACK_SECONDS:
                    continue
                entry = heap[place]
                seat = entry[2]
                if seat.entry is entry and seat.search != search and seat.room >= need:
                    wait = seat.wait(now)
                    if wait < least:
                        best, least = seat, wait
                places += (2 * place + 1, 2 * place + 2)
        return best

    def within(self, base: float, most: float, need: int, now: float, many: int) -> list[Seat]:
        """Those with room where what costs `base` seconds costs `most` with the wait; no more than `many` are named."""
        found: list[Seat] = []
        limit = most - base + SLACK_SECONDS
        for heap, since in ((self.idle, 0.0), (self.busy, now)):
            places = [0]
            while places and len(found) < many:
                place = places.pop()
                if place >= len(heap) or heap[place][0] - since > limit:
                    continue
                entry = heap[place]
                seat = entry[2]
                if seat.entry is entry and seat.room >= need and base + seat.wait(now) <= most:
                    found.append(seat)
                places += (2 * place + 1, 2 * place + 2)
        return found

    def tidy(self) -> None:
        """Drop the entries that mean nothing."""
        for heap in (self.idle, self.busy):
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)
        self.most_entries = max(FEWEST, 2 * len(self.idle), 2 * len(self.busy))


@dataclass(slots=True)
class Found:
    """What a search has found: the cheapest seat, the next to it, and their costs."""

    best: Seat | None = None
    lowest: float = math.inf
    passed: Seat | None = None
    second: float = math.inf

    def take(self, seat: Seat, cost: float) -> None:
        """Look at one more."""
        if cost < self.lowest:
            self.passed, self.second = self.best, self.lowest
            self.best, self.lowest = seat, cost
        elif cost < self.second:
            self.passed, self.second = seat, cost


class Index:
    """All seats that may be sent turns, in groups of peers."""

    def __init__(self) -> None:
        self.now = 0.0
        """Of the newest search."""
        self._numbers = 0
        self._groups: list[tuple[float, int, Peers]] = []
        """Those with seats, by price and number. Another list whenever that changes: a search may be looking at it."""
        self._least_decode = 0.0
        """Of theirs."""
        self._known: dict[tuple[Kind, float, int], Peers] = {}
        self._most_known = FEWEST
        """That there may be before those without a seat are forgotten: at least twice those that have one."""

    def enter(self, seat: Seat) -> None:
        """Let it stand where it belongs, and nowhere if it has no room."""
        self.leave(seat)
        if seat.room < 0:
            return
        size = (seat.room.bit_length() + 1) // 2
        peers = self._known.get((seat.kind, seat.crowd, size))
        if peers is None:
            peers = self._add(seat, size)
        seat.peers = peers
        peers.seats += 1
        if peers.seats == 1:
            groups = self._groups.copy()
            insort(groups, (peers.price, peers.number, peers))
            self._least_decode = min(self._least_decode, peers.decode) if self._groups else peers.decode
            self._groups = groups
        self._push(seat, peers)

    def leave(self, seat: Seat) -> None:
        """Let it stand nowhere."""
        peers, seat.peers, seat.entry = seat.peers, None, None
        if peers is None:
            return
        peers.seats -= 1
        if not peers.seats:
            peers.idle.clear()
            peers.busy.clear()
            groups = self._groups.copy()
            del groups[bisect_left(groups, (peers.price, peers.number))]
            self._groups = groups
            if peers.decode <= self._least_decode:
                self._least_decode = min((other.decode for _, _, other in groups), default=0.0)

    def mend(self, seat: Seat) -> None:
        """Its wait or its room has changed: see to it that it is still found."""
        peers, entry = seat.peers, seat.entry
        if peers is None or entry is None or seat.room > peers.most:
            self.enter(seat)
        elif (seat.free_at + seat.load if seat.is_busy else seat.load) < entry[0]:
            self._push(seat, peers)

    def search(self, ask: Ask, now: float, number: int, found: Found) -> None:
        """Add the two cheapest without a cached prefix to what was found, of those not looked at by this search."""
        self.now = now
        need, context, new, seeded = ask.room_tokens, ask.context_tokens, ask.new_tokens, ask.seeded
        second, home, least = found.second, None, new * self._least_decode
        for price, _, peers in self._groups:
            if context * price + least >= second:
                break
            limit = second - context * price - new * peers.decode
            idle, busy = peers.idle, peers.busy
            if (
                ((idle and idle[0][0] < limit) or (busy and busy[0][0] - now < limit + SLACK_SECONDS))
                and peers.most >= need
                and (peers.seeded or not seeded)
            ):
                seat = peers.first(need, now, number, limit)
                if seat is not None:
                    found.take(seat, context * price + new * peers.decode + seat.wait(now))
                    second = found.second
                    if found.best is seat:
                        home = peers
        if home is None or found.best is None:
            return
        found.best.search = number
        base = context * home.price + new * home.decode
        seat = home.first(need, now, number, second - base)
        if seat is not None:
            found.take(seat, base + seat.wait(now))

    def within(self, ask: Ask, now: float, most: float, many: int) -> list[Seat]:
        """Those where the turn costs `most` seconds at most without a cached prefix; no more than `many` are named."""
        found: list[Seat] = []
        need, context, new = ask.room_tokens, ask.context_tokens, ask.new_tokens
        for price, _, peers in self._groups:
            if peers.most < need or (ask.seeded and not peers.seeded):
                continue
            base = context * price + new * peers.decode
            limit, idle, busy = most - base + SLACK_SECONDS, peers.idle, peers.busy
            if (idle and idle[0][0] <= limit) or (busy and busy[0][0] - now <= limit):
                found += peers.within(base, most, need, now, many - len(found))
        return found

    def _add(self, seat: Seat, size: int) -> Peers:
        if len(self._known) >= self._most_known:
            self._known = {key: peers for key, peers in self._known.items() if peers.seats}
            self._most_known = max(FEWEST, 2 * len(self._known))
        self._numbers += 1
        least, most = 4**size // 4, 4**size - 1
        peers = Peers(self._numbers, seat.price, seat.decode, seat.kind.seeded, least, most, self)
        self._known[seat.kind, seat.crowd, size] = peers
        return peers

    def _push(self, seat: Seat, peers: Peers) -> None:
        if seat.free_at > self.now:
            heap, seat.is_busy = peers.busy, True
            seat.entry = (seat.free_at + seat.load, seat.number, seat)
        else:
            heap, seat.is_busy = peers.idle, False
            seat.entry = (seat.load, seat.number, seat)
        heappush(heap, seat.entry)
        if len(heap) > peers.most_entries:
            peers.tidy()
