"""What an engine step costs, learned from the steps themselves.

Keeps true: the estimate is `base + per_token * tokens` seconds, fitted by least squares over an exponentially fading
past, and both terms stay positive, so that every rate derived from it is finite.

Pure. Example: steps of 10 tokens in 3 ms and 110 tokens in 13 ms -> base 2 ms, 0.1 ms a token.
"""

FADING = 0.98
"""Weight that a step keeps with each step after it: about the last 50 count."""

LEAST_SECONDS = 1e-7
"""Floor under both terms: no engine is infinitely fast."""


class StepCost:
    """An online fit of step seconds against the tokens computed in the step."""

    def __init__(self, *, base_seconds: float, token_seconds: float) -> None:
        self.base_seconds = base_seconds
        self.token_seconds = token_seconds
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in one step that computed `tokens` tokens (prefill and decode together)."""
        self._weight = FADING * self._weight + 1.0
        self._x = FADING * self._x + tokens
        self._y = FADING * self._y + seconds
        self._xx = FADING * self._xx + tokens * tokens
        self._xy = FADING * self._xy + tokens * seconds
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-6 * self._xx * self._weight:  # steps of one size alone say nothing about the slope
            slope = (self._weight * self._xy - self._x * self._y) / spread
            self.token_seconds = max(slope, LEAST_SECONDS)
        self.base_seconds = max((self._y - self.token_seconds * self._x) / self._weight, LEAST_SECONDS)

    def seconds(self, tokens: int) -> float:
        """Predicted seconds of a step of `tokens` tokens."""
        return self.base_seconds + self.token_seconds * tokens

    @property
    def prefill_tokens_per_second(self) -> float:
        return 1.0 / self.token_seconds

    def decode_tokens_per_second(self, running: int) -> float:
        """Of one sequence while `running` sequences decode together."""
        return 1.0 / self.seconds(max(running, 1))
