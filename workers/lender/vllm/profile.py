"""A guest's first steps, before its first turn: so that turns are priced by what was measured.

Keeps true
- A step has no more tokens than it is let, so each size is priced by the smaller ones before it. The first step of all
  is not learned: it sets up what all later ones find.
- It takes the KV memory of a few hundred tokens at most, and less where there is less; no turn of it stays.
"""

from schemas.prompts import Sampling
from workers.executor.step_cost import StepCost
from workers.executor.vllm.engine import Engine
from workers.executor.want import Want, Work

GROWTH = 4
"""Each size is so many times the one before."""

ROUNDS = 2
"""That each size is tried."""

LONGEST = 64
"""Tokens of the largest step: what the prices of larger ones are is then known well enough to begin with."""

NAME = "profile"
"""Of the turn whose prefill it is."""


class Profile:
    """Of an engine that holds no turn."""

    def __init__(self, engine: Engine, cost: StepCost) -> None:
        """`cost` is told of the steps."""
        self.done = False
        self._engine = engine
        self._cost = cost
        self._sizes: list[int] | None = None
        """Of the steps to come, the next one last; None before the first."""
        self._warm = False

    @property
    def want(self) -> Want:
        """The next step."""
        return Want(Work.STEP, self._cost.cautious_seconds(self._sizes[-1] if self._sizes else 1))

    def needs(self, room_tokens: int) -> bool:
        """Whether it could do with more KV memory than for so many tokens."""
        return self._sizes is None and len(sizes(room_tokens)) < len(sizes(self._engine.longest_tokens - 1))

    def step(self, most_tokens: int, room_tokens: int) -> None:
        """One step, of at most so many tokens; they all find room in `room_tokens`. Raises EngineBroken."""
        if self.done:
            return
        if self._sizes is None:
            room = min(room_tokens, self._engine.longest_tokens - 1)
            self._sizes = sizes(room)
            if not self._sizes:
                self.done = True
                return
            context = [0] * (sum(self._sizes) + 1)  # its last token is not computed: nothing is drawn
            self._engine.add(NAME, context, Sampling(max_tokens=1), policy_version=self._engine.version)
        step = self._engine.step(min(self._sizes.pop(), most_tokens))
        if self._warm and step.tokens:
            self._cost.observe(step.tokens, step.seconds)
        self._warm = True
        if not self._sizes:
            self.end()

    def give_up(self, name: str, reason: str) -> None:
        """Serving wants its memory."""
        self.end()

    def end(self) -> None:
        """However far it is."""
        self._engine.abort(NAME)
        self.done = True


def sizes(room_tokens: int) -> list[int]:
    """Tokens of each step, the first one last, as many as there is room for."""
    found: list[int] = []
    size = 1
    while size <= LONGEST and 1 + ROUNDS * (sum(found) + size) < room_tokens:  # and a token that is not computed
        found.append(size)
        size *= GROWTH
    return [*reversed(found * ROUNDS), 1] if found else []
