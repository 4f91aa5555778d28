"""Decides how a worker reacts to an error of the broker: recover after a growing wait, or end. Pure.

Keeps true
- While leaders and coordinators move, or after the worker itself was frozen, the worker recovers from the log.
- The worker ends if only a person can correct the cause: another worker of its name, a missing topic, missing rights.
"""

from confluent_kafka import KafkaError

from rose.topics.errors import BusError, TopicMissing
from rose.topics.fetch import FetchStalled
from rose.topics.settings import TRANSACTION_MILLISECONDS
from rose.workers.environments.membership import WorkerFenced

RECOVERABLE = (BusError, TopicMissing, FetchStalled)
"""The errors that `RecoveryPolicy.on_error` takes."""

BACKOFF_SECONDS = 0.05
"""The first wait, doubled with each further error."""

LONGEST_BACKOFF_SECONDS = 2.0

CALM_SECONDS = 10.0
"""An error that comes so long after the last one counts as the first."""

MISSING_SECONDS = 30.0
"""A known topic may be missing from the metadata for so long while its leaders move."""

FENCED_TIMES = 6
FENCED_SECONDS = 120.0
"""A worker that is fenced this often within FENCED_SECONDS, without having been frozen, shares its name with a live
worker. A worker that starts and ends under the same name fences another one twice: it repeats its request while the
open transaction that it found is aborted, and a successor may have begun by then. Two live workers fence each other
once in each recovery, which may take a while."""

FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


class RecoveryPolicy:
    """Remembers recent errors. `now` is monotonic seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._well = False
        self._first_at = 0.0
        self._last_at = 0.0
        self._times = 0
        self._fenced_at: list[float] = []

    def on_success(self) -> None:
        """A cycle of the worker succeeded."""
        self._well = True

    def on_error(self, error: Exception, now: float, began_at: float) -> float:
        """Seconds to wait before the homes are recovered.

        `began_at`: monotonic seconds at the beginning of the last transaction.

        Raises WorkerFenced, or `error` itself if waiting does not help.
        """
        if not self._times or now - self._last_at > CALM_SECONDS:
            self._first_at, self._times = now, 0
        self._last_at = now
        self._times += 1
        if isinstance(error, TopicMissing) and (not self._well or now - self._first_at > MISSING_SECONDS):
            raise error
        if isinstance(error, BusError):
            self._judge(error, now, began_at)
        return float(min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** min(self._times - 1, 10)))

    def _judge(self, error: BusError, now: float, began_at: float) -> None:
        if error.is_permanent:
            raise error
        if error.code == KafkaError.FENCED_INSTANCE_ID:
            raise WorkerFenced(self._name) from error
        away = now - began_at >= TRANSACTION_MILLISECONDS / 1000  # the broker has timed out the transaction
        if error.code in FENCED and not away:
            self._fenced_at = [at for at in self._fenced_at if now - at < FENCED_SECONDS] + [now]
            if len(self._fenced_at) >= FENCED_TIMES:
                raise WorkerFenced(self._name) from error
