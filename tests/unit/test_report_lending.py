"""A run second by second: user latency of serving beside the lent capacity."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.report import lending_statistics as moments_of
from rose.pipeline.report.charts import lending_chart
from rose.pipeline.report.history import LenderStatus, RunHistory, TurnFact, fold_history
from rose.pipeline.report.lending_statistics import (
    LatencyBudgets,
    lending_sentence,
    seconds_of_lending,
    summarise_lending,
)
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat, WorkerClass
from rose.schemas.turns import TurnTimes
from rose.workers.loadgen.requests import UserRequest
from tests.golden.examples import EXAMPLES

PROMISED = LatencyBudgets(ttft=0.25, tpot=0.05)
NOW = 100_000.0
LENDER, DEDICATED = "executor-1", "executor-0"


def turn(
    trajectory: str, worker: str, *, begin: float, end: float, tokens: int = 10, first: float | None = None
) -> TurnFact:
    stations = (begin, begin, begin, begin, begin, begin, begin if first is None else first, end, end)
    return TurnFact(
        trajectory_id=trajectory,
        turn=0,
        attempt=0,
        worker=worker,
        version=0,
        sampled_tokens=tokens,
        context_tokens=10,
        cached_tokens=0,
        reusable_tokens=0,
        times=TurnTimes(**dict(zip(TurnTimes.__struct_fields__, stations, strict=True))),
        environment_seconds=0.0,
    )


def lender_status(at: float, *, cuts: int = 0, frozen: bool = False, incarnation: int = 1) -> LenderStatus:
    return LenderStatus(worker=LENDER, incarnation=incarnation, at=at, version=3, cuts=cuts, frozen=frozen)


def user_request(
    at: float, *, ttft: float = 0.1, tpot: float | None = 0.01, tokens: int = 8, error: str = ""
) -> UserRequest:
    if error:
        return UserRequest(at=at, seconds=ttft, prompt_tokens=5, error=error)
    seconds = ttft + (tpot or 0.0) * (tokens - 1)
    return UserRequest(
        at=at, seconds=seconds, prompt_tokens=5, tokens=tokens, first_token_seconds=ttft, token_seconds=tpot
    )


def history(*turns: TurnFact, standings: tuple[LenderStatus, ...] = (lender_status(100.0),)) -> RunHistory:
    return RunHistory(turns=list(turns), lender_statuses=list(standings))


def test_each_second_joins_user_latency_and_rollout_work() -> None:
    report = history(
        turn("g:0", LENDER, begin=100.5, end=102.5, tokens=20),
        turn("g:1", DEDICATED, begin=101.0, end=102.0, tokens=7),
    )
    rows = seconds_of_lending(
        report,
        [user_request(101.2, ttft=0.1), user_request(101.4, ttft=0.3), user_request(102.1, error="status 500")],
        now=NOW,
    )
    assert [row.at for row in rows] == [100, 101, 102]
    assert [row.lent_tokens for row in rows] == pytest.approx([5, 10, 5])
    assert rows[1].turns == ["g:0/0"]
    assert rows[1].other_tokens == pytest.approx(7)
    assert (rows[1].requests, rows[1].failed, rows[1].served_tokens) == (2, 0, pytest.approx(16))
    assert (rows[1].ttft, rows[1].ttft_most) == (pytest.approx(0.2), 0.3)
    assert rows[1].busy == pytest.approx(0.54)
    assert (rows[2].requests, rows[2].failed, rows[2].ttft) == (1, 1, None)
    assert {row.version for row in rows} == {3}


def test_cuts_are_counted_once_and_a_freeze_lasts_until_it_is_lifted() -> None:
    report = history(
        turn("g:0", LENDER, begin=100.0, end=107.9),
        standings=(
            lender_status(100.1, cuts=2),
            lender_status(102.1, cuts=5, frozen=True),
            lender_status(104.5, cuts=5),
            lender_status(106.2, cuts=1, incarnation=2),
        ),
    )
    rows = seconds_of_lending(report, [], now=NOW)
    assert [row.cuts for row in rows] == [2, 0, 3, 0, 0, 0, 1, 0]
    assert [row.frozen for row in rows] == [False, False, True, True, True, False, False, False]


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 9), st.integers(1, 99)), min_size=1, max_size=20))
def test_tokens_per_second_add_up_to_all_tokens(turns: list[tuple[float, float, int]]) -> None:
    report = history(*(turn(f"g:{n}", LENDER, begin=a, end=a + b, tokens=c) for n, (a, b, c) in enumerate(turns)))
    rows = seconds_of_lending(report, [], now=NOW)
    assert sum(row.lent_tokens for row in rows) == pytest.approx(sum(tokens for _, _, tokens in turns))


def test_promise_is_kept_by_requests_within_both_budgets() -> None:
    report = history(turn("g:0", LENDER, begin=100, end=101), turn("g:1", DEDICATED, begin=100, end=101, tokens=30))
    served = [
        user_request(100.0),
        user_request(100.1, ttft=0.3),
        user_request(100.2, tpot=0.06),
        user_request(100.3, error="reset\n"),
    ]
    rows = seconds_of_lending(report, served, now=NOW)
    lending = summarise_lending(report, served, rows, PROMISED)
    assert lending is not None
    assert (lending.requests, lending.failed, lending.kept) == (4, 1, 0.25)
    assert (lending.turns, lending.tokens, lending.share) == (1, 10, 0.25)
    assert "25.0 % of them within the latency targets" in lending_sentence(lending)
    assert "1 of them failed" in lending_sentence(lending)
    assert lending_chart(rows, PROMISED) is not None


def test_server_that_lent_nothing_is_reported_in_one_sentence() -> None:
    served = [user_request(100.0)]
    report = history()
    lending = summarise_lending(report, served, seconds_of_lending(report, served, now=NOW), PROMISED)
    assert lending is not None
    assert "lent nothing" in lending_sentence(lending)


def test_run_without_lender_and_users_has_no_moments() -> None:
    report = history(turn("g:1", DEDICATED, begin=100, end=101), standings=())
    assert seconds_of_lending(report, [], now=NOW) == []
    assert summarise_lending(report, [], [], PROMISED) is None
    assert lending_chart([], PROMISED) is None


def test_lenders_are_executors_that_report_serving() -> None:
    beat = next(record for record in EXAMPLES if isinstance(record, SlackHeartbeat))
    serving = [
        msgspec.structs.replace(
            beat, worker=LENDER, sequence=n, cuts=cuts, sent_at=100.0 + n, worker_class=WorkerClass.SERVING
        )
        for n, cuts in enumerate((0, 0, 1))
    ]
    leaves = {"sequence": 3, "cuts": 1, "sent_at": 103.0, "frozen": True, "state": ExecutorState.STOPPING}
    serving.append(msgspec.structs.replace(serving[-1], **leaves))
    dedicated = msgspec.structs.replace(beat, worker=DEDICATED, worker_class=WorkerClass.DEDICATED)
    report = fold_history([*serving, dedicated])
    assert report.lenders == {LENDER}
    assert [(each.at, each.cuts) for each in report.lender_statuses] == [(100.0, 0), (102.0, 1), (103.0, 1)]
    assert [each.frozen for each in report.lender_statuses] == [True, True, False], "who says goodbye is frozen no more"


def test_silent_lender_is_not_frozen_until_it_reports_that_again() -> None:
    """A lender that is killed while frozen reports nothing more."""
    beat = next(record for record in EXAMPLES if isinstance(record, SlackHeartbeat))
    serving = [
        msgspec.structs.replace(
            beat, sent_at=at, ttl_seconds=2.0, frozen=True, cuts=1, worker_class=WorkerClass.SERVING, sequence=n
        )
        for n, at in enumerate((100.0, 101.5, 110.0, 110.2))
    ]
    report = fold_history(serving)
    found = [(each.at, each.frozen) for each in report.lender_statuses]
    assert found == [(100.0, True), (103.5, False), (110.0, True), (112.2, False)]
    rows = seconds_of_lending(report, [user_request(float(second)) for second in range(100, 120)], now=NOW)
    assert [row.at for row in rows if row.frozen] == [100, 101, 102, 103, 110, 111, 112]


def test_paused_run_has_no_rows_for_the_pause() -> None:
    rows = seconds_of_lending(history(), [user_request(100.0), user_request(159.0), user_request(90_000.0)], now=NOW)
    assert [rows[0].at, rows[59].at, rows[60].at, len(rows)] == [100, 159, 90_000, 61]


WHENEVER = st.one_of(st.sampled_from([0.0, 100.0, 1.7e9, 253_402_300_799.0]), st.floats(0.0, 253_402_300_799.0))


@given(st.lists(st.tuples(WHENEVER, WHENEVER, WHENEVER), max_size=9))
def test_impossible_times_are_left_out_and_reported(forged: list[tuple[float, float, float]]) -> None:
    now = 1_700_000_100.0
    known = turn("g:0", LENDER, begin=now - 50.0, end=now - 41.5)
    others = [
        turn(f"g:{n}", worker, begin=begin, end=end, first=first)
        for n, (begin, first, end) in enumerate(forged, 1)
        for worker in (LENDER, DEDICATED)
    ]
    report = history(known, *others, standings=(lender_status(now - 60.0),))
    rows = seconds_of_lending(report, [], now=now)
    assert len(rows) <= 9 + sum(86_401 for _ in forged)
    assert rows == sorted(rows, key=lambda row: row.at) and rows[-1].at <= now + 3600
    lending = summarise_lending(report, [], rows, PROMISED)
    assert lending is not None
    in_order = sum(begin <= first <= end <= now + 3600 and end - begin <= 86_400 for begin, first, end in forged)
    assert lending.undrawn == len(forged) - in_order
    assert lending.turns == 1 + len(forged)


def test_rows_cover_a_bounded_newest_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_of, "MAX_ROWS", 70)
    now = 1_700_000_000.0
    turns = [turn(f"g:{n}", LENDER, begin=now - 10.0 * (n + 1), end=now - 10.0 * n - 0.5) for n in range(9)]
    report, served = (
        history(*turns, standings=(lender_status(now),)),
        [user_request(now - 85.0), user_request(now - 15.0)],
    )
    rows = seconds_of_lending(report, served, now=now)
    assert [row.at for row in rows] == list(range(int(now) - 70, int(now)))
    assert sum(row.requests for row in rows) == 1
    lending = summarise_lending(report, served, rows, PROMISED)
    assert lending is not None and (lending.turns, lending.undrawn) == (9, 2)
    assert "outside the plotted seconds: 2." in lending_sentence(lending)
