"""Lengths of what was trained on against what was asked for."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.report.history import RunHistory, TrajectoryFact, fold_history
from rose.pipeline.report.length_bias import estimated_mean, length_bias, length_sentence
from rose.schemas.arrays import pack_tokens
from rose.schemas.samples import Ending, Sample
from rose.schemas.turns import TurnOutcome, TurnResult
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


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.8), (0.8, 0.6), (1.0, 0.3)])
def test_asked_mean_is_a_lower_bound_however_unlike_the_groups_are(between: float, within: float) -> None:
    draw = random.Random(7)
    facts, true = [], []
    for number in range(300):
        typical = draw.gauss(5.5, between)
        group = sorted(round(draw.lognormvariate(typical, within)) for _ in range(20))
        true += group
        facts += [fact(f"g{number}", index, min(length, group[15]), index > 15) for index, length in enumerate(group)]
    bias = length_bias(RunHistory(trajectories=facts))
    assert bias is not None and bias.asked_at_least
    assert 1.02 * bias.finished_mean < bias.asked_mean < sum(true) / len(true)


def fact(group: str, index: int, tokens: int, surplus: bool) -> TrajectoryFact:
    return TrajectoryFact(
        trajectory_id=f"{group}:{index}",
        group_id=group,
        reward=None if surplus else 1.0,
        success=None,
        failure="",
        turns=1,
        sampled_tokens=tokens,
        first_version=0,
        completed_at=0.0,
        surplus=surplus,
    )


def test_surplus_trajectory_has_the_tokens_of_the_turn_that_was_stopped() -> None:
    """The sample of a surplus trajectory of one turn has no sampled token."""
    ended = [sample(index=index, tokens=[1] * (tokens + 1), reward=1.0) for index, tokens in enumerate((10, 20))]
    surplus = sample(index=2, tokens=[1], mask=[0], reward=None, ended=Ending.SURPLUS)
    stopped = [
        TurnResult(
            trajectory_id="g:2",
            group_id="g",
            home=0,
            turn=0,
            attempt=attempt,
            outcome=TurnOutcome.PREEMPTED,
            tokens=pack_tokens([1] * tokens),
        )
        for attempt, tokens in enumerate((8, 20))
    ]
    bias = length_bias(fold_history([*ended, surplus, *stopped]))
    assert bias is not None and (bias.finished_mean, bias.asked_at_least) == (15.0, True)
    assert bias.asked_mean == pytest.approx((10 + 20 + 20) / 3)


def test_run_with_surplus_trajectories_says_how_much_shorter_its_samples_are() -> None:
    def taken(index: int, tokens: int, ended: Ending) -> Sample:
        reward = None if ended is Ending.SURPLUS else 1.0
        return sample(index=index, tokens=[1] * (tokens + 1), reward=reward, ended=ended)

    records = [taken(0, 2, Ending.DONE), taken(1, 3, Ending.SURPLUS), taken(2, 4, Ending.DONE)]
    bias = length_bias(fold_history(records))
    assert bias is not None and (bias.surplus, bias.finished_mean) == (1, 3.0)
    assert length_sentence(bias).endswith("3 sampled tokens on average, all together would have had 3 (-10%).")
    assert length_bias(fold_history(records[:1])) is None
