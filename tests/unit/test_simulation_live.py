"""The simulation of a live run has the turns and contexts of the live run, whatever its times."""

from pathlib import Path

import pytest

from bench.fleet.arms import RATES
from bench.simulation_live import Figures, differences, live_of, simulate
from rose.schemas.samples import Sample
from tests.support.sample_fixtures import sample

GROUPS, GROUP_SIZE, EXECUTORS = 3, 4, 2


def trajectory(group: int, index: int) -> Sample:
    """Return a sample of two or three turns, with a prompt of five tokens."""
    mask = [0] * 5 + [1] * (3 + index) + [0] * 4 + [1] * 2 + [0, 1] * (group % 2)
    return sample(f"g{group}", index, size=GROUP_SIZE, tokens=[1] * len(mask), mask=mask)


def test_simulation_of_a_live_run_has_the_turns_and_contexts_of_the_live_run(tmp_path: Path) -> None:
    samples = [trajectory(group, index) for group in range(GROUPS) for index in range(GROUP_SIZE)]
    live = live_of(samples)
    simulated = simulate(live, RATES, EXECUTORS, tmp_path)
    assert sum(simulated.turns) == sum(live.figures.turns) == sum(len(each.turns) for each in samples)
    assert simulated.context_tokens == live.figures.context_tokens
    assert 0 < simulated.cached_tokens < simulated.context_tokens


def test_differences_are_relative_to_the_live_run_and_count_each_moved_turn_once() -> None:
    live = Figures(seconds=10.0, turns=[4, 6], cached_tokens=50, context_tokens=100)
    assert set(differences(live, live).values()) == {0.0}
    simulated = Figures(seconds=11.0, turns=[10], cached_tokens=40, context_tokens=100)
    assert differences(live, simulated) == pytest.approx({"rollout": 0.1, "workers": 0.4, "cached": -0.2})
