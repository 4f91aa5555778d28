"""What an engine step costs, learned from the steps themselves.

Keeps true
- The estimate is `base + per_token * tokens` seconds, fitted by least squares over an exponentially fading past, and
  both terms stay positive, so that every rate derived from it is finite.
- How wrong it is is known as well: `error` is a fading quantile of |measured - predicted| / predicted, each prediction
  made before its step was seen. About nine steps in ten end within `cautious_seconds`, whatever the fit leaves out.
- What must end within a bound is planned for the worst: `tokens_within` leaves room for the largest `overshoot` of the
  last thousand steps or so, so that only what is worse than all of those, or stalls, goes beyond it.
- A stall is no cost: of a step that took longer than `STALL` times its cautious price, no more than that is learned. A
  cost that has really changed is followed all the same, as the error rises with each such step.

Pure. Example: steps of 10 tokens in 3 ms and 110 tokens in 13 ms -> base 2 ms, 0.1 ms a token.
"""

import math

UNKNOWN = {"base_seconds": 0.01, "token_seconds": 0.0001}
"""A guess for an engine of which no step was seen."""

FADING = 0.98
"""Weight that a step keeps with each step after it: about the last 50 count."""

LEAST_SECONDS = 1e-7
"""Floor under both terms: no engine is infinitely fast."""

USUAL = 0.9
"""Share of the steps that `error` covers."""

ERROR_PACE = 0.2
"""How fast `error` moves, in its logarithm a step: it falls to a tenth in about 115 good steps, and rises 9 times as
fast."""

STALL = 2.0
"""Times its cautious price that is learned of a step at most."""

REMEMBERED = 0.999
"""Share of the largest overshoot that is left of it after a step that was less late."""

LEAST_ERROR, MOST_ERROR = 0.01, 10.0
"""Bounds of `error`."""


class StepCost:
    """An online fit of step seconds against the tokens computed in the step."""

    def __init__(self, *, base_seconds: float, token_seconds: float) -> None:
        self.base_seconds = base_seconds
        self.token_seconds = token_seconds
        self.error = 1.0
        """Relative, 0.1 is ten percent; it starts high, so that what was never measured is priced with caution."""
        self.observed = 0
        """Steps that were taken in."""
        self.overshoot = 0.0
        """How much longer than predicted a step took at most of late, relative; no stall is in it."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in one step that computed `tokens` tokens (prefill and decode together)."""
        predicted = self.seconds(tokens)
        missed = abs(seconds - predicted) > self.error * predicted
        if self.known:
            stall = STALL * self.cautious_seconds(tokens)
            self.overshoot = max(REMEMBERED * self.overshoot, 0.0 if seconds > stall else seconds / predicted - 1.0)
            seconds = min(seconds, stall)
        moved = self.error * math.exp(ERROR_PACE * (USUAL if missed else USUAL - 1.0))
        self.error = min(max(moved, LEAST_ERROR), MOST_ERROR)
        self.observed += 1
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

    @property
    def known(self) -> bool:
        """Whether a step was seen: until then it is a guess."""
        return self.observed > 0

    def seconds(self, tokens: int) -> float:
        """Predicted seconds of a step of `tokens` tokens."""
        return self.base_seconds + self.token_seconds * tokens

    def cautious_seconds(self, tokens: int, *, steps: int = 1) -> float:
        """Seconds within which `steps` steps of `tokens` tokens together are expected to end, error included."""
        return (self.base_seconds * steps + self.token_seconds * tokens) * (1.0 + self.error)

    def bounded_seconds(self, tokens: int) -> float:
        """Seconds within which a step of `tokens` tokens would have ended, had it been the worst of late."""
        return self.seconds(tokens) * self._worst

    def tokens_within(self, seconds: float) -> int:
        """The most tokens of one step whose `bounded_seconds` are at most `seconds`; 0 where none fit."""
        return max(0, int((seconds / self._worst - self.base_seconds) / self.token_seconds))

    @property
    def _worst(self) -> float:
        """Times its predicted seconds that a step took at most of late, or is expected to."""
        return 1.0 + max(self.error, self.overshoot)

    @property
    def prefill_tokens_per_second(self) -> float:
        return 1.0 / self.token_seconds

    def decode_tokens_per_second(self, running: int) -> float:
        """Of one sequence while `running` sequences decode together."""
        return 1.0 / self.seconds(max(running, 1))
