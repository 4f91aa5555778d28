"""The trainer's configuration refuses what makes no sense."""

from pathlib import Path
from typing import Any

import pytest

from workers.trainer.config import TrainerConfig


def config(**change: Any) -> TrainerConfig:
    return TrainerConfig(model_folder=Path("model"), run_folder=Path("runs/demo"), **change)


def test_checkpoints_lie_in_the_run_unless_said_otherwise() -> None:
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
def test_a_value_out_of_its_range_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        config(**change)
