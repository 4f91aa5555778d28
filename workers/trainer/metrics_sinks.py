"""The metrics sinks: where the figures of a training step go.

Keeps true
- The step log is the last sink: a step in the step log has reached every sink.

A tracker (Weights & Biases, MLflow, TensorBoard) is one more class with the two methods of MetricsSink, added to
`StepReporter`.
"""

from pathlib import Path
from typing import Protocol

from rose.workers.trainer.metrics import PrometheusSink
from rose.workers.trainer.step_log import StepLine, StepLog


class MetricsSink(Protocol):
    """Takes the figures of each step."""

    def log(self, step: int, values: StepLine) -> None:
        """Take the figures of a step. Steps come in order.

        A step comes a second time if the trainer was killed before every sink had it. An exception ends the trainer.
        """

    def close(self) -> None:
        """Write what is held back. Called once, when the trainer ends for whatever reason but a kill."""


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
