"""Learned rates: the speed of executors, and the length of turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.routing.candidates import (
    BUCKETS_PER_OCTAVE,
    TURN_BUCKETS_PER_OCTAVE,
    RateBucket,
    engine_step_rate,
    rate_bucket,
    turn_bucket,
)
from rose.pipeline.routing.turn import TRACKED_ENVIRONMENTS, LengthsByEnvironment, OutputLengths
from rose.schemas.heartbeats import Hardware, Tenant
from tests.support.routing_fixtures import heartbeat

RATES = st.floats(1e-3, 1e12)
STEP = 2 ** (1 / BUCKETS_PER_OCTAVE)


@given(st.lists(RATES, min_size=1, max_size=20))
def test_learned_rate_is_within_one_bucket_of_the_newest_reading(rates: list[float]) -> None:
    bucket: RateBucket | None = None
    for rate in rates:
        before, bucket = bucket, rate_bucket(rate, bucket)
        assert 1 / STEP - 1e-9 <= bucket.token_seconds * rate <= STEP + 1e-9
        if before is not None and before.min_rate <= rate <= before.max_rate:
            assert bucket is before, "a reading within a step changes nothing"


@given(RATES, st.lists(st.floats(0.95, 1.05), max_size=50))
def test_noise_changes_no_rate_bucket(rate: float, noise: list[float]) -> None:
    first = rate_bucket(rate, None)
    bucket = first
    for factor in noise:
        bucket = rate_bucket(min(1e12, rate * factor), bucket)
    assert bucket is first


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.integers(0, 256))
def test_engine_speed_does_not_depend_on_the_load_when_measured(
    base_seconds: float, token_seconds: float, running: int
) -> None:
    step_seconds = base_seconds + token_seconds * max(1, running)
    hardware = Hardware(prefill_tokens_per_second=1 / token_seconds, decode_tokens_per_second=1 / step_seconds)
    found = 1 / engine_step_rate(heartbeat(0, hardware=hardware, rollout=Tenant(running=running)))
    assert found == pytest.approx(max(base_seconds, token_seconds), rel=1e-6)


@given(RATES, RATES, st.integers(0, 4096))
def test_step_time_is_positive_for_any_measurement(prefill: float, decode: float, running: int) -> None:
    hardware = Hardware(prefill_tokens_per_second=prefill, decode_tokens_per_second=decode)
    rate = engine_step_rate(heartbeat(0, hardware=hardware, rollout=Tenant(running=running)))
    assert 0 < rate <= prefill * (1 + 1e-9)


@given(st.integers(1, 4096))
def test_turn_bucket_is_accurate_to_half_a_step_and_monotonic(turns: int) -> None:
    half = 2 ** (0.5 / TURN_BUCKETS_PER_OCTAVE)
    assert 1 / half - 1e-9 <= turn_bucket(turns) / turns <= half + 1e-9
    assert turn_bucket(turns) <= turn_bucket(turns + 1)
    assert turn_bucket(0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 511), st.integers(0, 600), st.integers(1, 500)), max_size=60))
def test_expected_length_of_a_turn_is_between_one_token_and_its_limit(
    seen: list[tuple[int, int, int]],
) -> None:
    lengths = OutputLengths()
    for turn, tokens, most in seen:
        lengths.record(turn, tokens, most)
        for each in (0, turn, 511):
            assert 1 <= lengths.expected(each, most) <= max(1, most) + 1e-9


def test_length_of_each_turn_number_is_learned_separately() -> None:
    lengths = OutputLengths()
    assert lengths.expected(0, 100) == 100.0, "before the first result: all that it may"
    for _ in range(50):
        lengths.record(0, 10, 100)
        lengths.record(1, 80, 100)
    assert round(lengths.expected(0, 100)) == 10 and round(lengths.expected(1, 200)) == 160
    assert round(lengths.expected(2, 100)) == 80, "what was not seen yet is taken for like what was seen last"


def test_environments_are_learned_separately_up_to_a_bound() -> None:
    lengths = LengthsByEnvironment()
    for number in range(3 * TRACKED_ENVIRONMENTS):
        lengths.for_environment(f"e{number}").record(0, number % 100, 100)
    assert (
        round(lengths.for_environment("e10").expected(0, 100)) == 10
        and round(lengths.for_environment("e20").expected(0, 100)) == 20
    )
    assert (
        lengths.for_environment("one more")
        is lengths.for_environment(f"e{TRACKED_ENVIRONMENTS}")
        is not lengths.for_environment("e10")
    )
