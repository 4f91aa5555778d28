"""The learning-rate schedule: its shape, and equal rates of a resumed and an uninterrupted run."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.trainer.checkpoint import Checkpoints
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.optimizer import learning_rate_ratio, make_schedule
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, select_groups
from tests.support.trainer_fixtures import (
    FAILED_GROUP,
    FILTERED_GROUP,
    GROUPS,
    group_name,
    make_policy,
    make_samples,
    save_first_version,
)

FIELDS = {
    "learning_rate_warmup_steps": st.integers(0, 5),
    "learning_rate_decay_steps": st.integers(1, 8),
    "learning_rate_floor_ratio": st.floats(0, 1),
    "learning_rate_schedule": st.sampled_from(["linear", "cosine"]),
}
CONFIGS = st.fixed_dictionaries(FIELDS).map(lambda fields: config_of(**fields))


def config_of(**change: Any) -> TrainerConfig:
    return TrainerConfig(model_folder=Path("model"), run_folder=Path("run"), **change)


def rates_of(config: TrainerConfig, *, steps: int, after: int = 0) -> list[float]:
    """Return the learning rates of some steps of a run that starts or resumes after a number of steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.123)
    schedule = make_schedule(optimizer, config, steps=after)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert schedule.last_epoch == after + steps
    return rates


@pytest.mark.parametrize(
    ("change", "ratios"),
    [
        ({}, [1, 1, 1]),
        ({"learning_rate_warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        ({"learning_rate_schedule": "linear", "learning_rate_decay_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        (
            {
                "learning_rate_schedule": "linear",
                "learning_rate_warmup_steps": 1,
                "learning_rate_decay_steps": 2,
                "learning_rate_floor_ratio": 0.5,
            },
            [0.5, 1, 0.75, 0.5, 0.5],
        ),
        ({"learning_rate_schedule": "cosine", "learning_rate_decay_steps": 2}, [1, 0.5, 0, 0]),
        (
            {"learning_rate_schedule": "cosine", "learning_rate_decay_steps": 3, "learning_rate_floor_ratio": 0.2},
            [1, 0.8, 0.4, 0.2, 0.2],
        ),
    ],
)
def test_schedule_has_the_documented_shape(change: dict[str, Any], ratios: list[float]) -> None:
    config = config_of(learning_rate=0.01, **change)
    expected = [0.01 * ratio for ratio in ratios]
    assert rates_of(config, steps=len(ratios)) == pytest.approx(expected, abs=1e-15)


@given(CONFIGS, st.integers(0, 20))
def test_resumed_schedule_has_the_rates_of_an_uninterrupted_schedule(config: TrainerConfig, after: int) -> None:
    assert rates_of(config, steps=5, after=after) == rates_of(config, steps=after + 5)[after:]


@given(CONFIGS, st.integers(0, 30))
def test_ratio_stays_between_floor_and_one_once_the_warm_up_is_over(config: TrainerConfig, steps: int) -> None:
    lowest = config.learning_rate_floor_ratio if steps >= config.learning_rate_warmup_steps else 0.0
    assert lowest <= learning_rate_ratio(config, steps) <= 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"learning_rate_schedule": "step"}, "learning_rate_schedule must be constant, linear or cosine"),
        (
            {"learning_rate_schedule": "linear"},
            "learning_rate_decay_steps must be above 0 if learning_rate_schedule is",
        ),
        ({"learning_rate_decay_steps": 5}, "learning_rate_decay_steps must be 0 if learning_rate_schedule is constant"),
        ({"learning_rate_floor_ratio": 1.5}, "learning_rate_floor_ratio must be from 0 to 1"),
        ({"algorithm": ""}, "algorithm must be"),
    ],
)
def test_inconsistent_settings_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(**change)


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("tiny") / "policy")


def steps_of(numbers: list[int]) -> list[list[SelectedGroup]]:
    """Return steps of one group each."""
    samples = sorted(make_samples(), key=lambda one: one.trajectory_id)
    rules = SelectionRules(max_staleness=100, vocabulary=40, context_tokens=64)
    return [
        select_groups(
            [CompleteGroup(name, tuple(one for one in samples if one.group_id == name))], version=1, rules=rules
        )
        for name in map(group_name, numbers)
    ]


def train(learner: Learner, steps: list[list[SelectedGroup]]) -> list[float]:
    """Return the learning rates of these steps."""
    return [learner.learn(copy.copy(groups), 1)[1].learning_rate for groups in steps]


def weights_of(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


def test_checkpoint_restores_the_schedule_and_new_settings_apply_from_its_step_on(
    policy_folder: Path, tmp_path: Path
) -> None:
    """The filtered group gives an uncounted step."""
    config = TrainerConfig(
        model_folder=policy_folder,
        run_folder=tmp_path,
        learning_rate=1e-2,
        learning_rate_warmup_steps=2,
        learning_rate_schedule="linear",
        learning_rate_decay_steps=6,
    )
    first = steps_of([0, FILTERED_GROUP, 1, 3])
    rest = steps_of([number for number in range(4, GROUPS) if number != FAILED_GROUP])
    whole, cut = Learner(config), Learner(config)
    assert train(whole, first) == train(cut, first)
    progress = save_first_version(cut, Checkpoints(tmp_path, None))
    assert progress.schedule_steps == 3
    resumed = Learner(config)
    resumed.restore(Checkpoints(tmp_path, None), progress)
    assert train(resumed, rest) == train(whole, rest)
    assert torch.equal(weights_of(resumed), weights_of(whole)) and resumed.schedule_steps == whole.schedule_steps
    changed = Learner(replace(config, learning_rate=0.5, learning_rate_warmup_steps=0, learning_rate_floor_ratio=0.1))
    changed.restore(Checkpoints(tmp_path, None), progress)
    assert train(changed, rest[:2]) == pytest.approx([0.5 * (0.1 + 0.9 * 3 / 6), 0.5 * (0.1 + 0.9 * 2 / 6)])
