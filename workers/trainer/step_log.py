"""`metrics.jsonl`: one JSON line for each optimizer step, for the report.

Keeps true: each step has exactly one complete line, in order, however often the trainer is killed.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from rose.schemas.samples import Outcome
from rose.workers.trainer.selection import SelectedGroup, staleness

if TYPE_CHECKING:  # imports torch, which the report of a run does not need
    from rose.workers.trainer.step import StepMetrics

STEP_LOG = "metrics.jsonl"


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
    """Seconds of waiting for groups since the step before."""
    training_seconds: float = 0.0
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
        line = cls(
            step=version,
            version=version,
            groups=len(groups),
            group_ids=tuple(group.group_id for group in groups),
            groups_filtered=sum(not group.trained for group in groups),
            outcomes=dict(Counter(decision.outcome.value for _, decision in settled)),
            endings=dict(Counter(sample.ended.value for sample, _ in settled)),
            reward_mean=_mean([sample.reward for sample in rewarded if sample.reward is not None]),
            success_rate=_mean([sample.success for sample in rewarded if sample.success is not None]),
            staleness_mean=_mean(ages),
            staleness_max=max(ages, default=None),
        )
        if done.groups:
            line.tokens, line.loss, line.gradient_norm = done.tokens, done.loss, done.gradient_norm
            line.importance_mean, line.kl_behaviour = done.importance_mean, done.kl_behaviour
            line.clipped_share, line.skipped_minibatches = done.clipped_share, done.skipped_minibatches
            line.learning_rate = done.learning_rate
        return line


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
