"""Typed records out of Kafka.

Keeps true
- What a Reader hands out as a record has been decoded and checked. What does not decode is handed out as it came: its
  consumer decides what becomes of it.
- What is assigned is read, unless it was paused since: no pause outlives an assignment.
- Nothing is committed on its own, and nothing is written.
"""

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from threading import Thread

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from rose.schemas.errors import RecordError
from rose.schemas.record import Record
from rose.schemas.wire import decode
from rose.topics import counts
from rose.topics.catalog import LOG_GROUP, Topic
from rose.topics.clients import new_client
from rose.topics.errors import AUTHORIZATION_CODES, UNAVAILABLE_CODES, BusError
from rose.topics.local_broker.idle_consumer import IdleConsumer
from rose.topics.queries import (
    COORDINATOR_SECONDS,
    EARLIEST,
    UNKNOWN_PARTITION_CODES,
    WATERMARKS_ATTEMPT_SECONDS,
    WATERMARKS_SECONDS,
    all_watermarks_of,
    missing_error,
    noop,
    offsets_at,
    partition_count,
    retry_query,
    watermarks_of,
)
from rose.topics.records import EndOfPartition, Envelope, InvalidMessage, Item, Place, SkippedMessage, raw_of
from rose.topics.settings import BusSettings

REJOIN_SECONDS = 5.0
"""The embedded broker waits 0.3 s for others once a group's first member has come. If the second comes just as that is
over, it answers neither, nor whoever comes after them, until one of them comes again by its name: after so long."""

COORDINATOR_ANSWER_SECONDS = 3.0
"""How long a coordinator may take to answer a client that has to look for it first; else it counts as away."""

CLOSE_SECONDS = 10.0
"""How long a reader may take to leave its group: as long as a session of its members."""


class Reader:
    """Reads typed records, either of partitions assigned by hand or as a member of a consumer group."""

    def __init__(
        self,
        settings: BusSettings,
        client_id: str,
        *,
        group: str = LOG_GROUP,
        member_id: str | None = None,
        report_ends: bool = False,
        on_wait: Callable[[], None] = noop,
        **overrides: object,
    ) -> None:
        """`member_id`: its name in the group, by which it is known again on a broker that never evicts a member.

        `report_ends` makes `read` report EndOfPartition too. `on_wait` is called every few seconds while a question to
        the broker has no answer; what it raises ends the question.
        """
        config = {**settings.consumer(client_id, group), "enable.partition.eof": report_ends, **overrides}
        self.right_to_group = f"{'Describe' if group == LOG_GROUP else 'Read'} on group {settings.name(group)}"
        if member_id is not None and settings.embedded:
            config["group.instance.id"] = settings.name(member_id)
        self._settings = settings
        self._config = config
        self._on_wait = on_wait
        self._consumer = self._new_consumer()
        self._join: Callable[[], None] | None = None
        """Ask the group to be taken in."""
        self._leaves_on_close = False
        self._joins_again_at = math.inf
        self._topics: dict[str, Topic] = {}
        self._assigned: set[Place] = set()
        self._membership: object = None
        """As of the assignment that is worked on. A member that the group has given up, and that does not know it yet,
        may have forgotten its generation: then the broker would take its commit for that of no member at all. It is
        asked for once, where the reader is used: a call of another thread waits until nobody polls, which may be never.
        """

    def assign(self, places: Mapping[Place, int]) -> None:
        """Read these partitions from these offsets (or confluent_kafka's OFFSET_BEGINNING, OFFSET_END).

        Raises TopicMissing or BusError.
        """
        self._register_topics(topic for topic, _ in places)
        self._assign_places(places)
        self.group_metadata()

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        on_assigned: Callable[[list[Place]], Mapping[Place, int]],
        on_revoked: Callable[[list[Place]], None],
    ) -> None:
        """Join the group. `on_assigned` says where to begin in each partition that comes; both run inside `read`.

        Nothing is said any more once `close` has begun.
        """
        self._register_topics(topics)

        def on_assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if self._leaves_on_close or consumer is not self._consumer:
                # It leaves, on a thread of its own: what is told now was decided before. Its client may have ended by
                # now, and what that raises in here Python 3.11 cannot have back.
                return
            self._joins_again_at = math.inf
            self._membership = consumer.consumer_group_metadata()
            self._assign_places(on_assigned([self._place(partition) for partition in partitions]))

        def on_revoke(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if self._leaves_on_close or consumer is not self._consumer:
                return  # as above
            on_revoked([self._place(partition) for partition in partitions])
            self._assigned = set()
            consumer.unassign()

        def join() -> None:
            self._consumer.subscribe(names, on_assign=on_assign, on_revoke=on_revoke, on_lost=on_revoke)
            if self._settings.embedded:
                self._joins_again_at = time.monotonic() + REJOIN_SECONDS

        names = [self._settings.topic(topic) for topic in topics]
        self._join = join
        join()

    def read(self, limit: int, timeout_seconds: float) -> list[Item]:
        """Up to `limit` records; returns as soon as any are there, or empty after the timeout.

        Raises TopicMissing or BusError.
        """
        taken = (self._item_of(message) for message in self._messages(limit, timeout_seconds))
        return [item for item in taken if item is not None]

    def read_selected(
        self, limit: int, timeout_seconds: float, selected: Mapping[Place, Container[int]]
    ) -> list[Item | SkippedMessage]:
        """`read` that decodes what lies at these offsets alone, which saves most of the time that the rest takes."""
        picked = (self._selected_item(message, selected) for message in self._messages(limit, timeout_seconds))
        return [item for item in picked if item is not None]

    def _messages(self, limit: int, timeout_seconds: float) -> list[Message]:
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            if time.monotonic() >= self._joins_again_at:
                self._rejoin()
            return []
        return [first, *self._consumer.consume(limit - 1, 0)] if limit > 1 else [first]

    def committed(self, places: Sequence[Place], *, seconds: float = COORDINATOR_SECONDS) -> dict[Place, int | None]:
        """The group's committed offsets; None where there is none.

        Waits so long for a coordinator that is coming up. Raises BusError.
        """
        answers = self._committed_offsets(self._consumer, places, seconds)
        return {
            place: answer.offset if answer.offset >= 0 else None for place, answer in zip(places, answers, strict=True)
        }

    def commit_metadata(self, places: Sequence[Place]) -> dict[Place, str]:
        """What was said with the offsets that were committed last, whatever is open: empty where nothing was.

        Waits for a coordinator that is coming up. Raises BusError.
        """
        with closing(self._observer()) as asking:
            answers = self._committed_offsets(asking, places, COORDINATOR_SECONDS)
        return {place: answer.metadata or "" for place, answer in zip(places, answers, strict=True)}

    def reach_coordinator(self, place: Place) -> None:
        """See that the group's coordinator answers who asks for what is committed of `place`, whatever is open.

        Asks with a client of its own, on any thread. Raises BusError within REACH_SECONDS or so.
        """
        try:
            with closing(self._observer()) as asking:
                asking.committed([self._partition(place, 0)], timeout=COORDINATOR_ANSWER_SECONDS)
        except KafkaException as error:
            raise BusError("reaching the coordinator of a group", error.args[0], self.right_to_group) from error

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Have the next offset to read of each partition committed, by the time of `close` at the latest.

        Waits for nothing: a commit that the broker refuses is a warning in the log, the group's offsets are the older
        ones then.
        """
        try:
            self._consumer.commit(offsets=[self._partition(place, offset) for place, offset in offsets.items()])
        except KafkaException as error:
            raise BusError("committing offsets", error.args[0]) from error

    def offsets_at(self, places: Sequence[Place], timestamp_seconds: float) -> dict[Place, int]:
        """Of each partition the first offset stamped at or after the time; its end if there is none."""
        milliseconds = max(0, int(timestamp_seconds * 1000))  # those below 0 mean something else to a broker
        requests = [self._partition(place, milliseconds) for place in places]
        found = retry_query(
            "looking offsets up by time",
            lambda left: self._consumer.offsets_for_times(requests, timeout=min(left, WATERMARKS_ATTEMPT_SECONDS)),
            WATERMARKS_SECONDS,
            on_wait=self._on_wait,
        )
        _raise_partition_errors(found, "looking offsets up by time")
        return {
            place: answer.offset if answer.offset >= 0 else self.watermarks(place)[1]
            for place, answer in zip(places, found, strict=True)
        }

    def watermarks(self, place: Place) -> tuple[int, int]:
        """The first offset kept and the next one to be written. Raises TopicMissing or BusError."""
        return watermarks_of(self._consumer, self._partition(place, 0), self._on_wait)

    def all_watermarks(
        self, places: Sequence[Place], *, on_wait: Callable[[], None] | None = None
    ) -> dict[Place, tuple[int, int]]:
        """`watermarks` of each, asked for at once. `on_wait`: if not the reader's own.

        Raises TopicMissing or BusError.
        """
        partitions = [self._partition(place, 0) for place in places]
        return dict(zip(places, all_watermarks_of(self._consumer, partitions, on_wait or self._on_wait), strict=True))

    def refresh_positions(self, places: Sequence[Place]) -> None:
        """Have what was assigned looked for now: librdkafka does so once a second, or when it is asked.

        What is missing, or does not answer, is told by reading.
        """
        with suppress(KafkaException):
            offsets_at(self._consumer, [self._partition(place, 0) for place in places], EARLIEST)

    def partition_count(self, topic: Topic) -> int:
        """How many partitions the topic has on the broker. Raises TopicMissing or BusError."""
        return partition_count(self._consumer, self._settings.topic(topic), self._on_wait)

    def pause(self, places: Iterable[Place]) -> None:
        """Hand nothing of these out until they are resumed or assigned anew; what is not assigned stays as it is."""
        self._consumer.pause([self._partition(place, 0) for place in places if place in self._assigned])

    def resume(self, places: Iterable[Place]) -> None:
        self._consumer.resume([self._partition(place, 0) for place in places if place in self._assigned])

    def group_metadata(self) -> object:
        """What a transaction of any thread needs in order to commit offsets of what this reader was assigned.

        The commit fails once the group has moved on.
        """
        if self._membership is None:
            self._membership = self._consumer.consumer_group_metadata()
        return self._membership

    @property
    def member_id(self) -> str:
        """As whom the group knows this reader; another name once it had given it up."""
        return str(self._consumer.memberid())

    def close(self) -> None:
        """Leave the group: its partitions go to the others at once, unless the broker knows its members by name.

        Takes CLOSE_SECONDS at most: in the middle of a rebalance librdkafka may wait for a word that never comes. The
        others then wait for the end of this member's session.
        """
        if self._leaves_on_close:
            return  # a client that is closed twice at once may wait for ever
        self._leaves_on_close = True
        leaving = Thread(target=self._consumer.close, name="leaves", daemon=True)
        leaving.start()
        leaving.join(CLOSE_SECONDS)
        if leaving.is_alive():
            structlog.get_logger("bus").warning("not left in time", seconds=CLOSE_SECONDS)

    def _committed_offsets(self, consumer: Consumer, places: Sequence[Place], seconds: float) -> list[TopicPartition]:
        """What a client of the group is told of its committed offsets. Raises BusError."""
        partitions = [self._partition(place, 0) for place in places]
        reads = consumer is self._consumer and (self._join is not None or bool(self._assigned))

        def ask(left: float) -> list[TopicPartition]:
            try:
                answers: list[TopicPartition] = consumer.committed(
                    partitions, timeout=min(left, WATERMARKS_ATTEMPT_SECONDS)
                )
                return answers
            except KafkaException:
                if not reads:
                    _raise_refusal(consumer)
                raise

        action = "reading committed offsets"
        answers = retry_query(action, ask, seconds, self.right_to_group, on_wait=self._on_wait)
        _raise_partition_errors(answers, action)
        return answers

    def _new_consumer(self) -> Consumer:
        # With nothing held at the broker a waiting consumer would ask without end: this one rests.
        return new_client(IdleConsumer if self._settings.embedded else Consumer, self._config)

    def _observer(self) -> Consumer:
        """A client that is no member of the group, and is told also of offsets whose transaction is open."""
        alike = {name: value for name, value in self._config.items() if name != "group.instance.id"}
        return new_client(Consumer, {**alike, "isolation.level": "read_uncommitted"})

    def _rejoin(self) -> None:
        assert self._join is not None
        structlog.get_logger("bus").warning("the broker has not answered a join: asking again", seconds=REJOIN_SECONDS)
        former, self._consumer = self._consumer, self._new_consumer()
        Thread(target=former.close, name="leaves", daemon=True).start()
        self._join()

    def _register_topics(self, topics: Iterable[Topic]) -> None:
        known = {self._settings.topic(topic): topic for topic in topics}
        for topic in known.values():
            counts.dead_letters(topic)  # at 0: the first one is to be seen as an increase
        self._topics.update(known)

    def _assign_places(self, places: Mapping[Place, int]) -> None:
        """Assign, and resume: librdkafka keeps an application's pause of a partition over any assignment."""
        partitions = [self._partition(place, at) for place, at in self._resolved_offsets(places).items()]
        try:
            self._consumer.assign(partitions)
            self._consumer.resume(partitions)
        except KafkaException as error:
            raise BusError("taking partitions on", error.args[0]) from error
        self._assigned = set(places)

    def _partition(self, place: Place, offset: int) -> TopicPartition:
        topic, partition = place
        return TopicPartition(self._settings.topic(topic), partition, offset)

    def _resolved_offsets(self, places: Mapping[Place, int]) -> dict[Place, int]:
        """The offsets as numbers, asked for here: librdkafka takes half a second to find the beginning or the end."""
        ends = self.all_watermarks([place for place, at in places.items() if at in (OFFSET_BEGINNING, OFFSET_END)])
        return {place: ends[place][at == OFFSET_END] if place in ends else at for place, at in places.items()}

    def _place(self, partition: TopicPartition) -> Place:
        return self._topics[partition.topic], partition.partition

    def _selected_item(
        self, message: Message, selected: Mapping[Place, Container[int]]
    ) -> Item | SkippedMessage | None:
        if message.error() is None:
            place, offset = (self._topics[message.topic()], message.partition()), message.offset()
            if offset not in selected.get(place, ()):
                return SkippedMessage(*place, offset, len(message.value() or b""))
        return self._item_of(message)

    def _item_of(self, message: Message) -> Item | None:
        name = message.topic()
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return EndOfPartition(self._topics[name], message.partition(), message.offset())
            if error.code() in UNKNOWN_PARTITION_CODES:
                raise missing_error(self._consumer, name or "?", message.partition())
            if error.retriable() or error.code() in UNAVAILABLE_CODES:
                return None  # librdkafka reconnects by itself
            raise BusError(f"reading {name or 'the log'}", error, f"Read on topic {name}", self.right_to_group)
        topic, raw = self._topics[name], raw_of(message)
        counts.read(topic).inc()
        place = topic, message.partition(), message.offset()
        record: Record | None = None
        if raw.value is not None:
            assert topic.record is not None
            try:
                record = decode(topic.record, raw.value, raw.headers)
            except RecordError as error:
                return InvalidMessage(*place, raw, str(error))
        key = raw.key.decode(errors="replace") if raw.key else ""
        timestamp_type, stamp = message.timestamp()
        return Envelope(record, *place, key, stamp / 1000, raw, timestamp_type == TIMESTAMP_LOG_APPEND_TIME)


def _raise_refusal(consumer: Consumer) -> None:
    """That the group may not be looked for is said where messages come: who reads nothing yet never hears of it."""
    if (message := consumer.poll(0)) is not None:
        error = message.error()
        if error is not None and error.code() in AUTHORIZATION_CODES:
            raise KafkaException(error)


def _raise_partition_errors(answers: Iterable[TopicPartition], action: str) -> None:
    """An answer for all may carry an error for one, and no offset: it is no answer. Raises BusError."""
    for answer in answers:
        if answer.error is not None:
            where = f"{answer.topic} [{answer.partition}]"
            raise BusError(f"{action} of {where}", answer.error, f"Describe on topic {answer.topic}")
