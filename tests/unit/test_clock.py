"""The monotonic clock in unix seconds, and timestamps in messages."""

import time

from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.clock import format_utc, steady_clock


def test_monotonic_seconds_are_unix_seconds() -> None:
    clock = steady_clock()
    assert abs(clock() - time.time()) < 1.0 and clock() <= clock()


@given(st.floats())
def test_any_message_timestamp_can_be_formatted(seconds: float) -> None:
    assert format_utc(seconds)
