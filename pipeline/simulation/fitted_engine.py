"""A profile of an engine, fitted to the turns that the engine computed in a run.

Keeps true
- What is fitted is linear: seconds of a step, of each request of a step, of each token of the decoding contexts, and of
  each prompt token. No fitted figure is negative.
- Between two tokens of a turn lies one step. So a turn shows the mean step of its decode time, and its prefill the
  steps that computed its prompt, with all that the engine computed meanwhile.
- All fitted intervals together take as long as they took.
- Attempts that went on from an earlier attempt are neighbours of other turns, and are not fitted themselves.

Memory, weights, and links of the profile are not fitted: the caller knows them, or the simulation does not need them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rose.pipeline.simulation.cost_model import Profile, linear_profile
from rose.pipeline.simulation.least_squares import nonnegative_least_squares

LEAST_ROWS = 16
"""Least number of intervals that a fit needs."""

WEIGHT_BYTES = 1_000_000_000
"""Stands for the weights, whose transfer a recorded run states in seconds."""


class ComputedTurn(NamedTuple):
    """One attempt at a turn, as its engine timed it. Times are Unix seconds."""

    worker: str
    scheduled_at: float
    first_token_at: float
    finished_at: float
    context_tokens: int
    prefill_tokens: int
    """Context tokens that were not in the prefix cache."""
    new_tokens: int
    whole: bool
    """Whether the attempt sampled all tokens of its turn."""

    @property
    def cached_tokens(self) -> int:
        """Context tokens that were in the prefix cache."""
        return self.context_tokens - self.prefill_tokens


class FittedEngine(NamedTuple):
    """The figures of a fit, and the relative errors of the seconds that it predicts for the fitted intervals."""

    step_seconds: float
    sequence_seconds: float
    context_token_seconds: float
    prefill_token_seconds: float
    block_tokens: int
    """Tokens of a block of the prefix cache: all hits are multiples of it."""
    rows: int
    median_error: float
    p90_error: float

    def profile(
        self, *, card: str, devices: int, kv_tokens: int, kv_bytes_per_token: int, wake_seconds: float = 0.0
    ) -> Profile:
        """Return the profile of an engine with this memory."""
        return linear_profile(
            "fitted to the turns of a recorded run",
            card=card,
            kv_tokens=max(1, kv_tokens),
            step_seconds=self.step_seconds,
            prefill_token_seconds=self.prefill_token_seconds,
            sequence_seconds=self.sequence_seconds,
            context_token_seconds=self.context_token_seconds,
            devices=devices,
            block_tokens=self.block_tokens,
            kv_bytes_per_token=max(1, kv_bytes_per_token),
            weight_bytes=WEIGHT_BYTES,
            wake_seconds=wake_seconds,
        )


class _Interval(NamedTuple):
    """A stretch of an engine's time in which a turn was computed."""

    seconds: float
    steps: int
    decoding: float
    """Mean number of decoding requests."""
    context_tokens: float
    """Mean number of tokens of their contexts."""
    prefill_tokens: float
    """Prompt tokens that the engine computed."""
    prefills: float
    """Mean number of requests whose prompt was computed."""


def fit_engine(turns: Iterable[ComputedTurn], *, step_tokens: int, stalled_share: float = 0.0) -> FittedEngine | None:
    """Fit the engines that computed the turns; return None if there are too few turns.

    Args:
        turns: All turns of engines of one kind.
        step_tokens: Prompt tokens of one step at most.
        stalled_share: Share of the time in which the engines stood still, which is not time of a step.
    """
    by_worker: defaultdict[str, list[ComputedTurn]] = defaultdict(list)
    block_tokens = 0
    for turn in turns:
        by_worker[turn.worker].append(turn)
        block_tokens = math.gcd(block_tokens, turn.cached_tokens)
    intervals = [each for found in by_worker.values() for each in _intervals(found, step_tokens)]
    if len(intervals) < LEAST_ROWS:
        return None
    parts = [
        (
            each.steps,
            each.steps * (each.decoding + each.prefills),
            each.steps * each.context_tokens,
            each.prefill_tokens,
        )
        for each in intervals
    ]
    rows = [[part / each.seconds for part in row] for row, each in zip(parts, intervals, strict=True)]
    figures = nonnegative_least_squares(rows, [1.0] * len(rows))
    predicted = [_sum_of_products(row, figures) for row in parts]
    # A relative error of a stalled step is at most 1, so the fit favours short steps. The sum says how long all took.
    scale = sum(each.seconds for each in intervals) / sum(predicted) if sum(predicted) else 0.0
    step, sequence, context, prefill = (scale * (1.0 - stalled_share) * each for each in figures)
    errors = sorted(
        abs(scale * each / interval.seconds - 1.0) for each, interval in zip(predicted, intervals, strict=True)
    )
    return FittedEngine(
        step_seconds=step,
        sequence_seconds=sequence,
        context_token_seconds=context,
        prefill_token_seconds=prefill,
        block_tokens=block_tokens or 1,
        rows=len(rows),
        median_error=_at(errors, 0.5),
        p90_error=_at(errors, 0.9),
    )


def _sum_of_products(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _at(errors: Sequence[float], share: float) -> float:
    return errors[math.ceil(share * len(errors)) - 1]


def _intervals(turns: Sequence[ComputedTurn], step_tokens: int) -> list[_Interval]:
    """Return the prefill and the decode interval of each whole turn of one engine."""
    begun = np.array([turn.scheduled_at for turn in turns])
    first = np.array([turn.first_token_at for turn in turns])
    ended = np.array([turn.finished_at for turn in turns])
    context = np.array([turn.context_tokens + turn.new_tokens / 2 for turn in turns])
    prompt = np.array([turn.prefill_tokens for turn in turns], dtype=float)
    decoding = _Integral(first, ended, np.ones(len(turns)))
    contexts = _Integral(first, ended, context)
    prefills = _Integral(begun, first, np.ones(len(turns)))
    tokens = _Integral(begun, first, prompt / np.maximum(first - begun, SHORTEST_SECONDS))
    found = []
    for turn in turns:
        parts = (
            (turn.scheduled_at, turn.first_token_at, max(1, math.ceil(turn.prefill_tokens / step_tokens))),
            (turn.first_token_at, turn.finished_at, turn.new_tokens - 1),
        )
        for begin, end, steps in parts:
            seconds = end - begin
            if turn.whole and steps > 0 and seconds > SHORTEST_SECONDS:
                found.append(
                    _Interval(
                        seconds,
                        steps,
                        decoding.between(begin, end) / seconds,
                        contexts.between(begin, end) / seconds,
                        tokens.between(begin, end),
                        prefills.between(begin, end) / seconds,
                    )
                )
    return found


SHORTEST_SECONDS = 1e-6
"""A shorter interval is no measurement."""


class _Integral:
    """The integral over time of a sum of rates, each of which holds from `begin` to `end`."""

    def __init__(self, begin: NDArray[np.float64], end: NDArray[np.float64], rate: NDArray[np.float64]) -> None:
        times = np.concatenate([begin, end])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        rates = np.cumsum(np.concatenate([rate, -rate])[order])
        self._sums = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(self._times))])

    def between(self, begin: float, end: float) -> float:
        """Return the integral between two times within the range of all rates."""
        low, high = np.interp((begin, end), self._times, self._sums)
        return float(high - low)
