"""The configurations of trainer, weights and executors refuse inconsistent values."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.workers.executor.config import ExecutorConfig
from rose.workers.trainer.config import TrainerConfig
from rose.workers.weights.config import WeightsConfig


def config(**change: Any) -> TrainerConfig:
    return TrainerConfig(model_folder=Path("model"), run_folder=Path("runs/demo"), **change)


def test_checkpoints_are_in_the_run_folder_by_default() -> None:
    assert config().checkpoints == Path("runs/demo/checkpoints")
    assert config(checkpoint_folder=Path("far")).checkpoints == Path("far")


@pytest.mark.parametrize(
    "change",
    [
        {"groups_per_step": 0},
        {"total_groups": -1},
        {"clip_low": 1.5},
        {"clip_high": 0.9},
        {"threads": 0},
        {"truncated": "drop"},
    ],
)
def test_value_out_of_range_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        config(**change)


def test_bound_of_the_ratio_says_what_the_ratio_is() -> None:
    with pytest.raises(ValueError, match=r"clip_high must be from 1 to 1e\+12: it is a ratio, 1 \+ epsilon"):
        config(clip_high=0.28)


SECTIONS: dict[type, dict[str, Any]] = {
    TrainerConfig: {"model_folder": Path("model"), "run_folder": Path("runs/demo")},
    WeightsConfig: {},
    ExecutorConfig: {"model_folder": Path("model")},
}
"""Required settings of each configuration."""


def numbers_of(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section) if field.type in (int, float, int | None, float | None)]


NUMBERS = [(section, name) for section in SECTIONS for name in numbers_of(section)]


@pytest.mark.parametrize(("section", "name"), NUMBERS, ids=[f"{section.__name__}.{name}" for section, name in NUMBERS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 1e300, 2**70])
def test_every_number_has_both_bounds(section: Any, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        section(**SECTIONS[section], **{name: value})


def test_every_accepted_seed_is_valid_for_torch() -> None:
    for seed in (0, 2**63 - 1):
        torch.manual_seed(config(seed=seed).seed)
    with pytest.raises(ValueError, match=r"seed must be from 0 to 2\^63 - 1"):
        config(seed=2**63)


@pytest.mark.parametrize(
    "change",
    [
        {"max_turns": 0},
        {"max_turns": 4097},
        {"max_model_len": 1},
        {"heartbeat_seconds": 0.3},
        {"heartbeat_seconds": 0.0},
    ],
)
def test_executor_with_settings_beyond_the_heartbeat_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        ExecutorConfig(model_folder=Path("model"), **change)
