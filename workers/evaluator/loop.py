"""The evaluator's loop: follows policy versions, asks for samples, settles them and writes results.

Keeps true
- The outcomes of an evaluation's trajectories, its result, and the position in the samples are one transaction. Nothing
  is settled between two results of evaluations, so a later evaluator reads again what is not settled, and no more.
- Of two evaluators of one set, the newer one fences the older one.
- Only the newest version is evaluated. When a newer one comes, the evaluation ends incomplete, without scores.
- Samples of evaluations that have ended settle once they come, and are in no result.
- Prompts of an evaluation that has ended are withdrawn.
"""

import time
from collections.abc import Callable
from threading import Event

import structlog
from confluent_kafka import OFFSET_BEGINNING

from rose.schemas.errors import RoseError
from rose.schemas.evaluations import EvaluationResult, Metric
from rose.schemas.prompts import group_id_of
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.weights import WeightManifest
from rose.topics.catalog import EVALUATION_RESULTS, EVALUATIONS, EVALUATOR_PREFIX, MANIFESTS, OUTCOMES, SAMPLES
from rose.topics.errors import BusError, RetryPolicy, TopicMissing
from rose.topics.health import HEALTH
from rose.topics.log_reader import (
    LARGE_RECORDS,
    await_transactions,
    read_keyed_messages,
    read_whole_topics,
    topic_starts,
)
from rose.topics.metrics import register
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, Item, Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.evaluator import metrics
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.evaluator.evaluation import ENDED, Evaluation, EvaluationSet, SampleFacts, verdict_of
from rose.workers.evaluator.scores import Scores, Series, scores_of
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.trust import Trust, make_trust

CLIENT_ID = "evaluator"

BATCH = 256
LOOK_SECONDS = 0.2
"""Most records of one read, and its longest wait; a stop is noticed within it."""

RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
"""Pauses after errors of the broker: the first, and the longest."""

NO_SUCCESS = "the environment does not say which tasks are solved: set evaluation.metric to reward"

log = structlog.get_logger("evaluator")


class EvaluatorFenced(RoseError):
    """Another evaluator of the set has started."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"another evaluator of the set {name} was started on this broker: this one ends, and nothing is lost"
        )


def run_evaluator(
    settings: BusSettings, config: EvaluationConfig, weights: WeightsConfig, tasks: EvaluationSet, stop: Event
) -> None:
    """Evaluate versions until `stop` is set. Being killed at any moment loses and doubles nothing.

    Raises UsageError for a broken key, EvaluatorFenced, and TopicMissing or BusError if waiting does not help.
    """
    register(metrics.EVALUATOR)
    trust = make_trust(settings, config.model_id, weights)
    retry = RetryPolicy(RETRY_SECONDS, LONGEST_RETRY_SECONDS)
    while not stop.is_set():
        session = Session(settings, config, trust, tasks, stop)
        failure: BusError | TopicMissing | None = None
        try:
            session.recover()
            while not stop.is_set():
                session.advance()
                retry.on_success()
        except (BusError, TopicMissing) as error:
            failure = error
        session.close()
        if isinstance(failure, BusError) and failure.is_fenced:
            raise EvaluatorFenced(tasks.name)
        if failure is not None and not stop.is_set():
            wait = retry.on_error(failure, time.monotonic())
            log.warning("restarting", reason=str(failure), retry_seconds=wait)
            HEALTH.report_restart(f"trouble with the broker: {failure}")
            stop.wait(wait)


class Session:
    """The evaluator from one reading of its state to the next error of the broker."""

    def __init__(
        self,
        settings: BusSettings,
        config: EvaluationConfig,
        trust: Trust,
        tasks: EvaluationSet,
        stop: Event,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: Unix seconds."""
        self._settings, self._config, self._trust, self._set = settings, config, trust, tasks
        self._stop, self._clock = stop, clock
        self._name = f"{EVALUATOR_PREFIX}{config.model_id}-{tasks.name}"
        self._series = Series(tasks.digest, Metric(config.metric))
        self._newest: WeightManifest | None = None
        self._knows_newest = False
        """Whether the manifests have been read to their end once."""
        self._open: Evaluation | None = None
        self._opened: WeightManifest | None = None
        """The version of the open evaluation."""
        self._started_at = 0.0
        self._held: dict[str, SampleFacts] = {}
        """Samples of the set without an outcome, by trajectory."""
        self._settled: set[str] = set()
        """Trajectories that were settled before, as far as the broker has forgotten the position."""
        self._next: dict[Place, int] = {}
        """Offsets after the last samples that were read."""
        self._asked: set[str] = set()
        """Groups whose prompts are on the log."""
        self._writer: Writer | None = None
        self._samples: Reader | None = None
        self._manifests: Reader | None = None

    def recover(self) -> None:
        """Fence an earlier evaluator of the set, and read back where it stands. Raises TopicMissing or BusError."""
        HEALTH.report("reads back where it stands", ready=False)
        wait = HEALTH.report_progress
        self._writer = Writer(
            self._settings,
            CLIENT_ID,
            transactional_id=self._name,
            still_needed=lambda: not self._stop.is_set(),
        )
        self._samples = Reader(
            self._settings, CLIENT_ID, group=self._name, report_ends=True, on_wait=wait, **LARGE_RECORDS
        )
        places: list[Place] = [(SAMPLES, part) for part in range(self._samples.partition_count(SAMPLES))]
        committed = self._writer.committed_offsets(self._samples, places)
        own = [(EVALUATION_RESULTS, 0), (EVALUATIONS, 0), (OUTCOMES, 0)]
        await_transactions(self._settings, own, client_id=CLIENT_ID, on_wait=wait)
        ends = self._samples.all_watermarks(places)
        for place in places:
            (low, high), offset = ends[place], committed[place]
            self._next[place] = low if offset is None or not low <= offset <= high else offset
        if any(committed[place] is None and ends[place][1] > 0 for place in places):
            self._settled = self._settled_before()
        for envelope in read_whole_topics(self._settings, [EVALUATION_RESULTS, EVALUATIONS], client_id=CLIENT_ID):
            self._on_own_record(envelope)
        self._samples.assign(self._next)
        self._manifests = Reader(self._settings, CLIENT_ID, report_ends=True, on_wait=wait)
        self._manifests.assign({(MANIFESTS, 0): OFFSET_BEGINNING})

    def advance(self) -> None:
        """Read once, and do what follows from it. Raises TopicMissing or BusError."""
        assert self._samples is not None and self._manifests is not None
        for item in self._manifests.read(BATCH, 0.0 if self._knows_newest else LOOK_SECONDS):
            self._on_manifest(item)
        for item in self._samples.read(BATCH, LOOK_SECONDS):
            self._on_sample(item)
        if not self._knows_newest:
            return
        if self._opened is not None and self._newest is not None and self._newest.order != self._opened.order:
            self._finish(f"version {self._newest.version} was published before it ended")
        if self._open is None:
            self._begin()
        if self._open is not None:
            self._ask()
            if self._open.is_ended:
                self._finish(self._open.incomplete_reason)
        elif self._held or self._asked:
            self._settle(None)
        HEALTH.report(self._activity)

    def close(self) -> None:
        """Close all clients. Never call this while an exception is handled."""
        for client in (self._manifests, self._samples, self._writer):
            if client is not None:
                client.close()

    @property
    def _activity(self) -> str:
        if self._open is None:
            return "waits for a version to evaluate"
        done, all_prompts = self._open.done_prompts, len(self._set.prompts)
        return f"evaluates version {self._open.version}: {done} of {all_prompts} prompts are done"

    def _settled_before(self) -> set[str]:
        begins = topic_starts(self._settings, [OUTCOMES], client_id=CLIENT_ID)
        found = read_keyed_messages(self._settings, begins, client_id=CLIENT_ID)
        return {message.key for message in found if message.key.startswith(self._set.prefix)}

    def _on_own_record(self, envelope: Envelope) -> None:
        result = envelope.record
        if envelope.topic is EVALUATIONS:
            if envelope.key.startswith(self._set.prefix):
                (self._asked.discard if result is None else self._asked.add)(envelope.key)
        elif isinstance(result, EvaluationResult) and (result.run, result.model_id, result.evaluation) == (
            self._trust.run,
            self._config.model_id,
            self._set.name,
        ):
            self._series.add(result)
            if result.set_digest == self._set.digest:
                metrics.show(result)

    def _on_manifest(self, item: Item) -> None:
        if isinstance(item, EndOfPartition):
            self._knows_newest = True
            return
        manifest = self._trust.verified(item) if isinstance(item, Envelope) else None
        if manifest is not None and (self._newest is None or manifest.order >= self._newest.order):
            self._newest = manifest

    def _on_sample(self, item: Item) -> None:
        place = item.topic, item.partition
        after = item.offset if isinstance(item, EndOfPartition) else item.offset + 1
        self._next[place] = max(self._next[place], after)
        sample = item.record if isinstance(item, Envelope) else None
        if not isinstance(sample, Sample) or sample.model_id != self._config.model_id:
            return
        name = sample.trajectory_id
        if not name.startswith(self._set.prefix) or name in self._settled or name in self._held:
            return
        self._held[name] = SampleFacts.of(sample)
        if self._open is not None:
            self._open.on_sample(self._held[name])

    def _begin(self) -> None:
        """Begin to evaluate the newest version if it is due and has no result."""
        newest = self._newest
        if newest is None or not self._config.is_due(newest.version) or newest.version in self._series.versions:
            return
        self._open, self._opened = Evaluation(self._set, newest.version, window=self._config.window_prompts), newest
        self._started_at = self._clock()
        for sample in self._held.values():
            self._open.on_sample(sample)
        log.info("evaluation_started", evaluation=self._set.name, version=newest.version, held=len(self._held))

    def _ask(self) -> None:
        """Write the prompts that the open evaluation needs and that are not on the log."""
        assert self._open is not None and self._writer is not None
        writer = self._writer
        metrics.PROMPTS_LEFT.set(len(self._set.prompts) - self._open.done_prompts)
        missing = [prompt for prompt in self._open.prompts() if prompt.group_id not in self._asked]
        if not missing:
            return

        def write() -> None:
            for prompt in missing:
                writer.write(EVALUATIONS, prompt, key=prompt.group_id, partition=0)

        writer.transact(write)
        self._asked.update(prompt.group_id for prompt in missing)

    def _finish(self, reason: str) -> None:
        """End the open evaluation with its result. `reason`: why it is incomplete; empty if it is complete."""
        result = self._result(reason)
        self._settle(result)
        self._series.add(result)
        metrics.count(result)
        metrics.PROMPTS_LEFT.set(0)
        self._open = self._opened = None
        if result.complete:
            log.info(
                "evaluation_completed",
                evaluation=result.evaluation,
                version=result.version,
                reward=result.reward,
                success=result.success,
                best_version=result.best_version,
                reason=result.reason,
            )
        else:
            log.warning(
                "evaluation_incomplete",
                evaluation=result.evaluation,
                version=result.version,
                counted=result.counted,
                reason=result.reason,
            )

    def _result(self, reason: str) -> EvaluationResult:
        assert self._open is not None and self._opened is not None
        evaluation, metric = self._open, Metric(self._config.metric)
        complete = evaluation.is_complete
        scores = scores_of(evaluation.counted_samples, self._config.ks) if complete else Scores()
        score = scores.value_of(metric)
        if complete:
            reason = NO_SUCCESS if score is None else ""
        result = EvaluationResult(
            model_id=self._config.model_id,
            run=self._trust.run,
            evaluation=self._set.name,
            set_digest=self._set.digest,
            version=evaluation.version,
            epoch=self._opened.epoch,
            prompts=len(self._set.prompts),
            samples=self._set.samples,
            counted=evaluation.counted,
            mismatched=evaluation.mismatched,
            failed=evaluation.failed,
            complete=complete,
            reason=reason,
            reward=scores.reward,
            success=scores.success,
            pass_at=scores.pass_at,
            metric=metric,
            score=score,
            started_at=self._started_at,
            completed_at=self._clock(),
        )
        return self._series.judged(
            result, stop_after=self._config.stop_after, min_improvement=self._config.min_improvement
        )

    def _settle(self, result: EvaluationResult | None) -> None:
        """Commit the outcomes of all held samples and the position after them, with the result if there is one."""
        assert self._writer is not None
        writer = self._writer
        outcomes = [self._outcome(sample, result) for sample in self._held.values()]

        def write() -> None:
            for outcome in outcomes:
                name = outcome.trajectory_id
                writer.write(OUTCOMES, outcome, key=name, trajectory_id=name)
            if result is not None:
                key = f"{result.run}/{result.evaluation}/{result.version}"
                writer.write(EVALUATION_RESULTS, result, key=key, partition=0)
            for group_id in sorted(self._asked):
                writer.tombstone(EVALUATIONS, key=group_id, partition=0)

        writer.transact(write, self._next, self._samples)
        self._held.clear()
        self._asked.clear()

    def _outcome(self, sample: SampleFacts, result: EvaluationResult | None) -> SampleOutcome:
        """Return the outcome of a sample. `result`: that of the evaluation that ends now, if one does."""
        group_id, version = _group_and_version(sample.trajectory_id)
        verdict = verdict_of(sample, version)
        if not verdict.reason and (result is None or self._open is None or not self._open.owns(sample.trajectory_id)):
            verdict = ENDED
        elif not verdict.reason and result is not None and not result.complete:
            verdict = ENDED._replace(reason="its evaluation is incomplete, and has no scores")
        return SampleOutcome(
            trajectory_id=sample.trajectory_id,
            group_id=group_id,
            outcome=verdict.outcome,
            step=version,
            policy_version=version,
            reason=verdict.reason,
            recorded_at=self._clock(),
        )


def _group_and_version(trajectory: str) -> tuple[str, int]:
    """Return the group of a trajectory of an evaluation, and the version that it is pinned to."""
    group_id = group_id_of(trajectory)
    version = group_id.split(":")[3:4]
    return group_id, int(version[0]) if version and version[0].isdecimal() else 0
