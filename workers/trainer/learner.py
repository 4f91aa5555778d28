"""Rank 0's view of the policy in training: has all ranks do the same, and marks the groups that no step can compute.

Keeps true
- Before rank 0 calls a method of its replica, it sends the other ranks the command to call the same (`follower`).
- A group that no step can compute is marked as failed with the reason, and training continues with the others. The same
  holds for the groups of a minibatch whose gradient is not finite.
- If consecutive steps have only minibatches without a finite gradient, or if every group fails, no group is at fault:
  an exception ends the run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.weights import WeightManifest
from rose.schemas.wire import encode
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.checkpoint import Checkpoints, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.engine_check import places_to_compare
from rose.workers.trainer.follower import (
    AddEarly,
    CheckFinite,
    Command,
    Fit,
    Put,
    Restore,
    Save,
    TakeSnapshot,
    exchange_parts,
    pack,
)
from rose.workers.trainer.ranks import ALONE, Ranks
from rose.workers.trainer.replica import Replica
from rose.workers.trainer.selection import SelectedGroup, mark_failed, mark_skipped
from rose.workers.trainer.step import StepMetrics
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.publish import WeightPublisher, merge_manifests
from rose.workers.weights.tensors import Snapshot

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

    def __init__(self, config: TrainerConfig, ranks: Ranks = ALONE) -> None:
        """Raises UsageError for an unusable algorithm or model folder."""
        self._replica = Replica(config, ranks)
        self._ranks = ranks
        self._fitted: list[str] = []
        """Names of the groups of the last step."""
        self._early: list[SelectedGroup] = []
        """The groups that were added since the last step."""
        self._converted: dict[str, TrainingSample] = {}
        """Their samples by trajectory."""
        self.fruitless_steps = 0
        """Number of consecutive steps without a finite gradient."""

    @property
    def model(self) -> Any:
        """The policy, a `transformers.PreTrainedModel`; with several ranks, its tensors are sharded."""
        return self._replica.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        return self._replica.optimizer

    @property
    def tensors(self) -> FolderTensors:
        """The policy under the names of its folder."""
        return self._replica.tensors

    @property
    def is_sharded(self) -> bool:
        """Whether the model's tensors are sharded."""
        return self._ranks.grouped

    @property
    def schedule_steps(self) -> int:
        """Number of steps that have applied a gradient: the position in the learning-rate schedule."""
        return self._replica.schedule_steps

    def restore(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Restore the state that a checkpoint has. Raises CheckpointRefused."""
        self._command(lambda: Restore(folder=str(checkpoints.folder.resolve()), progress=progress))
        self._replica.restore(checkpoints, progress)

    def save(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Write a checkpoint. Raises CheckpointFailed."""
        self._command(lambda: Save(folder=str(checkpoints.folder.resolve()), progress=progress))
        self._replica.save(checkpoints, progress)

    def add_early(self, group: SelectedGroup) -> int:
        """Compute the gradient of the next group of a step that is not whole yet, if the group is trained on.

        Call `learn` with this group, and the others that were added, before other groups of the step; what was computed
        is of no use otherwise.

        Returns the number of sampled tokens of the step whose gradient is computed. Raises if no group is at fault.
        """
        if not group.trained:
            return self._replica.early_tokens
        self._early.append(group)
        self._converted |= {one.trajectory_id: TrainingSample.of(one) for one in group.computable}
        self._command(lambda: AddEarly(group=[encode(one) for one in group.trained]))
        self._replica.add_early([self._converted[one.trajectory_id] for one in group.trained])
        return self._replica.early_tokens

    def learn(
        self, groups: list[SelectedGroup], version: int, *, since: int | None = None
    ) -> tuple[list[SelectedGroup], StepMetrics]:
        """Train one step on the trained samples of these groups; returns the groups with the faulty ones marked.

        `version`: the policy's version before the step. `since`: the first version with the same weights; None:
        `version`. A step that raises is undone to the last checkpoint.

        Raises NoProgress after MAX_FRUITLESS_STEPS consecutive steps without a finite gradient, and what the step
        raises if no group is at fault.
        """
        trained = [group for group in groups if group.trained]
        self._fitted = [group.group_id for group in trained]
        first = version if since is None else since
        records = [one for group in groups for one in group.computable]
        samples = [self._converted.get(one.trajectory_id) or TrainingSample.of(one) for one in records]
        early = len(self._early) if self._early == trained[: len(self._early)] else 0
        self._early, self._converted = [], {}
        compared = places_to_compare(samples, first)
        self._command(
            lambda: Fit(
                early=early,
                groups=[[encode(one) for one in group.trained] for group in trained[early:]],
                compared=[encode(records[place]) for place in compared],
                version=version,
                since=first,
            )
        )
        by_name = {record.trajectory_id: sample for record, sample in zip(records, samples, strict=True)}
        rows = [[by_name[one.trajectory_id] for one in group.trained] for group in trained]
        fitted = self._replica.fit(rows, version, compared=[samples[place] for place in compared], since=first)
        faults = {trained[place].group_id: error for place, error in fitted.failed.items()}
        for name, error in faults.items():
            log.error("group_failed", group=name, reason=repr(error))
        judged = [mark_failed(one, faults[one.group_id]) if one.group_id in faults else one for one in groups]
        return self._reject_skipped(judged, fitted.metrics, version), fitted.metrics

    def check_finite(self, groups: Sequence[SelectedGroup], version: int) -> None:
        """Check that the policy computes finite logprobs of the groups that it has just learned from.

        Raises PolicyRefused, naming `version`.
        """
        trained = {group.group_id for group in groups if group.trained}
        places = [place for place, name in enumerate(self._fitted) if name in trained]
        self._command(lambda: CheckFinite(places=places))
        if not self._replica.is_finite(places):
            raise PolicyRefused(
                f"version {version} is neither kept nor published: its logprobs of the samples that it learned "
                "from are not finite; start again with a lower trainer.learning_rate"
            )

    def snapshot(self, publisher: WeightPublisher) -> tuple[Snapshot, bytes]:
        """A snapshot of the policy, and its digest as its manifest will have it. Raises NotFinite."""
        self._command(TakeSnapshot)
        return self._replica.snapshot(publisher)

    def put_parts(self, version: int, *, epoch: int, anchor: bool) -> Callable[[WeightManifest], WeightManifest] | None:
        """Have the other ranks put their parts of a version. Call this once the version before it is on the log.

        Returns what merges rank 0's part of the manifest with theirs, on the publisher's thread; None for one rank.
        """
        if self._ranks.size == 1:
            return None
        self._command(lambda: Put(version=version, epoch=epoch, anchor=anchor))
        return lambda part: merge_manifests(exchange_parts(self._ranks, part))

    def _command(self, command: Callable[[], Command]) -> None:
        if self._ranks.size > 1:
            self._ranks.send_to_all(pack(command()))

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
