"""The policy in training as one rank holds it: its rows of the weights and of the optimizer's state.

Keeps true
- Every method is called on all ranks with the same arguments, and has the same result or agreed exception on all.
- `undo` restores the state that was saved or restored last, bit for bit.
- Groups that are added early are computed once, if the step is on them. A fault among them is no fault of the step:
  the step computes all groups, and meets the fault again.
- With one process and float32, weights are plain tensors, without a process group. Otherwise FSDP2 shards them: master
  weights, gradients and optimizer state are float32, each rank holds its rows, and a layer's weights are whole only
  while the layer computes.
- The reference policy, if the algorithm reads one, is that of the model folder, also after a restart; nothing changes
  it.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from rose.schemas.errors import RoseError, UsageError
from rose.workers.trainer.algorithms import AlgorithmError, StepAlgorithm, TrainingSample, make_algorithm
from rose.workers.trainer.checkpoint import Checkpoints, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.early_gradients import EarlyGradients, begins_with
from rose.workers.trainer.logprobs import LogprobModule
from rose.workers.trainer.optimizer import make_optimizer, make_schedule
from rose.workers.trainer.packing import pack_passes, pad_passes
from rose.workers.trainer.passes import Passes
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.ranks import ALONE, FailedOnARank, Ranks
from rose.workers.trainer.step import StepMetrics, dry_run_group, dry_run_policy, train_step
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.layout import Box, WholeDigest
from rose.workers.weights.publish import WeightPublisher
from rose.workers.weights.tensors import NotFinite, Snapshot

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors that do not blame a group: a smaller batch would have fitted."""

NO_MEMORY_ON_CPU = "DefaultCPUAllocator"
"""Text in the RuntimeError that torch raises when host memory is exhausted."""

log = structlog.get_logger("trainer")


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of a step."""

    metrics: StepMetrics
    failed: dict[int, Exception] = field(default_factory=dict)
    """Why no step can compute a group, by the group's place among those given. The step left these groups out."""


class Replica:
    """The policy, its optimizer, schedule and algorithm, on one rank."""

    def __init__(self, config: TrainerConfig, ranks: Ranks = ALONE) -> None:
        """Raises UsageError for an unusable algorithm or model folder."""
        self._config, self.ranks = config, ranks
        self._algorithm = make_algorithm(config)
        self.model = load_policy(config.model_folder)
        reads_reference = isinstance(self._algorithm, StepAlgorithm) and self._algorithm.needs_reference
        reference = load_policy(config.model_folder).requires_grad_(False) if reads_reference else None
        self.tensors = FolderTensors(self.model, config.model_folder)
        """The policy under the names of its folder."""
        self.tensors.check_values()
        ranks.require_alike(self.tensors.folder_digest, "model folders")
        models = [self.model, *([] if reference is None else [reference])]
        reasons = [pack_passes(model) for model in models]
        if not ranks.all_true(reasons[0] is None):
            for model in models:
                pad_passes(model)
            log.info("passes_padded", reason=reasons[0] or "another rank cannot pack them")
        torch.manual_seed(config.seed)
        if not ranks.grouped:
            for model in models:
                model.to(ranks.device)  # FSDP2 moves each layer's rows, as the whole model may not fit on one GPU
        if config.recompute_activations:
            recompute_layers(self.model)
        modules: list[Any] = [shard_policy(model, ranks, config) for model in models] if ranks.grouped else models
        self._module, self._reference = modules[0], None if reference is None else modules[1]
        self.optimizer = make_optimizer(self.model, learning_rate=config.learning_rate)
        self._schedule = make_schedule(self.optimizer, config)
        self._saved: tuple[Checkpoints, Progress] | None = None
        self._groups: list[list[TrainingSample]] = []
        self.early_groups: list[list[TrainingSample]] = []
        """The groups that were added since the last step."""
        self._early: EarlyGradients | None = None
        """The gradients of `early_groups`; None if there are none, or one of the groups failed."""

    @property
    def schedule_steps(self) -> int:
        """Number of steps that have applied a gradient: the position in the learning-rate schedule."""
        return self._schedule.last_epoch

    def restore(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Restore the state that a checkpoint has. Raises CheckpointRefused."""
        checkpoints.restore(progress, self.model, self.optimizer)
        self.early_groups, self._early = [], None
        self._schedule = make_schedule(self.optimizer, self._config, steps=progress.schedule_steps)
        self._saved = checkpoints, progress

    def save(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Write a checkpoint. Raises CheckpointFailed."""
        checkpoints.save(progress, self.model, self.optimizer, self.ranks)
        self._saved = checkpoints, progress

    def undo(self) -> None:
        """Restore the state that was saved or restored last."""
        assert self._saved is not None, "save or restore a checkpoint first"
        self.restore(*self._saved)

    @property
    def early_tokens(self) -> int:
        """Number of sampled tokens of a step that is not whole yet whose gradient is computed."""
        return 0 if self._early is None else self._early.tokens

    def add_early(self, group: list[TrainingSample]) -> None:
        """Compute the gradient of the next group of a step that is not whole yet, as `EarlyGradients` does.

        Raises if no group is at fault.
        """
        self.early_groups.append(group)
        if len(self.early_groups) == 1:
            self._early = EarlyGradients(self._passes())
        if self._early is None:
            return
        try:
            self._early.add(group)
        except Exception as error:  # see `_fit`
            if self._is_fatal(error):
                raise
            log.warning("early_gradients_dropped", reason=repr(error))
            self._early = None

    def fit(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        version: int,
        *,
        compared: Sequence[TrainingSample],
        since: int,
    ) -> Fitted:
        """Train one step on these groups; if that raises, on those for which training does not raise.

        `version`: the policy's version before the step. `compared`, `since`: see `train_step`. Raises what the step
        raises if no group is at fault.
        """
        self._groups = [list(group) for group in groups]
        if not begins_with(self._groups, self.early_groups):
            self._early = None
        self.early_groups = []
        train_on = partial(self._train_on, version=version, compared=compared, since=since)
        fitted = self._fit(train_on, version)
        if fitted.metrics.tokens:
            self._schedule.step()
        return fitted

    def _fit(self, train_on: Callable[[Sequence[Sequence[TrainingSample]]], StepMetrics], version: int) -> Fitted:
        try:
            return Fitted(train_on(self._groups))
        except Exception as error:  # models, kernels, autograd and a user's algorithm raise any exception
            if self._is_fatal(error):
                raise
            log.error("step_failed", version=version, reason=traceback.format_exc())
            self.undo()
            tried = [self._try_group(group) for group in self._groups]
            failed = {place: error for place, error in enumerate(tried) if error is not None}
            if len(failed) == len(tried) > 1:
                raise  # if all of several groups fail, the cause is no group
        self.undo()
        left = [group for place, group in enumerate(self._groups) if place not in failed]
        return Fitted(train_on(left), failed)

    def _is_fatal(self, error: Exception) -> bool:
        """Whether no group is to blame, or the exception came amid a pass.

        With FSDP2 such an exception leaves weights whole, and the other ranks wait for this one.
        """
        if self.ranks.grouped:
            return not isinstance(error, FailedOnARank)
        return _out_of_memory(error) or (isinstance(error, RoseError) and not isinstance(error, AlgorithmError))

    def _train_on(self, groups: Sequence[Sequence[TrainingSample]], **checked: Any) -> StepMetrics:
        early, self._early = self._early, None
        streamed = 0 if early is None else early.tokens
        if self._config.stream_gradients:
            early = early or EarlyGradients(self._passes())
            for group in groups[len(early.groups) :]:
                early.add(group)
        metrics = train_step(
            self._module,
            self.optimizer,
            groups,
            algorithm=self._algorithm,
            config=self._config,
            reference=self._reference,
            ranks=self.ranks,
            early=early,
            **checked,
        )
        if metrics.used_early:
            metrics.streamed_tokens = streamed
        elif early is not None:
            log.warning("early_gradients_dropped", reason="the algorithm gives the whole step other advantages")
        return metrics

    def _passes(self) -> Passes:
        return Passes(self._module, self._algorithm, self._config, self.ranks, self._reference)

    def _try_group(self, group: Sequence[TrainingSample]) -> Exception | None:
        try:
            dry_run_group(
                self._module,
                group,
                algorithm=self._algorithm,
                config=self._config,
                reference=self._reference,
                ranks=self.ranks,
            )
        except Exception as error:  # see `_fit`
            if _out_of_memory(error) or (self.ranks.grouped and not isinstance(error, FailedOnARank)):
                raise
            return error
        return None

    def is_finite(self, places: Sequence[int]) -> bool:
        """Whether the policy computes finite logprobs of groups of the last step, which are given by their places."""
        groups = [self._groups[place] for place in places]
        return dry_run_policy(self._module, groups, config=self._config, ranks=self.ranks)

    def snapshot(self, publisher: WeightPublisher) -> tuple[Snapshot, bytes]:
        """A snapshot of this rank's part of the policy, and the digest of the whole policy. Raises NotFinite."""
        snapshot, reason = None, ""
        try:
            snapshot = publisher.snapshot(self._named_tensors())
        except NotFinite as error:
            if self.ranks.size == 1:
                raise
            reason = str(error)
        own = [] if snapshot is None else [(name, box, digest) for (name, box), digest in snapshot.digests.items()]
        found = [_RankDigests.decode(part) for part in self.ranks.gather(_RankDigests(own, reason).encode())]
        if reasons := [part.reason for part in found if part.reason]:
            raise NotFinite(reasons[0])
        assert snapshot is not None
        numbers = {name: number for number, name in enumerate(snapshot.specs)}
        slices = [piece for part in found for piece in part.slices]
        whole = WholeDigest()
        for name, box, digest in sorted(
            slices, key=lambda one: (numbers[one[0]], one[1].row_start, one[1].column_start)
        ):
            whole.add(name, box, digest)
        return snapshot, whole.digest()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the policy. Those that all ranks have whole belong to rank 0."""
        if not self.ranks.grouped:
            yield from self.tensors
            return
        mesh = next(iter(self.model.parameters())).device_mesh
        for name, tensor in self.tensors:
            own = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()])
            yield name, own


class _RankDigests(msgspec.Struct, array_like=True):
    """The digests of a rank's slices, or why it has none."""

    slices: list[tuple[str, Box, bytes]]
    reason: str

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "_RankDigests":
        return msgspec.msgpack.decode(data, type=cls)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, OUT_OF_MEMORY) or NO_MEMORY_ON_CPU in str(error)


def shard_policy(model: Any, ranks: Ranks, config: TrainerConfig) -> LogprobModule:
    """Shard the model over the ranks with FSDP2, layer by layer; the module computes its logprobs.

    Raises UsageError for a model whose tensors do not have the shapes of its folder, or which FSDP2 cannot shard.
    """
    if any(type(change).__name__ != "WeightRenaming" for change in getattr(model, "_weight_conversions", None) or ()):
        raise UsageError(
            f"{config.model_folder}: a {model.config.model_type} joins tensors of its folder, which one process in "
            "float32 can train: start one trainer, without torchrun, and leave trainer.compute_dtype at float32"
        )
    module = LogprobModule(model)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    rounded = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # temperatures stay float32, and activations have the type of the weights
    )
    try:
        for layer in reversed(layers_of(model)):  # inner layers first
            fully_shard(layer, mesh=mesh, mp_policy=rounded)
        # The outermost weights are sharded again after a pass without gradients, too: `parameters` are always rows.
        fully_shard(module, mesh=mesh, mp_policy=rounded, reshard_after_forward=True)
    except ValueError as error:  # of tensors that two layers share, or without dimensions
        raise UsageError(
            f"{config.model_folder}: torch's FSDP2 does not shard a {model.config.model_type} ({error}): start one "
            "trainer, without torchrun, and leave trainer.compute_dtype at float32"
        ) from error
    return module


def layers_of(model: Any) -> list[Any]:
    """The model's layers: what transformers keeps on one device."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_layers(model: Any) -> None:
    """Have the backward pass compute each layer again instead of keeping its activations. Raises UsageError."""
    layers = layers_of(model)
    if not layers:
        raise UsageError(
            f"the layers of a {model.config.model_type} are not known: leave trainer.recompute_activations at false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
