"""The trainer's loop: reads groups, runs steps, publishes policy versions and outcomes.

Keeps true
- Every sample is trained on at most once and has one outcome, however often the trainer is killed (`versions`,
  `resume`).
- A model has one trainer: a newer trainer fences the older one, which then cannot settle or publish.
- A group that no step can compute is settled with the reason and training continues (`learner`).
- A version is published only after the version before it was evaluated, if that one was due (`evaluation_gate`).
- A policy with weights that are not finite, or with logprobs of its own samples that are not, is not saved, published
  or exported; the trainer ends.
"""

import time
from collections.abc import Sequence
from threading import Event
from time import perf_counter

import structlog

from rose.schemas.errors import RoseError
from rose.schemas.limits import MAX_CONTEXT_TOKENS
from rose.topics.errors import BusError
from rose.topics.health import HEALTH
from rose.topics.settings import TRANSACTION_MILLISECONDS, BusSettings
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.model_config import max_context_tokens
from rose.workers.trainer import metrics
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.evaluation_gate import EvaluationGate
from rose.workers.trainer.export import export_checkpoint, export_policy
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.metrics import StepLine, StepReporter
from rose.workers.trainer.ranks import ALONE, Ranks
from rose.workers.trainer.selection import (
    SelectedGroup,
    SelectionRules,
    oldest_fresh_version,
    outcomes_of,
    select_groups,
)
from rose.workers.trainer.stream import SampleStream
from rose.workers.trainer.versions import PolicyVersions, resume
from rose.workers.weights.config import WeightsConfig

log = structlog.get_logger("trainer")


class TrainerFenced(RoseError):
    """Another trainer of the model has started, or the broker has timed out this trainer's transaction."""

    def __init__(self, model_id: str) -> None:
        longest = TRANSACTION_MILLISECONDS // 1000
        super().__init__(
            f"another trainer of model {model_id} was started on this broker, or this trainer paused for {longest} s "
            "in a transaction: it ends, and resumes from its checkpoint when it is started again"
        )


class Trainer:
    """One run of training. The constructor loads the policy and fences any other trainer of the model."""

    def __init__(
        self,
        settings: BusSettings,
        config: TrainerConfig,
        weights: WeightsConfig,
        stop: Event,
        ranks: Ranks = ALONE,
        evaluation: EvaluationConfig | None = None,
    ) -> None:
        """`stop` ends `run` after the current step. If it is set while the log is read back, StreamStopped is raised.

        `ranks`: the ranks that train together, of which this process is rank 0. `evaluation`: None: no version is
        evaluated.

        Raises UsageError for a broken folder or algorithm, and BusError or TopicMissing.
        """
        self._config, self._ranks = config, ranks
        self.learner = Learner(config, ranks)
        model = self.learner.model
        self._rules = SelectionRules(
            max_staleness=config.max_staleness,
            vocabulary=model.get_input_embeddings().num_embeddings,
            context_tokens=max_context_tokens(model.config.to_dict()) or MAX_CONTEXT_TOKENS,
            leave_out_truncated=config.truncated == "leave_out",
        )
        if config.max_staleness == 0:
            reason = "groups open as a version is published, so that their first turns sample the version before"
            log.warning("most_samples_may_be_stale", reason=reason, max_staleness=0)
        self._reporter = StepReporter(config.run_folder)
        self.stream = SampleStream(settings, config.model_id, total_groups=config.total_groups, stop=stop)
        self.versions = PolicyVersions(settings, config, weights, self.learner, self.stream, stop)
        self._evaluations = EvaluationGate(
            settings, evaluation or EvaluationConfig(), self.versions.publisher.trust.run, stop
        )
        self._stop = stop
        self._waiting_since = perf_counter()
        self._early_seconds = 0.0
        """Seconds of computing for the next step while it waits for groups."""
        self._weights_since = 0
        """The first version with the weights of the current version, as far as this process knows."""

    def run(self) -> None:
        """Train until all groups of the run have ended, or an evaluation ends the run; then export the policy.

        If `stop` is set, return after the current step, or at once if the step waits for an evaluation: the step is
        repeated then.

        Raises RoseError if the checkpoint or the log is another run's, the broker refuses, or another trainer fences
        this one.
        """
        try:
            self.recover()
            self._waiting_since = perf_counter()
            add_early = self._add_early if self._config.stream_gradients else None
            while self._stopped_early is None and (
                groups := self.stream.take(self._config.groups_per_step, on_complete=add_early)
            ):
                self._step(groups)
            HEALTH.report("ends: the last version goes to the log", lasts_seconds=self._config.hung_seconds)
            self.versions.wait_until_published()
            if not self._stop.is_set():
                self._await_evaluation()
            self.versions.publisher.close()
        except BusError as error:
            if error.is_fenced:
                raise TrainerFenced(self._config.model_id) from error
            raise
        finally:
            self.stream.close()
            self._evaluations.close()
            self._reporter.close()
        if self.stream.ended or self._stopped_early is not None:
            HEALTH.report("ends: the policy is exported", lasts_seconds=self._config.hung_seconds)
            self._export()
            log.info(
                "run_completed",
                version=self.versions.current,
                groups=self._config.total_groups,
                reason=self._stopped_early or "all groups have ended",
            )

    def _export(self) -> None:
        if self.learner.is_sharded:
            assert self.versions.progress is not None
            export_checkpoint(self._config, self.versions.checkpoints, self.versions.progress, self._config.exported)
        else:
            export_policy(self.learner.tensors, self._config.exported)

    @property
    def _stopped_early(self) -> str | None:
        """Why an evaluation has ended the run; None if none has."""
        last = self._evaluations.last_stop
        if last is None:
            return None
        return (
            f"early stop: {last.without_improvement} evaluations were no improvement on version {last.best_version} "
            f"({last.metric.value} {last.best_score:g})"
        )

    def _await_evaluation(self) -> None:
        """Wait until the version in the newest checkpoint is evaluated, if it is due; export it if it is the best."""
        progress = self.versions.progress
        assert progress is not None
        result = self._evaluations.wait(progress.version)
        if result is None or not result.complete or result.best_version != progress.version:
            return
        HEALTH.report("exports the best policy", lasts_seconds=self._config.hung_seconds)
        export_checkpoint(self._config, self.versions.checkpoints, progress, self._config.best)
        log.info("best_exported", version=progress.version, score=result.score, folder=str(self._config.best))

    def recover(self) -> None:
        """Start a new run or restore the newest checkpoint, as `resume` does. `run` calls this first."""
        if line := resume(self._config, self.learner, self.versions, self.stream):
            self._reporter.report(line)
            self.learner.fruitless_steps = int(line.skipped_minibatches > 0 and not line.tokens)
        metrics.POLICY_VERSION.set(self.versions.current)
        self._weights_since = self.versions.current

    def _add_early(self, group: CompleteGroup) -> None:
        """Compute the gradient of a group of the next step while the step's other groups are awaited."""
        HEALTH.report("learns", lasts_seconds=self._config.hung_seconds)
        began = perf_counter()
        metrics.EARLY_TOKENS.set(self.learner.add_early(*self._select([group])))
        self._early_seconds += perf_counter() - began

    def _select(self, groups: Sequence[CompleteGroup]) -> list[SelectedGroup]:
        """Choose the outcomes under the current version, which does not change before the step is trained."""
        versions = self.versions
        return select_groups(groups, versions.current, rules=self._rules, abandoned=versions.abandoned)

    def _step(self, groups: Sequence[CompleteGroup]) -> None:
        HEALTH.report("learns", lasts_seconds=self._config.hung_seconds)
        began, early = perf_counter(), self._early_seconds
        waited, self._early_seconds = began - self._waiting_since - early, 0.0
        versions, before = self.versions, self.versions.current
        selected = self._select(groups)
        selected, done = self.learner.learn(selected, before, since=self._weights_since)
        trained, now = perf_counter(), time.time()
        # Keeps the checkpoint at most one version ahead of the log.
        versions.current = versions.wait_until_published()
        published = perf_counter()
        self._await_evaluation()
        held = perf_counter() - published
        if self._stop.is_set() and self._evaluations.is_awaited(before):
            return  # without the step: what it would publish would end the evaluation
        if done.tokens:
            self._weights_since = versions.current
        self.learner.check_finite(selected, versions.current)
        line = StepLine.of(selected, done, before=before, version=versions.current, abandoned=versions.abandoned)
        line.waiting_seconds, line.training_seconds, line.ended_at = waited, early + trained - began, now
        line.devices, line.evaluation_seconds = self._ranks.size, held
        fresh = oldest_fresh_version(versions.current, versions.abandoned, max_staleness=self._rules.max_staleness)
        outcomes = outcomes_of(selected, step=versions.current, policy_version=before, oldest_fresh=fresh, now=now)
        versions.save_and_publish(self.stream.settlement(outcomes), line=line, trained=trained + held)
        self._reporter.report(line)
        log.info(
            "step_finished", step=line.step, reward=line.reward_mean, success=line.success_rate, groups=line.groups
        )
        self._waiting_since = perf_counter()
