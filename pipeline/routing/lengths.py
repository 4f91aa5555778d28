"""How many tokens a turn is expected to generate.

Keeps true: the estimate lies between 1 and the turn's `max_tokens`; it depends on the results seen and their order.

Learned for each environment and turn number by itself: the first turns of a trajectory look around, its last ones
answer, and one kind of task is longer than another.
"""

WEIGHT = 0.02
"""Of the newest result in a running mean: the last hundred or so turns count."""

TURNS_APART = 64
"""Turns whose numbers are told apart; all later ones are as one."""

ENVIRONMENTS_APART = 64
"""Environments that are told apart, those that were asked for first; all others are as one."""


class Means:
    """Of one environment: running means of the fraction of `max_tokens` that turns really used."""

    def __init__(self) -> None:
        self._fractions = [1.0] * TURNS_APART
        self._seen = [0] * TURNS_APART
        self._begins = 1.0
        """Where the mean of a turn begins that was not seen yet: at that of the newest result's turn; 1 before it."""

    def saw(self, turn: int, tokens: int, max_tokens: int) -> None:
        if turn >= TURNS_APART:
            turn = TURNS_APART - 1
        seen = self._seen[turn] = self._seen[turn] + 1
        fraction = self._fractions[turn]
        weight = WEIGHT if seen * WEIGHT > 1.0 else 1.0 / seen
        fraction += weight * ((tokens / max_tokens if tokens < max_tokens else 1.0) - fraction)
        self._fractions[turn] = self._begins = fraction

    def expected(self, turn: int, max_tokens: int) -> float:
        if turn >= TURNS_APART:
            turn = TURNS_APART - 1
        tokens = max_tokens * (self._fractions[turn] if self._seen[turn] else self._begins)
        return tokens if tokens > 1.0 else 1.0


class Lengths:
    """Of all environments."""

    def __init__(self) -> None:
        self._by_environment: dict[str, Means] = {}
        self._others = Means()

    def of(self, environment: str) -> Means:
        """What is learned of it, and goes on to be."""
        known = self._by_environment.get(environment)
        if known is not None:
            return known
        if len(self._by_environment) >= ENVIRONMENTS_APART:
            return self._others
        return self._by_environment.setdefault(environment, Means())
