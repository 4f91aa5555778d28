"""Lengths of what was trained on against what was asked for."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.report.history import fold_history
from rose.pipeline.report.length_bias import estimated_mean, length_bias, length_sentence
from rose.schemas.samples import Ending, Sample
from tests.support.sample_fixtures import sample

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=40)


@given(LENGTHS)
def test_mean_of_trajectories_that_all_ended_is_their_mean(lengths: list[int]) -> None:
    mean, at_least = estimated_mean(lengths, [])
    assert mean == pytest.approx(sum(lengths) / len(lengths)) and not at_least


@given(LENGTHS, LENGTHS)
def test_mean_lies_between_the_lengths_at_the_cut_and_the_longest(ended: list[int], cut: list[int]) -> None:
    mean, at_least = estimated_mean(ended, cut)
    assert sum(ended + cut) / len(ended + cut) <= mean + 1e-9
    assert mean <= max(ended + cut) + 1e-9
    assert at_least == (max(cut) >= max(ended))


def test_known_estimate() -> None:
    assert estimated_mean([2, 4], [3]) == (pytest.approx(2 + 2 / 3 * 2), False)


def test_estimate_finds_the_mean_of_groups_whose_longest_members_were_cut() -> None:
    draw = random.Random(7)
    ended, cut, true = [], [], []
    for _ in range(400):
        group = sorted(round(draw.lognormvariate(5.0, 0.8)) for _ in range(20))
        true += group
        ended += group[:16]
        cut += [group[15]] * 4
    mean, at_least = estimated_mean(ended, cut)
    asked, trained = sum(true) / len(true), sum(ended) / len(ended)
    assert trained < 0.75 * asked, "what ended first is shorter"
    assert at_least or abs(mean / asked - 1) < 0.05
    assert mean > 0.85 * asked


def test_run_with_surplus_trajectories_says_how_much_shorter_its_samples_are() -> None:
    def taken(index: int, tokens: int, ended: Ending) -> Sample:
        reward = None if ended is Ending.SURPLUS else 1.0
        return sample(index=index, tokens=[1] * (tokens + 1), reward=reward, ended=ended)

    records = [taken(0, 2, Ending.DONE), taken(1, 3, Ending.SURPLUS), taken(2, 4, Ending.DONE)]
    bias = length_bias(fold_history(records))
    assert bias is not None and (bias.surplus, bias.finished_mean) == (1, 3.0)
    assert length_sentence(bias).endswith("3 sampled tokens on average, all together would have had 3 (-10%).")
    assert length_bias(fold_history(records[:1])) is None
