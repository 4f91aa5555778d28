"""The load of servers by minute, from recordings of `rose lend --observe --record`.

Keeps true
- Minutes are those of the Unix clock. A row counts in the minute of its middle, and servers that were recorded at the
  same time stay together.
- Minutes without a row are left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rose.workers.lender.recording import Row, read_recording

MINUTE = 60

MOST_BUSY = 0.98
"""From this busy share on, the busy share says nothing of the load: the number of requests does."""


@dataclass(frozen=True, slots=True)
class RecordedMinute:
    """One minute of one or several servers."""

    minute: int
    """Minutes since the Unix epoch."""
    busy: float
    """Share of the observed time in which a server had requests, on average over the servers."""
    requests: float
    """Mean number of requests of a server at the ends of its rows."""

    def load(self, engines: int) -> float:
        """Return the mean number of concurrent requests of each of `engines` engines that are as busy."""
        if self.busy <= MOST_BUSY:
            return offered_load(self.busy, engines)
        return max(offered_load(MOST_BUSY, engines), self.requests)


def recorded_minutes(files: Sequence[str]) -> list[RecordedMinute]:
    """Return the minutes of recordings, one for each server, in order of time. Raises UsageError."""
    return minutes_of([read_recording(Path(file)) for file in files])


def minutes_of(recordings: Iterable[Iterable[Row]]) -> list[RecordedMinute]:
    """Return the minutes in which at least one server was recorded, with the means over the rows of all servers."""
    found: defaultdict[int, list[Row]] = defaultdict(list)
    for row in chain.from_iterable(recordings):
        found[int((row.unix_seconds - row.seconds / 2) // MINUTE)].append(row)
    return [_minute(minute, rows) for minute, rows in sorted(found.items())]


def offered_load(busy: float, engines: int) -> float:
    """Return the mean number of requests of each engine at which engines are busy for the share `busy` of the time.

    With an infinite number of seats, the number of requests of all engines has a Poisson distribution (M/G/infinity).
    A request goes to an idle engine if there is one, so that as many engines are busy as there are requests, and at
    most all. One engine is idle for `exp(-load)` of the time.
    """
    if engines == 1:
        return -math.log1p(-busy)
    low, high = busy, -math.log1p(-busy)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _busy_share(middle * engines, engines) < busy else (low, middle)
    return (low + high) / 2


HALVINGS = 30


def _busy_share(requests: float, engines: int) -> float:
    """Return the mean share of busy engines if the number of requests has a Poisson distribution with this mean."""
    idle = 0.0
    for count in range(engines):
        chance = math.exp(count * math.log(requests) - requests - math.lgamma(count + 1)) if requests else not count
        idle += chance * (engines - count)
    return 1.0 - idle / engines


def _minute(minute: int, rows: Sequence[Row]) -> RecordedMinute:
    seconds = sum(row.seconds for row in rows)
    return RecordedMinute(
        minute=minute,
        busy=max(0.0, 1.0 - sum(row.idle_seconds for row in rows) / seconds),
        requests=sum(row.seconds * (row.running + row.waiting) for row in rows) / seconds,
    )
