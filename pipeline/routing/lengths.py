"""How many tokens a turn is expected to generate.

Keeps true: the estimate lies between 1 and the turn's `max_tokens`; it depends on the results seen and their order.
"""

WEIGHT = 0.02
"""Of the newest result in the running mean: the last hundred or so turns count."""


class Lengths:
    """A running mean of the fraction of `max_tokens` that turns really used; 1 before the first result."""

    def __init__(self) -> None:
        self.fraction = 1.0
        self._seen = 0

    def saw(self, tokens: int, max_tokens: int) -> None:
        self._seen += 1
        self.fraction += max(WEIGHT, 1.0 / self._seen) * (min(1.0, tokens / max_tokens) - self.fraction)

    def expected(self, max_tokens: int) -> float:
        return max(1.0, self.fraction * max_tokens)
