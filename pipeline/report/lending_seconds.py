"""A run by seconds: latencies of serving's users, and the work of trajectories on the lending servers.

Keeps true
- There is one row for every second from the first event of a user or a lent turn to the last, except for gaps of more
  than `PAUSE_SECONDS` without events: the run was stopped then.
- A request counts in the second in which it was due. A token counts in equal parts in the seconds in which its turn or
  answer was decoded. Failed requests have no latency and are counted.
- Lent work is work of workers whose heartbeats give the serving class. Turns of samples that never finished are not on
  the log, and not counted.
- A turn counts for the worker that ended it, including tokens that another worker sampled before a preemption.
- Times are those that the writers recorded. A turn is in no row if its times are not in order, if it lasts for more
  than a day, or if it ends after `now`. There are at most `MAX_ROWS` rows, the newest ones, whatever the times are.

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
"""Longest gap that has rows: between the end of a run and its continuation there may be days."""

TURN_SECONDS = 86_400.0
"""A turn with a longer duration has invalid times."""

CLOCKS_APART_SECONDS = 3_600.0
"""Largest difference between a clock of the run and this machine's clock."""

MAX_ROWS = 7 * 86_400
"""Maximum number of rows: a week."""


class LendingSecond(msgspec.Struct, kw_only=True):
    """One second: a line of `moments.jsonl`."""

    at: int
    """Start of the second, Unix seconds."""
    asked: int = 0
    """Number of requests that users sent."""
    failed: int = 0
    """Number of these requests that failed."""
    busy: float = 0.0
    """Share of the second in which the servers had a request of a user, as the users saw it."""
    served_tokens: float = 0.0
    """Number of tokens that arrived at users."""
    ttft: float | None = None
    """Median seconds to the first token of the requests that were sent in this second; None if there were none."""
    ttft_most: float | None = None
    """Longest time to the first token of these requests."""
    tpot: float | None = None
    """Median of these requests' mean seconds between tokens."""
    tpot_most: float | None = None
    lent_tokens: float = 0.0
    """Number of tokens that turns on lending servers sampled."""
    other_tokens: float = 0.0
    """Number of tokens that turns on dedicated executors sampled."""
    turns: list[str] = []
    """Turns on lending servers in any part of the second, as `trajectory/turn`."""
    version: int = -1
    """The newest policy version of any lender so far; -1 before the first."""
    cuts: int = 0
    """Number of times that serving took KV memory back from rollouts."""
    frozen: bool = False
    """Whether a lender could not grow after a cut."""


def seconds_of_lending(history: RunHistory, served: Sequence[UserRequest], *, now: float) -> list[LendingSecond]:
    """Return the seconds of lending until `now` (Unix seconds); empty if there was no lent turn and no user."""
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
    """Return whether the times of a turn that sampled tokens are possible."""
    in_order = times.received_at <= times.first_token_at <= times.finished_at <= now + CLOCKS_APART_SECONDS
    return in_order and times.finished_at - times.received_at <= TURN_SECONDS


def _newest_seconds(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return the seconds of the spans and of short gaps between them, in order; the newest MAX_ROWS of them."""
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
    """Fill the columns from the lenders' statuses; a status holds until the next one."""
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
    """Add an amount to the rows, in equal parts over the time from `begin` to `end`."""
    for second, share in _seconds(begin, end):
        if second in rows:
            setattr(rows[second], field, getattr(rows[second], field) + share * amount)


def _seconds(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield the seconds that an interval touches, with the share of the interval in each."""
    if end <= begin:
        yield floor(begin), 1.0
        return
    for second in range(floor(begin), floor(end) + 1):
        yield second, (min(end, second + 1) - max(begin, second)) / (end - begin)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same time as intervals without overlaps, in order."""
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
    """Return the name of a turn in rows."""
    return f"{turn.trajectory_id}/{turn.turn}"
