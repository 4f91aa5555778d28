"""The low water: from where a restart must read so that it knows of every unfinished turn.

Keeps true: all records of an unfinished turn (its request, dispatches, results) lie at or after the low water, and it
only rises. A mark is the next offsets at one moment; a turn belongs to the epoch that the newest mark began, so its
records lie at or after that mark.

Example, one partition
    mark 1 at offset 100, turn A asked for at 110     -> low water 100
    mark 2 at offset 200, turn B asked for at 205     -> low water 100, as long as A is unfinished
    A finishes                                        -> low water 200
"""

from collections import deque
from collections.abc import Mapping

from topics.records import Place

Offsets = Mapping[Place, int]


class LowWater:
    """The marks from the oldest that may still be read from to the newest."""

    def __init__(self, start: Offsets) -> None:
        """`start` is the mark of epoch 0."""
        self._marks: deque[tuple[int, Offsets]] = deque([(0, dict(start))])

    def mark(self, next_offsets: Offsets) -> int:
        """Note the next offsets; return the epoch that begins here."""
        epoch = self._marks[-1][0] + 1
        self._marks.append((epoch, dict(next_offsets)))
        return epoch

    def lowest(self, oldest_epoch: int) -> Offsets:
        """The low water while the oldest unfinished turn is of this epoch."""
        while self._marks[0][0] < oldest_epoch:
            self._marks.popleft()
        return self._marks[0][1]
