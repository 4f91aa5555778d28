"""Writes typed records to Kafka.

Keeps true
- The records that a Writer was given are on the broker once `flush` or `commit` has returned. A failed delivery raises
  BusError there.
- A record that its readers would refuse is not written.
- The next owner of a transactional id fences the last owner. The embedded broker hides what a transactional id commits
  after an abort. So on the embedded broker every owner writes under a new id, and aborts the last owner's open
  transaction.
- `transact` repeats a transaction only after an abort that the broker has acknowledged, so no record of the failed
  transaction is on the log. On the embedded broker it does not repeat, because the broker would hide the repetition.
- A commit ends or is given up (`topics/transactions.py`). The client of a closed writer is freed on another thread:
  librdkafka ends a client only after the threads of all its brokers, and its owner does not wait for them.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from rose.schemas.errors import ThreadRefused
from rose.schemas.record import Record
from rose.schemas.wire import EncodedRecord, encoded, headers_of
from rose.topics import counts, tracing
from rose.topics.admin import connect
from rose.topics.catalog import DEAD_LETTERS_TRANSACTIONAL_ID, PROMPTS, Topic
from rose.topics.dead_letters import DeadLetter, to_dead_letter
from rose.topics.errors import REJECTED_RECORD_CODES, BusError
from rose.topics.processes import start_thread
from rose.topics.queries import noop, partition_count
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, Place, RawMessage
from rose.topics.settings import BusSettings, new_client
from rose.topics.transactions import (
    HUNG_CALL_LEAVING_SECONDS,
    CallWatchdog,
    HungCall,
    in_time_slices,
    poll_until_done,
    retry_until_accepted,
    retry_until_committed,
    run_guarded,
)

STALL_SECONDS = 60.0
"""A flush fails when no record was stored for this time. A flush over a slow link may take longer in total."""

FLUSH_POLL_SECONDS = 1.0
"""Time between two checks of a flush whether a record was stored."""

CLOSE_SECONDS = 1.0
"""How long `close` waits for the delivery reports of the records that it drops; they arrive at once."""

CLOSE_POLL_SECONDS = 0.01

FREE_POLL_SECONDS = 0.1

HELD_BACK_SECONDS = 6.0
"""How long to wait for committed offsets before the transaction that holds them back is ended. A coordinator that
starts takes as long."""

SOLE_REFERENCES = 2
"""Reference count of a client that only one list holds: the list's reference and the argument of `getrefcount`."""

OWNERS: Place = (PROMPTS, 0)
"""The place whose committed offset, in a group of its own, is the number of owners of a transactional id."""


class Writer:
    """Writes records. With a `transactional_id` it writes only between `begin` and `commit`.

    Its methods raise BusError when the broker refuses. Discard a transactional writer that raised.
    """

    def __init__(
        self,
        settings: BusSettings,
        client_id: str,
        *,
        transactional_id: str | None = None,
        still_needed: Callable[[], bool] = lambda: True,
        on_wait: Callable[[], None] = noop,
    ) -> None:
        """`still_needed`: whether the constructor, a commit and an abort still wait for a broker that is away.

        `on_wait` is called about once a second while the writer fences the last owner of the `transactional_id`, and
        while a transaction with offsets is committed on Apache Kafka; an exception of `on_wait` ends the wait. Raises
        BusError.
        """
        self._settings = settings
        self._still_needed = still_needed
        self._on_wait = on_wait
        self._transactional = transactional_id is not None
        self._failure: tuple[KafkaError, str] | None = None
        """The error of a failed delivery, and its topic; None if there is none."""
        self._stored = 0
        self._closed = False
        self._touched_topics: set[str] = set()
        """Names of the topics that were written to since the transaction began."""
        self._rights: tuple[str, ...] = (
            f"Write on transactional id {settings.name(transactional_id or '')}",
            "IdempotentWrite on cluster kafka-cluster, or Write on any topic",
        )
        """Rights that the writer needs in addition to rights to topics and to its reader's group."""
        if transactional_id is None:
            self._producer = new_client(Producer, settings.producer(client_id))
        else:
            owning = self._successor_producer if settings.embedded else self._fenced_producer
            self._producer = owning(client_id, transactional_id)

    def write(
        self,
        topic: Topic,
        record: Record | EncodedRecord[Any],
        *,
        key: str,
        partition: int | None = None,
        trajectory_id: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        """Write a record. `on_delivery(partition, offset)` is called from `poll` or `flush` once it is stored.

        The bytes of an EncodedRecord are written as they are. `partition`: the client's partitioner chooses it if None.
        `headers` are written in addition to the record's own. Raises RecordError if readers would refuse the record, or
        BusError.
        """
        ready = record if isinstance(record, EncodedRecord) else encoded(record)
        name = self._settings.topic(topic)
        message_headers = [*headers_of(ready.record, trajectory_id), *(headers or {}).items()]
        if tracing.exporter is not None and trajectory_id is not None:
            tracing.exporter.on_written(ready.record, name)
        self._produce(name, key.encode(), ready.wire, partition, message_headers, on_delivery, counts.written(topic))

    def tombstone(
        self, topic: Topic, *, key: str, partition: int, on_delivery: Callable[[int, int], None] | None = None
    ) -> None:
        """Write a tombstone, which deletes the key."""
        self._produce(
            self._settings.topic(topic), key.encode(), None, partition, [], on_delivery, counts.written(topic)
        )

    def forward(self, topic: Topic, raw: RawMessage, *, partition: int, key: bytes | None) -> None:
        """Write a message unchanged to another partition, under this key."""
        headers, counted = list(raw.headers), counts.written(topic)
        self._produce(self._settings.topic(topic), key, raw.value, partition, headers, None, counted)

    def dead_letter(
        self,
        message: Envelope | InvalidMessage,
        reason: str,
        *,
        sent_back: bool = False,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        """Write an unusable message to its topic's dead letter queue, with reason and origin in headers.

        `sent_back`: whether to note that the message was sent back. See `topics/dead_letters.py`.
        """
        letter = to_dead_letter(message, reason, topic=self._settings.topic(message.topic), sent_back=sent_back)
        name, counted = f"{self._settings.namespace}{message.topic.dead_letters}", counts.dead_letters(message.topic)
        self._produce(name, letter.key, letter.value, None, list(letter.headers), on_delivery, counted)

    def partition_count(self, topic: Topic) -> int:
        """How many partitions the topic has on the broker. Raises TopicMissing or BusError."""
        return partition_count(self._producer, self._settings.topic(topic))

    def poll(self, seconds: float = 0.0) -> None:
        """Handle delivery reports, waiting up to `seconds` for the first. Raises BusError if a delivery failed."""
        self._guarded("writing", self._producer.poll, seconds)
        self._raise_failure()

    def flush(self) -> None:
        """Wait until all written records are stored. Raises BusError if none is stored for STALL_SECONDS."""
        seen, looks = self._stored, 0  # polls are counted, not seconds, so a process that was frozen does not time out
        while left_count := self._producer.flush(FLUSH_POLL_SECONDS):
            self._raise_failure()
            seen, looks = self._stored, looks + 1 if self._stored == seen else 0
            if looks * FLUSH_POLL_SECONDS >= STALL_SECONDS:
                raise BusError(
                    f"storing {left_count} records, none of them within {STALL_SECONDS:.0f} s",
                    KafkaError(KafkaError._MSG_TIMED_OUT),
                )
        self._raise_failure()

    def begin(self) -> None:
        """Begin a transaction. Raises BusError."""
        self._touched_topics.clear()
        self._failure = None  # of a transaction that was aborted
        self._guarded("beginning a transaction", self._producer.begin_transaction)

    def commit(
        self, offsets: Mapping[Place, int] | None = None, reader: Reader | None = None, *, metadata: str = ""
    ) -> None:
        """Commit the records since `begin` together with the `reader`'s next `offsets`, each with this `metadata`."""
        self._commit(self._producer, offsets or {}, reader, metadata)
        self._raise_failure()

    def abort(self) -> None:
        """Abort the transaction. Raises BusError."""
        abort = in_time_slices(self._producer.abort_transaction)
        self._guarded("aborting a transaction", poll_until_done, abort, self._watchdog())

    def transact(
        self,
        write: Callable[[], None],
        offsets: Mapping[Place, int] | None = None,
        reader: Reader | None = None,
        *,
        metadata: str = "",
    ) -> None:
        """Begin, call `write`, and `commit`; repeat all of it if the broker has aborted the transaction.

        A broker aborts a transaction, for example, when leaders or coordinators move during it. Raises BusError for any
        other error, or when the repetitions take longer than TRANSACTION_SECONDS.
        """

        def transaction() -> None:
            self.begin()
            write()
            self.commit(offsets, reader, metadata=metadata)

        retry_until_committed(transaction, self._was_aborted)

    def _was_aborted(self, error: BusError) -> bool:
        """Abort the transaction that failed with this error; return whether it is certainly not on the log."""
        if error.is_fenced or error.is_permanent or error.code in REJECTED_RECORD_CODES or error.outcome_unknown:
            return False  # with an unknown outcome, a call of the transaction may still be running
        if self._settings.embedded or not self._still_needed():
            return False
        try:
            self.abort()
        except BusError:  # the transaction may be on the log, or another owner has fenced this writer
            return False
        self._failure = None  # a failed delivery of the aborted transaction; all its reports have arrived by now
        return True

    def committed_offsets(
        self, reader: Reader, places: Sequence[Place], *, mark: str | None = None
    ) -> dict[Place, int | None]:
        """The committed offsets of the `reader`'s group, which this transactional writer commits; None for no offset.

        After a crash, the transaction coordinator may count a transaction as ended although the group's coordinator has
        no marker of its end (KAFKA-20734, seen with 4.3.1: a partition without a leader at that moment counts as
        deleted; the transaction coordinator's log has COMPLETE_ABORT, `__consumer_offsets` has no marker). The broker
        then never returns the group's offsets. Neither a timeout nor the next owner of the transactional id ends the
        transaction; the next transaction of that id does, so this method begins and aborts one.

        The returned offsets include every commit: an open transaction is waited for, as long as the broker allows it to
        be open. `mark`: see `Reader.committed`. Raises BusError, which names the tool that finds a transaction of
        another id that holds the offsets; discard the writer then.
        """
        try:
            return reader.committed(places, seconds=HELD_BACK_SECONDS, mark=mark)
        except BusError as error:
            if not error.outcome_unknown:
                raise
        reader.commit_metadata(places)  # raises if the coordinator is away: it answers this also during a transaction
        structlog.get_logger("bus").warning("offsets_held_back", reason="a transaction counts as open at the group")
        self.begin()
        self._send(self._producer, dict.fromkeys(places, 0), reader)
        self.abort()
        try:
            return reader.committed(places, mark=mark)
        except BusError as error:
            if not error.outcome_unknown:
                raise
            action = "reading committed offsets, which a transaction holds back (kafka-transactions.sh shows which)"
            raise BusError(action, KafkaError(KafkaError._TIMED_OUT)) from error

    def close(self) -> None:
        """Drop the records that are not stored yet, and free the client. A writer that is not closed is never freed."""
        if self._closed:  # with two `_free_later` threads, the reference count would never fall to SOLE_REFERENCES
            return
        self._closed = True
        self._producer.purge()  # without `blocking=False`: confluent-kafka inverts it, and would block all threads
        deadline = time.monotonic() + CLOSE_SECONDS
        while len(self._producer) and time.monotonic() < deadline:
            with suppress(KafkaException):  # a fenced producer raises its error again
                self._producer.poll(CLOSE_POLL_SECONDS)
        _free_later(self._producer)

    def _fenced_producer(self, client_id: str, transactional_id: str) -> Producer:
        """A producer of this transactional id that has fenced earlier ones. Raises BusError."""
        producer = new_client(Producer, self._settings.transactional(client_id, transactional_id))
        with ExitStack() as undo:
            undo.callback(_free_later, producer)
            self._guarded("fencing older transactions", self._fence_predecessor, producer)
            undo.pop_all()
        return producer

    def _fence_predecessor(self, producer: Producer) -> None:
        fenced = in_time_slices(producer.init_transactions)
        while not fenced(FLUSH_POLL_SECONDS):
            self._wait_while_needed()

    def _wait_while_needed(self) -> None:
        """Called between two polls while older transactions are fenced. Raises BusError once not `still_needed`."""
        if not self._still_needed():
            action = "fencing older transactions (it has no answer yet, and is not needed any more)"
            raise BusError(action, KafkaError(KafkaError._TIMED_OUT))
        self._on_wait()

    def _successor_producer(self, client_id: str, transactional_id: str) -> Producer:
        """A fenced producer under a numbered id of which no transaction was ever aborted, for the embedded broker.

        The number is the committed offset of a group. The producer of the plain id increments it after the last owner
        is fenced and the next owner exists. If two writers do this at once, one succeeds the other, or fails.
        """
        counting = self._fenced_producer(client_id, transactional_id)
        _free_later(counting)
        group = f"owners.{transactional_id}"
        with closing(Reader(self._settings, client_id, group=group, on_wait=self._wait_while_needed)) as reader:
            owners = reader.committed([OWNERS])[OWNERS] or 0
            _free_later(self._fenced_producer(client_id, f"{transactional_id}.{owners}"))
            owner = self._fenced_producer(client_id, f"{transactional_id}.{owners + 1}")
            self._guarded("beginning a transaction", counting.begin_transaction)
            self._commit(counting, {OWNERS: owners + 1}, reader)
        return owner

    def _commit(
        self, producer: Producer, offsets: Mapping[Place, int], reader: Reader | None, metadata: str = ""
    ) -> None:
        if offsets and reader is not None:
            self._send(producer, offsets, reader, metadata)
        # The embedded broker returns uncommitted offsets to a reader that takes the partitions over meanwhile.
        on_wait = self._on_wait if offsets and not self._settings.embedded else noop
        commit = in_time_slices(producer.commit_transaction)
        self._guarded("committing a transaction", poll_until_done, commit, self._watchdog(), on_wait)

    def _send(self, producer: Producer, offsets: Mapping[Place, int], reader: Reader, metadata: str = "") -> None:
        places = [
            TopicPartition(self._settings.topic(topic), part, at, metadata) for (topic, part), at in offsets.items()
        ]
        self._rights = (*self._rights[:2], reader.right_to_group)
        send = partial(producer.send_offsets_to_transaction, places, reader.group_metadata())
        reach_coordinator = partial(reader.reach_coordinator, next(iter(offsets)))
        wait = CallWatchdog(
            reach_coordinator, still_needed=self._still_needed, leaving_seconds=HUNG_CALL_LEAVING_SECONDS
        )
        self._guarded("committing offsets", run_guarded, partial(retry_until_accepted, send), wait)

    def _watchdog(self) -> CallWatchdog:
        return CallWatchdog(partial(connect, self._settings), still_needed=self._still_needed)

    def _produce(
        self,
        name: str,
        key: bytes | None,
        value: bytes | None,
        partition: int | None,
        headers: list[tuple[str, bytes]],
        on_delivery: Callable[[int, int], None] | None,
        counted: counts.Count,
    ) -> None:
        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failure = error, name
                return
            self._stored += 1
            counted.inc()
            if on_delivery is not None:
                on_delivery(message.partition(), message.offset())

        place: dict[str, Any] = {} if partition is None else {"partition": partition}
        self._touched_topics.add(name)
        while True:
            refused: KafkaError | None = None
            try:
                self._producer.produce(name, value=value, key=key, headers=headers, on_delivery=delivered, **place)
                return
            except BufferError:
                pass
            except KafkaException as error:
                refused = error.args[0]
            if refused is not None:
                raise self._error(f"writing to {name}", self._cause(refused), name)
            self._producer.poll(1.0)  # the local queue is full: let it drain
            self._raise_failure()

    def _cause(self, error: KafkaError) -> KafkaError:
        """The cause of a fatal error of `produce`: the producer's other calls say whether it was fenced."""
        if error.code() == KafkaError._FATAL and self._transactional:
            try:
                self._producer.begin_transaction()
            except KafkaException as fatal:
                return fatal.args[0]
        return error

    def _guarded(self, action: str, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except KafkaException as error:
            refused: KafkaError = error.args[0]
            if refused.code() in (KafkaError._STATE, KafkaError._INCONSISTENT):
                action += self._failed_delivery()
            raise self._error(action, refused, *sorted(self._touched_topics)) from error
        except HungCall as hung:
            raise BusError(f"{action} ({hung})", KafkaError(KafkaError._TIMED_OUT)) from hung

    def _failed_delivery(self) -> str:
        """Return the failed delivery after which librdkafka refuses further calls of a transaction; "" if none."""
        if self._touched_topics:
            with suppress(KafkaException):  # a fenced producer raises its error again
                self._producer.poll(0)
        if self._failure is None:
            return ""
        failure, topic = self._failure
        return (
            f" (a record of {topic} was not stored: {failure.str()}; see message.timeout.ms and transaction.timeout.ms)"
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            (failure, name), self._failure = self._failure, None
            raise self._error("storing a record", failure, name)

    def _error(self, action: str, error: KafkaError, *topics: str) -> BusError:
        return BusError(action, error, *(f"Write on topic {topic}" for topic in topics), *self._rights)


def _free_later(client: Producer) -> None:
    """Free the client on a thread of its own once no writer, exception or delivery report refers to it."""
    try:
        start_thread(_free, [client], name="free")
    except ThreadRefused as error:
        structlog.get_logger("bus").warning("client_not_freed", reason=str(error))


def _free(last: list[Producer]) -> None:
    while sys.getrefcount(last[0]) > SOLE_REFERENCES:
        time.sleep(FREE_POLL_SECONDS)  # Python does not report that a reference is gone
        if len(last[0]):  # late delivery reports refer to the writer until they are handled
            with suppress(KafkaException):
                last[0].poll(0)
    last.clear()


def resend(settings: BusSettings, dead_letter: DeadLetter, mended: RawMessage, *, partition: int) -> None:
    """Write `mended` to the dead letter's topic, and a copy that notes it, in one transaction. Raises BusError."""
    writer = Writer(settings, "rose-letters", transactional_id=DEAD_LETTERS_TRANSACTIONAL_ID)
    writer.begin()
    writer.forward(dead_letter.topic, mended, partition=partition, key=mended.key)
    noted = InvalidMessage(
        dead_letter.topic, dead_letter.partition, dead_letter.offset, dead_letter.raw, dead_letter.reason
    )
    writer.dead_letter(noted, dead_letter.reason, sent_back=True)
    writer.commit()
