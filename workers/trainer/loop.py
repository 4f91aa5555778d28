"""The trainer's loop: samples in, steps, policy versions and outcomes out.

Keeps true
- Every sample is trained once and has one outcome, however often the trainer is killed: the checkpoint of a step is on
  disk before its outcomes and manifest are on the log, and those two are one transaction.
- After a restart the newest checkpoint decides. If the log lacks its transaction, that is made again; if the log is
  further (the newest checkpoint was lost), the steps in between are made again from the same groups and not written.
- One trainer a model: a newer one fences the older, which then cannot settle or publish anything.
- A version is published while the next is trained, one at a time: no checkpoint is two versions ahead of the log.
- The policy that is on the log and the policy in the checkpoint have the same digest.
"""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from threading import Event
from time import perf_counter

import structlog
import torch

from pipeline.accounting.groups import AssembledGroup, GroupAssembly, GroupRules, Taken, staleness
from schemas.arrays import unpack_logprobs, unpack_tokens
from schemas.errors import RoseError
from schemas.samples import Outcome, Sample, SampleOutcome
from schemas.weights import WeightManifest
from schemas.wire import decode, encode
from topics.catalog import MANIFESTS, OUTCOMES
from topics.errors import BusError
from topics.settings import BusSettings
from topics.writer import Writer
from workers.trainer import metrics
from workers.trainer.checkpoint import CheckpointRefused, Checkpoints, Identity, Progress
from workers.trainer.config import TrainerConfig
from workers.trainer.export import export_policy
from workers.trainer.history import History
from workers.trainer.loss import LossBounds
from workers.trainer.policy import load_policy
from workers.trainer.step import StepSettings, TrainingSample, make_optimizer, train_step
from workers.trainer.step_log import StepLine, StepLog, decoded, encoded
from workers.trainer.stream import SampleStream
from workers.weights.config import WeightsConfig
from workers.weights.manifests import manifest_key, newest_manifest
from workers.weights.publish import publisher_of
from workers.weights.snapshot import Snapshot

EXPORTED = "model"
"""Folder of the final policy in the run's folder."""

log = structlog.get_logger("trainer")


class TrainerFenced(RoseError):
    """Another trainer has taken this one's place."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"another trainer of model {model_id} has been started on this broker: this one ends")


class Trainer:
    """One run of training. Making one loads the policy and fences any other trainer of the model."""

    def __init__(self, settings: BusSettings, config: TrainerConfig, weights: WeightsConfig, stop: Event) -> None:
        """`stop` ends `run` after the present step. Raises UsageError for a broken folder, BusError or TopicMissing."""
        self._settings = settings
        self._config = config
        self._model = load_policy(config.model_folder)
        self._optimizer = make_optimizer(self._model, learning_rate=config.learning_rate)
        self._step_settings = step_settings(config)
        self._rules = GroupRules(
            groups_per_step=config.groups_per_step,
            total_groups=config.total_groups,
            max_staleness=config.max_staleness,
            vocabulary=self._model.get_input_embeddings().num_embeddings,
        )
        self._identity = Identity(
            run=config.run_folder.resolve().name, namespace=settings.namespace, model_id=config.model_id
        )
        self._checkpoints = Checkpoints(config.checkpoints, self._identity)
        self._step_log = StepLog(config.run_folder)
        self._writer = Writer(settings, "trainer", transactional_id=f"trainer-{config.model_id}")
        self._publisher = publisher_of(settings, config.model_id, weights)
        self._assembly = GroupAssembly(self._rules)
        self._version = 0
        self._offsets: dict[int, int] = {}
        self._on_log: WeightManifest | None = None
        self._history: History | None = None
        self._waiting_since = perf_counter()
        self._stop = stop

    def run(self) -> None:
        """Train until the run's groups are settled, then export the policy; or until `stop`, after the present step.

        Raises RoseError: a checkpoint or log that is not this run's, a broker that refuses, another trainer.
        """
        try:
            self._recover()
            self._train()
            self._publisher.close()
        except BusError as error:
            if error.fenced:
                raise TrainerFenced(self._config.model_id) from error
            raise
        if not self._assembly.step_size:
            export_policy(self._model, self._config.model_folder, self._config.run_folder / EXPORTED)
            log.info("run complete", version=self._version, groups=self._assembly.settled_groups)

    def _recover(self) -> None:
        """Begin anew, or stand where the newest checkpoint stood, with its transaction on the log."""
        self._on_log = newest_manifest(self._settings, self._config.model_id)
        progress = next(filter(self._is_on_log_or_next, self._checkpoints.newest_first()), None)
        if progress is None:
            self._begin_anew()
        else:
            self._go_on_from(progress)
        metrics.POLICY_VERSION.set(self._version)

    def _is_on_log_or_next(self, progress: Progress) -> bool:
        """Whether the log agrees with the checkpoint: a fenced trainer may have left one that was never settled."""
        manifest = self._on_log
        if manifest is None or manifest.version != progress.version or manifest.digest == progress.weights_digest:
            return True
        log.warning("checkpoint is of another policy than the log's, trying the one before", version=progress.version)
        return False

    def _begin_anew(self) -> None:
        if self._on_log is not None:
            raise CheckpointRefused(
                f"the log holds version {self._on_log.version} of model {self._config.model_id}, and "
                f"{self._config.checkpoints} no checkpoint of it: name that run's folder, or take another --namespace"
            )
        torch.manual_seed(self._config.seed)
        self._assembly = GroupAssembly(self._rules, settled=History(self._settings).settled_groups)
        snapshot = self._snapshot()
        self._checkpoints.save(self._progress(snapshot, (), None), self._model, self._optimizer)
        self._publish(snapshot, ())

    def _go_on_from(self, progress: Progress) -> None:
        self._checkpoints.restore(progress, self._model, self._optimizer)
        self._version, self._offsets = progress.version, dict(progress.offsets)
        self._assembly = GroupAssembly(self._rules, settled=progress.settled, settled_groups=progress.settled_groups)
        for wire in progress.held:
            self._assembly.offer(decode(Sample, wire))
        log.info("going on", version=self._version, held=len(progress.held))
        if self._on_log is None or self._on_log.version < self._version:
            history = History(self._settings)
            outcomes = [decode(SampleOutcome, wire) for wire in progress.outcomes]
            self._publish(self._snapshot(), [outcome for outcome in outcomes if not history.has(outcome)])
        elif self._on_log.version > self._version:
            self._history = History(self._settings)
        if progress.step_line:
            self._step_log.append(decoded(progress.step_line))

    def _train(self) -> None:
        stream = SampleStream(self._settings, stop=self._stop, offsets=self._offsets)
        self._offsets = stream.offsets
        self._waiting_since = perf_counter()
        try:
            self._take_steps()
            for placed in stream if self._assembly.step_size else ():
                taken = self._assembly.offer(placed.sample)
                metrics.SAMPLES.labels(taken.value).inc()
                if taken is not Taken.HELD:
                    log.warning("sample dropped", trajectory=placed.sample.trajectory_id, reason=taken.value)
                self._take_steps()
                if not self._assembly.step_size:
                    break
        finally:
            stream.close()

    def _take_steps(self) -> None:
        while not self._stop.is_set():
            groups = self._assembly.take(self._version, self._made_before())
            if groups is None:
                break
            self._step(groups)
        metrics.HELD_SAMPLES.set(self._assembly.held_samples)

    def _made_before(self) -> list[str] | None:
        """The groups of the next step, if the log has that step already."""
        if self._on_log is None or self._history is None or self._version >= self._on_log.version:
            return None
        groups = self._history.groups_of(self._version + 1)
        if not groups:
            raise CheckpointRefused(
                f"the log is at version {self._on_log.version}, the newest whole checkpoint at {self._version}, and "
                f"the outcomes of step {self._version + 1} are no longer on the log: start a run with another name"
            )
        return groups

    def _step(self, groups: Sequence[AssembledGroup]) -> None:
        waited = perf_counter() - self._waiting_since
        began = perf_counter()
        line = _line_of(groups, self._version)
        trained = [_training_group(group) for group in groups if group.trained]
        if trained:
            done = train_step(self._model, self._optimizer, trained, settings=self._step_settings)
            line.tokens, line.loss, line.gradient_norm = done.tokens, done.loss, done.gradient_norm
            line.importance_mean, line.kl_behaviour = done.importance_mean, done.kl_behaviour
            line.clipped_share, line.skipped_minibatches = done.clipped_share, done.skipped_minibatches
        now = time.time()
        line.waiting_seconds, line.training_seconds, line.ended_at = waited, perf_counter() - began, now
        outcomes = self._outcomes(groups, now)
        began = perf_counter()
        self._publisher.settle()  # no checkpoint is two versions ahead of the log
        self._version += 1
        snapshot = self._snapshot()
        line.publishing_seconds = perf_counter() - began
        began = perf_counter()
        self._checkpoints.save(self._progress(snapshot, outcomes, line), self._model, self._optimizer)
        line.checkpoint_seconds = perf_counter() - began
        if self._on_log is None or self._version > self._on_log.version:
            self._publish(snapshot, outcomes)
        else:
            self._compare_with_log(snapshot)
        self._step_log.append(line)
        metrics.observe(line)
        log.info("step", step=line.step, reward=line.reward_mean, success=line.success_rate, groups=line.groups)
        self._waiting_since = perf_counter()

    def _outcomes(self, groups: Sequence[AssembledGroup], now: float) -> list[SampleOutcome]:
        return [
            SampleOutcome(
                trajectory_id=end.trajectory_id,
                group_id=end.group_id,
                outcome=end.outcome,
                step=self._version + 1,
                policy_version=self._version,
                reason=end.reason,
                recorded_at=now,
            )
            for group in groups
            for end in group.settled
        ]

    def _snapshot(self) -> Snapshot:
        return self._publisher.snapshot(self._model.named_parameters())

    def _progress(self, snapshot: Snapshot, outcomes: Sequence[SampleOutcome], line: StepLine | None) -> Progress:
        return Progress(
            identity=self._identity,
            version=self._version,
            weights_digest=snapshot.digest(),
            offsets=dict(self._offsets),
            held=tuple(encode(sample) for sample in self._assembly.held),
            settled=tuple(self._assembly.settled),
            settled_groups=self._assembly.settled_groups,
            outcomes=tuple(encode(outcome) for outcome in outcomes),
            step_line=b"" if line is None else encoded(line),
        )

    def _publish(self, snapshot: Snapshot, outcomes: Sequence[SampleOutcome]) -> None:
        """Begin to publish the present version; training goes on meanwhile. A failure ends the run."""
        began = perf_counter()

        def published(done: Future[WeightManifest]) -> None:
            if done.exception() is not None:
                self._stop.set()
            else:
                metrics.PUBLISHING_SECONDS.observe(perf_counter() - began)
                metrics.POLICY_VERSION.set(done.result().version)

        publishing = self._publisher.start(snapshot, self._version, partial(self._commit, outcomes))
        publishing.add_done_callback(published)

    def _commit(self, outcomes: Sequence[SampleOutcome], manifest: WeightManifest) -> None:
        """Settle a step's samples and put its version on the log in one transaction."""
        self._writer.begin()
        for outcome in outcomes:
            name = outcome.trajectory_id
            self._writer.write(OUTCOMES, outcome, key=name, trajectory_id=name)
        self._writer.write(MANIFESTS, manifest, key=manifest_key(manifest))
        self._writer.commit()

    def _compare_with_log(self, snapshot: Snapshot) -> None:
        """A step that was made again should have made the same policy."""
        assert self._on_log is not None
        if self._version == self._on_log.version:
            same = snapshot.digest() == self._on_log.digest
            (log.info if same else log.warning)("caught up with the log", version=self._version, same_policy=same)


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


def _training_group(group: AssembledGroup) -> list[TrainingSample]:
    return [
        TrainingSample(
            tokens=unpack_tokens(sample.tokens),
            loss_mask=list(sample.loss_mask),
            behaviour_logprobs=unpack_logprobs(sample.logprobs).tolist(),
            reward=sample.reward,
        )
        for sample in group.trained
        if sample.reward is not None
    ]


def _line_of(groups: Sequence[AssembledGroup], version: int) -> StepLine:
    settled = [
        (sample, end.outcome) for group in groups for sample, end in zip(group.samples, group.settled, strict=True)
    ]
    rewarded = [sample for sample, outcome in settled if outcome is not Outcome.INFRA_FAILED]
    ages = [staleness(sample, version) for sample, outcome in settled if outcome is Outcome.TRAINED]
    return StepLine(
        step=version + 1,
        version=version + 1,
        groups=len(groups),
        groups_filtered=sum(not group.trained for group in groups),
        outcomes=dict(Counter(outcome.value for _, outcome in settled)),
        reward_mean=_mean([sample.reward for sample in rewarded if sample.reward is not None]),
        success_rate=_mean([sample.success for sample in rewarded]),
        staleness_mean=_mean(ages),
        staleness_max=max(ages, default=None),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
