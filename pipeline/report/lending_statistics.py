"""Results of lending: a row for each second, whether serving kept its promise, and how many tokens were lent.

Keeps true
- There is one row for every second from the first event of a user or a lent turn to the last, except for gaps of more
  than `PAUSE_SECONDS` without events: the run was stopped then.
- A request counts in the second in which it was due. A token counts in equal parts in the seconds in which its turn or
  answer was decoded. Failed requests have no latency and are counted.
- A request kept the promise if it did not fail and both its latencies were within their budgets.
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
from rose.workers.loadgen.requests import UserRequest

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
    requests: int = 0
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
        row.requests, row.failed = len(requests), sum(bool(each.error) for each in requests)
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


class LatencyBudgets(msgspec.Struct, frozen=True, kw_only=True):
    """Latency budgets of serving, in seconds."""

    ttft: float
    tpot: float


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run's lending servers and their users."""

    promised: LatencyBudgets
    requests: int
    failed: int
    kept: float
    """Share of the requests that kept the promise."""
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    busy: float
    """Share of the time in which the servers had a request of a user."""
    turns: int
    """Number of turns that ran on lending servers."""
    undrawn: int = 0
    """Number of `turns` in no row of `moments.jsonl`: their times are invalid, or older than the oldest row."""
    tokens: int
    """Number of tokens that all `turns` sampled."""
    share: float
    """Share of `tokens` in all tokens that the run sampled."""
    tokens_per_second: float
    cuts: int
    frozen_seconds: int


def summarise_lending(
    history: RunHistory, served: Sequence[UserRequest], rows: Sequence[LendingSecond], promised: LatencyBudgets
) -> Lending | None:
    """Return the figures of lending; None if there were no users and no lent turns."""
    if not rows:
        return None
    first = [each.first_token_seconds for each in served if not each.error and each.first_token_seconds is not None]
    between = [each.token_seconds for each in served if not each.error and each.token_seconds is not None]
    kept = [
        each
        for each in served
        if not each.error
        and (each.first_token_seconds or 0.0) <= promised.ttft
        and (each.token_seconds or 0.0) <= promised.tpot
    ]
    lent = [turn for turn in history.turns if turn.worker in history.lenders]
    tokens, sampled = sum(turn.sampled_tokens for turn in lent), sum(turn.sampled_tokens for turn in history.turns)
    at_work = [row for row in rows if row.turns]
    drawn = {name for row in at_work for name in row.turns}
    return Lending(
        promised=promised,
        requests=len(served),
        failed=sum(bool(each.error) for each in served),
        kept=len(kept) / len(served) if served else 1.0,
        ttft_p50=_quantile(first, 0.5),
        ttft_p99=_quantile(first, 0.99),
        tpot_p50=_quantile(between, 0.5),
        tpot_p99=_quantile(between, 0.99),
        busy=sum(row.busy for row in rows) / len(rows),
        turns=len(lent),
        undrawn=sum(turn.sampled_tokens > 0 and turn_name(turn) not in drawn for turn in lent),
        tokens=tokens,
        share=tokens / sampled if sampled else 0.0,
        tokens_per_second=tokens / len(at_work) if at_work else 0.0,
        cuts=sum(row.cuts for row in rows),
        frozen_seconds=sum(row.frozen for row in rows),
    )


def lending_sentence(lending: Lending, *, users: str = "replayed from a trace of real users") -> str:
    """Return the main result of lending in one or two sentences; `users` says where the requests come from."""
    if not lending.requests:
        return "The serving engine had no requests: all lent capacity was idle."
    if not lending.turns:
        return "The serving engine answered requests and lent nothing. Its log has the reason."
    failed = f" {lending.failed:,} of them failed." if lending.failed else ""
    undrawn = f" Lent turns outside the plotted seconds: {lending.undrawn:,}." if lending.undrawn else ""
    kept, share = f"{100 * lending.kept:.1f} %", f"{100 * lending.share:.0f} %"
    return (
        f"Serving answered {lending.requests:,} requests, {users}, {kept} of them within "
        f"the latency targets. Meanwhile its engine sampled {share} of the run's rollout tokens.{failed}{undrawn}"
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(np.asarray(values), share)) if values else 0.0
