"""The trainer's loop: reads groups, runs steps, publishes policy versions and outcomes.

Keeps true
- Every sample is trained on at most once and has one outcome, however often the trainer is killed: the checkpoint of a
  step is on disk before its outcomes and manifest are committed in one transaction.
- After a restart the newest checkpoint decides. If the log lacks the checkpoint's transaction, the transaction is
  repeated. If the log is ahead, the run goes back: settled groups stay settled, the checkpoint's policy is published in
  a new epoch under a number above all others, and samples of the versions in between settle as SUPERSEDED. The same
  policy in another element type or with other slices is another version on the log and also begins a new epoch.
- If the log does not know the checkpoint (a new log after the old one was lost, or another run's log), the checkpoint's
  policy becomes its first version, with a new epoch and a number above those of the checkpoint.
- A version number stands for one policy. The policy on the log and the policy in the checkpoint have the same digest.
- A model has one trainer: a newer trainer fences the older one, which then cannot settle or publish.
- A version is published while the next step trains, one version at a time, so a checkpoint is never two versions ahead
  of the log.
- A group that no step can compute is settled with the reason and training continues. The same holds for the groups of a
  minibatch whose gradient is not finite. If consecutive steps have only such minibatches, the trainer ends, and further
  restarts settle no more groups for this reason.
- A policy with weights that are not finite, or with logprobs of its own samples that are not, is not saved, published
  or exported; the trainer ends.
"""

import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Event
from time import perf_counter

import structlog
import torch

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.limits import MAX_CONTEXT_TOKENS
from rose.schemas.samples import SampleOutcome
from rose.schemas.weights import WeightManifest
from rose.schemas.wire import decode, encode
from rose.topics.errors import BusError
from rose.topics.health import HEALTH
from rose.topics.settings import TRANSACTION_MILLISECONDS, BusSettings
from rose.workers.model_config import max_context_tokens
from rose.workers.trainer import metrics
from rose.workers.trainer.checkpoint import CheckpointRefused, Checkpoints, Identity, Progress, export_policy
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.loss import LossBounds
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.selection import (
    SelectedGroup,
    SelectionRules,
    mark_failed,
    mark_skipped,
    outcomes_of,
    select_samples,
    still_relevant,
)
from rose.workers.trainer.step import (
    StepMetrics,
    StepSettings,
    TrainingSample,
    dry_run_group,
    dry_run_policy,
    make_optimizer,
    train_step,
)
from rose.workers.trainer.step_log import StepLine, StepLog, decode_line, encode_line
from rose.workers.trainer.stream import SampleStream, Settlement
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.publish import make_publisher
from rose.workers.weights.snapshot import NotFinite, Snapshot

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors that do not blame a group: a smaller batch would have fitted."""

NO_MEMORY_ON_CPU = "DefaultCPUAllocator"
"""Text in the RuntimeError that torch raises when host memory is exhausted."""

MAX_FRUITLESS_STEPS = 2
"""Consecutive steps without a finite gradient after which the trainer ends: one such step may be caused by its groups,
several are caused by the policy."""

ENCODING_CHANGED = "weights travel in another way than before"
"""Reason in log events: the digest of the restored weights is not the digest of the checkpoint."""

log = structlog.get_logger("trainer")


class NoProgress(RoseError):
    """Several consecutive steps had no finite gradient."""


class PolicyRefused(UsageError):
    """A step, or the model folder, gave a policy that no engine can serve."""


class TrainerFenced(RoseError):
    """Another trainer of the model has started, or the broker has timed out this trainer's transaction."""

    def __init__(self, model_id: str) -> None:
        longest = TRANSACTION_MILLISECONDS // 1000
        super().__init__(
            f"another trainer of model {model_id} was started on this broker, or this one stood still for {longest} s "
            "amid a transaction: it ends, and goes on where it was if it is started again"
        )


class Trainer:
    """One run of training. The constructor loads the policy and fences any other trainer of the model."""

    def __init__(self, settings: BusSettings, config: TrainerConfig, weights: WeightsConfig, stop: Event) -> None:
        """`stop` ends `run` after the current step. If it is set while the log is read back, StreamStopped is raised.

        Raises UsageError for a broken folder, and BusError or TopicMissing.
        """
        self._config = config
        self._stop = stop
        self._model = load_policy(config.model_folder)
        self._tensors = FolderTensors(self._model, config.model_folder)
        self._tensors.check_values()
        self._optimizer = make_optimizer(self._model, learning_rate=config.learning_rate)
        self._step_settings = step_settings(config)
        self._rules = SelectionRules(
            max_staleness=config.max_staleness,
            vocabulary=self._model.get_input_embeddings().num_embeddings,
            context_tokens=max_context_tokens(self._model.config.to_dict()) or MAX_CONTEXT_TOKENS,
            leave_out_truncated=config.truncated == "leave_out",
        )
        self._identity = Identity(
            run=config.run_folder.resolve().name, namespace=settings.namespace, model_id=config.model_id
        )
        self._checkpoints = Checkpoints(config.checkpoints, self._identity)
        self._step_log = StepLog(config.run_folder)
        self._stream = SampleStream(settings, config.model_id, total_groups=config.total_groups, stop=stop)
        self._publisher = make_publisher(settings, config.model_id, weights, on_wait=self._stream.check_stopped)
        self._version = 0
        self._abandoned: tuple[tuple[int, int], ...] = ()
        self._progress: Progress | None = None
        """Progress of the current version, as saved in its checkpoint."""
        self._fruitless = 0
        """Number of consecutive steps without a finite gradient."""
        self._waiting_since = perf_counter()

    def run(self) -> None:
        """Train until all groups of the run have ended, then export the policy.

        If `stop` is set, return after the current step.

        Raises RoseError if the checkpoint or the log is another run's, the broker refuses, or another trainer fences
        this one.
        """
        try:
            self._recover()
            self._waiting_since = perf_counter()
            while groups := self._stream.take(self._config.groups_per_step):
                self._step(groups)
            HEALTH.report("ends: the last version goes to the log", lasts_seconds=self._config.hung_seconds)
            self._publisher.wait_until_published(HEALTH.report_progress)
            self._publisher.close()
        except BusError as error:
            if error.is_fenced:
                raise TrainerFenced(self._config.model_id) from error
            raise
        finally:
            self._stream.close()
        if self._stream.ended:
            HEALTH.report("ends: the policy is exported", lasts_seconds=self._config.hung_seconds)
            export_policy(self._tensors, self._config.exported)
            log.info("run_completed", version=self._version, groups=self._config.total_groups)

    def _recover(self) -> None:
        """Start a new run, or restore the newest checkpoint and have its transaction committed."""
        newest = self._publisher.newest
        progress = next((one for one in self._checkpoints.newest_first() if _may_be_of(one, newest)), None)
        if progress is None:
            self._start_fresh()
        elif newest is None and progress.version and self._stream.fresh:
            self._import_checkpoint(self._checkpoints, progress)
        else:
            self._resume_from(progress, newest)
        metrics.POLICY_VERSION.set(self._version)

    def _start_fresh(self) -> None:
        """Start a run that has no checkpoint.

        It begins with the checkpoint of `begin_from` if that is set, otherwise with the model folder.
        """
        taken = self._publisher.next_version - 1
        if taken >= 0:
            raise CheckpointRefused(
                f"the log holds version {taken} of model {self._config.model_id}, and {self._config.checkpoints} no "
                "checkpoint of it: name that run's folder, or take another --namespace"
            )
        if self._config.begin_from is not None:
            others = Checkpoints(self._config.begin_from, None)
            progress = next(others.newest_first(), None)
            if progress is None:
                raise CheckpointRefused(f"trainer.begin_from names {others.folder}, where no whole checkpoint is")
            self._import_checkpoint(others, progress)
            return
        torch.manual_seed(self._config.seed)
        self._version = 0
        self._save_and_publish(self._stream.settlement(()), line=None)

    def _import_checkpoint(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Begin a new epoch on a log that does not know the checkpoint.

        The outcomes of the checkpoint's step are not written.
        """
        checkpoints.restore(progress, self._model, self._optimizer)
        self._version = self._publisher.begin_epoch(epoch=progress.epoch, version=progress.version)
        log.warning(
            "epoch_started",
            checkpoint=str(checkpoints.folder),
            checkpoint_version=progress.version,
            version=self._version,
            reason="the log knows nothing of the checkpoint",
        )
        self._save_and_publish(self._stream.settlement(()), line=None)

    def _resume_from(self, progress: Progress, newest: WeightManifest | None) -> None:
        self._checkpoints.restore(progress, self._model, self._optimizer)
        self._progress, self._version, self._abandoned = progress, progress.version, progress.abandoned
        snapshot = self._snapshot()
        level = newest is not None and (newest.epoch, newest.version) == (progress.epoch, progress.version)
        ahead = progress.version >= self._publisher.next_version and progress.epoch == self._publisher.epoch
        unsettled = progress.outcomes if ahead else ()  # otherwise they were committed with the version
        settlement = self._stream.settlement([decode(SampleOutcome, wire) for wire in unsettled])
        travels_alike = snapshot.digest() == progress.weights_digest
        if (level or ahead) and travels_alike:
            log.info("run_resumed", version=self._version)
            # As an anchor, so that executors that join later need not read far back.
            self._publish(snapshot, settlement)
        elif ahead and not level:
            log.info("run_resumed", version=self._version, reason=ENCODING_CHANGED)
            self._save_and_publish(settlement, line=None)  # saved again with the digest that the log will have
        else:
            # If no version is trusted any more, as after a change of keys, only the checkpoint knows epoch and number.
            known = {} if newest is not None else {"epoch": progress.epoch, "version": progress.version}
            self._version = self._publisher.begin_epoch(**known)
            if self._version > progress.version + 1:
                self._abandoned += ((progress.version + 1, self._version - 1),)
            why = ENCODING_CHANGED if level else "the log is further than the checkpoint"
            log.warning("epoch_started", checkpoint_version=progress.version, version=self._version, reason=why)
            self._save_and_publish(settlement, line=None)
        if progress.step_line:
            line = decode_line(progress.step_line)
            self._step_log.append(line)
            self._fruitless = int(line.skipped_minibatches > 0 and not line.tokens)

    def _step(self, groups: Sequence[CompleteGroup]) -> None:
        HEALTH.report("learns", lasts_seconds=self._config.hung_seconds)
        waited = perf_counter() - self._waiting_since
        began = perf_counter()
        judged = [
            select_samples(group, self._version, rules=self._rules, abandoned=self._abandoned) for group in groups
        ]
        judged, done = self._learn(judged)
        judged = self._reject_skipped(judged, done)
        trained, now = perf_counter(), time.time()
        # Keeps the checkpoint at most one version ahead of the log.
        self._publisher.wait_until_published(HEALTH.report_progress)
        before, self._version = self._version, self._publisher.next_version
        self._check_policy_finite(judged)
        line = StepLine.of(judged, done, before=before, version=self._version, abandoned=self._abandoned)
        line.waiting_seconds, line.training_seconds, line.ended_at = waited, trained - began, now
        outcomes = outcomes_of(judged, step=self._version, policy_version=before, now=now)
        self._save_and_publish(self._stream.settlement(outcomes), line=line, trained=trained)
        self._step_log.append(line)
        metrics.observe(line)
        log.info(
            "step_finished", step=line.step, reward=line.reward_mean, success=line.success_rate, groups=line.groups
        )
        self._waiting_since = perf_counter()

    def _learn(self, groups: list[SelectedGroup]) -> tuple[list[SelectedGroup], StepMetrics]:
        """Train on these groups.

        If that raises, mark the groups on which training raises as failed and train on the others.
        """
        try:
            return groups, self._train_on(groups)
        except Exception as error:  # models, kernels and autograd raise any exception
            if _out_of_memory(error) or isinstance(error, RoseError):
                raise
            log.error("step_failed", version=self._version, reason=traceback.format_exc())
            self._restore()
            judged = [self._try_group(group) for group in groups]
            left = [group for group in judged if group.trained]
            if not left and sum(bool(group.trained) for group in groups) > 1:
                raise  # if all of several groups fail, the cause is no group
        self._restore()
        return judged, self._train_on(judged)

    def _train_on(self, groups: Sequence[SelectedGroup]) -> StepMetrics:
        return train_step(self._model, self._optimizer, _trained(groups), settings=self._step_settings)

    def _check_policy_finite(self, groups: Sequence[SelectedGroup]) -> None:
        """Raises PolicyRefused if the policy after the step computes logprobs that are not finite."""
        if not dry_run_policy(self._model, _trained(groups), settings=self._step_settings):
            raise PolicyRefused(
                f"version {self._version} is neither kept nor published: its logprobs of the samples that it learned "
                "from are no numbers; start again with a lower trainer.learning_rate"
            )

    def _reject_skipped(self, groups: list[SelectedGroup], done: StepMetrics) -> list[SelectedGroup]:
        """Mark the groups of skipped minibatches as failed.

        Raises NoProgress after MAX_FRUITLESS_STEPS consecutive steps without a finite gradient.
        """
        if not done.skipped_minibatches:
            self._fruitless = 0 if done.tokens else self._fruitless
            return groups
        trained = [group for group in groups if group.trained]
        left_out = {trained[place].group_id for place in done.skipped_groups}
        self._fruitless = 0 if done.tokens else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS_STEPS:
            raise NoProgress(
                f"in {self._fruitless} steps on end no gradient was finite: what the policy of version {self._version} "
                "computes overflows, and the groups of the last of these steps are not settled; begin again with "
                "another model folder or a lower trainer.learning_rate"
            )
        reason = "gradients are not finite"
        log.error("groups_skipped", version=self._version, groups=sorted(left_out), reason=reason)
        return [mark_skipped(group) if group.group_id in left_out else group for group in groups]

    def _try_group(self, group: SelectedGroup) -> SelectedGroup:
        try:
            samples = [TrainingSample.of(sample) for sample in group.trained]
            dry_run_group(self._model, samples, settings=self._step_settings)
        except Exception as error:  # see `_learn`
            if _out_of_memory(error):
                raise
            log.error("group_failed", group=group.group_id, reason=repr(error))
            return mark_failed(group, error)
        return group

    def _restore(self) -> None:
        """Restore the current version from its checkpoint."""
        assert self._progress is not None
        self._checkpoints.restore(self._progress, self._model, self._optimizer)

    def _save_and_publish(self, settlement: Settlement, *, line: StepLine | None, trained: float = 0.0) -> None:
        """Save the current version as a checkpoint, then begin to publish it with the settlement.

        `line`: the step's line; None if no step made the version. `trained`: perf_counter() seconds at the end of
        training.
        """
        snapshot = self._snapshot()
        saving = perf_counter()
        if line is not None:
            line.publishing_seconds = saving - trained
        self._abandoned = still_relevant(self._abandoned, self._version, max_staleness=self._rules.max_staleness)
        self._progress = Progress(
            identity=self._identity,
            version=self._version,
            epoch=self._publisher.epoch,
            weights_digest=snapshot.digest(),
            abandoned=self._abandoned,
            outcomes=tuple(encode(outcome) for outcome in settlement.outcomes),
            step_line=b"" if line is None else encode_line(line),
        )
        self._checkpoints.save(self._progress, self._model, self._optimizer)
        if line is not None:
            line.checkpoint_seconds = perf_counter() - saving
        self._publish(snapshot, settlement)

    def _snapshot(self) -> Snapshot:
        """A snapshot of the current version. Raises PolicyRefused if a value is not finite."""
        try:
            return self._publisher.snapshot(self._tensors)
        except NotFinite as error:
            raise PolicyRefused(f"version {self._version} is neither kept nor published: {error}") from error

    def _publish(self, snapshot: Snapshot, settlement: Settlement) -> None:
        """Begin to publish the current version while training goes on. A failure ends the run."""
        began = perf_counter()

        def published(done: Future[WeightManifest]) -> None:
            if done.exception() is not None:
                self._stop.set()
            else:
                metrics.PUBLISHING_SECONDS.observe(perf_counter() - began)
                metrics.POLICY_VERSION.set(done.result().version)

        publishing = self._publisher.publish_snapshot(snapshot, self._version, settlement.commit)
        publishing.add_done_callback(published)


def step_settings(config: TrainerConfig) -> StepSettings:
    """The part of the configuration that the step uses."""
    bounds = LossBounds(clip_low=config.clip_low, clip_high=config.clip_high, importance_cap=config.importance_cap)
    return StepSettings(
        bounds=bounds,
        scale_by_deviation=config.scale_by_deviation,
        minibatches=config.minibatches,
        gradient_norm=config.gradient_norm,
        microbatch_tokens=config.microbatch_tokens,
    )


def _trained(groups: Sequence[SelectedGroup]) -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample) for sample in group.trained] for group in groups if group.trained]


def _may_be_of(progress: Progress, newest: WeightManifest | None) -> bool:
    """Whether the checkpoint agrees with the newest manifest.

    A fenced trainer may have saved a checkpoint that it never published.
    """
    if newest is None or newest.version != progress.version or newest.digest == progress.weights_digest:
        return True
    log.warning("checkpoint_skipped", version=progress.version, reason="its policy is not the one on the log")
    return False


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, OUT_OF_MEMORY) or NO_MEMORY_ON_CPU in str(error)
