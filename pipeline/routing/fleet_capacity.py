"""Room: how much a fleet could take in, and what is known when it can't, so that nobody asks every executor again.

Keeps true
- `LargestBudget` is the greatest of the budgets that it was told of and that still hold.
- While a `Shortage` lasts, every seat with room for its `min_tokens` or more is among those that have grown to it
  since.
"""

from dataclasses import dataclass, field

from rose.pipeline.routing.candidates import CLOSED, Candidate

UNLIMITED = 2**62
"""More room than anybody asks for."""

MAX_TRACKED = 4
"""Seats with room that a shortage lasts with. With more of them the index is cheaper: a search of it costs what some
five looks at single seats do, unless much of the fleet has nearly as much room as is needed."""


@dataclass(slots=True)
class LargestBudget:
    """The largest budget of those that are open."""

    tokens: int = CLOSED
    _counts: dict[int, int] = field(default_factory=dict)

    def replace(self, old: int, new: int) -> bool:
        """One budget takes the place of another (CLOSED: of none); whether the largest grew."""
        largest_before, counts = self.tokens, self._counts
        if old != CLOSED:
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if new != CLOSED:
            counts[new] = counts.get(new, 0) + 1
        if new > largest_before:
            self.tokens = new
        elif old == largest_before and old not in counts:
            self.tokens = max(counts, default=CLOSED)
        return self.tokens > largest_before


@dataclass(slots=True)
class Shortage:
    """Nobody had `min_tokens` tokens of room; since then only those in `with_room` may have."""

    min_tokens: int = UNLIMITED
    _grown: dict[int, Candidate] = field(default_factory=dict)

    def record(self, room_tokens: int) -> None:
        """Nobody has room for `room_tokens`."""
        self.min_tokens = min(self.min_tokens, room_tokens)
        self._grown = {
            number: candidate for number, candidate in self._grown.items() if candidate.room >= self.min_tokens
        }

    def on_room_grown(self, candidate: Candidate) -> None:
        """The seat has room for `min_tokens`."""
        self._grown[candidate.number] = candidate
        if len(self._grown) > MAX_TRACKED:
            self.min_tokens = UNLIMITED
            self._grown.clear()

    @property
    def with_room(self) -> list[Candidate]:
        return list(self._grown.values())
