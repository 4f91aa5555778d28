"""Simulated users of the serving engines.

Keeps true
- Arrivals are a Poisson process, whose rate changes by minute and by second. Each ten minutes have the mean rate, and
  their largest minute and largest second have the stated ratio to the mean. With a recording, the rate of each minute
  is that at which an engine would be busy as recorded; after its last minute the recording begins again.
- Arrivals and lengths depend on the seed and the recording alone: every arm has the same users.
- A request goes to the engine with the fewest requests of users, and among equal ones to the next in turn.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist

from rose.pipeline.simulation.cost_model import CostModel
from rose.pipeline.simulation.engine import EngineRequest
from rose.pipeline.simulation.events import EventQueue
from rose.pipeline.simulation.prefix_cache import Segment
from rose.pipeline.simulation.recorded_load import offered_load, recorded_minutes
from rose.pipeline.simulation.scenario import Users, longest_requests

PEAK_EVERY_SECONDS = 600
"""A minute with the largest rate comes once in so many seconds, and in it a second with the largest rate."""

MINUTE, MINUTES = 60, PEAK_EVERY_SECONDS // 60

PEAK_MINUTE = 1
"""Place of the minute with the largest rate among `MINUTES` minutes."""

LEAST_RATE = 0.05
"""Least sum of the other minutes' factors, where the largest minute has all of the mean."""


class Arrivals:
    """The rate of requests over time, and the requests."""

    def __init__(self, users: Users, cost: CostModel, engines: int, seed: int) -> None:
        """`engines`: serving engines of the fleet; `cost`: one of them."""
        self._users = users
        self._draw = random.Random(f"{seed}/users")
        self._seed = seed
        self._minute = -1
        self._seconds: Sequence[float] = ()
        """Factors of the seconds of `_minute`."""
        prompt, new = longest_requests(cost.kv_cache_tokens)
        self._most = min(users.max_prompt_tokens, prompt), min(users.max_new_tokens, new)
        """Longest prompt and answer, in tokens."""
        mean_prompt = mean_length(users.prompt_tokens, users.prompt_spread, self._most[0])
        mean_new = mean_length(users.new_tokens, users.new_spread, self._most[1])
        alone = _seconds_alone(cost, round(mean_prompt), round(mean_new))
        recorded = [minute.load(engines) / alone * engines for minute in recorded_minutes(users.recording)]
        self._recorded = recorded
        """Mean rate of each recorded minute."""
        self.requests_per_second = (
            sum(recorded) / len(recorded) if recorded else offered_load(users.busy or 0.0, engines) / alone * engines
        )
        """Mean rate, at which an engine that takes its share is busy for `users.busy` of the time or as recorded."""

    def start(self, events: EventQueue, send: Callable[[EngineRequest], None]) -> None:
        """Send requests from now on."""
        number = 0

        def second() -> None:
            nonlocal number
            now = int(events.now)
            for offset in sorted(self._draw.random() for _ in range(self._poisson(self._rate(now)))):
                number += 1
                request = self._request(number, now + offset)
                events.at(request.arrived_at, partial(send, request))

        events.repeat(1.0, second)

    def _rate(self, second: int) -> float:
        """Requests of this second, on average."""
        minute, place = divmod(second, MINUTE)
        spikes = (
            each.factor for each in self._users.spikes if each.at_seconds <= second < each.at_seconds + each.for_seconds
        )
        return self._rate_of_minute(minute) * self._second_factors(minute)[place] * math.prod(spikes)

    def _rate_of_minute(self, minute: int) -> float:
        if self._recorded:
            return self._recorded[minute % len(self._recorded)]
        period, place = divmod(minute, MINUTES)
        names = [f"minute {MINUTES * period + each}" for each in range(MINUTES)]
        return self.requests_per_second * _factors(self._seed, names, self._users.minute_peak, PEAK_MINUTE)[place]

    def _second_factors(self, minute: int) -> Sequence[float]:
        """Return the rate of each second of a minute relative to that of the minute."""
        if minute != self._minute:
            users = self._users
            names = [f"second {MINUTE * minute + each}" for each in range(MINUTE)]
            peak = MINUTE // 2 if minute % MINUTES == PEAK_MINUTE else None
            self._minute = minute
            self._seconds = _factors(self._seed, names, users.second_peak / users.minute_peak, peak)
        return self._seconds

    def _poisson(self, mean: float) -> int:
        if mean > 500:
            return max(0, round(self._draw.gauss(mean, math.sqrt(mean))))
        count, left = 0, self._draw.expovariate(1.0)
        while left < mean:
            count += 1
            left += self._draw.expovariate(1.0)
        return count

    def _request(self, number: int, at: float) -> EngineRequest:
        users, draw = self._users, self._draw
        prompt = max(1, round(users.prompt_tokens * math.exp(draw.gauss(0, users.prompt_spread))))
        new = max(1, round(users.new_tokens * math.exp(draw.gauss(0, users.new_spread))))
        name = f"user {number}"
        most_prompt, most_new = self._most
        return EngineRequest(name, (Segment(name, min(prompt, most_prompt)),), min(new, most_new), at)


NORMAL = NormalDist()


def mean_length(median: float, spread: float, most: float) -> float:
    """Return the mean of lengths that are log-normal around a median, and cut off at `most`."""
    if not spread:
        return min(median, most)
    cut = math.log(most / median) / spread
    below = median * math.exp(spread**2 / 2) * NORMAL.cdf(cut - spread)
    return below + most * (1.0 - NORMAL.cdf(cut))


def least_loaded(requests: Sequence[int], turn: int) -> int:
    """Return the place of the least number of requests; of several, the first at or after `turn`."""
    count = len(requests)
    return min(range(count), key=lambda each: (requests[each], (each - turn) % count))


def _factors(seed: int, names: Sequence[str], peak: float, at: int | None) -> list[float]:
    """Draw a factor for each name. The factor at the place `at` is `peak`, and none exceeds `peak`.

    Their mean is 1, but for what the limit cuts off of the others.
    """
    if peak <= 1.0:
        return [1.0] * len(names)
    spread = math.log(peak) / 3
    drawn = [math.exp(random.Random(f"{seed}/{name}").gauss(-spread * spread / 2, spread)) for name in names]
    left = float(len(names)) if at is None else max(LEAST_RATE, len(names) - peak)
    others = sum(each for place, each in enumerate(drawn) if place != at)
    return [peak if place == at else min(peak, left / others * each) for place, each in enumerate(drawn)]


def _seconds_alone(cost: CostModel, prompt: int, new: int) -> float:
    prefill = cost.step_seconds(decoding=0, context_tokens=0, chunks=[(prompt, 0)])
    fixed, per_token = cost.decode_terms(1)
    return prefill + (new - 1) * (fixed + per_token * (prompt + new / 2))
