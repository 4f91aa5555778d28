"""Pace: how many turns an endpoint is asked for at once, from the latency that it shows.

Keeps true
- Between 0 and `max_limit`. It begins with 1, doubles while nothing was ever late, and grows by 1 from then on.
- It grows only after a window that was full, on time, and with a fifth of each budget to spare.
- A window that was late halves it, down to 0. The window after that shows what was asked before, and is not judged.
- At 0 nothing of its own is seen: after a quiet time it asks for 1 again, twice as long each time that was too much.

Late is a window of which more than one in twenty of the latencies of either kind are over their budget: of its own
turns, or of all requests where the endpoint tells (`late`).

Pure; seconds, `now` on any one clock.

Example (most 8): full and on time for three windows -> 2, 4, 8; late -> 4; late (not judged) -> 4; full, on time -> 5
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.workers.executor.step_cost import StepCost

MAX_LATE_SHARE = 0.05
"""Share of latencies over the budget from which on a window is late."""

GROWTH_SHARE = 0.8
"""Share of a budget that may be used while the pace grows."""

QUIET_SECONDS = 10.0
"""At 0, until it is tried with 1 again, the first time."""

MAX_QUIET_SECONDS = 160.0

Buckets = Mapping[float, float]
"""By upper bound in seconds, how many latencies were ever seen up to it: a Prometheus histogram; infinity is there."""


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """What was seen since the window before. Latencies still growing stand as they are now."""

    ttft: Sequence[float]
    """Of its own turns; infinity for one that broke off."""
    tpot: Sequence[float]
    full: bool
    """Whether it had as many turns running as it might, at some time."""
    others_late: bool = False
    """Of all requests of the endpoint, as it tells."""


class AimdLimit:
    """The limit, and what the last windows taught. Times are seconds on whatever clock the caller keeps."""

    def __init__(self, *, ttft_seconds: float, tpot_seconds: float, max_limit: int) -> None:
        self.limit = min(1, max_limit)
        """Turns at once."""
        self._ttft_seconds = ttft_seconds
        self._tpot_seconds = tpot_seconds
        self._max_limit = max_limit
        self._was_late = False
        self._measured = True
        self._quiet_seconds = QUIET_SECONDS
        self._closed_at = 0.0

    def on_window(self, window: LatencyWindow, now: float) -> int:
        """Take in one window; returns the limit from here on."""
        if not self._measured:
            self._measured = True
        elif self._late(window):
            self._halve(now)
        elif self.limit == 0:
            if now - self._closed_at >= self._quiet_seconds:
                self.limit = min(1, self._max_limit)
        elif window.full and self._has_spare(window):
            self.limit = min(self._max_limit, self.limit + (1 if self._was_late else self.limit))
            self._quiet_seconds = QUIET_SECONDS
        return self.limit

    def _late(self, window: LatencyWindow) -> bool:
        own = (window.ttft, self._ttft_seconds), (window.tpot, self._tpot_seconds)
        return window.others_late or any(
            sum(each > budget for each in seen) > MAX_LATE_SHARE * len(seen) for seen, budget in own
        )

    def _halve(self, now: float) -> None:
        self._was_late = True
        if self.limit == 1:
            self._quiet_seconds = min(2 * self._quiet_seconds, MAX_QUIET_SECONDS)
        if self.limit:
            self._measured = False
        self.limit //= 2
        self._closed_at = now

    def _has_spare(self, window: LatencyWindow) -> bool:
        worst_ttft, worst_tpot = max(window.ttft, default=0.0), max(window.tpot, default=0.0)
        return worst_ttft <= GROWTH_SHARE * self._ttft_seconds and worst_tpot <= GROWTH_SHARE * self._tpot_seconds


def exceeds_budget(before: Buckets, after: Buckets, budget_seconds: float) -> bool:
    """Whether more than one in twenty of the latencies between two looks at a histogram are surely over the budget.

    Surely: those in the bucket that the budget falls into are not counted.
    """
    seen = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = max(seen.values(), default=0.0)
    kept = [count for bound, count in seen.items() if bound >= budget_seconds]
    return total > 0 and total - min(kept, default=total) > MAX_LATE_SHARE * total


class TokenRates:
    """Tokens a second, as the turns that ended show them, fading.

    Keeps true
    - Prefill is what each token more of a prompt adds to the time to the first one. The rest of that is the network's,
      the queue's and a step's own, and says nothing about how fast tokens are computed: most prompts are a few tokens.
    - Who decodes for `n` turns at once computes `n` tokens in each step: prefill is no slower than that.
    - What was measured of decoding is the mean of seconds a token, of as many turns as ran then: no turn whose tokens
      came together makes it fast. What is told is of as many as run now, as if each of them added a token to the step.

    Example: 30 tokens took 50 ms to the first token, 1030 took 100 ms, and 32 turns decode at 100 tokens/s each
        prefill is 20,000 tokens/s; alone, a turn is told to decode at 1 / (10 - 31 * 0.05 ms) = 118 tokens/s
    """

    NEWEST_WEIGHT = 0.2
    """Of a decoded turn in what is known."""

    INITIAL_POINTS = (1, 0.05), (2000, 0.25)
    """Tokens and seconds to the first one, as if they had been seen: a guess of what a token adds, which short prompts
    alone, whose times are noise, change but slowly."""

    def __init__(self) -> None:
        self._first = StepCost(base_seconds=0.05, token_seconds=1e-4)
        for tokens, seconds in self.INITIAL_POINTS:
            self._first.observe(tokens, seconds)
        self._decode_seconds = 0.01
        """Of a token."""
        self._running = 1.0
        """Turns that ran while that was measured."""

    def on_first_token(self, computed_tokens: int, seconds: float) -> None:
        self._first.observe(max(computed_tokens, 1), max(seconds, 1e-6))

    def on_decoded(self, seconds_per_token: float, running: int) -> None:
        """A turn was, beside `running - 1` others."""
        self._decode_seconds += self.NEWEST_WEIGHT * (max(seconds_per_token, 1e-6) - self._decode_seconds)
        self._running += self.NEWEST_WEIGHT * (running - self._running)

    @property
    def prefill(self) -> float:
        return max(self._first.prefill_tokens_per_second, self._running / self._decode_seconds)

    def decode(self, running: int) -> float:
        """Of one turn while so many run."""
        return 1.0 / (self._decode_seconds + (max(1, running) - self._running) / self.prefill)
