"""The policy in training: model, optimizer, learning-rate schedule and algorithm, and steps that bear faulty groups.

Keeps true
- A group that no step can compute is marked as failed with the reason, and training continues with the others. The same
  holds for the groups of a minibatch whose gradient is not finite.
- If consecutive steps have only minibatches without a finite gradient, or if every group fails, no group is at fault:
  an exception ends the run.
- The learning rate of a step depends only on the settings and on the number of steps before it, so a run that is
  resumed has the learning rates of a run that was not interrupted.
"""

import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog
import torch
from torch.optim.lr_scheduler import LambdaLR

from rose.schemas.errors import RoseError, UsageError
from rose.workers.trainer.algorithms import AlgorithmError, TrainingSample, make_algorithm
from rose.workers.trainer.checkpoint import Checkpoints, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.selection import SelectedGroup, mark_failed, mark_skipped
from rose.workers.trainer.step import StepMetrics, dry_run_group, dry_run_policy, train_step

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors that do not blame a group: a smaller batch would have fitted."""

NO_MEMORY_ON_CPU = "DefaultCPUAllocator"
"""Text in the RuntimeError that torch raises when host memory is exhausted."""

MAX_FRUITLESS_STEPS = 2
"""Consecutive steps without a finite gradient after which the trainer ends: one such step may be caused by its groups,
several are caused by the policy."""

log = structlog.get_logger("trainer")


class NoProgress(RoseError):
    """Several consecutive steps had no finite gradient."""


class PolicyRefused(UsageError):
    """A step, or the model folder, gave a policy that no engine can serve."""


class Learner:
    """The policy and everything that changes it."""

    def __init__(self, config: TrainerConfig) -> None:
        """Raises UsageError for an unusable algorithm or model folder."""
        self._config = config
        self._algorithm = make_algorithm(config)
        self.model = load_policy(config.model_folder)
        self.optimizer = make_optimizer(self.model, learning_rate=config.learning_rate)
        self._schedule = make_schedule(self.optimizer, config)
        self.fruitless_steps = 0
        """Number of consecutive steps without a finite gradient."""

    @property
    def schedule_steps(self) -> int:
        """Number of steps that have applied a gradient: the position in the learning-rate schedule."""
        return self._schedule.last_epoch

    def restore(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Restore the state that a checkpoint has. Raises CheckpointRefused."""
        checkpoints.restore(progress, self.model, self.optimizer)
        self._schedule = make_schedule(self.optimizer, self._config, steps=progress.schedule_steps)

    def learn(
        self, groups: list[SelectedGroup], version: int, *, undo: Callable[[], None]
    ) -> tuple[list[SelectedGroup], StepMetrics]:
        """Train one step on the trained samples of these groups; returns the groups with the faulty ones marked.

        `version`: the policy's version before the step. `undo` restores the state before the step.

        Raises NoProgress after MAX_FRUITLESS_STEPS consecutive steps without a finite gradient, and what the step
        raises if no group is at fault.
        """
        groups, done = self._train_without_faulty(groups, version, undo)
        if done.tokens:
            self._schedule.step()
        return self._reject_skipped(groups, done, version), done

    def check_finite(self, groups: Sequence[SelectedGroup], version: int) -> None:
        """Check that the policy computes finite logprobs of these groups. Raises PolicyRefused, naming `version`."""
        if not dry_run_policy(self.model, _trained(groups), config=self._config):
            raise PolicyRefused(
                f"version {version} is neither kept nor published: its logprobs of the samples that it learned "
                "from are not finite; start again with a lower trainer.learning_rate"
            )

    def _train_without_faulty(
        self, groups: list[SelectedGroup], version: int, undo: Callable[[], None]
    ) -> tuple[list[SelectedGroup], StepMetrics]:
        """Train on these groups.

        If that raises, mark the groups on which training raises as failed, and train on the others.
        """
        try:
            return groups, self._train_on(groups, version)
        except Exception as error:  # models, kernels, autograd and a user's algorithm raise any exception
            if _out_of_memory(error) or (isinstance(error, RoseError) and not isinstance(error, AlgorithmError)):
                raise
            log.error("step_failed", version=version, reason=traceback.format_exc())
            undo()
            judged = [self._try_group(group) for group in groups]
            left = [group for group in judged if group.trained]
            if not left and sum(bool(group.trained) for group in groups) > 1:
                raise  # if all of several groups fail, the cause is no group
        undo()
        return judged, self._train_on(judged, version)

    def _train_on(self, groups: Sequence[SelectedGroup], version: int) -> StepMetrics:
        return train_step(
            self.model,
            self.optimizer,
            _trained(groups),
            algorithm=self._algorithm,
            config=self._config,
            version=version,
        )

    def _reject_skipped(self, groups: list[SelectedGroup], done: StepMetrics, version: int) -> list[SelectedGroup]:
        """Mark the groups of skipped minibatches as failed."""
        if not done.skipped_minibatches:
            self.fruitless_steps = 0 if done.tokens else self.fruitless_steps
            return groups
        trained = [group for group in groups if group.trained]
        left_out = {trained[place].group_id for place in done.skipped_groups}
        self.fruitless_steps = 0 if done.tokens else self.fruitless_steps + 1
        if self.fruitless_steps >= MAX_FRUITLESS_STEPS:
            raise NoProgress(
                f"in {self.fruitless_steps} steps on end no gradient was finite: what the policy of version {version} "
                "computes overflows, and the groups of the last of these steps are not settled; begin again with "
                "another model folder or a lower trainer.learning_rate"
            )
        reason = "gradients are not finite"
        log.error("groups_skipped", version=version, groups=sorted(left_out), reason=reason)
        return [mark_skipped(group) if group.group_id in left_out else group for group in groups]

    def _try_group(self, group: SelectedGroup) -> SelectedGroup:
        try:
            samples = [TrainingSample.of(sample) for sample in group.trained]
            dry_run_group(self.model, samples, algorithm=self._algorithm, config=self._config)
        except Exception as error:  # see `_train_without_faulty`
            if _out_of_memory(error):
                raise
            log.error("group_failed", group=group.group_id, reason=repr(error))
            return mark_failed(group, error)
        return group


def _trained(groups: Sequence[SelectedGroup]) -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample) for sample in group.trained] for group in groups if group.trained]


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, OUT_OF_MEMORY) or NO_MEMORY_ON_CPU in str(error)


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
