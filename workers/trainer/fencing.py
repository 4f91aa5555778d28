"""Fencing and transactions of a model's sample streams.

Keeps true
- Each transaction commits a mark as metadata of its offsets: the stream's unique name and a number. The newest mark is
  that of the newest stream, from the stream's start on.
- If the outcome of a transaction is unknown (`topics/transactions.py`), a new writer repeats it if its mark is not
  committed. A stream that finds the mark of a newer stream is fenced and settles nothing. If a stream starts at the
  same moment as another one's writer is replaced, both may be fenced; then neither settles anything.
- On the embedded broker, which hides records after an abort, no transaction is repeated.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from threading import Event, Lock
from uuid import uuid4

import structlog
from confluent_kafka import KafkaError

from rose.schemas.errors import UsageError
from rose.topics.catalog import OUTCOMES, TRAINER_PREFIX
from rose.topics.errors import BusError
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

CLIENT_ID = "trainer"
"""Name of the clients of a stream."""

OUTCOMES_PLACE: Place = (OUTCOMES, 0)
"""The outcomes topic has one partition. Every transaction commits an offset of it, so its metadata holds the newest
mark."""

log = structlog.get_logger("trainer")


class FencedCommitter:
    """The transactions of one stream. Making one fences all older streams of the model."""

    def __init__(self, settings: BusSettings, model_id: str, stop: Event) -> None:
        """`stop` ends waiting for an unreachable broker. Raises BusError."""
        self._settings, self._stop = settings, stop
        self._id = f"{TRAINER_PREFIX}{model_id}"
        self._lock = Lock()
        self._name, self._numbers = uuid4().hex, count()
        self._closed = False
        self._mark = ""
        """The mark that is committed; at first, the mark of the stream before this one."""
        self.writer = self._fencing()

    def claim(self, reader: Reader, places: Sequence[Place]) -> dict[Place, int | None]:
        """Commit this stream's first mark and return the committed offsets of these places and of OUTCOMES_PLACE.

        Raises BusError.
        """
        if not self._settings.embedded:
            # Read before the offsets: if the offsets are not a newer stream's, the mark is not either.
            self._mark = reader.commit_metadata([OUTCOMES_PLACE])[OUTCOMES_PLACE]
        offsets = self.writer.committed_offsets(reader, [*places, OUTCOMES_PLACE])
        if not self._settings.embedded:
            stood = {place: offset for place, offset in offsets.items() if offset is not None}
            self.commit(lambda writer: None, {OUTCOMES_PLACE: 0, **stood}, reader)
        return offsets

    def commit(self, write: Callable[[Writer], None], offsets: Mapping[Place, int], reader: Reader) -> None:
        """Call `write` in a transaction that also commits `offsets` for the group of `reader`, exactly once.

        On any thread.

        Raises BusError, fenced if a newer stream exists; UsageError if this object is closed; and what the `on_wait` of
        the reader raises.
        """
        with self._lock:
            if self._closed:
                raise UsageError(
                    "the stream is closed, so nothing is settled: close the publisher first, then the stream"
                )
            mark = f"{self._name}/{next(self._numbers)}"
            failure = self._try(write, offsets, reader, mark)
            if failure is not None:
                if not failure.outcome_unknown or self._settings.embedded or self._stop.is_set():
                    raise failure
                log.warning("transaction_given_up", reason=str(failure))
                self._retry_unknown_commit(write, offsets, reader, mark, failure)
            self._mark = mark

    def dead_letter(self, item: Envelope | InvalidMessage, reason: str) -> None:
        """Write a dead letter in its own transaction. Raises BusError."""
        with self._lock:
            self.writer.transact(lambda: self.writer.dead_letter(item, reason))

    def close(self) -> None:
        """Refuse further transactions and close the writer, after a transaction that is under way."""
        with self._lock:
            self._closed = True
            self.writer.close()

    def _try(
        self, write: Callable[[Writer], None], offsets: Mapping[Place, int], reader: Reader, mark: str
    ) -> BusError | None:
        try:
            self.writer.transact(lambda: write(self.writer), offsets, reader, metadata=mark)
        except BusError as error:
            return error
        return None

    def _retry_unknown_commit(
        self,
        write: Callable[[Writer], None],
        offsets: Mapping[Place, int],
        reader: Reader,
        mark: str,
        failure: BusError,
    ) -> None:
        """Repeat a transaction of unknown outcome if it is not committed and this stream is the newest.

        Raises BusError.
        """
        self.writer.close()
        self._committed_mark(reader, mark, failure)
        self.writer = self._fencing()
        reader.committed([OUTCOMES_PLACE])  # waits until no transaction is open, as the mark is unknown until then
        if self._committed_mark(reader, mark, failure) != mark:
            self.writer.transact(lambda: write(self.writer), offsets, reader, metadata=mark)

    def _committed_mark(self, reader: Reader, mark: str, failure: BusError) -> str:
        """The committed mark: the previous mark or `mark`.

        Raises `failure` if no mark is left, and BusError, fenced, if the mark is another stream's.
        """
        found = reader.commit_metadata([OUTCOMES_PLACE])[OUTCOMES_PLACE]
        if found in (self._mark, mark):
            return found
        if not found:
            raise failure
        raise BusError("settling, while another stream of the model is there,", KafkaError(KafkaError._FENCED))

    def _fencing(self) -> Writer:
        return Writer(
            self._settings,
            CLIENT_ID,
            transactional_id=self._id,
            still_needed=lambda: not self._stop.is_set(),
        )
