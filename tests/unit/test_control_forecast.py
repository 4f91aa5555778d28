"""Completion time of waiting work."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.control.forecast import CompletionForecast, WorkerEstimates, WorkShare, finish_seconds

SHARES = st.lists(st.builds(WorkShare, st.floats(0, 100), st.floats(0.01, 100)), max_size=8)
TURNS = st.just(0.0) | st.floats(0.01, 10_000)


@given(SHARES, TURNS)
def test_work_finishes_when_the_shares_have_done_all_turns(shares: list[WorkShare], turns: float) -> None:
    done = finish_seconds(shares, turns)
    if not shares and turns > 0:
        assert done == math.inf
    elif turns:
        assert math.isclose(sum(each.rate * max(0.0, done - each.free_at) for each in shares), turns, rel_tol=1e-6)


@given(SHARES, st.builds(WorkShare, st.floats(0, 100), st.floats(0.01, 100)), TURNS)
def test_additional_worker_never_delays_the_finish(shares: list[WorkShare], more: WorkShare, turns: float) -> None:
    assert finish_seconds([*shares, more], turns) <= finish_seconds(shares, turns) * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=20))
def test_rate_is_positive_and_finite_for_any_backlog(seen: list[tuple[int, int, int]]) -> None:
    learned = WorkerEstimates()
    for turns, prefill, new in seen:
        learned.on_waiting(turns, prefill, new)
    assert 0 < learned.turns_per_second("anybody") < math.inf


@given(SHARES, SHARES, st.floats(0, 1000))
def test_forecast_completes_the_sum_of_its_shares(
    first: list[WorkShare], more: list[WorkShare], seconds: float
) -> None:
    flow = CompletionForecast(first)
    for share in more:
        flow.add(share)
    expected = sum(each.rate * max(0.0, seconds - each.free_at) for each in [*first, *more])
    assert math.isclose(flow.turns_done_by(seconds), expected, rel_tol=1e-6, abs_tol=1e-6)
