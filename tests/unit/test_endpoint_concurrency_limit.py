"""The concurrency limit of an endpoint lender: growth, cuts and convergence."""

import itertools
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.lender.endpoint.concurrency_limit import AimdLimit, LatencyWindow, TokenRates, exceeds_budget

TTFT, TPOT, MOST = 1.0, 0.1, 64

seconds = st.floats(0, 4, allow_nan=False)
windows = st.builds(
    LatencyWindow,
    ttft=st.lists(seconds, max_size=8),
    tpot=st.lists(seconds.map(lambda s: s / 10), max_size=8),
    full=st.booleans(),
    others_late=st.booleans(),
)
LATE = LatencyWindow([2 * TTFT], [], full=True)
CALM = LatencyWindow([0.1 * TTFT], [0.1 * TPOT], full=True)


def new_pace(most: int = MOST) -> AimdLimit:
    return AimdLimit(ttft_seconds=TTFT, tpot_seconds=TPOT, max_limit=most)


@given(st.lists(windows, max_size=60), st.integers(0, 100))
def test_limit_stays_in_bounds_and_grows_only_without_lateness(history: list[LatencyWindow], most: int) -> None:
    limit_control, was_late = new_pace(most), False
    for now, window in enumerate(history):
        before = limit_control.limit
        after = limit_control.on_window(window, float(now))
        assert after == limit_control.limit and 0 <= after <= most
        on_time = not window.others_late and all(s <= TTFT for s in window.ttft) and all(s <= TPOT for s in window.tpot)
        assert after <= before or on_time
        assert after <= before or before == 0 or window.full
        assert after <= before + (1 if was_late else max(before, 1))
        was_late |= after < before


@given(st.lists(windows, max_size=40))
def test_limit_of_a_persistently_late_endpoint_soon_reaches_zero(
    history: list[LatencyWindow],
) -> None:
    limit_control = new_pace()
    for now, window in enumerate(history):
        limit_control.on_window(window, float(now))
    for _ in range(2 * MOST.bit_length() + 1):
        limit_control.on_window(LATE, 40.0)
    assert limit_control.limit == 0
    assert limit_control.on_window(LatencyWindow([], [], full=False), 41.0) == 0


def test_window_after_a_cut_is_ignored() -> None:
    limit_control = new_pace(8)
    assert [limit_control.on_window(CALM, 0.0) for _ in range(3)] == [2, 4, 8]
    assert [
        limit_control.on_window(LATE, 1.0),
        limit_control.on_window(LATE, 2.0),
        limit_control.on_window(CALM, 3.0),
    ] == [4, 4, 5]


def test_exceeded_limit_is_retried_with_exponential_backoff() -> None:
    limit_control, now, tries = new_pace(), 0.0, []
    for _ in range(400):
        before = limit_control.limit
        after = limit_control.on_window(LATE if before else LatencyWindow([], [], full=False), now)
        if before == 0 and after == 1:
            tries.append(now)
        now += 1.0
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert all(later >= earlier for earlier, later in itertools.pairwise(gaps)) and gaps[-1] > 3 * gaps[0]


@given(st.integers(2, MOST - 1), st.floats(0.2, 0.7))
def test_limit_settles_where_the_endpoint_meets_its_budget(knee: int, base_share: float) -> None:
    """The time per token of the endpoint grows with its turns, and exceeds its budget beyond `knee` turns."""
    limit_control, tokens, late_windows = new_pace(), 0, 0
    base = base_share * TPOT
    for now in range(600):
        tpot = base + (TPOT - base) * limit_control.limit / (knee + 0.5)
        full = limit_control.limit > 0
        if now >= 100:
            tokens += limit_control.limit
            late_windows += tpot > TPOT
        limit_control.on_window(LatencyWindow([0.1], [tpot] if full else [], full=full), float(now))
    spare = int((0.8 - base_share) / (1 - base_share) * (knee + 0.5))
    assert tokens / 500 >= min(spare, knee) / 2
    assert late_windows <= 50


def test_lateness_counts_only_buckets_fully_over_the_budget() -> None:
    nothing = {0.1: 0.0, 0.25: 0.0, inf: 0.0}
    assert not exceeds_budget({}, {}, 0.2) and not exceeds_budget(nothing, nothing, 0.2)
    assert not exceeds_budget(nothing, {0.1: 0.0, 0.25: 20.0, inf: 20.0}, 0.2)
    assert not exceeds_budget(nothing, {0.1: 19.0, 0.25: 19.0, inf: 20.0}, 0.2)
    assert exceeds_budget(nothing, {0.1: 18.0, 0.25: 18.0, inf: 20.0}, 0.2)
    before = {0.1: 0.0, 0.25: 0.0, inf: 500.0}
    assert not exceeds_budget(before, {0.1: 10.0, 0.25: 10.0, inf: 510.0}, 0.2)


BASE_SECONDS, TOKEN_SECONDS = 0.008, 0.00005
"""Seconds of an engine step of the endpoint, and of each token in it."""


@given(st.floats(0.0, 0.2), st.integers(0, 2**32 - 1))
def test_network_latency_does_not_raise_the_token_cost(away: float, seed: int) -> None:
    """The requests cross a network, and most compute few tokens; the reported rates are those of the engine."""
    random, rates = Random(seed), TokenRates()
    for _ in range(300):
        running = random.randint(1, 32)
        computed = random.randint(1, 60) if random.random() < 0.9 else random.randint(500, 3000)
        rates.on_first_token(computed, away + BASE_SECONDS + TOKEN_SECONDS * (computed + running))
        rates.on_decoded(BASE_SECONDS + TOKEN_SECONDS * running, running)
    assert 1 / rates.prefill == pytest.approx(TOKEN_SECONDS, rel=0.2)
    for running in (0, 1, 16, 64):
        step = BASE_SECONDS + TOKEN_SECONDS * max(1, running)
        assert 1 / rates.decode(running) == pytest.approx(step, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(0, 65_536), st.floats(0, 600)), max_size=30),
    st.lists(st.tuples(st.floats(0, 600), st.integers(1, 4096)), max_size=30),
    st.integers(0, 4096),
)
def test_step_time_is_at_least_the_time_of_its_tokens(
    first: list[tuple[int, float]], decoded: list[tuple[float, int]], running: int
) -> None:
    rates = TokenRates()
    for computed, seconds in first:
        rates.on_first_token(computed, seconds)
    for seconds, others in decoded:
        rates.on_decoded(seconds, others)
    assert 1e-3 <= rates.decode(running) * max(1, running) <= rates.prefill * (1 + 1e-9) <= 1e12


def test_turn_delivered_in_one_chunk_does_not_raise_the_rate() -> None:
    rates = TokenRates()
    for _ in range(50):
        rates.on_decoded(0.01, 1)
    rates.on_decoded(0.0, 1)
    assert 80 < rates.decode(1) < 200
