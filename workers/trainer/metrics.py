"""The figures of the trainer: Prometheus metrics, the line of a step, and the sinks where the lines of steps go.

The step log, `metrics.jsonl` in a run folder, has one JSON line for each optimizer step, for the report.

Keeps true
- Each step has exactly one complete line in the step log, in order, however often the trainer is killed.
- The step log is the last sink: a step in the step log has reached every sink.

Experiment trackers read the log instead (`rose track`).
"""

import math
import os
from collections import Counter as Counts
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rose.schemas.arrays import unpack_logprobs
from rose.schemas.samples import TRUNCATED, Outcome
from rose.workers.trainer.groups import SampleStatus
from rose.workers.trainer.selection import SelectedGroup, staleness, steps_between

if TYPE_CHECKING:  # imports torch, which the report of a run does not need
    from rose.workers.trainer.step import StepMetrics

STEP_LOG = "metrics.jsonl"

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

OTHER_MODEL, DEAD_LETTER, EVALUATION = "other_model", "dead_letter", "evaluation"
"""Labels of samples that are not given to the group assembly."""

TRAINER = CollectorRegistry()
"""Metrics of the trainer, exported once it has started."""

_counter, _gauge = partial(Counter, registry=TRAINER), partial(Gauge, registry=TRAINER)
_histogram = partial(Histogram, buckets=SECONDS, registry=TRAINER)

SAMPLES = _counter("rose_trainer_samples_total", "Samples read, by status.", ["taken"])
OUTCOMES = _counter("rose_trainer_outcomes_total", "Trajectories settled, by outcome.", ["outcome"])
HELD_SAMPLES = _gauge("rose_trainer_held_samples", "Samples that wait for their group or for a training step.")
POLICY_VERSION = _gauge("rose_trainer_policy_version", "Newest version of the policy on the log.")
STEPS = _counter("rose_trainer_steps_total", "Optimizer steps.")
TOKENS = _counter("rose_trainer_tokens_total", "Sampled tokens that were trained on.")
SKIPPED = _counter("rose_trainer_skipped_minibatches_total", "Minibatches whose gradient was not finite.")
REWARD = _gauge("rose_trainer_reward_mean", "Mean reward of the samples of the latest step.")
SUCCESS = _gauge("rose_trainer_success_ratio", "Share of successful samples of the latest step.")
STALENESS = _gauge("rose_trainer_staleness_versions", "Mean staleness of the samples of the latest step.")
STALENESS_MOST = _gauge("rose_trainer_staleness_max_versions", "Greatest staleness of the samples of the latest step.")
GRADIENT_NORM = _gauge("rose_trainer_gradient_norm", "Norm of the latest step's gradient, before it is clipped.")
BEHAVIOUR_KL = _gauge(
    "rose_trainer_behaviour_kl_nats",
    "KL divergence of the sampling policy from the trained policy, per token, in the latest step.",
)
IMPORTANCE = _gauge(
    "rose_trainer_importance_mean_ratio",
    "Mean ratio of a sampled token's probability, trainer to engine, in the latest step.",
)
CLIPPED = _gauge(
    "rose_trainer_clipped_ratio", "Share of the latest step's tokens without gradient because of the clip range."
)
CLIPPED_BY_SIGN = _gauge(
    "rose_trainer_clipped_sign_ratio",
    "Share of the latest step's tokens of one sign of the advantage without gradient because of the clip range.",
    ["advantage"],
)
REJECTED = _gauge(
    "rose_trainer_rejected_ratio", "Share of the latest step's tokens left out by their ratio of trainer to engine."
)
MISMATCH_KL = _gauge(
    "rose_trainer_mismatch_kl_nats",
    "KL divergence of engines from trainer, per token, over compared tokens of the trainer's own weights, in the "
    "latest step that had any.",
)
REFERENCE_KL = _gauge(
    "rose_trainer_reference_kl_nats",
    "KL divergence of the trained policy from the policy of the model folder, per token, in the latest step.",
)
ENTROPY = _gauge(
    "rose_trainer_entropy_nats", "Entropy of the policies that sampled the latest step's samples, per token."
)
TOKEN_STALENESS = _gauge(
    "rose_trainer_token_staleness_versions", "Mean staleness of the tokens that the latest step was trained on."
)
TRUNCATED_SHARE = _gauge("rose_trainer_truncated_ratio", "Share of the latest step's samples that were cut off.")
NO_ADVANTAGE = _gauge(
    "rose_trainer_zero_advantage_ratio",
    "Share of the latest step's usable samples whose advantage is 0, so that nothing is learned from them.",
)
EARLY_TOKENS = _gauge(
    "rose_trainer_early_tokens",
    "Sampled tokens of the step to come whose gradient is computed; always 0 without trainer.stream_gradients.",
)
STREAMED_TOKENS = _counter(
    "rose_trainer_streamed_tokens_total",
    "Sampled tokens whose gradient was computed before their step's last group was complete.",
)
LEARNING_RATE = _gauge("rose_trainer_learning_rate", "Learning rate of the latest step.")
BATCH_WAIT_SECONDS = _histogram("rose_trainer_batch_wait_seconds", "Time that a step waited for its groups.")
POLICY_WAIT_SECONDS = _histogram(
    "rose_trainer_policy_wait_seconds",
    "Time that a step waited until the last version was on the log, with the copy of its own weights.",
)
EVALUATION_WAIT_SECONDS = _histogram(
    "rose_trainer_evaluation_wait_seconds", "Time that a version waited for the evaluation of the version before it."
)
TRAINING_SECONDS = _histogram("rose_trainer_training_seconds", "Time of training on the groups of a step.")
CHECKPOINT_SECONDS = _histogram("rose_trainer_checkpoint_seconds", "Time to write the checkpoint of a step.")
PUBLISHING_SECONDS = _histogram(
    "rose_trainer_publishing_seconds", "Time to publish chunks, manifest and outcomes, during the next step."
)

for _taken in (*SampleStatus, OTHER_MODEL, DEAD_LETTER, EVALUATION):
    SAMPLES.labels(_taken if isinstance(_taken, str) else _taken.value)
for _unknown in (MISMATCH_KL, REFERENCE_KL, ENTROPY):
    _unknown.set(math.nan)  # 0 would be an alarm, or hide one, before the first step
for _sign in ("positive", "negative"):
    CLIPPED_BY_SIGN.labels(_sign)
for _outcome in Outcome:
    OUTCOMES.labels(_outcome.value)


class StepLine(msgspec.Struct, kw_only=True):
    """Metrics of one step."""

    step: int
    version: int
    """Policy version that the step made."""
    groups: int
    groups_filtered: int
    """Number of `groups` without a trained sample."""
    outcomes: dict[str, int]
    """Number of trajectories by outcome."""
    reward_mean: float | None
    """Mean reward of the step's samples that have a reward; None if there are none."""
    success_rate: float | None
    """Share of successful samples; None if no sample reports success."""
    staleness_mean: float | None
    """Mean staleness, in versions, of the samples that were trained on."""
    staleness_max: int | None
    tokens: int = 0
    """Number of sampled tokens that were trained on."""
    loss: float | None = None
    gradient_norm: float | None = None
    importance_mean: float | None = None
    """Mean ratio of a sampled token's probability in the trainer to that in the engine; 1 on policy."""
    kl_behaviour: float | None = None
    """KL divergence of the sampling policy from the trained policy, in nats per token."""
    clipped_share: float | None = None
    """Share of tokens that have no gradient because of a bound of the algorithm."""
    skipped_minibatches: int = 0
    """Number of minibatches whose gradient was not finite."""
    waiting_seconds: float = 0.0
    """Seconds of waiting for groups since the step before, without the seconds of computing meanwhile."""
    training_seconds: float = 0.0
    """Seconds of computing, also of what was computed while groups were awaited."""
    publishing_seconds: float = 0.0
    """Seconds of waiting for the previous version to be on the log, and of copying this one."""
    checkpoint_seconds: float | None = None
    """Seconds of writing the checkpoint; None if the trainer was killed after the checkpoint."""
    ended_at: float = 0.0
    """Unix seconds at the end of training, before publishing."""
    group_ids: tuple[str, ...] = ()
    """Ids of `groups`, which are settled with this step."""
    endings: dict[str, int] = {}
    """Number of trajectories by how they ended (`rose.schemas.samples.Ending`)."""
    learning_rate: float | None = None
    devices: int = 1
    """Number of devices of the trainer: one for each rank."""
    mismatch_kl: float | None = None
    """KL divergence of the engines' policy from the trainer's, in nats per token, over tokens that the trainer's own
    weights sampled; None if the step has no such samples. Other than `kl_behaviour`, staleness is no part of it."""
    clipped_share_positive: float | None = None
    """Like `clipped_share`, of the tokens with an advantage above 0; None without such tokens."""
    clipped_share_negative: float | None = None
    """Like `clipped_share`, of the tokens with an advantage below 0; None without such tokens."""
    rejected_share: float | None = None
    """Share of tokens that are left out because of their ratio of trainer to engine."""
    kl_reference: float | None = None
    """KL divergence of the trained policy from that of the model folder, in nats per token; None without
    `kl_coefficient`."""
    entropy: float | None = None
    """Mean of -logprob, as engines recorded it, over the sampled tokens of usable samples: an unbiased estimate of the
    entropy of the policies that sampled them, in nats per token; None without such tokens."""
    tokens_by_staleness: dict[int, int] = {}
    """Number of sampled tokens of trained samples by their staleness, in versions."""
    truncated_share: float | None = None
    """Share of the step's samples that were cut off."""
    zero_advantage_share: float | None = None
    """Share of usable samples whose advantage is 0, with those of groups of equal rewards; None without such
    samples."""
    streamed_tokens: int = 0
    """Number of sampled tokens whose gradient was computed before the step's last group was complete."""
    evaluation_seconds: float = 0.0
    """Seconds of holding the version back until the version before was evaluated."""

    @classmethod
    def of(
        cls,
        groups: Sequence[SelectedGroup],
        done: "StepMetrics",
        *,
        before: int,
        version: int,
        abandoned: Sequence[tuple[int, int]] = (),
    ) -> Self:
        """The line of a step from version `before` to `version`; `abandoned` as in `select_samples`."""
        settled = [pair for group in groups for pair in zip(group.samples, group.decisions, strict=True)]
        rewarded = [sample for sample, decision in settled if decision.outcome is not Outcome.INFRA_FAILED]
        ages = [staleness(sample, before, abandoned) for group in groups for sample in group.trained]
        usable = sum(len(group.computable) for group in groups)
        line = cls(
            step=version,
            version=version,
            groups=len(groups),
            group_ids=tuple(group.group_id for group in groups),
            groups_filtered=sum(not group.trained for group in groups),
            outcomes=dict(Counts(decision.outcome.value for _, decision in settled)),
            endings=dict(Counts(sample.ended.value for sample, _ in settled)),
            reward_mean=_mean([sample.reward for sample in rewarded if sample.reward is not None]),
            success_rate=_mean([sample.success for sample in rewarded if sample.success is not None]),
            staleness_mean=_mean(ages),
            staleness_max=max(ages, default=None),
            entropy=entropy_of(groups),
            tokens_by_staleness=tokens_by_staleness(groups, before, abandoned),
            truncated_share=_mean([sample.ended in TRUNCATED for sample, _ in settled]),
            zero_advantage_share=1 - done.samples_with_signal / usable if usable else None,
            mismatch_kl=done.mismatch_kl,
        )
        if done.groups:
            line.tokens, line.loss, line.gradient_norm = done.tokens, done.loss, done.gradient_norm
            line.importance_mean, line.kl_behaviour = done.importance_mean, done.kl_behaviour
            line.clipped_share, line.skipped_minibatches = done.clipped_share, done.skipped_minibatches
            line.learning_rate, line.streamed_tokens = done.learning_rate, done.streamed_tokens
            line.clipped_share_positive = done.clipped_share_positive
            line.clipped_share_negative = done.clipped_share_negative
            line.rejected_share, line.kl_reference = done.rejected_share, done.kl_reference
        return line

    @property
    def token_staleness(self) -> float | None:
        """Mean staleness of the tokens that were trained on, in versions; None without such tokens."""
        tokens = sum(self.tokens_by_staleness.values())
        total = sum(age * count for age, count in self.tokens_by_staleness.items())
        return total / tokens if tokens else None


def entropy_of(groups: Sequence[SelectedGroup]) -> float | None:
    """Return the mean of -logprob over the sampled tokens of the groups' usable samples; None for none.

    The logprobs are those that engines recorded. A token is drawn from the very distribution that gave its logprob, so
    the mean is an unbiased estimate of the entropy of the sampling policies, at the temperatures of the turns.
    """
    total, tokens = 0.0, 0
    for sample in (sample for group in groups for sample in group.computable):
        sampled = unpack_logprobs(sample.logprobs)[np.frombuffer(sample.loss_mask, dtype=np.uint8) == 1]
        total -= float(sampled.sum(dtype=np.float64))
        tokens += len(sampled)
    return total / tokens if tokens else None


def tokens_by_staleness(
    groups: Sequence[SelectedGroup], version: int, abandoned: Sequence[tuple[int, int]]
) -> dict[int, int]:
    """Return the number of sampled tokens of trained samples by their own staleness under policy `version`.

    A sample may have tokens of several versions. `abandoned` as in `select_samples`.
    """
    counts: Counts[int] = Counts()
    for sample in (sample for group in groups for sample in group.trained):
        mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
        for span in sample.spans:
            counts[steps_between(span.version, version, abandoned)] += int(mask[span.start : span.end].sum())
    return dict(sorted(counts.items()))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
            (CLIPPED_BY_SIGN.labels("positive"), values.clipped_share_positive),
            (CLIPPED_BY_SIGN.labels("negative"), values.clipped_share_negative),
            (REJECTED, values.rejected_share),
            (MISMATCH_KL, values.mismatch_kl),
            (REFERENCE_KL, values.kl_reference),
            (ENTROPY, values.entropy),
            (TOKEN_STALENESS, values.token_staleness),
            (TRUNCATED_SHARE, values.truncated_share),
            (NO_ADVANTAGE, values.zero_advantage_share),
            (LEARNING_RATE, values.learning_rate),
        ):
            if value is not None:
                gauge.set(value)
        STEPS.inc()
        TOKENS.inc(values.tokens)
        STREAMED_TOKENS.inc(values.streamed_tokens)
        EARLY_TOKENS.set(0)
        SKIPPED.inc(values.skipped_minibatches)
        BATCH_WAIT_SECONDS.observe(values.waiting_seconds)
        POLICY_WAIT_SECONDS.observe(values.publishing_seconds)
        TRAINING_SECONDS.observe(values.training_seconds)
        CHECKPOINT_SECONDS.observe(values.checkpoint_seconds or 0.0)

    def close(self) -> None:
        """Do nothing: the process exports its metrics until it ends."""


class StepLog:
    """The metrics sink that appends to the step log of a run folder."""

    def __init__(self, run_folder: Path) -> None:
        """Open the log and remove a truncated last line.

        Raises OSError, or DecodeError if the file has another format.
        """
        run_folder.mkdir(parents=True, exist_ok=True)
        self._file = run_folder / STEP_LOG
        content = self._file.read_bytes() if self._file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self._file, len(whole))
        lines = whole.splitlines()
        self.last_step = msgspec.json.decode(lines[-1], type=StepLine).step if lines else 0
        """Number of the last step in the log; 0 if there is none."""

    def log(self, step: int, values: StepLine) -> None:
        """Append a step's line, unless the log has the step already."""
        if step > self.last_step:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(values) + b"\n")
            self.last_step = step

    def close(self) -> None:
        """Do nothing: each line is complete in the file."""


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


def decode_line(data: bytes) -> StepLine:
    """Decode a step's line from JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=StepLine)


def encode_line(line: StepLine) -> bytes:
    """Encode a step's line as JSON without a newline."""
    return msgspec.json.encode(line)


def read_step_log(run_folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's step log, as plain objects; empty if the file does not exist."""
    file = run_folder / STEP_LOG
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [msgspec.to_builtins(decode_line(line)) for line in lines if line.endswith(b"\n")]
