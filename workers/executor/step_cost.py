"""Online estimate of the seconds of an engine step, learned from the steps themselves.

Keeps true
- The estimate is `base + per_token * tokens` seconds, a `FadingLine`: both terms stay positive, so that every rate
  derived from it is finite. An engine that decodes makes steps of similar size: the cost per token of larger steps is
  kept until the next prompt.
- The prediction error is known: `error` is a fading quantile of |measured - predicted| / predicted, each prediction
  made before its step was observed. About nine steps in ten end within `cautious_seconds`, whatever the fit omits.
- Steps with a time bound are planned for the worst recent case: `tokens_within` leaves room for the largest
  `overshoot` of about the last thousand steps, so only a step that is later than all of those, or stalls, exceeds the
  bound. A step of little more than its fixed cost would be late as often without use; `MIN_USEFUL_SHARE` sets the
  tokens that a step computes regardless. An estimate that no step of another size tests would never be corrected;
  `MIN_TOKEN_VARIANCE` sets when a step of another size is tried, provided that it is expected to end in time.
- A stall is not learned as a cost: a step counts at most as `MAX_LEARNED_RATIO` times its `cautious_seconds`. A cost
  that has really changed is still followed, because `error` rises with each such step.

Pure. Example: steps of 10 tokens in 3 ms and 110 tokens in 13 ms -> base 2 ms, 0.1 ms a token.
"""

import math

from rose.topics.fading_line import FADING, FadingLine

INITIAL_COST = {"base_seconds": 0.01, "token_seconds": 0.0001}
"""Initial estimate for an engine, before any step was observed."""

MAX_STEP_GROWTH = 4
"""A step is planned for at most this many times the tokens of the largest recent step: costs are not known far beyond
the sizes that were observed."""

LEAST_SECONDS = 1e-7
"""Lower bound of both terms: no engine is infinitely fast."""

ERROR_QUANTILE = 0.9
"""Share of the steps that `error` covers."""

ERROR_RATE = 0.2
"""Change of log(`error`) per step: `error` falls to a tenth in about 115 good steps, and rises 9 times as fast."""

MAX_LEARNED_RATIO = 2.0
"""A step counts at most as this many times its `cautious_seconds`: longer steps are stalls."""

OVERSHOOT_FADING = 0.999
"""Factor by which a step with a smaller overshoot fades the largest overshoot."""

MAX_OVERSHOOT = 1.0
"""Largest overshoot that is recorded. A larger one shows that the fit is wrong, and the fit corrects itself."""

MIN_USEFUL_SHARE = 0.5
"""A step computes tokens for this share of its fixed cost whatever steps were late, or for this share of the time that
the bound, divided by one plus `error`, leaves above the fixed cost, if that is less."""

MIN_TOKEN_VARIANCE = 1.0
"""Tokens squared: where recent steps differ by no more than this, the estimate of the cost per token counts half (as in
a ridge regression), and a step of up to twice their size is tried. Otherwise an estimate that allows only steps of one
size would never be corrected."""

LEAST_ERROR, MOST_ERROR = 0.01, 10.0
"""Bounds of `error`."""


class StepCost:
    """An online fit of step seconds against the tokens computed in the step."""

    def __init__(self, *, base_seconds: float, token_seconds: float) -> None:
        self._line = FadingLine(base_seconds, token_seconds, LEAST_SECONDS)
        self.error = 1.0
        """Relative prediction error, 0.1 is ten percent; starts high, so that predictions without data are cautious."""
        self.observed = 0
        """Number of observed steps."""
        self.overshoot = 0.0
        """Largest relative excess of a recent step over its prediction, stalls left out."""
        self._largest = 0.0
        """Tokens of the largest step, fading."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one step that computed `tokens` tokens (prefill and decode together) in `seconds`."""
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
        self._largest = max(FADING * self._largest, tokens)
        self._line.add(tokens, seconds)

    @property
    def base_seconds(self) -> float:
        """Estimated seconds of a step without tokens."""
        return self._line.base

    @property
    def token_seconds(self) -> float:
        """Estimated seconds that each token adds to a step."""
        return self._line.slope

    @property
    def has_observed(self) -> bool:
        """Whether a step was observed. Before that, all predictions use the initial estimate."""
        return self.observed > 0

    def seconds(self, tokens: float) -> float:
        """Predicted seconds of a step of `tokens` tokens."""
        return self._line.at(tokens)

    def cautious_seconds(self, tokens: int, *, steps: int = 1) -> float:
        """Seconds within which `steps` steps of `tokens` tokens together are expected to end, error included."""
        return (self.base_seconds * steps + self.token_seconds * tokens) * (1.0 + self.error)

    def bounded_seconds(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens in the worst recent case."""
        return self.seconds(tokens) * self._worst

    def tokens_within(self, seconds: float) -> int:
        """Return the most tokens of one step whose `bounded_seconds` are at most `seconds`; 0 if none fit.

        `MIN_USEFUL_SHARE` and `MIN_TOKEN_VARIANCE` allow more tokens, `MAX_STEP_GROWTH` fewer.
        """
        tokens = self._planned(seconds, self.token_seconds, self.base_seconds)
        return (
            min(max(tokens, self._exploratory_tokens(seconds)), int(MAX_STEP_GROWTH * self._largest))
            if self.has_observed
            else tokens
        )

    def _exploratory_tokens(self, seconds: float) -> int:
        """Tokens with the cost per token discounted by `MIN_TOKEN_VARIANCE`, if they are expected to end in time."""
        spread, tokens_mean = self._line.spread, self._line.mean_x
        sure = self.token_seconds * spread / (spread + MIN_TOKEN_VARIANCE)
        tokens = self._planned(seconds, max(sure, LEAST_SECONDS), self.seconds(tokens_mean) - sure * tokens_mean)
        expected = int((seconds / (1.0 + self.error) - self.base_seconds) / self.token_seconds)
        return min(tokens, expected, round(2.0 * tokens_mean))

    def _planned(self, seconds: float, token_seconds: float, base_seconds: float) -> int:
        """Tokens of a step that ends within `seconds` in the worst recent case, at these costs."""
        bounded = seconds / self._worst - base_seconds
        worth = MIN_USEFUL_SHARE * min(base_seconds, seconds / (1.0 + self.error) - base_seconds)
        return max(0, int(max(bounded, worth) / token_seconds))

    @property
    def _worst(self) -> float:
        """Ratio of planned to predicted seconds of a step."""
        return 1.0 + max(self.error, self.overshoot)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Estimated rate of prefill."""
        return 1.0 / self.token_seconds

    def decode_tokens_per_second(self, running: int) -> float:
        """Decode rate of one sequence while `running` sequences decode together."""
        return 1.0 / self.seconds(max(running, 1))


LEAST_SHARE = 0.01
"""Lower bound of a measured share, so that rates stay positive."""

SHARE_MEMORY_SECONDS = 10.0
"""Time constant of `ComputeShare` while there are turns: a moment counts for 1/e after so many seconds."""

FORGET_SHARE_SECONDS = 60.0
"""Time constant with which the share returns to 1 while there are no turns."""


class ComputeShare:
    """Share of the time with turns in which an engine computes; below 1 for a guest whose host computes in between.

    An engine's rates times this share are the rates at which its turns advance. Without turns nothing is measured, and
    the share returns to 1, so that an engine that was slow is tried again.

    Pure. Example: 0.1 s of steps in 0.2 s, again and again -> 0.5
    """

    def __init__(self) -> None:
        self._mean = 1.0

    @property
    def value(self) -> float:
        """The share, from `LEAST_SHARE` to 1."""
        return min(1.0, max(LEAST_SHARE, self._mean))

    def observe(self, computed_seconds: float, seconds: float, *, has_turns: bool) -> None:
        """Take in what the engine computed in the last `seconds`, with or without turns.

        `computed_seconds`: time of the steps that ended in this time. It exceeds `seconds` after a long step.
        """
        if seconds <= 0.0:
            return
        share = computed_seconds / seconds if has_turns else 1.0
        memory = SHARE_MEMORY_SECONDS if has_turns else FORGET_SHARE_SECONDS
        self._mean += (1.0 - math.exp(-seconds / memory)) * (share - self._mean)
