"""Emulated users of serving workers: the load of a real trace, what it leaves to turns, and what a fleet could spare.

Keeps true
- Users are served as if alone: what guests cost them is `bench.coserve`'s to measure, not this.
- A trace is played `speed` times as fast, from another moment of it on each worker, and again from its beginning. Of
  its requests a worker is sent every so many-th, so that it is busy as serving fleets are.
- A worker's guests compute while it has no user: it lends strictly, as is the default.
- Who gives workers away in whole keeps what users asked for at most within the time that it takes to have one back. A
  worker can serve as many at once as any of them ever does where each keeps its users: that they might be slower for it
  counts against nobody.

Units: seconds of the trace, unless a name says otherwise. Pure.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from rose.workers.loadgen.traces import Arrival

BUSY = 0.189
"""Share of the time in which a worker serves somebody: what ROSE (arXiv 2605.06534) saw of production's devices."""

UTILISED = 0.7
"""Share of what they can serve to which whole workers are filled with users, as autoscalers aim for."""

LOOK_SECONDS = 1.0
"""Between two decisions about whole workers."""


class Step(NamedTuple):
    """Users of one worker, from a moment on."""

    at: float
    running: int
    """Requests."""
    tokens: int
    """Of KV that they hold: prompts and answers."""


class ServingRates(msgspec.Struct, frozen=True, kw_only=True):
    """How fast serving is."""

    prefill_tokens_per_second: float
    tpot_seconds: float


class Load:
    """One trace as a worker sees it."""

    def __init__(self, arrivals: Sequence[Arrival], rates: ServingRates) -> None:
        """`arrivals`: at least one."""
        changes: list[tuple[float, int, int]] = []
        for each in arrivals:
            tokens = each.prompt_tokens + each.output_tokens
            takes = each.prompt_tokens / rates.prefill_tokens_per_second + each.output_tokens * rates.tpot_seconds
            changes += (each.at, 1, tokens), (each.at + takes, -1, -tokens)
        changes.sort()
        self.steps: list[Step] = []
        running = tokens = 0
        for at, more, more_tokens in changes:
            running, tokens = running + more, tokens + more_tokens
            self.steps.append(Step(at, running, tokens))
        self._times = [step.at for step in self.steps]
        ends = [*self._times[1:], self._times[-1]]
        idle = ((end - step.at) * (not step.running) for step, end in zip(self.steps, ends, strict=True))
        self._idle = [*accumulate(idle, initial=self._times[0])]
        """Seconds without anybody, before each step and in all."""

    @property
    def seconds(self) -> float:
        """From its beginning until nobody is served any more."""
        return self._times[-1]

    @property
    def most_running(self) -> int:
        """Requests at once."""
        return max(step.running for step in self.steps)

    @property
    def busy(self) -> float:
        """Share of the time in which somebody is served."""
        return 1.0 - self._idle[-1] / self.seconds

    def at(self, seconds: float) -> Step:
        """As it is after so many seconds; `at` of the step is on the same clock."""
        rounds, within = divmod(seconds, self.seconds)
        place = bisect_right(self._times, within) - 1
        began = rounds * self.seconds
        if place < 0:
            return Step(began, 0, 0)
        return self.steps[place]._replace(at=began + self._times[place])

    def idle_until(self, seconds: float) -> float:
        """Of so many, those in which nobody was served."""
        rounds, within = divmod(seconds, self.seconds)
        place = bisect_right(self._times, within) - 1
        if place < 0:
            return rounds * self._idle[-1] + within
        step = self.steps[place]
        return rounds * self._idle[-1] + self._idle[place] + (within - step.at) * (not step.running)


class Users(NamedTuple):
    """Of one worker; their clock begins at 0, and runs `speed` times as fast as anybody else's."""

    load: Load
    offset: float
    """Where in the trace they begin."""
    speed: float
    full: int
    """Requests that a worker can serve at once."""

    def at(self, wall_seconds: float) -> Step:
        """`at` of the step is in seconds of the same clock."""
        step = self.load.at(self.offset + wall_seconds * self.speed)
        return step._replace(at=(step.at - self.offset) / self.speed)

    def idle(self, since: float, until: float) -> float:
        """Wall-clock seconds between these two in which nobody was served."""
        there, here = (self.load.idle_until(self.offset + each * self.speed) for each in (until, since))
        return (there - here) / self.speed


def users_of(arrivals: Sequence[Arrival], rates: ServingRates, *, workers: int, speed: float) -> list[Users]:
    """Of each worker."""
    every = next(many for many in range(1, len(arrivals)) if Load(arrivals[::many], rates).busy <= BUSY)
    loads = [Load(arrivals[first::every], rates) for first in range(min(every, workers))]
    full = max(load.most_running for load in loads)
    at = [loads[worker % len(loads)].seconds * worker / workers for worker in range(workers)]
    return [Users(loads[worker % len(loads)], at[worker], speed, full) for worker in range(workers)]


class Whole(NamedTuple):
    """A worker is given to rollouts, or taken back; `at` in wall-clock seconds."""

    at: float
    worker: int
    given: bool


def whole_workers(users: Sequence[Users], *, delay: float, wall_seconds: float) -> list[Whole]:
    """What an allocator does that moves workers in whole, each given `delay` after it was seen to be spare.

    Users of a worker that is given go to the others, which serve UTILISED of what they can at most. It keeps as many as
    the most that was asked for within the last `delay` needed, and takes back at once.
    """
    speed, full = users[0].speed, users[0].full
    looks = [
        number * LOOK_SECONDS - delay for number in range(math.ceil((wall_seconds * speed + delay) / LOOK_SECONDS))
    ]
    asked = [sum(each.at(at / speed).running for each in users) for at in looks]
    back = math.ceil(delay / LOOK_SECONDS)
    wanted_since: dict[int, float] = {}
    given: set[int] = set()
    moves: list[Whole] = []
    for place in range(back, len(looks)):
        at = looks[place]
        kept = math.ceil(max(asked[place - back : place + 1]) / (UTILISED * full))
        spare = max(0, len(users) - kept)
        for worker in range(len(users)):
            if worker >= spare:
                wanted_since.pop(worker, None)
                if worker in given:
                    given.remove(worker)
                    moves.append(Whole(at / speed, worker, given=False))
            elif worker not in given and at >= wanted_since.setdefault(worker, at) + delay:
                given.add(worker)
                moves.append(Whole(at / speed, worker, given=True))
    return moves


def short_seconds(users: Sequence[Users], moves: Sequence[Whole], *, wall_seconds: float) -> float:
    """Wall-clock seconds in which users asked for more than the workers hold that `moves` left to serving."""
    short, step, given, left = 0.0, LOOK_SECONDS / users[0].speed, 0, list(moves)[::-1]
    for number in range(math.ceil(wall_seconds / step)):
        at = number * step
        while left and left[-1].at <= at:
            given += 1 if left.pop().given else -1
        asked = sum(each.at(at).running for each in users)
        short += step * (asked > (len(users) - given) * users[0].full)
    return short
