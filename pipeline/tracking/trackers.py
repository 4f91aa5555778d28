"""Experiment trackers: where the figures of steps go.

Keeps true
- A tracker's package is imported only when it is asked for; if it is missing, one sentence names the extra.
- What was written before `flush` returns survives the end of this process.
- A step that is written again, with equal figures and after any kill, is one point of the tracker.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from sys import stderr
from typing import Any, Protocol

from rose.pipeline.tracking.steps import StepPoint
from rose.schemas.errors import RoseError, UsageError, describe_error

MILLISECONDS = 1000

EVALUATIONS = "evaluations"
"""Name of the place of evaluations: a folder of TensorBoard, the end of a run's name elsewhere."""


class Tracker(Protocol):
    """Takes the figures of steps."""

    def write(self, point: StepPoint) -> None:
        """Take a step; steps come in order. A step may come again. Raises TrackerFailed."""

    def flush(self) -> None:
        """Store all that was written. Raises TrackerFailed."""

    def close(self) -> None:
        """End the connection; called once, after the last `flush`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a tracker keeps the figures of a run."""

    run: str
    """Name of the run, with the namespace in front if there is one."""
    project: str
    """Name of the tracker's project or experiment."""
    folder: Path
    """Folder of TensorBoard's event files."""

    @property
    def for_evaluations(self) -> "Target":
        """The place of the run's evaluations, whose steps are policy versions."""
        return replace(self, run=f"{self.run}-{EVALUATIONS}", folder=self.folder / EVALUATIONS)


class TrackerFailed(RoseError):
    """The tracker does not take the figures. The committed offsets stay, so a new start writes them."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"{name} does not take the figures ({describe_error(error)}): mend that, and start the command again; it "
            "goes on from the last step that was stored"
        )


class TensorBoard:
    """Writes scalars to event files, without TensorFlow or torch.

    An event of a session's start makes TensorBoard drop what earlier files have from its step on, so a step that is
    written again replaces itself.
    """

    def __init__(self, target: Target) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._file = EventFileWriter(str(target.folder))
        self._last: int | None = None

    def write(self, point: StepPoint) -> None:
        """Write the figures, after a mark that drops this step and later ones if they may be there."""
        if self._last is None or point.step <= self._last:
            begun = self._session(status=self._session.START)
            self._file.add_event(self._event(wall_time=time.time(), step=point.step, session_log=begun))
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        event = self._event(wall_time=point.at, step=point.step, summary=self._summary(value=values))
        self._file.add_event(event)
        self._last = point.step

    def flush(self) -> None:
        """Write what the writer's thread still holds."""
        try:
            self._file.flush()
        except OSError as error:
            raise TrackerFailed("TensorBoard's event file", error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MLflow:
    """Writes metrics of one MLflow run, which a tag finds again.

    A metric has the time of its step, not of its writing. So a step that is written again is the same row of MLflow's
    database, which has it once. The server is that of MLFLOW_TRACKING_URI.
    """

    TAG = "rose.run"

    def __init__(self, target: Target) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._error = Metric, MlflowException
        try:
            self._client = MlflowClient()
            self._run_id = self._find_or_create(target)
        except MlflowException as error:
            raise TrackerFailed("MLflow", error) from error

    def _find_or_create(self, target: Target) -> str:
        found = self._client.get_experiment_by_name(target.project)
        experiment = self._client.create_experiment(target.project) if found is None else found.experiment_id
        name = target.run.replace("'", "''")
        known = self._client.search_runs([experiment], filter_string=f"tags.`{self.TAG}` = '{name}'", max_results=1)
        if known:
            return str(known[0].info.run_id)
        made = self._client.create_run(experiment, tags={self.TAG: target.run}, run_name=target.run)
        return str(made.info.run_id)

    def write(self, point: StepPoint) -> None:
        """Send the figures in one request."""
        at = round(MILLISECONDS * point.at)
        metrics = [self._metric(name, value, at, point.step) for name, value in point.values.items()]
        try:
            self._client.log_batch(self._run_id, metrics=metrics)
        except self._error as error:
            raise TrackerFailed("MLflow", error) from error

    def flush(self) -> None:
        """Do nothing: a request is answered once its metrics are stored."""

    def close(self) -> None:
        """Do nothing: the run stays open in MLflow, to be gone on with."""


class Trackio:
    """Writes to trackio's database on this machine, in TRACKIO_DIR.

    Trackio appends, so a step that its database has is not written again.
    """

    def __init__(self, target: Target) -> None:
        import trackio

        self._trackio, self._target = trackio, target
        self._run: Any = None
        self._steps = self._stored_steps()

    def _stored_steps(self) -> set[int]:
        from trackio.sqlite_storage import SQLiteStorage

        try:
            return {int(row["step"]) for row in SQLiteStorage.get_logs(self._target.project, self._target.run)}
        except Exception as error:  # its storage raises what sqlite3 and its own checks raise
            raise TrackerFailed("trackio", error) from error

    def write(self, point: StepPoint) -> None:
        """Queue the figures."""
        if point.step in self._steps:
            return
        with redirect_stdout(stderr):  # trackio prints
            if self._run is None:
                self._run = self._trackio.init(
                    project=self._target.project,
                    name=self._target.run,
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
            self._run.log(dict(point.values), step=point.step)
        self._steps.add(point.step)

    def flush(self) -> None:
        """Write the queue: trackio stores it for certain only as the run finishes; the next step resumes it."""
        if self._run is not None:
            with redirect_stdout(stderr):
                self._run.finish()
            self._run = None

    def close(self) -> None:
        """Do nothing: `flush` has finished the run."""


TRACKERS: Mapping[str, Callable[[Target], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""Trackers by the name that `--to` takes, which is also that of the extra."""


def open_tracker(name: str, target: Target) -> Tracker:
    """Return the tracker. Raises UsageError if its package is not installed, or TrackerFailed."""
    if name not in TRACKERS:
        raise UsageError(f"--to {name} is no tracker: give one of {', '.join(TRACKERS)}")
    try:
        return TRACKERS[name](target)
    except ImportError:
        raise UsageError(f"{name} is not installed: pip install 'rose-rollouts[{name}]'") from None
    except OSError as error:
        raise TrackerFailed(name, error) from error
