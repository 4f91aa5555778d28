"""Concurrency limit: how many turns run at an endpoint at once, from the latency of the endpoint (AIMD).

Keeps true
- The limit is between 0 and `max_limit`. It starts at 1, doubles until a window was late for the first time, and then
  grows by 1.
- The limit grows only after a window that was full, on time, and with a fifth of each budget to spare.
- A late window halves the limit, down to 0. The window after it still shows the old limit, and is not judged.
- At limit 0 no own latencies are measured: the limit becomes 1 again after a quiet time, which doubles each time that
  limit 1 was too much.

A window is late if more than one in twenty latencies of either kind exceed their budget: latencies of the lender's own
turns, or of all requests if the endpoint exports them (`others_late`).

Pure; times are seconds, `now` on any one clock.

Example (max_limit 8): full and on time for three windows -> 2, 4, 8; late -> 4; late (not judged) -> 4; full and on
time -> 5
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.workers.executor.step_cost import StepCost

MAX_LATE_SHARE = 0.05
"""A window is late if a larger share of its latencies exceeds the budget."""

GROWTH_SHARE = 0.8
"""Largest share of a budget that latencies may use in a window after which the limit grows."""

QUIET_SECONDS = 10.0
"""First quiet time at limit 0, before limit 1 is tried again."""

MAX_QUIET_SECONDS = 160.0

Buckets = Mapping[float, float]
"""A Prometheus histogram: by upper bound in seconds, infinity included, the cumulative number of latencies."""


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """Latencies since the window before, in seconds. Latencies that still grow count with their present value."""

    ttft: Sequence[float]
    """Times to first token of the lender's own turns; infinity for a lost turn, except for a single failure."""
    tpot: Sequence[float]
    full: bool
    """Whether as many turns as the limit allows ran at some time in the window."""
    others_late: bool = False
    """Whether too many requests of the endpoint, other users included, exceeded a budget."""


class AimdLimit:
    """The concurrency limit of one endpoint. Times are seconds on any one clock."""

    def __init__(self, *, ttft_seconds: float, tpot_seconds: float, max_limit: int) -> None:
        self.limit = min(1, max_limit)
        """Most turns at once."""
        self._ttft_seconds = ttft_seconds
        self._tpot_seconds = tpot_seconds
        self._max_limit = max_limit
        self._was_late = False
        self._measured = True
        self._quiet_seconds = QUIET_SECONDS
        self._closed_at = 0.0

    def on_window(self, window: LatencyWindow, now: float) -> int:
        """Judge one window. Return the limit from now on."""
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
    """Whether more than one in twenty latencies between two readings of a histogram exceed the budget.

    Latencies in the bucket of the budget itself are not counted as over the budget.
    """
    seen = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = max(seen.values(), default=0.0)
    kept = [count for bound, count in seen.items() if bound >= budget_seconds]
    return total > 0 and total - min(kept, default=total) > MAX_LATE_SHARE * total


class TokenRates:
    """Prefill and decode rates in tokens per second, as fading estimates from turns that have ended.

    Keeps true
    - The prefill rate follows from the time that each further prompt token adds to the time to first token. The rest of
      this time is network, queue and fixed cost of a step, and says nothing about the rate: most prompts are short.
    - An endpoint that decodes `n` turns at once computes `n` tokens in each step, so prefill is at least as fast.
    - The decode estimate is a mean of seconds per token and of the turns that ran at the time, so a turn whose tokens
      came in one chunk does not make it fast. The reported rate is for the turns that run now, each of which adds one
      token to the step.

    Example: 30 tokens took 50 ms to the first token, 1030 took 100 ms, and 32 turns decode at 100 tokens/s each
        prefill is 20,000 tokens/s; the decode rate of one turn alone is 1 / (10 - 31 * 0.05 ms) = 118 tokens/s
    """

    NEWEST_WEIGHT = 0.2
    """Weight of the newest turn in the decode estimates."""

    INITIAL_POINTS = (1, 0.05), (2000, 0.25)
    """Initial observations of prompt tokens and seconds to first token: an estimate that short prompts, whose times are
    noise, change only slowly."""

    def __init__(self) -> None:
        self._first = StepCost(base_seconds=0.05, token_seconds=1e-4)
        for tokens, seconds in self.INITIAL_POINTS:
            self._first.observe(tokens, seconds)
        self._decode_seconds = 0.01
        """Mean seconds per token."""
        self._running = 1.0
        """Mean number of turns that ran meanwhile."""

    def on_first_token(self, computed_tokens: int, seconds: float) -> None:
        """Learn from the time to the first token of a turn. `computed_tokens`: prompt tokens that were not cached."""
        self._first.observe(max(computed_tokens, 1), max(seconds, 1e-6))

    def on_decoded(self, seconds_per_token: float, running: int) -> None:
        """Learn from a turn that was decoded while `running` turns ran, itself included."""
        self._decode_seconds += self.NEWEST_WEIGHT * (max(seconds_per_token, 1e-6) - self._decode_seconds)
        self._running += self.NEWEST_WEIGHT * (running - self._running)

    @property
    def prefill(self) -> float:
        """Estimated prefill tokens per second."""
        return max(self._first.prefill_tokens_per_second, self._running / self._decode_seconds)

    def decode(self, running: int) -> float:
        """Decode rate of one turn while `running` turns run."""
        return 1.0 / (self._decode_seconds + (max(1, running) - self._running) / self.prefill)
