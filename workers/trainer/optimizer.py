"""The trainer's optimizer and the schedule of its learning rate.

Keeps true
- The learning rate of a step depends only on the settings and on the number of steps before it, so a run that is
  resumed has the learning rates of a run that was not interrupted.
"""

import math
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from rose.workers.trainer.config import TrainerConfig


def make_optimizer(model: Any, *, learning_rate: float) -> torch.optim.AdamW:
    """AdamW without weight decay and with a beta2 of 0.95, which adapts fast enough for a run of a few dozen steps."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainerConfig, *, steps: int = 0) -> LambdaLR:
    """The schedule of the optimizer's learning rate after `steps` steps; sets the rate of the next step.

    Call the schedule's `step()` once after each step that has applied a gradient. `last_epoch` is then the number of
    such steps, which a checkpoint keeps. If the settings have changed since the checkpoint, the new settings decide, at
    the number of steps of the checkpoint: nothing of the old schedule is kept.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config.learning_rate
    return LambdaLR(optimizer, partial(learning_rate_ratio, config), last_epoch=steps - 1)


def learning_rate_ratio(config: TrainerConfig, steps: int) -> float:
    """Ratio of the learning rate to `config.learning_rate` after `steps` steps; from 0 to 1."""
    warmup = config.learning_rate_warmup_steps
    if steps < warmup:
        return (steps + 1) / (warmup + 1)
    if config.learning_rate_schedule == "constant":
        return 1.0
    done = min((steps - warmup) / config.learning_rate_decay_steps, 1.0)
    left = 1 - done if config.learning_rate_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate_floor_ratio + (1 - config.learning_rate_floor_ratio) * left
