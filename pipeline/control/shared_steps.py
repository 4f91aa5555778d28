"""Shared steps: how much faster the held turns of a cell would run if one more executor shared them.

Keeps true
- The turns on an executor share its steps, and each turn makes a step longer. Turns are taken to spread so that the
  steps of all executors that hold turns take equally long, because placement prices shared steps.
- The gain of an executor is the work that it adds, in executors: the tokens a second that all turns gain, relative to
  the mean of the executors that share the turns. It is 0 for an executor whose steps with one turn take as long as the
  steps without it, and 0 if every turn has an executor of its own.
- With equal executors the gain is the part of a step that its turns add once the executor is there. So the gain depends
  on how crowded the executors are, not on their number.
- The gain of an executor before it is added equals the gain that is lost when it is removed.

Pure. Example: a step takes 8 ms and 0.5 ms for each turn
    32 turns on 2 executors, 16.0 ms   -> a third makes it 13.3 ms and adds 0.40 of an executor's work
    32 turns on 8 executors, 10.0 ms   -> a ninth makes it 9.8 ms and adds 0.18
    8 turns on 8 executors, 8.5 ms     -> a ninth adds nothing
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class StepShare(NamedTuple):
    """Cost of an executor's steps."""

    base_seconds: float
    """Seconds of a step without turns."""
    turn_seconds: float
    """Seconds that each turn adds; above 0."""
    most_turns: float = math.inf
    """Turns that the executor takes at once."""


class SharedSteps:
    """Turns that share the steps of some executors."""

    def __init__(self, shares: Iterable[StepShare], turns: int) -> None:
        """`turns`: the held turns of all executors together."""
        self.turns = turns
        self.executors = 0
        self._sharing = 0
        """Executors that hold turns if turns are spread evenly. The steps of the others take longer without turns."""
        self._slowest = 0.0
        """Largest base of these executors, seconds."""
        self._room = self._offset = 0.0
        """Turns for each second of a step, and turns that would run in steps of no length; sums over `_sharing`."""
        for share in sorted(shares):
            self.add(share)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step; infinite without executors."""
        return (self.turns + self._offset) / self._room if self._sharing else math.inf

    def add(self, share: StepShare) -> None:
        """Add an executor."""
        self.executors += 1
        if share.base_seconds < self.step_seconds:
            self._slowest = max(self._slowest, share.base_seconds)
            self._count(share, 1)

    def remove(self, share: StepShare) -> None:
        """Remove an executor that was added."""
        self.executors -= 1
        if share.base_seconds <= self._slowest:
            self._count(share, -1)

    def gain(self, share: StepShare) -> float:
        """Work that an executor would add, in executors."""
        now = self.step_seconds
        if not self._sharing or self.turns <= self.executors or share.base_seconds >= now:
            return 0.0
        room, offset = 1.0 / share.turn_seconds, share.base_seconds / share.turn_seconds
        shared = (self.turns + self._offset + offset) / (self._room + room)
        full = (self.turns - share.most_turns + self._offset) / self._room
        after = max(shared, full, share.base_seconds + share.turn_seconds)
        return self._sharing * max(0.0, now / after - 1.0)

    def lost_gain(self, share: StepShare) -> float:
        """Work that would be lost without an executor that was added, in executors."""
        self.remove(share)
        gain = self.gain(share)
        self.add(share)
        return gain

    def _count(self, share: StepShare, sign: int) -> None:
        self._sharing += sign
        self._room += sign / share.turn_seconds
        self._offset += sign * share.base_seconds / share.turn_seconds
