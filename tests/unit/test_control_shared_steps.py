"""The work that one more executor adds to turns that share steps."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rose.pipeline.control.shared_steps import SharedSteps, StepShare

SHARE = st.builds(StepShare, st.floats(0.001, 0.1), st.floats(1e-5, 0.01), st.integers(1, 64))
UNLIMITED = st.builds(StepShare, st.floats(0.001, 0.1), st.floats(1e-5, 0.01), st.just(math.inf))
COUNT = st.integers(1, 40)


@given(UNLIMITED, COUNT, st.integers(0, 2000))
def test_gain_of_an_equal_executor_is_the_part_of_a_step_that_its_turns_add(
    share: StepShare, executors: int, turns: int
) -> None:
    gain = SharedSteps([share] * executors, turns).gain(share)
    if turns <= executors:
        assert gain == 0.0
    elif turns > executors + 1:
        added = share.turn_seconds * turns / (executors + 1)
        assert gain == pytest.approx(added / (share.base_seconds + added), rel=1e-6, abs=1e-9)


@given(st.lists(SHARE, min_size=1, max_size=8), SHARE, st.integers(0, 500))
def test_additional_executor_never_makes_steps_longer(shares: list[StepShare], more: StepShare, turns: int) -> None:
    steps = SharedSteps(shares, turns)
    before = steps.step_seconds
    steps.add(more)
    assert steps.step_seconds <= before * (1 + 1e-9)


@given(UNLIMITED, COUNT, st.integers(0, 500))
def test_each_further_equal_executor_adds_no_more(share: StepShare, executors: int, turns: int) -> None:
    steps, gains = SharedSteps([share] * executors, turns), list[float]()
    for _ in range(4):
        gains.append(steps.gain(share))
        steps.add(share)
    assert all(later <= gain * (1 + 1e-6) + 1e-6 for gain, later in pairwise(gains))


@given(st.lists(SHARE, min_size=1, max_size=8), SHARE, st.integers(0, 500))
def test_gain_before_an_executor_is_added_is_lost_with_its_removal(
    shares: list[StepShare], more: StepShare, turns: int
) -> None:
    steps = SharedSteps(shares, turns)
    gain = steps.gain(more)
    steps.add(more)
    assert steps.lost_gain(more) == pytest.approx(gain, rel=1e-6, abs=1e-6)


@given(st.lists(SHARE, min_size=1, max_size=8), st.integers(0, 500))
def test_steps_that_hold_turns_take_equally_long_and_hold_all_turns(shares: list[StepShare], turns: int) -> None:
    steps = SharedSteps(shares, turns)
    held = (max(0.0, steps.step_seconds - each.base_seconds) / each.turn_seconds for each in shares)
    assert sum(held) == pytest.approx(turns, rel=1e-6, abs=1e-3)


@given(SHARE, COUNT, st.integers(0, 500))
def test_executor_that_is_slower_without_turns_than_the_others_with_theirs_adds_nothing(
    share: StepShare, executors: int, turns: int
) -> None:
    steps = SharedSteps([share] * executors, turns)
    assume(steps.step_seconds > 0)
    assert steps.gain(StepShare(steps.step_seconds, share.turn_seconds)) == 0.0


def test_faster_executor_adds_nothing_to_turns_with_an_executor_each() -> None:
    slow, fast = StepShare(0.02, 0.001), StepShare(0.005, 0.001)
    assert SharedSteps([slow] * 4, 4).gain(fast) == 0.0 < SharedSteps([slow] * 4, 5).gain(fast)


def test_executor_for_few_turns_adds_less() -> None:
    steps = SharedSteps([StepShare(0.008, 0.0005)] * 2, 32)
    gains = [steps.gain(StepShare(0.008, 0.0005, most)) for most in (1, 4, 8, 16)]
    assert gains == sorted(gains) and gains[0] < gains[2] / 4 and gains[3] == pytest.approx(0.4)


def test_turns_without_executors_gain_nothing() -> None:
    steps = SharedSteps([], 9)
    assert steps.step_seconds == math.inf and steps.gain(StepShare(0.01, 0.001)) == 0.0
