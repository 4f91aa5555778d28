"""Results of lending: whether serving kept its promise, and how many tokens were lent.

Keeps true: a request kept the promise if it did not fail and both its latencies were within their budgets.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from rose.pipeline.report.history import RunHistory
from rose.pipeline.report.lending_seconds import LendingSecond, turn_name
from rose.schemas.user_requests import UserRequest


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


def lending_sentence(lending: Lending) -> str:
    """Return the main result of lending in one or two sentences."""
    if not lending.requests:
        return "Nobody asked the serving engine for anything: what was lent was idle."
    if not lending.turns:
        return "The serving engine served its users and lent nothing: its log says why."
    failed = f" {lending.failed:,} of them failed." if lending.failed else ""
    undrawn = f" Lent turns in no second of the picture: {lending.undrawn:,}." if lending.undrawn else ""
    kept, share = f"{100 * lending.kept:.1f} %", f"{100 * lending.share:.0f} %"
    return (
        f"Serving answered {lending.requests:,} requests, replayed from a trace of real users, {kept} of them within "
        f"its promise. Meanwhile its engine sampled {share} of the run's rollout tokens.{failed}{undrawn}"
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(np.asarray(values), share)) if values else 0.0
