"""A trainer's standing with the broker: the transactions of a model's newest stream, and how it knows that it is that.

Keeps true
- With a stream's offsets lies its mark, a name that no other has and a number: that of the newest stream from when it
  begins, another with each transaction.
- A transaction that was given up (`topics/transactions.py`) is made again by another writer if its mark is not on the
  log, and not if it is. Who finds a newer stream's mark there is fenced, and settles nothing. A stream that comes in
  the very moment in which another writer is made may be fenced as well: then neither settles anything more.
- The embedded broker hides what comes after an abort, so there nothing is made again.
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
from rose.topics.held_offsets import committed_offsets
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

OUTCOMES_PLACE: Place = (OUTCOMES, 0)
"""Outcomes lie in one partition. Each transaction commits an offset of it, so marks are looked for there."""

log = structlog.get_logger("trainer")


class FencedCommitter:
    """Of one stream. Making one fences the model's older streams."""

    def __init__(self, settings: BusSettings, model_id: str, client_id: str, stop: Event) -> None:
        """`stop`: nobody waits for a broker that is away any more. Raises BusError."""
        self._settings, self._client_id, self._stop = settings, client_id, stop
        self._id = f"{TRAINER_PREFIX}{model_id}"
        self._lock = Lock()
        self._name, self._numbers = uuid4().hex, count()
        self._closed = False
        self._mark = ""
        """What is on the log; at first, of whom this stream succeeds."""
        self.writer = self._fencing()

    def claim(self, reader: Reader, places: Sequence[Place]) -> dict[Place, int | None]:
        """Have it known that there is a newer stream, which stands where the last one did: the committed offsets of
        these and of OUTCOMES_PLACE. Raises BusError.
        """
        if not self._settings.embedded:
            self._mark = reader.commit_metadata([OUTCOMES_PLACE])[
                OUTCOMES_PLACE
            ]  # first: no newer one's, if the offsets are not
        offsets = committed_offsets(reader, self.writer, [*places, OUTCOMES_PLACE])
        if not self._settings.embedded:
            stood = {place: offset for place, offset in offsets.items() if offset is not None}
            self.commit(lambda writer: None, {OUTCOMES_PLACE: 0, **stood}, reader)
        return offsets

    def commit(self, write: Callable[[Writer], None], offsets: Mapping[Place, int], reader: Reader) -> None:
        """Write, and commit with the `reader`'s next `offsets`, once. On any thread.

        Raises BusError, `fenced` where a newer stream has come, UsageError once closed, and what the reader's
        `meanwhile` does.
        """
        with self._lock:
            if self._closed:
                raise UsageError(
                    "the stream is closed, so nothing is settled: close the publisher first, then the stream"
                )
            mark = f"{self._name}/{next(self._numbers)}"
            trouble = self._try(write, offsets, reader, mark)
            if trouble is not None:
                if not trouble.outcome_unknown or self._settings.embedded or self._stop.is_set():
                    raise trouble
                log.warning("a transaction was given up", reason=str(trouble))
                self._retry_unknown_commit(write, offsets, reader, mark, trouble)
            self._mark = mark

    def dead_letter(self, item: Envelope | InvalidMessage, reason: str) -> None:
        """Bury what was read in a transaction of its own. Raises BusError."""
        with self._lock:
            self.writer.transact(lambda: self.writer.dead_letter(item, reason))

    def close(self) -> None:
        """Write nothing more; waits for a transaction that is under way."""
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
        trouble: BusError,
    ) -> None:
        """Have what was given up on the log after all, if this is still the newest stream. Raises BusError."""
        self.writer.close()
        self._committed_mark(reader, mark, trouble)
        self.writer = self._fencing()
        reader.committed([OUTCOMES_PLACE])  # waits until nothing is open; where its end is not known, nor is the mark
        if self._committed_mark(reader, mark, trouble) != mark:
            self.writer.transact(lambda: write(self.writer), offsets, reader, metadata=mark)

    def _committed_mark(self, reader: Reader, mark: str, trouble: BusError) -> str:
        """The mark on the log: the last one or `mark`. Raises `trouble` where there is none any more, and BusError as
        to who is fenced for another stream's.
        """
        found = reader.commit_metadata([OUTCOMES_PLACE])[OUTCOMES_PLACE]
        if found in (self._mark, mark):
            return found
        if not found:
            raise trouble
        raise BusError("settling, while another stream of the model is there,", KafkaError(KafkaError._FENCED))

    def _fencing(self) -> Writer:
        return Writer(
            self._settings,
            self._client_id,
            transactional_id=self._id,
            still_needed=lambda: not self._stop.is_set(),
        )
