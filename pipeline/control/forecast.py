"""When the work that waits is done, and what was learned to say so.

Keeps true
- One more worker never makes it later.
- What was never seen is assumed, and what was seen counts from the first time on.

Work flows: each worker takes part from the moment at which it is free, at its own rate. Pure.

Example
    finish_seconds([Share(0, 2)], 10)               -> 5.0
    finish_seconds([Share(0, 2), Share(4, 8)], 10)  -> 4.2: the second one comes for the last 2
"""

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from rose.schemas.cells import ExecutorLine

WEIGHT = 0.2
"""Of the newest in a running mean, once there were five."""


class WorkShare(NamedTuple):
    """One worker's part in the work."""

    free_at: float
    """Seconds from now."""
    rate: float
    """Turns a second from then on."""


IDLE = WorkShare(0.0, 0.0)
"""Of one that takes no part."""


def finish_seconds(shares: Iterable[WorkShare], turns: float) -> float:
    """Seconds until so many turns are done; infinite where nobody does any."""
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
    """Who takes part in the work: how much is done by when. To ask costs the logarithm of how many there were first."""

    def __init__(self, shares: Iterable[WorkShare]) -> None:
        begins = sorted(shares)
        self._times = [each.free_at for each in begins]
        self._rates = [0.0, *accumulate(each.rate for each in begins)]
        self._done_before = [0.0, *accumulate(each.rate * each.free_at for each in begins)]
        self._added: list[WorkShare] = []

    def add(self, share: WorkShare) -> None:
        """One more takes part."""
        self._added.append(share)

    def turns_done_by(self, seconds: float) -> float:
        """Turns, by so many seconds from now."""
        index = bisect(self._times, seconds)
        more = sum(each.rate * (seconds - each.free_at) for each in self._added if each.free_at < seconds)
        return self._rates[index] * seconds - self._done_before[index] + more


@dataclass(slots=True)
class RemainingCapacity:
    """What a cell has without those of its lenders that were found of no use."""

    shares: dict[str, WorkShare]
    forecast: CompletionForecast
    turns: float
    """That wait, or were held by who was of no use."""
    free_turns: int
    free_tokens: int

    def is_needed(self, name: str, line: ExecutorLine, seconds: float) -> bool:
        """Whether without one of them there is no room for what it holds, or not all is done in so many seconds."""
        share, turns = self._part(name, line)
        has_room = self.free_turns - line.free_turns >= line.held_turns
        has_room = has_room and self.free_tokens - line.free_tokens >= line.held_tokens
        others_free = self.forecast.turns_done_by(seconds) - share.rate * max(0.0, seconds - share.free_at)
        others_free = max(0.0, others_free)  # of the last one the difference is 0, or by rounding a little less
        return not has_room or others_free < self.turns + turns

    def remove(self, name: str, line: ExecutorLine) -> None:
        """One was: others do what it held."""
        share, turns = self._part(name, line)
        self.shares.pop(name, None)
        self.forecast.add(WorkShare(share.free_at, -share.rate))
        self.turns += turns
        self.free_turns -= line.free_turns + line.held_turns
        self.free_tokens -= line.free_tokens + line.held_tokens

    def _part(self, name: str, line: ExecutorLine) -> tuple[WorkShare, float]:
        """Of one, and the turns that others would have to do: one that is sent none may hold some all the same."""
        share = self.shares.get(name)
        return (IDLE, line.held_turns) if share is None else (share, line.load_seconds * share.rate)


@dataclass(slots=True)
class RunningMean:
    """A running mean that begins with what is assumed."""

    value: float
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(WEIGHT, 1.0 / self.count) * (value - self.value)


class Rates(NamedTuple):
    """How fast a worker is."""

    prefill: float
    """Tokens a second."""
    decode: float
    """Tokens a second, of all turns that it runs at once."""


FIRST_RATES = Rates(1000.0, 100.0)
"""Assumed while no worker was seen at work."""


@dataclass(slots=True)
class DelayEstimate:
    """How long something takes: of each worker, and of one that was not seen to do it, as of all."""

    fleet: RunningMean
    workers: dict[str, RunningMean] = field(default_factory=dict)

    def expected(self, worker: str) -> float:
        return self.workers.get(worker, self.fleet).value

    def add(self, worker: str, seconds: float) -> None:
        self.fleet.add(seconds)
        self.workers.setdefault(worker, RunningMean(seconds)).add(seconds)


class WorkerEstimates:
    """Online, from what was seen."""

    def __init__(self) -> None:
        self.wake = DelayEstimate(RunningMean(15.0))
        """From the grant until there is a guest."""
        self.catch_up = DelayEstimate(RunningMean(5.0))
        """From there until it has the weights and may be sent turns."""
        self._rates: dict[str, tuple[bool, Rates]] = {}
        """By worker, with whether it serves: as it was when it was last open."""
        self._fleet_rates: Rates | None = None
        """Of a lender that was never seen at work, until others were seen anew."""
        self._prefill_tokens = RunningMean(1000.0)
        """Of a turn that waits."""
        self._new_tokens = RunningMean(100.0)

    def on_open(self, line: ExecutorLine) -> None:
        """Rates that a worker says of itself while it is parked are of no engine."""
        decode = line.decode_tokens_per_second * line.lanes
        self._rates[line.worker] = line.serving, Rates(line.prefill_tokens_per_second, decode)
        self._fleet_rates = None

    def on_waiting(self, turns: int, prefill_tokens: int, new_tokens: int) -> None:
        self._prefill_tokens.add(prefill_tokens / turns)
        self._new_tokens.add(new_tokens / turns)

    def forget(self, worker: str) -> None:
        self._rates.pop(worker, None)
        self._fleet_rates = None
        self.wake.workers.pop(worker, None)
        self.catch_up.workers.pop(worker, None)

    def turns_per_second(self, worker: str) -> float:
        """Of turns as they come, with nothing of them cached."""
        rates = self._rates[worker][1] if worker in self._rates else self._typical_rates()
        return 1.0 / (self._prefill_tokens.value / rates.prefill + max(1.0, self._new_tokens.value) / rates.decode)

    def _typical_rates(self) -> Rates:
        """Of others that serve; of any, where none does."""
        if self._fleet_rates is None:
            known = [rates for serving, rates in self._rates.values() if serving]
            known = known or [rates for _, rates in self._rates.values()] or [FIRST_RATES]
            self._fleet_rates = Rates(*(sum(column) / len(known) for column in zip(*known, strict=True)))
        return self._fleet_rates
