"""Results of evaluations on the log, for a tracker: a run of their own, whose steps are policy versions.

Keeps true
- All results of the run are written at each start: a point that is written again replaces itself. So no position is
  kept.
- Nothing is opened in the tracker before there is a result with scores.
- The figures of training steps are not touched: a tracker may drop what follows a step that is written late.
"""

from collections.abc import Callable, Iterator

from confluent_kafka import OFFSET_BEGINNING

from rose.pipeline.tracking.steps import StepPoint
from rose.pipeline.tracking.trackers import Tracker
from rose.schemas.evaluations import EvaluationResult
from rose.topics.catalog import EVALUATION_RESULTS
from rose.topics.errors import TopicMissing
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope
from rose.topics.settings import BusSettings

CLIENT = "rose-track"

BATCH = 500
POLL_SECONDS = 0.5
"""Most records of one read, and its longest wait."""


def evaluation_point(result: EvaluationResult) -> StepPoint | None:
    """Return the figures of an evaluation, with its version as the step; None if it has no scores."""
    figures = {
        "reward_mean": result.reward,
        f"avg@{result.samples}": result.success,
        **{f"pass@{each.k}": each.value for each in result.pass_at},
        "best_version": float(result.best_version),
        "best_score": result.best_score,
        "without_improvement": float(result.without_improvement),
        "seconds": result.completed_at - result.started_at,
    }
    values = {f"{result.evaluation}/{name}": value for name, value in figures.items() if value is not None}
    return StepPoint(result.version, result.completed_at, values) if result.complete else None


class EvaluationTracking:
    """Writes the results of one run to a tracker of their own."""

    def __init__(self, settings: BusSettings, model_id: str, run: str, open_tracker: Callable[[], Tracker]) -> None:
        """`run`: name of the run, as manifests have it. A log of an earlier version of ROSE has no results."""
        self._model_id, self._run, self._open_tracker = model_id, run, open_tracker
        self._tracker: Tracker | None = None
        self._reader: Reader | None = Reader(settings, CLIENT, report_ends=True)
        try:
            self._reader.assign({(EVALUATION_RESULTS, 0): OFFSET_BEGINNING})
        except TopicMissing:
            self._reader.close()
            self._reader = None

    def update(self) -> int:
        """Write the results that are new, and return their number. Raises BusError or TrackerFailed."""
        count = 0
        for point in self._new_points():
            if self._tracker is None:
                self._tracker = self._open_tracker()
            self._tracker.write(point)
            count += 1
        if count and self._tracker is not None:
            self._tracker.flush()
        return count

    def close(self) -> None:
        """Close the reader and the tracker."""
        if self._reader is not None:
            self._reader.close()
        if self._tracker is not None:
            self._tracker.close()

    def _new_points(self) -> Iterator[StepPoint]:
        """Yield the points up to the present end of the log."""
        is_first = True
        while self._reader is not None:
            items = self._reader.read(BATCH, POLL_SECONDS if is_first else 0.0)
            is_first = False
            for item in items:
                result = item.record if isinstance(item, Envelope) else None
                if isinstance(result, EvaluationResult) and (result.run, result.model_id) == (
                    self._run,
                    self._model_id,
                ):
                    point = evaluation_point(result)
                    if point is not None:
                        yield point
            if not items or any(isinstance(item, EndOfPartition) for item in items):
                return
