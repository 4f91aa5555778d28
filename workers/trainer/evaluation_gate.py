"""The trainer's side of evaluations: it holds a version back until the version before it is evaluated.

Keeps true
- While the evaluation of a version is under way, no newer version is published, for `hold_seconds` at most. So engines
  keep the evaluated version, and every token of the evaluation can be of it.
- The policy of the best version is exported before the version after it is saved: a trainer that is killed in between
  exports it after its restart.
- Whether the run stops early is read from the log: a trainer that starts again finds the same. A run that has stopped
  goes on only with `stop_after` 0.
"""

import time
from threading import Event

import structlog
from confluent_kafka import OFFSET_BEGINNING

from rose.schemas.evaluations import EvaluationResult
from rose.topics.catalog import EVALUATION_RESULTS
from rose.topics.health import HEALTH
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope
from rose.topics.settings import BusSettings
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.trainer import metrics

CLIENT_ID = "trainer-evaluations"

BATCH = 256
LOOK_SECONDS = 0.2
"""Most records of one read, and its longest wait; a stop is noticed within it."""

log = structlog.get_logger("trainer")


class EvaluationGate:
    """The results of one set of evaluations of one run."""

    def __init__(self, settings: BusSettings, config: EvaluationConfig, run: str, stop: Event) -> None:
        """Read the results so far. `run`: name of the run, as manifests have it. Raises TopicMissing or BusError."""
        self._config, self._run, self._stop = config, run, stop
        self._results: dict[int, EvaluationResult] = {}
        self.last_stop: EvaluationResult | None = None
        """The last result that ends the run; None if there is none, or `stop_after` is 0 now."""
        self._reader: Reader | None = None
        if config.every_versions:
            self._reader = Reader(settings, CLIENT_ID, report_ends=True, on_wait=HEALTH.report_progress)
            self._reader.assign({(EVALUATION_RESULTS, 0): OFFSET_BEGINNING})
            while not (self._read() or stop.is_set()):
                HEALTH.report_progress()

    def wait(self, version: int) -> EvaluationResult | None:
        """Wait for the result of a version; None if there is none after `hold_seconds`, or if `stop` is set.

        Returns None at once for a version that is not due. Raises BusError.
        """
        if not self._config.is_due(version):
            return None
        began = time.monotonic()
        while version not in self._results and not self._stop.is_set():
            if time.monotonic() - began > self._config.hold_seconds:
                reason = f"it has no result after {self._config.hold_seconds:g} s: is `rose evaluator` running?"
                log.warning("evaluation_not_awaited", version=version, evaluation=self._config.name, reason=reason)
                break
            HEALTH.report(f"holds the next version until version {version} is evaluated")
            self._read()
        metrics.EVALUATION_WAIT_SECONDS.observe(time.monotonic() - began)
        return self._results.get(version)

    def is_awaited(self, version: int) -> bool:
        """Whether the version is due, and has no result yet."""
        return self._config.is_due(version) and version not in self._results

    def close(self) -> None:
        """Close the reader."""
        if self._reader is not None:
            self._reader.close()

    def _read(self) -> bool:
        """Read results; return whether the present end was reached."""
        assert self._reader is not None
        ended = False
        for item in self._reader.read(BATCH, LOOK_SECONDS):
            ended |= isinstance(item, EndOfPartition)
            result = item.record if isinstance(item, Envelope) else None
            if isinstance(result, EvaluationResult) and (result.run, result.model_id, result.evaluation) == (
                self._run,
                self._config.model_id,
                self._config.name,
            ):
                self._results[result.version] = result
                if result.stops_run and self._config.stop_after:
                    self.last_stop = result
        return ended
