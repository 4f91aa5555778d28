"""Forecasts: when the waiting turns of a cell are done, from estimates of each worker's rates, steps and delays.

Keeps true
- One more worker never makes the finish later.
- A quantity that was never measured has an assumed value, and the first measurement replaces it. Only the steps of
  workers have no assumed cost.
- The seconds of a worker's step are a line, fitted to its held tokens: each token that is held makes a step longer,
  because decoding reads the whole KV cache. Held turns alone would not do: their contexts grow while turns end.

Each worker does work from the time at which it is free, at its own rate. Pure.

Example:
    finish_seconds([WorkShare(0, 2)], 10)                   -> 5.0
    finish_seconds([WorkShare(0, 2), WorkShare(4, 8)], 10)  -> 4.2: the second worker helps with the last 2 turns
"""

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from rose.pipeline.control.shared_steps import StepShare
from rose.pipeline.running_mean import RunningMean
from rose.schemas.cells import ExecutorLine
from rose.topics.fading_line import FadingLine

WEIGHT = 0.2
"""Weight of the newest value in a running mean, from the fifth value on."""


class WorkShare(NamedTuple):
    """One worker's part in the work of a cell."""

    free_at: float
    """Seconds from now until the worker is free."""
    rate: float
    """Turns a second from then on."""


IDLE = WorkShare(0.0, 0.0)
"""The share of a worker that takes no part."""


def finish_seconds(shares: Iterable[WorkShare], turns: float) -> float:
    """Seconds from now until `turns` turns are done; infinite if no worker takes part."""
    if turns <= 0:
        return 0.0
    rate = turns_done = at = 0.0
    for share in sorted(shares):
        reached = turns_done + rate * (share.free_at - at)
        if rate and reached >= turns:
            break
        turns_done, at, rate = reached, share.free_at, rate + share.rate
    return at + (turns - turns_done) / rate if rate else math.inf


class CompletionForecast:
    """How many turns a set of workers has done by a time. A query costs O(log n) in the number of initial shares."""

    def __init__(self, shares: Iterable[WorkShare]) -> None:
        begins = sorted(shares)
        self._times = [each.free_at for each in begins]
        self._rates = [0.0, *accumulate(each.rate for each in begins)]
        self._done_before = [0.0, *accumulate(each.rate * each.free_at for each in begins)]
        self._added: list[WorkShare] = []

    def add(self, share: WorkShare) -> None:
        """Add a share; a negative rate takes a share away."""
        self._added.append(share)

    def turns_done_by(self, seconds: float) -> float:
        """Turns that are done `seconds` seconds from now."""
        index = bisect(self._times, seconds)
        more = sum(each.rate * (seconds - each.free_at) for each in self._added if each.free_at < seconds)
        return self._rates[index] * seconds - self._done_before[index] + more


@dataclass(slots=True)
class RemainingCapacity:
    """Work and capacity of a cell without the lenders that were found to be not needed."""

    shares: dict[str, WorkShare]
    forecast: CompletionForecast
    turns: float
    """Turns that wait, or are held by removed lenders."""
    free_turns: int
    free_tokens: int

    def is_needed(self, name: str, line: ExecutorLine, seconds: float) -> bool:
        """Whether the other workers have no room for a lender's turns, or do not finish all turns within `seconds`."""
        share, turns = self._part(name, line)
        has_room = self.free_turns - line.free_turns >= line.held_turns
        has_room = has_room and self.free_tokens - line.free_tokens >= line.held_tokens
        others_free = self.forecast.turns_done_by(seconds) - share.rate * max(0.0, seconds - share.free_at)
        others_free = max(0.0, others_free)  # for the last worker, rounding may make the difference less than 0
        return not has_room or others_free < self.turns + turns

    def remove(self, name: str, line: ExecutorLine) -> None:
        """Remove a lender that is not needed; its turns count as waiting."""
        share, turns = self._part(name, line)
        self.shares.pop(name, None)
        self.forecast.add(WorkShare(share.free_at, -share.rate))
        self.turns += turns
        self.free_turns -= line.free_turns + line.held_turns
        self.free_tokens -= line.free_tokens + line.held_tokens

    def _part(self, name: str, line: ExecutorLine) -> tuple[WorkShare, float]:
        """The share of a lender, and the turns that the others would have to do in its place.

        A lender without a share is sent no turns but may still hold turns.
        """
        share = self.shares.get(name)
        return (IDLE, line.held_turns) if share is None else (share, line.load_seconds * share.rate)


class Rates(NamedTuple):
    """Speed of a worker."""

    prefill: float
    """Tokens a second."""
    decode: float
    """Tokens a second, the sum over all turns that run at once."""


FIRST_RATES = Rates(1000.0, 100.0)
"""Assumed until a worker was open."""


MIN_SPREAD = 0.25
"""Sum of the squared relative deviations of held tokens from which the cost of a worker's steps counts as known. An
error of 5 % in the step seconds then changes the part of a step that its turns add by at most a tenth of the step."""

LEAST_STEP_SECONDS = 1e-12
"""Lower bound of both terms of a worker's step."""


class WorkerSteps(NamedTuple):
    """Steps of a worker."""

    serving: bool
    line: FadingLine
    """Seconds of a step by the tokens that the worker holds."""
    most_turns: int
    """Turns that it runs at once."""

    @property
    def is_known(self) -> bool:
        """Whether the held tokens have differed enough for the line to hold."""
        return self.line.spread >= MIN_SPREAD * self.line.mean_x**2 > 0.0


@dataclass(slots=True)
class DelayEstimate:
    """Mean duration of an operation by worker; a worker without measurements has the mean of the fleet."""

    fleet: RunningMean
    workers: dict[str, RunningMean] = field(default_factory=dict)

    def expected(self, worker: str) -> float:
        """Expected seconds for this worker."""
        return self.workers.get(worker, self.fleet).value

    def add(self, worker: str, seconds: float) -> None:
        """Add a delay of a worker, in seconds."""
        self.fleet.add(seconds)
        self.workers.setdefault(worker, RunningMean(seconds, WEIGHT)).add(seconds)


class WorkerEstimates:
    """Online estimates of the delays and rates of workers, and of the length of waiting turns."""

    def __init__(self, wake_seconds: float = 15.0, catch_up_seconds: float = 5.0) -> None:
        """Both delays are assumed until a worker was woken."""
        self.wake = DelayEstimate(RunningMean(wake_seconds, WEIGHT))
        """Seconds from the wake until the lender has a guest."""
        self.catch_up = DelayEstimate(RunningMean(catch_up_seconds, WEIGHT))
        """Seconds from then until the guest has the weights and may be sent turns."""
        self._rates: dict[str, tuple[bool, Rates]] = {}
        """Whether a worker serves, and its rates when it was last open; by worker."""
        self._fleet_rates: Rates | None = None
        """Cached result of `_typical_rates`; None after a change."""
        self._steps: dict[str, WorkerSteps] = {}
        """Steps of the workers that were open with turns."""
        self._fleet_step: StepShare | None = None
        self._fleet_step_is_stale = False
        """Whether `_fleet_step` has to be computed again."""
        self._prefill_tokens = RunningMean(1000.0, WEIGHT)
        """Prefill tokens of a waiting turn."""
        self._new_tokens = RunningMean(100.0, WEIGHT)
        """Expected new tokens of a waiting turn."""

    def on_open(self, line: ExecutorLine) -> None:
        """Take the rates of an open worker. Rates in the lines of a parked worker do not come from an engine."""
        decode = line.decode_tokens_per_second * line.lanes
        self._rates[line.worker] = line.serving, Rates(line.prefill_tokens_per_second, decode)
        self._fleet_rates = None
        if line.held_turns:  # without turns the rate is that of earlier steps
            known = self._steps.get(line.worker)
            steps = known.line if known else FadingLine(0.0, LEAST_STEP_SECONDS, LEAST_STEP_SECONDS)
            steps.add(line.held_tokens, 1.0 / line.decode_tokens_per_second)
            self._steps[line.worker] = WorkerSteps(line.serving, steps, line.lanes)
            self._fleet_step_is_stale = True

    def on_waiting(self, turns: int, prefill_tokens: int, new_tokens: int) -> None:
        """Take the sums over the waiting turns of a summary; `turns` is more than 0."""
        self._prefill_tokens.add(prefill_tokens / turns)
        self._new_tokens.add(new_tokens / turns)

    def forget(self, worker: str) -> None:
        """Forget everything about a worker."""
        self._rates.pop(worker, None)
        self._steps.pop(worker, None)
        self._fleet_rates, self._fleet_step_is_stale = None, True
        self.wake.workers.pop(worker, None)
        self.catch_up.workers.pop(worker, None)

    def turns_per_second(self, worker: str) -> float:
        """Turns of mean length that a worker does a second, without cached prefixes."""
        rates = self._rates[worker][1] if worker in self._rates else self._typical_rates()
        return 1.0 / (self._prefill_tokens.value / rates.prefill + max(1.0, self._new_tokens.value) / rates.decode)

    def step_share(self, worker: str, turn_tokens: float) -> StepShare | None:
        """Cost of a worker's steps, with `turn_tokens` tokens held for each turn. None if no worker's steps are known.

        A worker whose steps are not known has the mean of the known serving workers, or of all known workers.
        """
        steps, turn_tokens = self._steps.get(worker), max(1.0, turn_tokens)
        if steps is not None and steps.is_known:
            return StepShare(steps.line.base, steps.line.slope * turn_tokens, steps.most_turns)
        typical = self._typical_step()
        return typical and StepShare(typical.base_seconds, typical.turn_seconds * turn_tokens, typical.most_turns)

    def _typical_step(self) -> StepShare | None:
        """Mean of the known steps, for turns of one token."""
        if self._fleet_step_is_stale:
            self._fleet_step_is_stale = False
            known = [steps for steps in self._steps.values() if steps.is_known]
            known = [steps for steps in known if steps.serving] or known
            columns = zip(*((each.line.base, each.line.slope, each.most_turns) for each in known), strict=True)
            self._fleet_step = StepShare(*(sum(column) / len(known) for column in columns)) if known else None
        return self._fleet_step

    def _typical_rates(self) -> Rates:
        """Mean rates of the known serving workers; of all known workers if no serving worker is known."""
        if self._fleet_rates is None:
            known = [rates for serving, rates in self._rates.values() if serving]
            known = known or [rates for _, rates in self._rates.values()] or [FIRST_RATES]
            self._fleet_rates = Rates(*(sum(column) / len(known) for column in zip(*known, strict=True)))
        return self._fleet_rates
