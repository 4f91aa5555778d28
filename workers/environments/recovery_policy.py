"""What a worker makes of trouble with the broker: it recovers, later each time, unless waiting cannot mend it. Pure.

Keeps true
- While leaders and coordinators move, or after a freeze of its own, a worker goes on from the log.
- It ends when nobody but a person can mend it: another worker of its name, a missing topic, a refusal of rights.
"""

from confluent_kafka import KafkaError

from rose.topics.errors import BusError, TopicMissing
from rose.topics.fetch import FetchStalled
from rose.topics.settings import TRANSACTION_MILLISECONDS
from rose.workers.environments.membership import WorkerFenced

RECOVERABLE = (BusError, TopicMissing, FetchStalled)
"""What `RecoveryPolicy.met` is asked about."""

BACKOFF_SECONDS = 0.05
"""The first wait; twice as long each time that trouble follows on trouble."""

LONGEST_BACKOFF_SECONDS = 2.0

CALM_SECONDS = 10.0
"""Trouble that comes so long after the last is the first of its kind."""

MISSING_SECONDS = 30.0
"""A topic that was there may be out of sight for so long, while its leaders move."""

FENCED_TIMES = 6
FENCED_SECONDS = 120.0
"""Fenced so often within so long, without having been away itself: another worker lives under this name. One that comes
and goes fences twice: it asks again while what it found open is aborted, and by then a successor may have begun. Two
that live fence each other once in a recovery, which may take a while."""

FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


class RecoveryPolicy:
    """Remembers what went wrong of late. `now` is monotonic seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._well = False
        self._first_at = 0.0
        self._last_at = 0.0
        self._times = 0
        self._fenced_at: list[float] = []

    def on_success(self) -> None:
        """A cycle went through."""
        self._well = True

    def on_error(self, trouble: Exception, now: float, began_at: float) -> float:
        """Seconds to wait before the homes are recovered. `began_at`: when the last transaction began.

        Raises WorkerFenced, or the trouble itself where waiting is in vain.
        """
        if not self._times or now - self._last_at > CALM_SECONDS:
            self._first_at, self._times = now, 0
        self._last_at = now
        self._times += 1
        if isinstance(trouble, TopicMissing) and (not self._well or now - self._first_at > MISSING_SECONDS):
            raise trouble
        if isinstance(trouble, BusError):
            self._judge(trouble, now, began_at)
        return float(min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** min(self._times - 1, 10)))

    def _judge(self, error: BusError, now: float, began_at: float) -> None:
        if error.is_permanent:
            raise error
        if error.code == KafkaError.FENCED_INSTANCE_ID:
            raise WorkerFenced(self._name) from error
        away = now - began_at >= TRANSACTION_MILLISECONDS / 1000  # then the broker itself has ended the transaction
        if error.code in FENCED and not away:
            self._fenced_at = [at for at in self._fenced_at if now - at < FENCED_SECONDS] + [now]
            if len(self._fenced_at) >= FENCED_TIMES:
                raise WorkerFenced(self._name) from error
