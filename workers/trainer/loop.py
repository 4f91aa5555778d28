"""The trainer's loop: groups in, steps, policy versions and outcomes out.

Keeps true
- Every sample is trained once and has one outcome, however often the trainer is killed: the checkpoint of a step is on
  disk before its outcomes and manifest are on the log, and those two are one transaction.
- After a restart the newest checkpoint decides. If the log lacks its transaction, that is made again. If the log is
  further, the run goes back: what is settled stays settled, the checkpoint's policy is published under a number above
  all, in a new epoch, and samples of the versions in between settle as SUPERSEDED. The same policy in another element
  type, or cut in another way, is another version on the log: it too begins an epoch.
- A log that knows nothing of the checkpoint, as a new one after the old was lost, or that of another run, has the
  checkpoint's policy as its first version, in an epoch and under a number above those that the policy had.
- A version number stands for one policy, and the policy on the log and that in the checkpoint have the same digest.
- One trainer a model: a newer one fences the older, which then cannot settle or publish anything.
- A version is published while the next is trained, one at a time: no checkpoint is two versions ahead of the log.
- A group that no step can compute is settled with the reason, and the trainer goes on. So are those of a minibatch
  whose gradient is not finite. Where steps on end have no other minibatches, the trainer ends, and however often it
  is started again, no more groups are settled for that.
- A policy that is not finite, or whose logprobs of its own samples are not, is neither kept in a checkpoint nor
  published nor exported: the trainer ends.
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
"""No sample's fault: with less at once it would have gone."""

NO_MEMORY_ON_CPU = "DefaultCPUAllocator"
"""What torch's RuntimeError names when the machine's own memory is not enough."""

MAX_FRUITLESS_STEPS = 2
"""On end, of which no minibatch had a finite gradient: one may be its groups' fault, so many are the policy's."""

log = structlog.get_logger("trainer")


class NoProgress(RoseError):
    """The policy computes what no gradient can be made of."""


class PolicyRefused(UsageError):
    """A step, or the model folder, left a policy that no engine could serve."""


class TrainerFenced(RoseError):
    """Another trainer has taken this one's place, or the broker takes it for dead."""

    def __init__(self, model_id: str) -> None:
        longest = TRANSACTION_MILLISECONDS // 1000
        super().__init__(
            f"another trainer of model {model_id} was started on this broker, or this one stood still for {longest} s "
            "amid a transaction: it ends, and goes on where it was if it is started again"
        )


class Trainer:
    """One run of training. Making one loads the policy and fences any other trainer of the model."""

    def __init__(self, settings: BusSettings, config: TrainerConfig, weights: WeightsConfig, stop: Event) -> None:
        """`stop` ends `run` after the present step, and reading the log back before that, with Stopped.

        Raises UsageError for a broken folder, BusError or TopicMissing.
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
        """Of the present version, as it is on disk."""
        self._fruitless = 0
        """Steps on end of which no minibatch had a finite gradient."""
        self._waiting_since = perf_counter()

    def run(self) -> None:
        """Train until the run's groups have ended, then export the policy; or until `stop`, after the present step.

        Raises RoseError: a checkpoint or log that is not this run's, a broker that refuses, another trainer.
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
            log.info("run complete", version=self._version, groups=self._config.total_groups)

    def _recover(self) -> None:
        """Begin anew, or stand where the newest checkpoint stood, with its transaction on the log."""
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
        """Without a checkpoint of this run: with another's, where one is named, or with the model folder."""
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
        """Begin a log that knows nothing of this checkpoint: of what its step settled, this one never heard."""
        checkpoints.restore(progress, self._model, self._optimizer)
        self._version = self._publisher.begin_epoch(epoch=progress.epoch, version=progress.version)
        log.warning(
            "the log knows nothing of the checkpoint: its policy begins a new epoch here",
            checkpoint=str(checkpoints.folder),
            policy_of=progress.version,
            now=self._version,
        )
        self._save_and_publish(self._stream.settlement(()), line=None)

    def _resume_from(self, progress: Progress, newest: WeightManifest | None) -> None:
        self._checkpoints.restore(progress, self._model, self._optimizer)
        self._progress, self._version, self._abandoned = progress, progress.version, progress.abandoned
        snapshot = self._snapshot()
        level = newest is not None and (newest.epoch, newest.version) == (progress.epoch, progress.version)
        ahead = progress.version >= self._publisher.next_version and progress.epoch == self._publisher.epoch
        unsettled = progress.outcomes if ahead else ()  # otherwise they came on the log with the version
        settlement = self._stream.settlement([decode(SampleOutcome, wire) for wire in unsettled])
        travels_alike = snapshot.digest() == progress.weights_digest
        if (level or ahead) and travels_alike:
            log.info("going on", version=self._version)
            self._publish(snapshot, settlement)  # whole, so that who joins now need not look far back
        elif ahead and not level:
            log.info("going on, weights travel in another way than before", version=self._version)
            self._save_and_publish(settlement, line=None)  # with the digest that the log will have
        else:
            # Where no version is believed any more, as after a change of keys, the checkpoint alone tells of numbers.
            known = {} if newest is not None else {"epoch": progress.epoch, "version": progress.version}
            self._version = self._publisher.begin_epoch(**known)
            if self._version > progress.version + 1:
                self._abandoned += ((progress.version + 1, self._version - 1),)
            why = "weights travel in another way than before" if level else "the log is further than the checkpoint"
            log.warning(f"{why}: a new epoch begins", policy_of=progress.version, now=self._version)
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
        self._publisher.wait_until_published(HEALTH.report_progress)  # no checkpoint is two versions ahead of the log
        before, self._version = self._version, self._publisher.next_version
        self._check_policy_finite(judged)
        line = StepLine.of(judged, done, before=before, version=self._version, abandoned=self._abandoned)
        line.waiting_seconds, line.training_seconds, line.ended_at = waited, trained - began, now
        outcomes = outcomes_of(judged, step=self._version, policy_version=before, now=now)
        self._save_and_publish(self._stream.settlement(outcomes), line=line, trained=trained)
        self._step_log.append(line)
        metrics.observe(line)
        log.info("step", step=line.step, reward=line.reward_mean, success=line.success_rate, groups=line.groups)
        self._waiting_since = perf_counter()

    def _learn(self, groups: list[SelectedGroup]) -> tuple[list[SelectedGroup], StepMetrics]:
        """Train on these groups; those on which that raises are judged anew, as failed, and left out."""
        try:
            return groups, self._train_on(groups)
        except Exception as error:  # a model, its kernels and autograd raise whatever they like
            if _out_of_memory(error) or isinstance(error, RoseError):
                raise
            log.error("a step raised: looking for the group", version=self._version, error=traceback.format_exc())
            self._restore()
            judged = [self._try_group(group) for group in groups]
            left = [group for group in judged if group.trained]
            if not left and sum(bool(group.trained) for group in groups) > 1:
                raise  # all of several: that is no group's fault
        self._restore()
        return judged, self._train_on(judged)

    def _train_on(self, groups: Sequence[SelectedGroup]) -> StepMetrics:
        return train_step(self._model, self._optimizer, _trained(groups), settings=self._step_settings)

    def _check_policy_finite(self, groups: Sequence[SelectedGroup]) -> None:
        """The present version that the step made, if it computes none. Raises PolicyRefused."""
        if not dry_run_policy(self._model, _trained(groups), settings=self._step_settings):
            raise PolicyRefused(
                f"version {self._version} is neither kept nor published: its logprobs of the samples that it learned "
                "from are no numbers; start again with a lower trainer.learning_rate"
            )

    def _reject_skipped(self, groups: list[SelectedGroup], done: StepMetrics) -> list[SelectedGroup]:
        """Those of minibatches that were not applied are judged anew, as failed. Raises NoProgress."""
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
        log.error("gradients are not finite, groups left out", version=self._version, groups=sorted(left_out))
        return [mark_skipped(group) if group.group_id in left_out else group for group in groups]

    def _try_group(self, group: SelectedGroup) -> SelectedGroup:
        try:
            samples = [TrainingSample.of(sample) for sample in group.trained]
            dry_run_group(self._model, samples, settings=self._step_settings)
        except Exception as error:  # as above
            if _out_of_memory(error):
                raise
            log.error("group left out", group=group.group_id, error=repr(error))
            return mark_failed(group, error)
        return group

    def _restore(self) -> None:
        """To the present version as it is on disk, whatever a step has done to it."""
        assert self._progress is not None
        self._checkpoints.restore(self._progress, self._model, self._optimizer)

    def _save_and_publish(self, settlement: Settlement, *, line: StepLine | None, trained: float = 0.0) -> None:
        """Put the present version on disk, then begin to put it and what it was made of on the log.

        `trained`: when the step of the line had computed.
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
        """The present version as it travels. Raises PolicyRefused for one that no engine could serve."""
        try:
            return self._publisher.snapshot(self._tensors)
        except NotFinite as error:
            raise PolicyRefused(f"version {self._version} is neither kept nor published: {error}") from error

    def _publish(self, snapshot: Snapshot, settlement: Settlement) -> None:
        """Begin to publish the present version; training goes on meanwhile. A failure ends the run."""
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
    """What of the configuration the step itself needs."""
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
    """Whether the log agrees with the checkpoint: a fenced trainer may have left one that was never settled."""
    if newest is None or newest.version != progress.version or newest.digest == progress.weights_digest:
        return True
    log.warning("checkpoint is of another policy than the log's, trying the one before", version=progress.version)
    return False


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, OUT_OF_MEMORY) or NO_MEMORY_ON_CPU in str(error)
