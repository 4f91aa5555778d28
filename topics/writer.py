"""Typed records into Kafka.

Keeps true
- What a Writer was given is on the broker once `flush` or `commit` has returned; a delivery that failed raises there.
- Nothing is written that its readers would refuse.
- The next owner of a transactional id fences the last, and what it commits is seen. The embedded broker hides what an
  id commits after an abort: there every owner writes under a new one, and ends what the last left open.
- What `transact` makes again was undone by an abort that its broker has acknowledged: nothing of it is on the log. The
  embedded broker would hide what comes after an abort, so there it is not made again.
- A commit ends, or is given up: see `topics/transactions.py`. So is the client of a writer that was closed: librdkafka
  ends a client only once all its brokers' threads have, and its owner does not wait for that.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from threading import Thread
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from rose.schemas.record import Record
from rose.schemas.wire import encode, headers_of
from rose.topics import counts, tracing
from rose.topics.admin import connect
from rose.topics.catalog import PROMPTS, Topic
from rose.topics.clients import new_client
from rose.topics.dead_letter_headers import to_dead_letter
from rose.topics.errors import BusError
from rose.topics.queries import noop, partition_count
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, Place, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.transactions import (
    HUNG_CALL_LEAVING_SECONDS,
    PERMANENT_REJECTIONS,
    CallWatchdog,
    HungCall,
    in_time_slices,
    poll_until_done,
    retry_until_accepted,
    retry_until_committed,
    run_guarded,
)

STALL_SECONDS = 60.0
"""A flush gives up when nothing at all was stored for so long. A slow link is none: it takes what it takes."""

FLUSH_POLL_SECONDS = 1.0
"""How often a flush looks whether anything was stored."""

CLOSE_SECONDS = 1.0
"""How long a writer that is closed waits for the reports of what it gives up; they are there at once."""

CLOSE_POLL_SECONDS = 0.01

FREE_POLL_SECONDS = 0.1

SOLE_REFERENCES = 2
"""References to a client that only one list has: the list's, and that of whoever asks."""

OWNERS: Place = (PROMPTS, 0)
"""Where the number of owners of a transactional id is kept, in a group of its own."""


class Writer:
    """Writes records. With a `transactional_id` it writes only between `begin` and `commit`.

    Raises BusError when the broker refuses; a transactional writer that raised is to be thrown away.
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
        """`still_needed`: whether this one, and a commit or an abort, still wait for a broker that is away. `on_wait`
        is called every second or so while it takes the place of the last owner of the `transactional_id`, and while a
        transaction that has all its offsets is committed on Apache Kafka; what that raises ends it.
        """
        self._settings = settings
        self._still_needed = still_needed
        self._on_wait = on_wait
        self._transactional = transactional_id is not None
        self._failure: tuple[KafkaError, str] | None = None
        """Of a delivery, and the topic."""
        self._stored = 0
        self._closed = False
        self._touched_topics: set[str] = set()
        """Topics that were written to since the transaction began."""
        self._rights: tuple[str, ...] = (
            f"Write on transactional id {settings.name(transactional_id or '')}",
            "IdempotentWrite on cluster kafka-cluster, or Write on any topic",
        )
        """That it takes, beside those to topics and to its reader's group."""
        if transactional_id is None:
            self._producer = new_client(Producer, settings.producer(client_id))
        else:
            owning = self._successor_producer if settings.embedded else self._fenced_producer
            self._producer = owning(client_id, transactional_id)

    def write(
        self,
        topic: Topic,
        record: Record,
        *,
        key: str,
        partition: int | None = None,
        trajectory_id: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        """Hand a record over. `on_delivery(partition, offset)` is called from `poll` or `flush` once it is stored.

        Raises RecordError for one that its readers would refuse.
        """
        self.write_encoded(
            topic,
            record,
            encode(record),
            key=key,
            partition=partition,
            trajectory_id=trajectory_id,
            headers=headers,
            on_delivery=on_delivery,
        )

    def write_encoded(
        self,
        topic: Topic,
        record: Record,
        value: bytes,
        *,
        key: str,
        partition: int | None = None,
        trajectory_id: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        """`write` of a record whose bytes are known: what was signed or sized is what travels."""
        name, message_headers = (
            self._settings.topic(topic),
            [*headers_of(record, trajectory_id), *(headers or {}).items()],
        )
        if tracing.exporter is not None and trajectory_id is not None:
            tracing.exporter.on_written(record, name)
        self._produce(name, key.encode(), value, partition, message_headers, on_delivery, counts.written(topic))

    def tombstone(
        self, topic: Topic, *, key: str, partition: int, on_delivery: Callable[[int, int], None] | None = None
    ) -> None:
        """Say that the key has ended."""
        self._produce(
            self._settings.topic(topic), key.encode(), None, partition, [], on_delivery, counts.written(topic)
        )

    def forward(self, topic: Topic, raw: RawMessage, *, partition: int, key: bytes | None) -> None:
        """Write a message as it came, to another place and under this key."""
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
        """Store a message that could not be used, as it came, with why and where it lay; see
        `topics/dead_letter_headers.py`.
        """
        letter = to_dead_letter(message, reason, topic=self._settings.topic(message.topic), sent_back=sent_back)
        name, counted = f"{self._settings.namespace}{message.topic.dead_letters}", counts.dead_letters(message.topic)
        self._produce(name, letter.key, letter.value, None, list(letter.headers), on_delivery, counted)

    def partition_count(self, topic: Topic) -> int:
        """How many partitions the topic has on the broker. Raises TopicMissing or BusError."""
        return partition_count(self._producer, self._settings.topic(topic))

    def poll(self, seconds: float = 0.0) -> None:
        """Take delivery reports in, waiting so long for the first. Raises BusError if a delivery failed."""
        self._guarded("writing", self._producer.poll, seconds)
        self._raise_failure()

    def flush(self) -> None:
        """Wait until all that was written is stored, for as long as anything is. Raises BusError if it is not."""
        seen, looks = self._stored, 0  # of which none lasts longer for a process that is frozen amid it
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
        self._touched_topics.clear()
        self._guarded("beginning a transaction", self._producer.begin_transaction)

    def commit(
        self, offsets: Mapping[Place, int] | None = None, reader: Reader | None = None, *, metadata: str = ""
    ) -> None:
        """Commit what was written since `begin` together with the `reader`'s next `offsets`, and a `metadata` at
        each.
        """
        self._commit(self._producer, offsets or {}, reader, metadata)
        self._raise_failure()

    def abort(self) -> None:
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
        """Begin, `write`, and `commit`; all of it again where a broker has undone it.

        One does so whose leaders or coordinators move amid it. Raises BusError for what is no such trouble, or lasts
        longer than TRANSACTION_SECONDS.
        """

        def transaction() -> None:
            self.begin()
            write()
            self.commit(offsets, reader, metadata=metadata)

        retry_until_committed(transaction, self._was_aborted)

    def _was_aborted(self, error: BusError) -> bool:
        """Whether the transaction that failed so is certainly not on the log, and this writer may make it again."""
        if error.is_fenced or error.is_permanent or error.code in PERMANENT_REJECTIONS or error.outcome_unknown:
            return False  # if unknown, a call of it may still be under way as well
        if self._settings.embedded or not self._still_needed():
            return False
        try:
            self.abort()
        except BusError:  # it may be on the log, or another owner has come
            return False
        self._failure = None  # that what was aborted was not stored, as all reports of it have said by now
        return True

    def abort_open_transaction(self, places: Iterable[Place], reader: Reader) -> None:
        """Abort a transaction that would commit the `reader`'s offsets of these, and with it all that is open there of
        this transactional id, whoever wrote it and whatever its own end was.
        """
        self.begin()
        self._send(self._producer, dict.fromkeys(places, 0), reader)
        self.abort()

    def close(self) -> None:
        """Give up what is not stored by now. A writer that is dropped without it goes on, and is never freed."""
        if self._closed:  # a client that is let go twice is never alone
            return
        self._closed = True
        self._producer.purge()  # confluent-kafka turns its `blocking` round: False waits, and with it all threads
        deadline = time.monotonic() + CLOSE_SECONDS
        while len(self._producer) and time.monotonic() < deadline:
            with suppress(KafkaException):  # one that was fenced says so again
                self._producer.poll(CLOSE_POLL_SECONDS)
        _free_later(self._producer)

    def _fenced_producer(self, client_id: str, transactional_id: str) -> Producer:
        """A producer of this id; what an earlier one had open is over."""
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
        """Between two looks for an answer of whom it succeeds. Raises BusError once nobody waits for it any more."""
        if not self._still_needed():
            action = "fencing older transactions (it has no answer yet, and nobody waits for it any more)"
            raise BusError(action, KafkaError(KafkaError._TIMED_OUT))
        self._on_wait()

    def _successor_producer(self, client_id: str, transactional_id: str) -> Producer:
        """`_fenced_producer` with a producer under whose own id nothing was ever aborted.

        The number in it is kept as the offset of a group. It is counted up by whoever holds the id itself, once the
        last owner is fenced and the next one is there: of two who do this at once one succeeds the other, or fails.
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
        # The embedded broker tells open offsets to whoever takes the partitions over meanwhile.
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
        """Why this producer takes nothing any more: all of its calls but `produce` tell whether it was fenced."""
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
            raise self._error(action, error.args[0], *sorted(self._touched_topics)) from error
        except HungCall as hung:
            raise BusError(f"{action} ({hung})", KafkaError(KafkaError._TIMED_OUT)) from hung

    def _raise_failure(self) -> None:
        if self._failure is not None:
            (failure, name), self._failure = self._failure, None
            raise self._error("storing a record", failure, name)

    def _error(self, action: str, error: KafkaError, *topics: str) -> BusError:
        return BusError(action, error, *(f"Write on topic {topic}" for topic in topics), *self._rights)


def _free_later(client: Producer) -> None:
    """Free the client on a thread of its own, once nothing else has it: its writer, an error or a report may have."""
    Thread(target=_free, args=([client],), name="free", daemon=True).start()


def _free(last: list[Producer]) -> None:
    while sys.getrefcount(last[0]) > SOLE_REFERENCES:
        time.sleep(FREE_POLL_SECONDS)  # nobody tells that a reference is gone
        if len(last[0]):  # reports that are late hold the writer until they are taken in
            with suppress(KafkaException):
                last[0].poll(0)
    last.clear()
