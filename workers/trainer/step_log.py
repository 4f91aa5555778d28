"""`metrics.jsonl`: one JSON line for each optimizer step, for the report.

Keeps true: a step has one line, whole, in order, however often the trainer was killed.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

NAME = "metrics.jsonl"


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


class StepLog:
    """Appends to the file of a run folder."""

    def __init__(self, run_folder: Path) -> None:
        """Drops a last line that was cut short. Raises OSError, or DecodeError if it is somebody else's file."""
        run_folder.mkdir(parents=True, exist_ok=True)
        self._file = run_folder / NAME
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


def decoded(data: bytes) -> StepLine:
    return msgspec.json.decode(data, type=StepLine)


def encoded(line: StepLine) -> bytes:
    return msgspec.json.encode(line)


def read_step_log(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run so far, for a report; empty before the first."""
    file = run_folder / NAME
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [msgspec.to_builtins(decoded(line)) for line in lines if line.endswith(b"\n")]
