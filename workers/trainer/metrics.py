"""The figures of the trainer: Prometheus metrics, and the sinks where the figures of a training step go.

Keeps true
- The step log is the last sink: a step in the step log has reached every sink.

A tracker (Weights & Biases, MLflow, TensorBoard) is one more class with the two methods of MetricsSink, added to
`StepReporter`.
"""

from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rose.schemas.samples import Outcome
from rose.workers.trainer.groups import SampleStatus
from rose.workers.trainer.step_log import StepLine, StepLog

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

OTHER_MODEL, DEAD_LETTER = "other_model", "dead_letter"
"""Labels of samples that are not given to the group assembly."""

TRAINER = CollectorRegistry()
"""Metrics of the trainer, exported once it has started."""

SAMPLES = Counter("rose_trainer_samples_total", "Samples read, by status.", ["taken"], registry=TRAINER)
OUTCOMES = Counter("rose_trainer_outcomes_total", "Trajectories settled, by outcome.", ["outcome"], registry=TRAINER)
HELD_SAMPLES = Gauge(
    "rose_trainer_held_samples", "Samples that wait for their group or for a training step.", registry=TRAINER
)
POLICY_VERSION = Gauge("rose_trainer_policy_version", "Newest version of the policy on the log.", registry=TRAINER)
STEPS = Counter("rose_trainer_steps_total", "Optimizer steps.", registry=TRAINER)
TOKENS = Counter("rose_trainer_tokens_total", "Sampled tokens that were trained on.", registry=TRAINER)
SKIPPED = Counter(
    "rose_trainer_skipped_minibatches_total", "Minibatches whose gradient was not finite.", registry=TRAINER
)
REWARD = Gauge("rose_trainer_reward_mean", "Mean reward of the samples of the latest step.", registry=TRAINER)
SUCCESS = Gauge("rose_trainer_success_ratio", "Share of successful samples of the latest step.", registry=TRAINER)
STALENESS = Gauge(
    "rose_trainer_staleness_versions", "Mean staleness of the samples of the latest step.", registry=TRAINER
)
STALENESS_MOST = Gauge(
    "rose_trainer_staleness_max_versions", "Greatest staleness of the samples of the latest step.", registry=TRAINER
)
GRADIENT_NORM = Gauge(
    "rose_trainer_gradient_norm", "Norm of the latest step's gradient, before it is clipped.", registry=TRAINER
)
BEHAVIOUR_KL = Gauge(
    "rose_trainer_behaviour_kl_nats",
    "KL divergence of the sampling policy from the trained policy, per token, in the latest step.",
    registry=TRAINER,
)
IMPORTANCE = Gauge(
    "rose_trainer_importance_mean_ratio",
    "Mean ratio of a sampled token's probability, trainer to engine, in the latest step.",
    registry=TRAINER,
)
CLIPPED = Gauge(
    "rose_trainer_clipped_ratio",
    "Share of the latest step's tokens without gradient because of the clip range.",
    registry=TRAINER,
)
LEARNING_RATE = Gauge("rose_trainer_learning_rate", "Learning rate of the latest step.", registry=TRAINER)
BATCH_WAIT_SECONDS = Histogram(
    "rose_trainer_batch_wait_seconds",
    "Time that a step waited for its groups.",
    buckets=SECONDS,
    registry=TRAINER,
)
POLICY_WAIT_SECONDS = Histogram(
    "rose_trainer_policy_wait_seconds",
    "Time that a step waited until the last version was on the log, with the copy of its own weights.",
    buckets=SECONDS,
    registry=TRAINER,
)
TRAINING_SECONDS = Histogram(
    "rose_trainer_training_seconds", "Time of training on the groups of a step.", buckets=SECONDS, registry=TRAINER
)
CHECKPOINT_SECONDS = Histogram(
    "rose_trainer_checkpoint_seconds", "Time to write the checkpoint of a step.", buckets=SECONDS, registry=TRAINER
)
PUBLISHING_SECONDS = Histogram(
    "rose_trainer_publishing_seconds",
    "Time to publish chunks, manifest and outcomes, during the next step.",
    buckets=SECONDS,
    registry=TRAINER,
)

for _taken in (*SampleStatus, OTHER_MODEL, DEAD_LETTER):
    SAMPLES.labels(_taken if isinstance(_taken, str) else _taken.value)
for _outcome in Outcome:
    OUTCOMES.labels(_outcome.value)


class MetricsSink(Protocol):
    """Takes the figures of each step."""

    def log(self, step: int, values: StepLine) -> None:
        """Take the figures of a step. Steps come in order.

        A step comes a second time if the trainer was killed before every sink had it. An exception ends the trainer.
        """

    def close(self) -> None:
        """Write what is held back. Called once, when the trainer ends for whatever reason but a kill."""


class PrometheusSink:
    """The metrics sink that sets the metrics of this module."""

    def log(self, step: int, values: StepLine) -> None:
        """Update the metrics with a finished step."""
        for outcome, count in values.outcomes.items():
            OUTCOMES.labels(outcome).inc(count)
        for gauge, value in (
            (REWARD, values.reward_mean),
            (SUCCESS, values.success_rate),
            (STALENESS, values.staleness_mean),
            (STALENESS_MOST, values.staleness_max),
            (GRADIENT_NORM, values.gradient_norm),
            (BEHAVIOUR_KL, values.kl_behaviour),
            (IMPORTANCE, values.importance_mean),
            (CLIPPED, values.clipped_share),
            (LEARNING_RATE, values.learning_rate),
        ):
            if value is not None:
                gauge.set(value)
        STEPS.inc()
        TOKENS.inc(values.tokens)
        SKIPPED.inc(values.skipped_minibatches)
        BATCH_WAIT_SECONDS.observe(values.waiting_seconds)
        POLICY_WAIT_SECONDS.observe(values.publishing_seconds)
        TRAINING_SECONDS.observe(values.training_seconds)
        CHECKPOINT_SECONDS.observe(values.checkpoint_seconds or 0.0)

    def close(self) -> None:
        """Do nothing: the process exports its metrics until it ends."""


class StepReporter:
    """Gives each step to all sinks of a run. The step log is last: a step in it has reached every sink."""

    def __init__(self, run_folder: Path) -> None:
        """Raises OSError or DecodeError as StepLog does."""
        self._step_log = StepLog(run_folder)
        self._sinks: tuple[MetricsSink, ...] = (PrometheusSink(), self._step_log)

    def report(self, line: StepLine) -> None:
        """Give a step's line to every sink, unless the step log has the step."""
        if line.step > self._step_log.last_step:
            for sink in self._sinks:
                sink.log(line.step, line)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()
