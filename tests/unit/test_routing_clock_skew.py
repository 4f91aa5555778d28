"""A wrong clock is logged, and a late heartbeat is not taken for a wrong clock."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.routing.liveness import (
    MAX_SKEW_SECONDS,
    SKEW_FORGET_SECONDS,
    SKEW_WARNING_SECONDS,
    SKEW_WINDOW_SECONDS,
    ClockSkews,
)


@given(
    ahead=st.floats(-1e6, 1e6).filter(lambda ahead: abs(abs(ahead) - MAX_SKEW_SECONDS) > 0.1),
    delays=st.lists(st.floats(0.0, 60.0), min_size=1, max_size=20),
)
def test_clock_skew_is_the_minimum_difference_of_a_window(ahead: float, delays: list[float]) -> None:
    skews, now = ClockSkews(), 1000.0
    for number, delay in enumerate([*delays, 0.0]):
        assert skews.on_heartbeat("w0", now + ahead - delay, now + number / 100) is None
    skew = skews.on_heartbeat("w0", now + ahead, now + SKEW_WINDOW_SECONDS)
    assert abs(skews.seconds["w0"] + ahead) < 0.3
    assert (skew is not None) == (abs(ahead) > MAX_SKEW_SECONDS) or abs(abs(ahead) - MAX_SKEW_SECONDS) < 0.3


def test_wrong_clock_is_logged_once_a_minute() -> None:
    skews = ClockSkews()
    skew = [now for now in range(600) if skews.on_heartbeat("w0", now + 100.0, float(now)) is not None]
    assert skew[0] <= SKEW_WINDOW_SECONDS and len(skew) <= 600 / SKEW_WARNING_SECONDS
    assert all(later - earlier >= SKEW_WARNING_SECONDS for earlier, later in pairwise(skew))


def test_gone_executor_is_no_longer_logged_and_keeps_no_state() -> None:
    skews = ClockSkews()
    for now in range(2 * int(SKEW_FORGET_SECONDS + SKEW_WINDOW_SECONDS)):
        skews.on_heartbeat("stays", float(now), float(now))
        skews.on_heartbeat(f"stranger-{now}", 0.0, float(now))
        if now < SKEW_FORGET_SECONDS:
            skews.on_heartbeat("left", now - 100.0, float(now))
        if now == SKEW_FORGET_SECONDS:
            assert skews.seconds["left"] == 100.0
    assert skews.seconds == {"stays": 0.0}
    assert len(skews._windows) <= SKEW_FORGET_SECONDS + 2 * SKEW_WINDOW_SECONDS
