"""`metrics.jsonl`: one JSON line for each optimizer step, for the report.

Keeps true: a step has one line, whole, in order, however often the trainer was killed.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from rose.schemas.samples import Outcome
from rose.workers.trainer.selection import SelectedGroup, staleness

if TYPE_CHECKING:  # computes with torch, which the report of a run can do without
    from rose.workers.trainer.step import StepMetrics

STEP_LOG = "metrics.jsonl"


class StepLine(msgspec.Struct, kw_only=True):
    """What one step was."""

    step: int
    version: int
    """The policy version that it made."""
    groups: int
    groups_filtered: int
    """Of `groups`; whose rewards said nothing."""
    outcomes: dict[str, int]
    """Trajectories by outcome."""
    reward_mean: float | None
    """Over the step's samples that have a reward; None if none has."""
    success_rate: float | None
    """Of the same samples."""
    staleness_mean: float | None
    """In versions, of the samples that were trained on."""
    staleness_max: int | None
    tokens: int = 0
    """Sampled tokens that were trained on."""
    loss: float | None = None
    gradient_norm: float | None = None
    importance_mean: float | None = None
    """Mean ratio of the trainer's probability of a sampled token to the engine's: 1 on policy."""
    kl_behaviour: float | None = None
    """Divergence of the sampling policy from the trained one, nats a token."""
    clipped_share: float | None = None
    """Of the tokens: those that the clip kept from pulling further."""
    skipped_minibatches: int = 0
    """Whose gradient was not finite."""
    waiting_seconds: float = 0.0
    """For samples, since the step before."""
    training_seconds: float = 0.0
    publishing_seconds: float = 0.0
    """What the step waited for the version before to be on the log, and copied of its own."""
    checkpoint_seconds: float | None = None
    """None if the trainer was killed after it."""
    ended_at: float = 0.0
    """Unix seconds; of the training, not of the publishing."""
    group_ids: tuple[str, ...] = ()
    """Of `groups`: settled with this step."""
    endings: dict[str, int] = {}
    """Trajectories by how they ended (`rose.schemas.samples.Ending`)."""

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
        """What a step from version `before` made of these groups; `abandoned` as `select_samples` takes it."""
        settled = [pair for group in groups for pair in zip(group.samples, group.decisions, strict=True)]
        rewarded = [sample for sample, verdict in settled if verdict.outcome is not Outcome.INFRA_FAILED]
        ages = [staleness(sample, before, abandoned) for group in groups for sample in group.trained]
        line = cls(
            step=version,
            version=version,
            groups=len(groups),
            group_ids=tuple(group.group_id for group in groups),
            groups_filtered=sum(not group.trained for group in groups),
            outcomes=dict(Counter(verdict.outcome.value for _, verdict in settled)),
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
        return line


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class StepLog:
    """Appends to the file of a run folder."""

    def __init__(self, run_folder: Path) -> None:
        """Drops a last line that was cut short. Raises OSError, or DecodeError if it is somebody else's file."""
        run_folder.mkdir(parents=True, exist_ok=True)
        self._file = run_folder / STEP_LOG
        content = self._file.read_bytes() if self._file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self._file, len(whole))
        lines = whole.splitlines()
        self.last_step = msgspec.json.decode(lines[-1], type=StepLine).step if lines else 0
        """0 before the first."""

    def append(self, line: StepLine) -> None:
        """Add a step's line, unless it is there."""
        if line.step > self.last_step:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
            self.last_step = line.step


def decode_line(data: bytes) -> StepLine:
    """A step's line from its bytes. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=StepLine)


def encode_line(line: StepLine) -> bytes:
    """A step's line as one line of JSON, without its end."""
    return msgspec.json.encode(line)


def read_step_log(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run so far, for a report; empty before the first."""
    file = run_folder / STEP_LOG
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [msgspec.to_builtins(decode_line(line)) for line in lines if line.endswith(b"\n")]
