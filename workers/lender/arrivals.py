"""The prompts that may arrive during a guest's step.

Keeps true: what is told is the mean and two standard deviations of a Poisson stream of prompts, at the rate and sizes
of the last seconds. So a rare prompt has a price, a frequent one its whole length, and a burst raises it at once.

Units: tokens, seconds; `now` is any clock of the caller's. Pure.

Example: 10 prompts a second of 100 tokens each, for 10 ms -> 10 tokens on average, 73 with its spread.
"""

import math

MEMORY_SECONDS = 3.0
"""After so long an arrival counts for 1/e."""

SPREAD = 2.0
"""Standard deviations above the mean."""


class Arrivals:
    """Fading rates of what arrived."""

    def __init__(self) -> None:
        self._tokens = self._squares = 0.0
        self._latest = -math.inf

    def arrived(self, tokens: int, now: float) -> None:
        """A prompt of `tokens` tokens came to serving."""
        fading = self._fading(now)
        self._tokens = self._tokens * fading + tokens
        self._squares = self._squares * fading + tokens * tokens
        self._latest = max(self._latest, now)

    def within(self, seconds: float, now: float) -> int:
        """Prompt tokens that may arrive within `seconds`."""
        share = self._fading(now) * seconds / MEMORY_SECONDS
        return round(self._tokens * share + SPREAD * math.sqrt(self._squares * share))

    def _fading(self, now: float) -> float:
        return math.exp(min(0.0, self._latest - now) / MEMORY_SECONDS)
