"""The wait before an operation is tried again, and the decision whether a loop goes on after an error of the broker.

Keeps true
- The wait is a back-off (`backoff`), from `first_seconds` to at most `longest_seconds`.
- While leaders and coordinators move, the loop goes on after a wait.
- The loop ends if only a person can remove the cause: missing rights, another process with the same name, or a topic
  that has never been there or has been missing for MISSING_SECONDS since the loop last worked.

Pure: times are seconds on any clock; `now` of a `RetryPolicy` is monotonic. A single query of the broker is repeated by
`topics/queries.py`, a transaction by `topics/transactions.py`.
"""

from confluent_kafka import KafkaError

from rose.topics.backoff import Backoff
from rose.topics.errors import BusError, TopicMissing

CALM_SECONDS = 10.0
"""An error that comes so long after the wait for the last error begins a new row of errors."""

MISSING_SECONDS = 30.0
"""A topic that was there may be missing from the metadata for so long while its leaders move."""


class RetryPolicy:
    """The errors in a row of one loop that works with the broker."""

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        """`first_seconds`: the wait after the first error; it doubles up to `longest_seconds`."""
        self._backoff = Backoff(first_seconds, longest_seconds, reset_seconds=CALM_SECONDS)
        self._has_worked = False
        self._missing_since: float | None = None
        """Time of the first TopicMissing since the loop last worked."""

    def on_success(self) -> None:
        """The loop has done its work once."""
        self._has_worked, self._missing_since = True, None

    def on_error(self, error: Exception, now: float) -> float:
        """Return the seconds to wait before the loop goes on. Raises `error` if waiting does not help."""
        wait = self._backoff.failed(now)
        if isinstance(error, TopicMissing):
            self._missing_since = now if self._missing_since is None else self._missing_since
            if not self._has_worked or now - self._missing_since > MISSING_SECONDS:
                raise error
        if isinstance(error, BusError) and (error.is_permanent or error.code == KafkaError.FENCED_INSTANCE_ID):
            raise error
        return wait
