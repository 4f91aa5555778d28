"""Decides how a worker reacts to an error of the broker: recover after a growing wait, or end. Pure.

Keeps true
- While leaders and coordinators move, or after the worker itself was frozen, the worker recovers from the log.
- The worker ends if only a person can correct the cause: another worker of its name, a missing topic, missing rights.
"""

from confluent_kafka import KafkaError

from rose.topics.errors import BusError, TopicMissing
from rose.topics.log_reader import FetchStalled
from rose.topics.retry import RetryPolicy
from rose.topics.settings import TRANSACTION_MILLISECONDS
from rose.workers.environments.membership import WorkerFenced

RECOVERABLE = (BusError, TopicMissing, FetchStalled)
"""The errors that `RecoveryPolicy.on_error` takes."""

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0

FENCED_TIMES = 6
FENCED_SECONDS = 120.0
"""A worker that is fenced this often within FENCED_SECONDS, without having been frozen, shares its name with a live
worker. A worker that starts and ends under the same name fences another one twice: it repeats its request while the
open transaction that it found is aborted, and a successor may have begun by then. Two live workers fence each other
once in each recovery, which may take a while."""


class RecoveryPolicy:
    """Remembers recent errors. `now` is monotonic seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._retry_policy = RetryPolicy(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
        self._fenced_at: list[float] = []

    def on_success(self) -> None:
        """A cycle of the worker succeeded."""
        self._retry_policy.on_success()

    def on_error(self, error: Exception, now: float, began_at: float) -> float:
        """Seconds to wait before the homes are recovered.

        `began_at`: monotonic seconds at the beginning of the last transaction.

        Raises WorkerFenced, or `error` itself if waiting does not help.
        """
        if isinstance(error, BusError) and error.is_fenced and self._has_namesake(error, now, began_at):
            raise WorkerFenced(self._name) from error
        return self._retry_policy.on_error(error, now)

    def _has_namesake(self, error: BusError, now: float, began_at: float) -> bool:
        if error.code == KafkaError.FENCED_INSTANCE_ID:
            return True
        if now - began_at >= TRANSACTION_MILLISECONDS / 1000:  # the broker has timed out the transaction
            return False
        self._fenced_at = [at for at in self._fenced_at if now - at < FENCED_SECONDS] + [now]
        return len(self._fenced_at) >= FENCED_TIMES
