"""Capacity of the fleet: the largest token budget, and shortages of room, so that a full fleet is not searched again.

Keeps true
- `LargestBudget.tokens` is the greatest of the present budgets.
- While a `Shortage` lasts, every candidate with room for at least its `min_tokens` is in `with_room`.
"""

from dataclasses import dataclass, field

from rose.pipeline.routing.candidates import CLOSED, Candidate

UNLIMITED = 2**62
"""More tokens than any turn needs."""

MAX_TRACKED = 4
"""Most candidates with room while a shortage lasts; one more ends the shortage. A search of the index costs about as
much as considering five candidates individually, unless much of the fleet has nearly as much room as is needed."""


@dataclass(slots=True)
class LargestBudget:
    """The largest token budget of the open executors."""

    tokens: int = CLOSED
    _counts: dict[int, int] = field(default_factory=dict)

    def replace(self, old: int, new: int) -> bool:
        """Replace one budget by another, where CLOSED means none; return whether the largest budget grew."""
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
    """No candidate had `min_tokens` tokens of room; since then only the candidates in `with_room` may have it."""

    min_tokens: int = UNLIMITED
    _grown: dict[int, Candidate] = field(default_factory=dict)

    def record(self, room_tokens: int) -> None:
        """Record that no candidate has `room_tokens` tokens of room."""
        self.min_tokens = min(self.min_tokens, room_tokens)
        self._grown = {
            number: candidate for number, candidate in self._grown.items() if candidate.room >= self.min_tokens
        }

    def on_room_grown(self, candidate: Candidate) -> None:
        """Record that a candidate has at least `min_tokens` tokens of room now."""
        self._grown[candidate.number] = candidate
        if len(self._grown) > MAX_TRACKED:
            self.min_tokens = UNLIMITED
            self._grown.clear()

    @property
    def with_room(self) -> list[Candidate]:
        """Return the candidates whose room has grown."""
        return list(self._grown.values())
