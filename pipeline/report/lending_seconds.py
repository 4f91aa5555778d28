"""A run second by second: what serving's users waited, and what trajectories did on the server that they asked.

Keeps true
- One row for every second from the first thing that a user or a lent turn did to the last, but for stretches of more
  than `PAUSE_SECONDS` in which neither did anything: then the run stood still.
- A request belongs to the second in which it was due, a token to the seconds in which its turn or answer was decoded,
  in equal parts. Failed requests have no latency: they are counted.
- Lent is what a worker did that says of itself, in its heartbeats, that it serves. Turns of samples that never
  finished are not on the log, and not here.
- A turn is all of the worker that ended it, with the tokens that another had sampled before it was preempted there.
- Times are what whoever wrote them says. A turn that they have end before it began, last for more than a day or end
  after `now` is in no row, and rows are of `MAX_ROWS` at most, the newest: so nobody's times make them many.

Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import floor

import msgspec
import numpy as np

from rose.pipeline.report.history import LenderStatus, RunHistory, TurnFact
from rose.schemas.turns import TurnTimes
from rose.schemas.user_requests import UserRequest

PAUSE_SECONDS = 60.0
"""Between a run that was ended and the one that goes on from there may lie days."""

TURN_SECONDS = 86_400.0
"""A turn that took longer did not."""

CLOCKS_APART_SECONDS = 3_600.0
"""By which clocks of a run may differ from that of who looks at it."""

MAX_ROWS = 7 * 86_400
"""Rows."""


class LendingSecond(msgspec.Struct, kw_only=True):
    """A second: a line of `moments.jsonl`."""

    at: int
    """Unix seconds of its beginning."""
    asked: int = 0
    """Requests that users sent."""
    failed: int = 0
    """Of these, that failed."""
    busy: float = 0.0
    """Share of it in which the servers held a request of a user, as users saw it."""
    served_tokens: float = 0.0
    """That came to users."""
    ttft: float | None = None
    """Median seconds to the first token of the requests that were sent in it; None if there were none."""
    ttft_most: float | None = None
    """The longest of these."""
    tpot: float | None = None
    """Median of their mean seconds between tokens."""
    tpot_most: float | None = None
    lent_tokens: float = 0.0
    """Sampled by turns on the servers that lend."""
    other_tokens: float = 0.0
    """Sampled by turns on dedicated executors."""
    turns: list[str] = []
    """On the servers that lend, in any part of it: `trajectory/turn`."""
    version: int = -1
    """The newest policy version that a lender had; -1 before the first."""
    cuts: int = 0
    """Times that serving took memory back from rollouts."""
    frozen: bool = False
    """Whether a lender was not to grow, after a cut."""


def seconds_of_lending(history: RunHistory, served: Sequence[UserRequest], *, now: float) -> list[LendingSecond]:
    """Every second of lending until `now`, in unix seconds; empty where there was no lender and no user."""
    turns = [turn for turn in history.turns if turn.sampled_tokens and _plausible(turn.times, now)]
    lent = [turn for turn in turns if turn.worker in history.lenders]
    spans = [(each.at, each.at + each.seconds) for each in served]
    spans += [(turn.times.received_at, turn.times.finished_at) for turn in lent]
    rows = {second: LendingSecond(at=second, turns=[]) for second in _newest_seconds(spans)}
    _users(rows, served)
    for turn in turns:
        field = "lent_tokens" if turn.worker in history.lenders else "other_tokens"
        _spread(rows, field, turn.times.first_token_at, turn.times.finished_at, turn.sampled_tokens)
    for turn in lent:
        for second, _ in _seconds(turn.times.received_at, turn.times.finished_at):
            if second in rows:
                rows[second].turns.append(turn_name(turn))
    _lender_columns(rows, history.lender_statuses)
    return list(rows.values())


def _plausible(times: TurnTimes, now: float) -> bool:
    """Whether a turn that sampled tokens may have come by its stations at these times."""
    in_order = times.received_at <= times.first_token_at <= times.finished_at <= now + CLOCKS_APART_SECONDS
    return in_order and times.finished_at - times.received_at <= TURN_SECONDS


def _newest_seconds(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Those of the spans and of short pauses between them, in order; no more than may be rows."""
    seconds: list[int] = []
    for begin, end in reversed(_union((low, high + PAUSE_SECONDS) for low, high in spans)):
        last = floor(end - PAUSE_SECONDS)
        first = max(floor(begin), last + 1 - (MAX_ROWS - len(seconds)))
        seconds += range(last, first - 1, -1)
    return seconds[::-1]


def _users(rows: dict[int, LendingSecond], served: Sequence[UserRequest]) -> None:
    due: defaultdict[int, list[UserRequest]] = defaultdict(list)
    for each in served:
        due[floor(each.at)].append(each)
        if each.first_token_seconds is not None:
            _spread(rows, "served_tokens", each.at + each.first_token_seconds, each.at + each.seconds, each.tokens)
    for second, requests in due.items():
        row = rows.get(second)
        if row is None:
            continue
        row.asked, row.failed = len(requests), sum(bool(each.error) for each in requests)
        first = [each.first_token_seconds for each in requests if each.first_token_seconds is not None]
        between = [each.token_seconds for each in requests if each.token_seconds is not None]
        row.ttft, row.ttft_most = _median_and_most(first)
        row.tpot, row.tpot_most = _median_and_most(between)
    for low, high in _union((each.at, each.at + each.seconds) for each in served):
        _spread(rows, "busy", low, high, high - low)


def _lender_columns(rows: dict[int, LendingSecond], statuses: Iterable[LenderStatus]) -> None:
    """What lenders say of themselves holds until they say something else."""
    seen: dict[str, tuple[int, int]] = {}
    newest, frozen = -1, False
    by_second: defaultdict[int, list[LenderStatus]] = defaultdict(list)
    for standing in statuses:
        by_second[floor(standing.at)].append(standing)
    latest: dict[str, bool] = {}
    for second in sorted(by_second.keys() | rows.keys()):
        row = rows.get(second)
        frozen = any(latest.values())
        for standing in by_second.get(second, ()):
            incarnation, cuts = seen.get(standing.worker, (standing.incarnation, 0))
            new = standing.cuts - (cuts if incarnation == standing.incarnation else 0)
            seen[standing.worker] = (standing.incarnation, standing.cuts)
            latest[standing.worker] = standing.frozen
            newest, frozen = max(newest, standing.version), frozen or standing.frozen
            if row is not None:
                row.cuts += new
        if row is not None:
            row.version, row.frozen = newest, frozen


def _spread(rows: dict[int, LendingSecond], field: str, begin: float, end: float, amount: float) -> None:
    """Add an amount in equal parts to all the time from `begin` to `end`."""
    for second, share in _seconds(begin, end):
        if second in rows:
            setattr(rows[second], field, getattr(rows[second], field) + share * amount)


def _seconds(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """The seconds that an interval touches, and the share of it that lies in each."""
    if end <= begin:
        yield floor(begin), 1.0
        return
    for second in range(floor(begin), floor(end) + 1):
        yield second, (min(end, second + 1) - max(begin, second)) / (end - begin)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps."""
    joined: list[tuple[float, float]] = []
    for low, high in sorted(intervals):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _median_and_most(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (float(np.median(values)), max(values)) if values else (None, None)


def turn_name(turn: TurnFact) -> str:
    """As rows name it."""
    return f"{turn.trajectory_id}/{turn.turn}"
