"""What an engine step costs, learned from the steps themselves.

Keeps true
- The estimate is `base + per_token * tokens` seconds, fitted by least squares over an exponentially fading past, and
  both terms stay positive, so that every rate derived from it is finite.
- Of what a token adds a step has forgotten only as much as it tells. An engine that decodes makes steps of like size,
  whose differences are noise: what larger ones told of a token is kept until the next prompt comes.
- How wrong it is is known as well: `error` is a fading quantile of |measured - predicted| / predicted, each prediction
  made before its step was seen. About nine steps in ten end within `cautious_seconds`, whatever the fit leaves out.
- What must end within a bound is planned for the worst: `tokens_within` leaves room for the largest `overshoot` of the
  last thousand steps or so, so that only what is worse than all of those, or stalls, goes beyond it. But a step of
  little more than its fixed cost would be late as often, and for nothing: `MIN_USEFUL_SHARE` says what it computes all
  the same. So would a price that no step of another size tests: `MIN_TOKEN_VARIANCE` says when one does, that is
  expected to end in time.
- A stall is no cost: of a step that took longer than `MAX_LEARNED_RATIO` times its cautious price, no more than that is
  learned. A cost that has really changed is followed all the same, as the error rises with each such step.

Pure. Example: steps of 10 tokens in 3 ms and 110 tokens in 13 ms -> base 2 ms, 0.1 ms a token.
"""

import math

INITIAL_COST = {"base_seconds": 0.01, "token_seconds": 0.0001}
"""A guess for an engine of which no step was seen."""

FADING = 0.98
"""Weight that a step keeps with each step after it: about the last 50 count."""

SLOPE_FADING = 0.998
"""The same of what is known of a token, at most, where steps tell nothing about it: half of it is left after 350."""

MAX_STEP_GROWTH = 4
"""Times as many tokens as in the largest step of late that a step is planned for at most: no price is known far beyond
what was seen."""

LEAST_SECONDS = 1e-7
"""Floor under both terms: no engine is infinitely fast."""

ERROR_QUANTILE = 0.9
"""Share of the steps that `error` covers."""

ERROR_RATE = 0.2
"""How fast `error` moves, in its logarithm a step: it falls to a tenth in about 115 good steps, and rises 9 times as
fast."""

MAX_LEARNED_RATIO = 2.0
"""Times its cautious price that is learned of a step at most."""

OVERSHOOT_FADING = 0.999
"""Share of the largest overshoot that is left of it after a step that was less late."""

MAX_OVERSHOOT = 1.0
"""What is later than that says that the fit is wrong, which it mends by itself."""

MIN_USEFUL_SHARE = 0.5
"""A step computes tokens for this share of its fixed cost whatever was late, or for this share of the time that the
bound leaves above that, its error included, if that is less."""

MIN_TOKEN_VARIANCE = 1.0
"""Tokens squared: where the steps of late differ by no more than this, what is known of a token counts half (as in a
ridge regression), and a step of up to twice their size is tried. Else a price that lets only steps of one size be made
would never be seen to be wrong."""

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
        self._weight = self._tokens = self._seconds = 0.0
        """Of the last steps: how many count, and their means."""
        self._spread = self._covered = 0.0
        """Of distances from the means of their time, the sums of tokens squared and of tokens times seconds. A step has
        both fade by as much as it adds to the first."""
        self._largest = 0.0
        """Tokens of the largest step, fading."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in one step that computed `tokens` tokens (prefill and decode together)."""
        predicted = self.seconds(tokens)
        missed = abs(seconds - predicted) > self.error * predicted
        if self.has_observed:
            stall = MAX_LEARNED_RATIO * self.cautious_seconds(tokens)
            late = min(seconds / predicted - 1.0, MAX_OVERSHOOT) if seconds <= stall else 0.0
            self.overshoot = max(OVERSHOOT_FADING * self.overshoot, late)
            seconds = min(seconds, stall)
        moved = self.error * math.exp(ERROR_RATE * (ERROR_QUANTILE if missed else ERROR_QUANTILE - 1.0))
        self.error = min(max(moved, LEAST_ERROR), MOST_ERROR)
        self.observed += 1
        self._fit(tokens, seconds)

    def _fit(self, tokens: int, seconds: float) -> None:
        before = FADING * self._weight
        self._weight = before + 1.0
        more, longer = tokens - self._tokens, seconds - self._seconds
        self._tokens += more / self._weight
        self._seconds += longer / self._weight
        information = before / self._weight * more * more
        share = information * self._weight / self._spread if self._spread else 1.0
        fading = min(max(FADING, 1.0 - (1.0 - FADING) * share), SLOPE_FADING)
        self._spread = fading * self._spread + information
        self._covered = fading * self._covered + before / self._weight * more * longer
        self._largest = max(FADING * self._largest, tokens)
        if self._spread > 1e-6 * self._tokens * self._tokens:  # steps of one size alone say nothing about the slope
            token_seconds = min(self._covered / self._spread, self._seconds / self._tokens)  # the base is not below 0
            self.token_seconds = max(token_seconds, LEAST_SECONDS)
        self.base_seconds = max(self._seconds - self.token_seconds * self._tokens, LEAST_SECONDS)

    @property
    def has_observed(self) -> bool:
        """Whether a step was seen: until then it is a guess."""
        return self.observed > 0

    def seconds(self, tokens: float) -> float:
        """Predicted seconds of a step of `tokens` tokens."""
        return self.base_seconds + self.token_seconds * tokens

    def cautious_seconds(self, tokens: int, *, steps: int = 1) -> float:
        """Seconds within which `steps` steps of `tokens` tokens together are expected to end, error included."""
        return (self.base_seconds * steps + self.token_seconds * tokens) * (1.0 + self.error)

    def bounded_seconds(self, tokens: int) -> float:
        """Seconds within which a step of `tokens` tokens would have ended, had it been the worst of late."""
        return self.seconds(tokens) * self._worst

    def tokens_within(self, seconds: float) -> int:
        """The most tokens of one step whose `bounded_seconds` are at most `seconds`, but for what `MIN_USEFUL_SHARE`,
        `MIN_TOKEN_VARIANCE` and `MAX_STEP_GROWTH` say; 0 where none fit.
        """
        tokens = self._planned(seconds, self.token_seconds, self.base_seconds)
        return (
            min(max(tokens, self._exploratory_tokens(seconds)), int(MAX_STEP_GROWTH * self._largest))
            if self.has_observed
            else tokens
        )

    def _exploratory_tokens(self, seconds: float) -> int:
        """The same with what is still known of a token, as far as so many are expected to end in time."""
        sure = self.token_seconds * self._spread / (self._spread + MIN_TOKEN_VARIANCE)
        tokens = self._planned(seconds, max(sure, LEAST_SECONDS), self.seconds(self._tokens) - sure * self._tokens)
        expected = int((seconds / (1.0 + self.error) - self.base_seconds) / self.token_seconds)
        return min(tokens, expected, round(2.0 * self._tokens))

    def _planned(self, seconds: float, token_seconds: float, base_seconds: float) -> int:
        """For the worst of late, with a step at these prices."""
        bounded = seconds / self._worst - base_seconds
        worth = MIN_USEFUL_SHARE * min(base_seconds, seconds / (1.0 + self.error) - base_seconds)
        return max(0, int(max(bounded, worth) / token_seconds))

    @property
    def _worst(self) -> float:
        """Times its predicted seconds that a step is planned for."""
        return 1.0 + max(self.error, self.overshoot)

    @property
    def prefill_tokens_per_second(self) -> float:
        return 1.0 / self.token_seconds

    def decode_tokens_per_second(self, running: int) -> float:
        """Of one sequence while `running` sequences decode together."""
        return 1.0 / self.seconds(max(running, 1))
