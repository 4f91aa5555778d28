"""Emulated users of serving workers: the load of a real trace, and the capacity that it leaves to turns and to a fleet.

Keeps true
- Users are served as if alone: `bench.coserve` measures the cost of guests for users.
- A trace is replayed `speed` times as fast, from another position for each worker, and repeated from its beginning. A
  worker gets only a fraction of the requests, so that it is as busy as production workers are.
- A worker's guests compute while it has no user: it lends strictly, which is the default.
- An allocator of whole workers keeps the capacity that users needed at most within the time to get a worker back. The
  capacity of a worker is the largest number of concurrent requests of any worker with its own users. That requests may
  be slower at this load counts for no arm.

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
"""Share of the time in which a worker serves a request: the share that ROSE (arXiv 2605.06534) reports for production
devices."""

UTILISED = 0.7
"""Utilisation up to which whole workers are filled with users, a usual target of autoscalers."""

LOOK_SECONDS = 1.0
"""Time between two decisions about whole workers."""


class Step(NamedTuple):
    """Users of one worker, from a time on."""

    at: float
    running: int
    """Number of requests."""
    tokens: int
    """KV tokens that the requests hold: prompts and answers."""


class ServingRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of serving."""

    prefill_tokens_per_second: float
    tpot_seconds: float


class Load:
    """One trace as the load of a worker."""

    def __init__(self, arrivals: Sequence[Arrival], rates: ServingRates) -> None:
        """Take the arrivals of a trace, at least one."""
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
        """Idle seconds before each step, and in total."""

    @property
    def seconds(self) -> float:
        """Return the time from the beginning of the trace until its last request is served."""
        return self._times[-1]

    @property
    def most_running(self) -> int:
        """Return the largest number of concurrent requests."""
        return max(step.running for step in self.steps)

    @property
    def busy(self) -> float:
        """Return the share of the time with at least one request."""
        return 1.0 - self._idle[-1] / self.seconds

    def at(self, seconds: float) -> Step:
        """Return the users after this many seconds; `at` of the step is on the same clock."""
        rounds, within = divmod(seconds, self.seconds)
        place = bisect_right(self._times, within) - 1
        began = rounds * self.seconds
        if place < 0:
            return Step(began, 0, 0)
        return self.steps[place]._replace(at=began + self._times[place])

    def idle_until(self, seconds: float) -> float:
        """Return the idle seconds of the first `seconds` seconds."""
        rounds, within = divmod(seconds, self.seconds)
        place = bisect_right(self._times, within) - 1
        if place < 0:
            return rounds * self._idle[-1] + within
        step = self.steps[place]
        return rounds * self._idle[-1] + self._idle[place] + (within - step.at) * (not step.running)


class Users(NamedTuple):
    """Users of one worker; their clock begins at 0 and runs `speed` times as fast as wall-clock time."""

    load: Load
    offset: float
    """Position in the trace at which they begin."""
    speed: float
    full: int
    """Most requests that a worker serves at once."""

    def at(self, wall_seconds: float) -> Step:
        """Return the users at this time; `at` of the step is in seconds of the same clock."""
        step = self.load.at(self.offset + wall_seconds * self.speed)
        return step._replace(at=(step.at - self.offset) / self.speed)

    def idle(self, since: float, until: float) -> float:
        """Return the wall-clock seconds between these two times without a request."""
        there, here = (self.load.idle_until(self.offset + each * self.speed) for each in (until, since))
        return (there - here) / self.speed


def users_of(arrivals: Sequence[Arrival], rates: ServingRates, *, workers: int, speed: float) -> list[Users]:
    """Return the users of each worker."""
    every = next(many for many in range(1, len(arrivals)) if Load(arrivals[::many], rates).busy <= BUSY)
    loads = [Load(arrivals[first::every], rates) for first in range(min(every, workers))]
    full = max(load.most_running for load in loads)
    at = [loads[worker % len(loads)].seconds * worker / workers for worker in range(workers)]
    return [Users(loads[worker % len(loads)], at[worker], speed, full) for worker in range(workers)]


class Whole(NamedTuple):
    """A worker is given to rollouts, or taken back; `at` is in wall-clock seconds."""

    at: float
    worker: int
    given: bool


def whole_workers(users: Sequence[Users], *, delay: float, wall_seconds: float) -> list[Whole]:
    """Return the moves of an allocator of whole workers; each worker is given `delay` after the decision.

    Users of a worker that is given go to the other workers, which serve at most UTILISED of their capacity. The
    allocator keeps as many workers as the highest load within the last `delay` needed, and takes workers back at once.
    """
    speed, full = users[0].speed, users[0].full
    looks = [
        number * LOOK_SECONDS - delay for number in range(math.ceil((wall_seconds * speed + delay) / LOOK_SECONDS))
    ]
    loads = [sum(each.at(at / speed).running for each in users) for at in looks]
    back = math.ceil(delay / LOOK_SECONDS)
    wanted_since: dict[int, float] = {}
    given: set[int] = set()
    moves: list[Whole] = []
    for place in range(back, len(looks)):
        at = looks[place]
        kept = math.ceil(max(loads[place - back : place + 1]) / (UTILISED * full))
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
    """Return the wall-clock seconds in which users needed more than the workers that `moves` left to serving."""
    short, step, given, left = 0.0, LOOK_SECONDS / users[0].speed, 0, list(moves)[::-1]
    for number in range(math.ceil(wall_seconds / step)):
        at = number * step
        while left and left[-1].at <= at:
            given += 1 if left.pop().given else -1
        running = sum(each.at(at).running for each in users)
        short += step * (running > (len(users) - given) * users[0].full)
    return short
