"""Advantages of the menu against their definitions written out, and against numbers of verl and TRL."""

import math
import statistics
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rose.schemas.samples import Ending
from rose.workers.trainer.algorithms import TrainingSample, make_algorithm, step_advantages
from rose.workers.trainer.algorithms.advantages import (
    DEVIATION_EPSILON,
    RewardedGroup,
    batch_normalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    likelihood_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
)
from rose.workers.trainer.algorithms.combined import overlong_penalty
from rose.workers.trainer.config import TrainerConfig
from tests.support.trainer_fixtures import make_samples

BINARY = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9)
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, -1.0, 2.5]), min_size=2, max_size=8)
GROUPS = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 5)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)
"""Rewards with numbers of sampled tokens."""


def config_of(**change: Any) -> TrainerConfig:
    return TrainerConfig(model_folder=Path("model"), run_folder=Path("run"), **change)


def sample_of(reward: float, tokens: int = 2, *, truncated: bool = False) -> TrainingSample:
    """Return a sample with `tokens` sampled tokens after an observed one."""
    size = tokens + 1
    return TrainingSample(
        tokens=[0] * size,
        loss_mask=[0, *[1] * tokens],
        behaviour_logprobs=[-1.0] * size,
        temperatures=[1.0] * size,
        reward=reward,
        truncated=truncated,
    )


def rewarded(groups: Sequence[Sequence[tuple[float, int]]]) -> list[RewardedGroup]:
    return [RewardedGroup([reward for reward, _ in group], [tokens for _, tokens in group]) for group in groups]


def differ(rewards: Sequence[float]) -> bool:
    return max(rewards) > min(rewards)


@given(REWARDS)
def test_maxrl_is_the_distance_from_the_mean_over_the_mean(rewards: list[float]) -> None:
    mean = statistics.fmean(rewards)
    defined = mean > 0 and differ(rewards)
    expected = [(reward - mean) / mean if defined else 0.0 for reward in rewards]
    assert likelihood_advantages(rewards) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_expected_maxrl_gradient_is_that_of_the_truncated_log_likelihood(size: int, probability: float) -> None:
    """A policy succeeds with probability p = sigmoid(t), so the score of a sample is its reward minus p."""
    expected = 0.0
    for drawn in product((0.0, 1.0), repeat=size):
        weight = math.prod(probability if one else 1 - probability for one in drawn)
        scores = zip(likelihood_advantages(drawn), drawn, strict=True)
        expected += weight * sum(advantage * (one - probability) for advantage, one in scores) / size
    # log p = -sum of (1 - p)^k / k; dp/dt = p (1 - p)
    slope = sum((1 - probability) ** (k - 1) for k in range(1, size)) * probability * (1 - probability)
    assert expected == pytest.approx(slope)


@given(REWARDS, st.integers(1, 6))
def test_pass_at_k_is_the_mean_over_all_subsets_that_have_the_sample(rewards: list[float], k: int) -> None:
    subsets = [*combinations(range(len(rewards)), k)]
    best = [max(rewards[place] for place in subset) for subset in subsets]
    expected = [0.0] * len(rewards)
    if len(rewards) > k and differ(best):
        mean, deviation = statistics.fmean(best), statistics.pstdev(best) + DEVIATION_EPSILON
        for place in range(len(rewards)):
            own = [(one - mean) / deviation for one, subset in zip(best, subsets, strict=True) if place in subset]
            expected[place] = statistics.fmean(own)
    assert pass_at_k_advantages(rewards, k=k) == pytest.approx(expected, abs=1e-9)


@given(BINARY, st.integers(1, 6))
def test_pass_at_k_of_binary_rewards_is_the_closed_form_of_the_paper(rewards: list[float], k: int) -> None:
    size, failures = len(rewards), rewards.count(0.0)
    assume(size > k and k <= failures < size)
    mean = 1 - math.comb(failures, k) / math.comb(size, k)
    deviation = math.sqrt(mean * (1 - mean)) + DEVIATION_EPSILON
    failed = 1 - mean - math.comb(failures - 1, k - 1) / math.comb(size - 1, k - 1)
    expected = [(1 - mean if reward else failed) / deviation for reward in rewards]
    assert pass_at_k_advantages(rewards, k=k) == pytest.approx(expected)


def test_pass_at_k_of_a_large_group_is_finite() -> None:
    advantages = pass_at_k_advantages([0.0] * 4000 + [1.0] * 96, k=64)
    assert all(map(math.isfinite, advantages)) and advantages[-1] > 0 > advantages[0]


@given(GROUPS)
def test_batch_normalised_divides_by_the_deviation_of_all_rewards(groups: list[list[tuple[float, int]]]) -> None:
    every = [reward for group in groups for reward, _ in group]
    unit = statistics.pstdev(every) + DEVIATION_EPSILON
    for group, found in zip(groups, batch_normalised_advantages(rewarded(groups)), strict=True):
        mean = statistics.fmean(reward for reward, _ in group)
        assert found == pytest.approx([(reward - mean) / unit for reward, _ in group], abs=1e-9)


@given(GROUPS, st.booleans())
def test_reinforce_plus_plus_whitens_over_tokens(groups: list[list[tuple[float, int]]], baseline: bool) -> None:
    def centred(group: list[tuple[float, int]]) -> list[float]:
        mean = statistics.fmean(reward for reward, _ in group) if baseline else 0.0
        return [reward - mean for reward, _ in group]

    of_tokens = [
        value
        for group in groups
        for value, (_, tokens) in zip(centred(group), group, strict=True)
        for _ in range(tokens)
    ]
    mean, unit = statistics.fmean(of_tokens), statistics.pstdev(of_tokens) + DEVIATION_EPSILON
    for group, found in zip(groups, reinforce_plus_plus_advantages(rewarded(groups), baseline=baseline), strict=True):
        expected = [(value - mean) / unit for value in centred(group)]
        assert found == pytest.approx(expected, abs=1e-9)


RECORDED = RewardedGroup([1.0, 0.0, 0.25], [4, 2, 3]), RewardedGroup([0.5, 0.5, 2.0], [1, 4, 2])


def stretched(found: Sequence[float], deviation: float, theirs: float) -> list[float]:
    """Return advantages as they are over another deviation: verl and TRL estimate that of a population."""
    return [one * (deviation + DEVIATION_EPSILON) / theirs for one in found]


def test_advantages_are_those_of_verl() -> None:
    """The numbers are those of verl 0.9.1, `verl.trainer.ppo.core_algos`, for RECORDED."""
    first, second = (group.rewards for group in RECORDED)
    mean = [group_advantages(group, scale_by_deviation=False) for group in (first, second)]
    assert mean == [pytest.approx([0.583333333, -0.416666667, -0.166666667]), pytest.approx([-0.5, -0.5, 1.0])]
    loo = [leave_one_out_advantages(group) for group in (first, second)]
    assert loo == [pytest.approx([0.875, -0.625, -0.25]), pytest.approx([-0.75, -0.75, 1.5])]
    for rewards, numbers in (
        (first, [1.120894923, -0.800639231, -0.320255692]),
        (second, [-0.577349603, -0.577349603, 1.154699205]),
    ):
        found = group_advantages(rewards, scale_by_deviation=True)
        theirs = statistics.stdev(rewards) + 1e-6
        assert stretched(found, statistics.pstdev(rewards), theirs) == pytest.approx(numbers, abs=1e-8)


@pytest.mark.parametrize(
    ("baseline", "numbers"),
    [
        (False, [0.489058728, -1.158296985, -0.746458057, -0.334619129, -0.334619129, 2.136414442]),
        (True, [0.953755856, -0.773801921, -0.341912477, -0.917765069, -0.917765069, 1.673571596]),
    ],
)
def test_reinforce_plus_plus_is_that_of_verl(baseline: bool, numbers: list[float]) -> None:
    """The numbers are those of verl 0.9.1 for RECORDED."""
    found = [one for group in reinforce_plus_plus_advantages(RECORDED, baseline=baseline) for one in group]
    values = [
        reward - (statistics.fmean(group.rewards) if baseline else 0.0)
        for group in RECORDED
        for reward, tokens in zip(group.rewards, group.tokens, strict=True)
        for _ in range(tokens)
    ]
    theirs = math.sqrt(statistics.variance(values) + 1e-8)
    assert stretched(found, statistics.pstdev(values), theirs) == pytest.approx(numbers, abs=1e-8)


def test_batch_normalised_is_that_of_trl() -> None:
    """The numbers are those of `scale_rewards = "batch"` of TRL 1.16.0 for RECORDED."""
    found = [one for group in batch_normalised_advantages(RECORDED) for one in group]
    rewards = [*RECORDED[0].rewards, *RECORDED[1].rewards]
    numbers = [0.816382311, -0.583130222, -0.233252089, -0.699756267, -0.699756267, 1.399512533]
    theirs = statistics.stdev(rewards) + 1e-4
    assert stretched(found, statistics.pstdev(rewards), theirs) == pytest.approx(numbers, abs=1e-8)


def test_maxrl_is_that_of_skyrl() -> None:
    """The numbers are those of `compute_maxrl_advantage` of SkyRL 0.3.0, which adds 1e-6 to the mean, for RECORDED."""
    found = [likelihood_advantages(group.rewards) for group in RECORDED]
    numbers = [[1.39999664, -0.9999976, -0.39999904], [-0.4999995, -0.4999995, 0.999999]]
    assert found == [pytest.approx(numbers[0], abs=4e-6), pytest.approx(numbers[1], abs=4e-6)]


def test_advantage_over_the_step_reaches_every_group_in_its_order() -> None:
    algorithm = make_algorithm(config_of(algorithm="lite_ppo"))
    groups = [[sample_of(0.0), sample_of(1.0)], [sample_of(0.0), sample_of(10.0)]]
    small, large = step_advantages(algorithm, groups)
    assert large == pytest.approx([10 * one for one in small])
    alone = step_advantages(algorithm, groups[:1])[0]
    assert alone[1] > small[1], "without the other group the deviation is smaller"


@pytest.mark.parametrize(
    ("tokens", "truncated", "taken"),
    [(6, False, 0.0), (7, False, 0.125), (9, False, 0.375), (10, False, 0.5), (11, False, 0.5), (2, True, 0.5)],
)
def test_overlong_penalty_grows_over_the_buffer(tokens: int, truncated: bool, taken: float) -> None:
    config = config_of(overlong_penalty=0.5, overlong_tokens=10, overlong_buffer_tokens=4)
    assert overlong_penalty(sample_of(1.0, tokens, truncated=truncated), config) == pytest.approx(taken)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 30))
def test_overlong_penalty_is_the_piecewise_definition(tokens: int, most: int, buffer: int) -> None:
    assume(buffer <= most)
    config = config_of(overlong_penalty=1.0, overlong_tokens=most, overlong_buffer_tokens=buffer)
    if tokens <= most - buffer:
        expected = 0.0
    elif tokens <= most:
        expected = -((most - buffer) - tokens) / buffer
    else:
        expected = 1.0
    assert overlong_penalty(sample_of(1.0, tokens), config) == pytest.approx(expected)


@pytest.mark.parametrize("ended", Ending)
def test_sample_that_ended_by_a_limit_is_truncated(ended: Ending) -> None:
    record = msgspec.structs.replace(make_samples()[0], reward=1.0, ended=ended)
    assert TrainingSample.of(record).truncated is (ended in (Ending.MAX_TURNS, Ending.CONTEXT))


def test_overlong_sample_has_a_lower_advantage_than_an_equal_short_one() -> None:
    algorithm = make_algorithm(config_of(algorithm="dapo", overlong_penalty=0.5))
    short, cut, wrong = algorithm.advantages([sample_of(1.0), sample_of(1.0, truncated=True), sample_of(0.0)])
    assert short > cut > wrong
