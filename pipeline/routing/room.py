"""Room: how much a fleet could take in, and what is known when it can't, so that nobody asks every executor again.

Keeps true
- `Largest` is the greatest of the budgets that it was told of and that still hold.
- While a `Shortage` lasts, every seat with room for its `least` or more is among those that have grown to it since.
"""

from dataclasses import dataclass, field

from pipeline.routing.peers import CLOSED, Seat

NEVER = 2**62
"""More room than anybody asks for."""

FEW = 4
"""Seats with room that a shortage lasts with. With more of them the index is cheaper: a search of it costs what some
five looks at single seats do, unless much of the fleet has nearly as much room as is needed."""


@dataclass(slots=True)
class Largest:
    """The largest budget of those that are open."""

    most: int = CLOSED
    _counts: dict[int, int] = field(default_factory=dict)

    def swap(self, before: int, now: int) -> bool:
        """One budget takes the place of another (CLOSED: of none); whether the largest grew."""
        was, counts = self.most, self._counts
        if before != CLOSED:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
        if now != CLOSED:
            counts[now] = counts.get(now, 0) + 1
        if now > was:
            self.most = now
        elif before == was and before not in counts:
            self.most = max(counts, default=CLOSED)
        return self.most > was


@dataclass(slots=True)
class Shortage:
    """Nobody had `least` tokens of room; since then only those in `grown` may have."""

    least: int = NEVER
    _grown: dict[int, Seat] = field(default_factory=dict)

    def found(self, need: int) -> None:
        """Nobody has room for `need`."""
        self.least = min(self.least, need)
        self._grown = {number: seat for number, seat in self._grown.items() if seat.room >= self.least}

    def grew(self, seat: Seat) -> None:
        """The seat has room for `least`."""
        self._grown[seat.number] = seat
        if len(self._grown) > FEW:
            self.least = NEVER
            self._grown.clear()

    @property
    def grown(self) -> list[Seat]:
        return list(self._grown.values())
