"""The index of all seats that may be sent turns: groups of peers, and the way to the two cheapest.

Keeps true
- A search looks at groups with seats alone, by their price of a token of context, and ends where the context costs too
  much by itself, with what its new tokens cost anywhere at least.
- A group that has no seat any more holds nothing of those that it had, and groups are no more than a few times as many
  as have seats: so it costs nothing that executors come, go, or tell of other rates each time.
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from pipeline.routing.peers import CLOSED, FEWEST, SLACK_SECONDS, Ask, Kind, Peers, Seat


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
        size = seat.room.bit_length()
        peers = self._known.get((seat.kind, seat.crowd, size))
        if peers is None:
            peers = self._add(seat, size)
        seat.peers = peers
        peers.seats += 1
        peers.roomiest = max(peers.roomiest, seat.room)
        if peers.seats == 1:
            groups = self._groups.copy()
            insort(groups, (peers.price, peers.number, peers))
            self._least_decode = min(self._least_decode, peers.decode) if self._groups else peers.decode
            self._groups = groups
        peers.add(seat, self.now)

    def leave(self, seat: Seat) -> None:
        """Let it stand nowhere."""
        peers, seat.peers, seat.entry = seat.peers, None, None
        if peers is None:
            return
        peers.seats -= 1
        if not peers.seats:
            peers.idle.clear()
            peers.busy.clear()
            peers.roomiest = CLOSED
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
        else:
            if seat.room > peers.roomiest:
                peers.roomiest = seat.room
            # Its key, without a call: this runs several times a turn.
            if (seat.free_at + seat.load if seat.is_busy else seat.load) < entry[0]:
                peers.add(seat, self.now)

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
                and peers.roomiest >= need
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
            if peers.roomiest < need or (ask.seeded and not peers.seeded):
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
        least, most = 2**size // 2, 2**size - 1
        peers = Peers(self._numbers, seat.price, seat.decode, seat.kind.seeded, least, most, self.enter)
        self._known[seat.kind, seat.crowd, size] = peers
        return peers
