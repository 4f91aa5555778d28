"""Reads typed records from Kafka.

Keeps true
- A Reader returns a record only after it was decoded and checked. A message that does not decode is returned as it
  came, and its consumer decides what to do with it.
- Assigned partitions are read unless they were paused after the assignment: an assignment ends every pause.
- A member that is assigned nothing although the group has a partition for each member joins again.
- A Reader commits only when it is asked to, and it writes nothing.
"""

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import closing, suppress

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
from confluent_kafka.admin import AdminClient

from rose.schemas.errors import RecordError, ThreadRefused
from rose.schemas.record import Record
from rose.schemas.wire import decode
from rose.topics import counts
from rose.topics.catalog import LOG_GROUP, Topic
from rose.topics.errors import (
    AUTHORIZATION_CODES,
    UNKNOWN_PARTITION_CODES,
    BusError,
    TopicMissing,
    bus_errors,
    is_transient,
)
from rose.topics.idle_consumer import IdleConsumer
from rose.topics.processes import start_thread
from rose.topics.queries import (
    COORDINATOR_SECONDS,
    EARLIEST,
    WATERMARKS_ATTEMPT_SECONDS,
    WATERMARKS_SECONDS,
    all_watermarks_of,
    group_members,
    missing_error,
    noop,
    offsets_at,
    partition_count,
    retry_query,
    watermarks_of,
)
from rose.topics.records import EndOfPartition, Envelope, InvalidMessage, Item, Place, SkippedMessage, raw_of
from rose.topics.settings import BusSettings, new_client

REJOIN_SECONDS = 5.0
"""Time after which a member of a group on the embedded broker joins again. The broker waits 0.3 s for other members
after the first member has joined. If the second member joins at the end of that wait, the broker answers no member of
the group until one of them joins again under its name."""

UNASSIGNED_SECONDS = 10.0
"""Time after which a member without partitions asks whether there are any for it. librdkafka joins again when topics
change, but not if the topics were missing only at the moment of the assignment, e.g. on a broker that lost its disk."""

ASK_SECONDS = 1.0
"""How long such a member waits for the answer to one query."""

COORDINATOR_ANSWER_SECONDS = 3.0
"""How long a coordinator may take to answer a client that has to look it up first. Otherwise it counts as away."""

CLOSE_SECONDS = 10.0
"""How long a reader may take to leave its group: as long as a session of its members."""


class Reader:
    """Reads typed records, either from partitions that are assigned by hand or as a member of a consumer group."""

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

        `report_ends` makes `read` return EndOfPartition, too. `on_wait` is called every few seconds while a query has
        no answer from the broker; an exception of `on_wait` ends the query. `overrides`: librdkafka settings.
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
        """Subscribes again, with the present consumer; None for a reader without a subscription."""
        self._leaves_on_close = False
        self._joins_again_at = math.inf
        self._asks_again_at = math.inf
        """When a member without partitions asks whether there are any for it."""
        self._topics: dict[str, Topic] = {}
        self._assigned: set[Place] = set()
        self._membership: object = None
        """Consumer group metadata of the present assignment. A member that the group has evicted, and that does not
        know it yet, may have forgotten its generation; the broker would then accept its commit as a commit of no
        member. So the metadata is read once per assignment, on the thread that uses the reader: a call on another
        thread waits until no thread polls, which may be forever."""

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
        """Join the group. `on_assigned` returns the offset at which to begin in each newly assigned partition.

        Both callbacks run inside `read`, and neither runs after `close` has begun.
        """
        self._register_topics(topics)

        def on_assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if self._leaves_on_close or consumer is not self._consumer:
                # This consumer is leaving on its own thread, so this assignment is out of date. Its client may have
                # been closed, and Python 3.11 cannot recover from an exception that the client raises in here.
                return
            self._joins_again_at = math.inf
            self._asks_again_at = math.inf if partitions else time.monotonic() + UNASSIGNED_SECONDS
            self._membership = consumer.consumer_group_metadata()
            self._assign_places(on_assigned([self._place(partition) for partition in partitions]))

        def on_revoke(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if self._leaves_on_close or consumer is not self._consumer:
                return  # the consumer is leaving, as in on_assign
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
        """Up to `limit` items; returns as soon as there are any, or an empty list after the timeout.

        Raises TopicMissing or BusError.
        """
        taken = (self._item_of(message) for message in self._messages(limit, timeout_seconds))
        return [item for item in taken if item is not None]

    def read_selected(
        self, limit: int, timeout_seconds: float, selected: Mapping[Place, Container[int]]
    ) -> list[Item | SkippedMessage]:
        """`read` that decodes only the messages at the `selected` offsets, which saves most of the time of the others.

        Other messages are returned as SkippedMessage. Raises TopicMissing or BusError.
        """
        picked = (self._selected_item(message, selected) for message in self._messages(limit, timeout_seconds))
        return [item for item in picked if item is not None]

    def _messages(self, limit: int, timeout_seconds: float) -> list[Message]:
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            if time.monotonic() >= self._joins_again_at:
                self._rejoin()
            elif time.monotonic() >= self._asks_again_at:
                self._join_if_partitions_are_free()
            return []
        return [first, *self._consumer.consume(limit - 1, 0)] if limit > 1 else [first]

    def committed(
        self, places: Sequence[Place], *, seconds: float = COORDINATOR_SECONDS, mark: str | None = None
    ) -> dict[Place, int | None]:
        """The group's committed offsets; None for a place without a committed offset.

        `seconds`: how long to wait for a coordinator that is starting. `mark`: if given, an offset without this
        metadata is not used, and None is returned for its place. Raises BusError.
        """
        answers = self._committed_offsets(self._consumer, places, seconds)
        found = {place: answer for place, answer in zip(places, answers, strict=True) if answer.offset >= 0}
        foreign = [place for place, answer in found.items() if mark is not None and answer.metadata != mark]
        if foreign:
            structlog.get_logger("bus").warning(
                "offsets_not_used",
                offsets={f"{topic.name}/{number}": found[topic, number].offset for topic, number in foreign},
                reason="another program or an earlier version of ROSE committed them, so the log says where to begin",
            )
        return {place: found[place].offset if place in found and place not in foreign else None for place in places}

    def commit_metadata(self, places: Sequence[Place]) -> dict[Place, str]:
        """The metadata of the last committed offsets, also while a transaction with offsets is open; empty without any.

        Waits for a coordinator that is starting. Raises BusError.
        """
        with closing(self._observer()) as asking:
            answers = self._committed_offsets(asking, places, COORDINATOR_SECONDS)
        return {place: answer.metadata or "" for place, answer in zip(places, answers, strict=True)}

    def reach_coordinator(self, place: Place) -> None:
        """Check that the group's coordinator answers a query for the committed offset of `place`.

        Uses a client of its own, so any thread may call this. Raises BusError within about COORDINATOR_ANSWER_SECONDS.
        """
        with (
            bus_errors("reaching the coordinator of a group", self.right_to_group),
            closing(self._observer()) as asking,
        ):
            asking.committed([self._partition(place, 0)], timeout=COORDINATOR_ANSWER_SECONDS)

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit the next offset to read of each partition asynchronously, before the end of `close` at the latest.

        Does not wait. If the broker refuses the commit, a warning is logged and the group keeps its older offsets.
        Raises BusError if the client refuses it.
        """
        with bus_errors("committing offsets"):
            self._consumer.commit(offsets=[self._partition(place, offset) for place, offset in offsets.items()])

    def offsets_at(self, places: Sequence[Place], timestamp_seconds: float) -> dict[Place, int]:
        """The first offset with a timestamp at or after the time, for each partition; its end if there is none.

        `timestamp_seconds`: unix seconds. Raises TopicMissing or BusError.
        """
        milliseconds = max(0, int(timestamp_seconds * 1000))  # negative timestamps have special meanings for a broker
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
        """`watermarks` of all places, queried together. `on_wait` replaces the reader's own.

        Raises TopicMissing or BusError.
        """
        partitions = [self._partition(place, 0) for place in places]
        return dict(zip(places, all_watermarks_of(self._consumer, partitions, on_wait or self._on_wait), strict=True))

    def refresh_positions(self, places: Sequence[Place]) -> None:
        """Make librdkafka look up the leaders of assigned partitions now; otherwise it does so once a second.

        Errors are ignored here: `read` raises them.
        """
        with suppress(KafkaException):
            offsets_at(self._consumer, [self._partition(place, 0) for place in places], EARLIEST)

    def partition_count(self, topic: Topic) -> int:
        """How many partitions the topic has on the broker. Raises TopicMissing or BusError."""
        return partition_count(self._consumer, self._settings.topic(topic), self._on_wait)

    def pause(self, places: Iterable[Place]) -> None:
        """Return no records of these partitions until they are resumed or assigned again. Ignores unassigned ones."""
        self._consumer.pause([self._partition(place, 0) for place in places if place in self._assigned])

    def resume(self, places: Iterable[Place]) -> None:
        """Resume those of the places that are assigned."""
        self._consumer.resume([self._partition(place, 0) for place in places if place in self._assigned])

    def group_metadata(self) -> object:
        """The metadata with which a transaction, on any thread, commits offsets of this reader's assignment.

        The commit fails once the group has a newer generation.
        """
        if self._membership is None:
            self._membership = self._consumer.consumer_group_metadata()
        return self._membership

    @property
    def member_id(self) -> str:
        """The member id in the group. It changes if the group has evicted this reader and the reader joins again."""
        return str(self._consumer.memberid())

    def close(self) -> None:
        """Leave the group: its partitions go to the other members at once, unless it is a static member.

        Takes CLOSE_SECONDS at most: during a rebalance librdkafka may wait for an answer that never comes. The other
        members then wait for the end of this member's session.
        """
        if self._leaves_on_close:
            return  # a client that two threads close at once may wait forever
        self._leaves_on_close = True
        try:
            leaving = start_thread(self._consumer.close, name="leaves")
        except ThreadRefused as error:
            structlog.get_logger("bus").warning("group_not_left", reason=str(error))
            return
        leaving.join(CLOSE_SECONDS)
        if leaving.is_alive():
            structlog.get_logger("bus").warning("group_not_left", seconds=CLOSE_SECONDS)

    def _committed_offsets(self, consumer: Consumer, places: Sequence[Place], seconds: float) -> list[TopicPartition]:
        """The coordinator's answer about committed offsets, for a client of the group. Raises BusError."""
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
        # The embedded broker answers an empty fetch at once, so a waiting consumer has to pause between fetches.
        return new_client(IdleConsumer if self._settings.embedded else Consumer, self._config)

    def _observer(self) -> Consumer:
        """A client outside the group that can read committed offsets while a transaction is open."""
        alike = {name: value for name, value in self._config.items() if name != "group.instance.id"}
        return new_client(Consumer, {**alike, "isolation.level": "read_uncommitted"})

    def _rejoin(self) -> None:
        structlog.get_logger("bus").warning("join_retried", seconds=REJOIN_SECONDS)
        follower = self._new_consumer()
        start_thread(self._consumer.close, name="leaves")
        self._consumer = follower
        self.join_again()

    def join_again(self) -> None:
        """Subscribe again to the same topics, so that the group assigns its partitions again."""
        assert self._join is not None
        self._join()

    def _join_if_partitions_are_free(self) -> None:
        """Subscribe again if the group has a partition for each member. Raises TopicMissing.

        Takes at most ASK_SECONDS for each of two queries, as a member that does not poll holds its group up. A query
        without an answer is repeated after UNASSIGNED_SECONDS.
        """
        self._asks_again_at = time.monotonic() + UNASSIGNED_SECONDS
        client = new_client(AdminClient, self._settings.client(str(self._config["client.id"])))
        try:
            found = client.list_topics(timeout=ASK_SECONDS).topics
            members = group_members(client, str(self._config["group.id"]), ASK_SECONDS)
        except KafkaException:
            return
        if missing := [name for name in self._topics if name not in found]:
            raise TopicMissing(missing[0])
        if len(members) <= max(len(found[name].partitions) for name in self._topics):
            self.join_again()

    def _register_topics(self, topics: Iterable[Topic]) -> None:
        known = {self._settings.topic(topic): topic for topic in topics}
        for topic in known.values():
            counts.dead_letters(topic)  # exported as 0 from the start, so the first dead letter shows as an increase
        self._topics.update(known)

    def _assign_places(self, places: Mapping[Place, int]) -> None:
        """Assign and resume: librdkafka would keep an application's pause of a partition over an assignment."""
        partitions = [self._partition(place, at) for place, at in self._resolved_offsets(places).items()]
        with bus_errors("taking partitions on"):
            self._consumer.assign(partitions)
            self._consumer.resume(partitions)
        self._assigned = set(places)

    def _partition(self, place: Place, offset: int) -> TopicPartition:
        topic, partition = place
        return TopicPartition(self._settings.topic(topic), partition, offset)

    def _resolved_offsets(self, places: Mapping[Place, int]) -> dict[Place, int]:
        """The offsets as numbers, queried here: librdkafka takes half a second to find a beginning or an end."""
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
            if is_transient(error):
                return None  # librdkafka reconnects by itself
            raise BusError(f"reading {name or 'the log'}", error, f"Read on topic {name}", self.right_to_group)
        topic, raw = self._topics[name], raw_of(message)
        counts.read(topic).inc()
        place = topic, message.partition(), message.offset()
        timestamp_type, stamp = message.timestamp()
        record: Record | None = None
        if raw.value is not None:
            assert topic.record is not None
            try:
                record = decode(topic.record, raw.value, raw.headers)
            except RecordError as error:
                return InvalidMessage(*place, raw, str(error), stamp / 1000)
        key = raw.key.decode(errors="replace") if raw.key else ""
        return Envelope(record, *place, key, stamp / 1000, raw, timestamp_type == TIMESTAMP_LOG_APPEND_TIME)


def _raise_refusal(consumer: Consumer) -> None:
    """Raise the client's authorization error, which librdkafka returns only from `poll`, as KafkaException.

    For a reader that has no partitions yet and is therefore not polled.
    """
    if (message := consumer.poll(0)) is not None:
        error = message.error()
        if error is not None and error.code() in AUTHORIZATION_CODES:
            raise KafkaException(error)


def _raise_partition_errors(answers: Iterable[TopicPartition], action: str) -> None:
    """Raise BusError if the answer for one of the partitions is an error: the answer as a whole does not show that."""
    for answer in answers:
        if answer.error is not None:
            where = f"{answer.topic} [{answer.partition}]"
            raise BusError(f"{action} of {where}", answer.error, f"Describe on topic {answer.topic}")
