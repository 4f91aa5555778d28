"""Figures of a fleet's journal. Pure; times are unix seconds."""

import statistics
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.fleet.executor import GRANT, USERS, NoteKind
from bench.fleet.fleet import Line


class Spread(NamedTuple):
    """Percentiles in milliseconds, and the number of values."""

    median: float
    p99: float
    many: int


def spread_of(seconds: Sequence[float]) -> Spread | None:
    """Return the spread of these times; None for fewer than two."""
    if len(seconds) < 2:
        return None
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return Spread(round(1000 * statistics.median(seconds), 1), round(1000 * p99, 1), len(seconds))


class Waiting:
    """Whether turns waited for room, by the router's summaries."""

    def __init__(self, summaries: Iterable[tuple[float, int]]) -> None:
        """Take the time of each summary and its number of waiting turns."""
        self._summaries = sorted(summaries)
        self._times = [at for at, _ in self._summaries]

    def throughout(self, since: float, until: float) -> bool:
        """Return whether turns waited in each summary from the last before `since` to the first after `until`."""
        begin, end = bisect_right(self._times, since) - 1, bisect_right(self._times, until)
        between = self._summaries[max(begin, 0) : end + 1]
        return begin >= 0 and len(between) > 0 and all(many for _, many in between)


def first_turns(lines: Iterable[Line], waiting: Waiting, *, late: float) -> Mapping[str, Sequence[float]]:
    """Return the seconds from free capacity to the first turn on it, by cause, if turns waited during the whole time.

    Capacity that went away after more than `late` seconds without a turn counts with its full time: without it, only
    quick cases would count. Capacity that went away sooner is left out, because the time of a turn is unknown.
    """
    found: dict[str, list[float]] = {GRANT: [], USERS: []}
    free: dict[str, Line] = {}
    for line in lines:
        if line.what == NoteKind.FREE.value:
            free[line.worker] = line
        elif line.what == NoteKind.FIRST.value:
            free.pop(line.worker, None)
            if waiting.throughout(line.since, line.at):
                found[line.reason].append(line.at - line.since)
        elif line.what == NoteKind.SHUT.value:
            began = free.pop(line.worker, line)
            if line.at - began.at > late and waiting.throughout(began.at, line.at):
                found[began.reason].append(line.at - began.at)
    return found


def from_grants(lines: Iterable[Line], waiting: Waiting) -> Sequence[float]:
    """Return the seconds from the writing of a grant to the first turn, which includes the guest's wake."""
    granted: dict[str, float] = {}
    found = []
    for line in lines:
        if line.what == NoteKind.FREE.value:
            granted[line.worker] = line.since
        elif line.what == NoteKind.FIRST.value and line.reason == GRANT and waiting.throughout(line.since, line.at):
            found.append(line.at - granted[line.worker])
    return found


def last_turns_off(lines: Iterable[Line]) -> Mapping[str, Sequence[float]]:
    """Return the seconds from the cause to the last returned turn on the log, by cause."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line.what == NoteKind.OFF.value:
            found.setdefault(line.reason, []).append(line.at - line.since)
    return found


def last_lent(lines: Iterable[Line], lenders: Collection[str], *, since: float) -> float | None:
    """Return the time when the last lender had parked and all its turns were off.

    None if a lender still lends, or none lent at `since`.
    """
    lends: dict[str, bool] = dict.fromkeys(lenders, False)
    at = 0.0
    for line in lines:
        if line.worker not in lends:
            continue
        if line.what in (NoteKind.FREE.value, NoteKind.SHUT.value):
            lends[line.worker] = line.what == NoteKind.FREE.value or line.reason != GRANT
        if line.what in (NoteKind.SHUT.value, NoteKind.OFF.value) and line.reason == GRANT:
            at = max(at, line.at)
    return None if any(lends.values()) or at < since else at
