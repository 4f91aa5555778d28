"""Queries to a broker: watermarks of partitions, metadata, and the number of a topic's partitions.

Keeps true: while leaders, coordinators and topics start or move, a query is repeated for a bounded time. `on_wait` is
called between two attempts, which last at most twice WATERMARKS_ATTEMPT_SECONDS, so that the caller can do work that
must not wait longer.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata, ListOffsetsResultInfo, MemberDescription

from rose.topics.catalog import CATALOG
from rose.topics.errors import UNKNOWN_PARTITION_CODES, BusError, PartitionMissing, TopicMissing, is_transient

Answer = TypeVar("Answer")

RETRY_SECONDS = 0.1
"""Pause between two attempts."""

COORDINATOR_SECONDS = 30.0
"""How long a group's coordinator may take to start before that is an error."""

WATERMARKS_SECONDS = 30.0
"""How long a partition's leader may take to answer; the election of a new leader takes some seconds."""

WATERMARKS_ATTEMPT_SECONDS = 3.0
"""How long one query to a leader may take before the leaders are looked up again."""

BATCH_QUERY_SECONDS = 1.0
"""How long a query for many partitions may take before each partition is queried by itself."""

LATEST, EARLIEST = -1, -2
"""Special timestamps of a query by time: the end and the beginning of a partition."""

PROPAGATION_SECONDS = 1.0
"""How long a broker may take to learn of a topic that was just created through another broker."""


def noop() -> None:
    """The default of `on_wait`: does nothing."""


def watermarks_of(consumer: Consumer, partition: TopicPartition, on_wait: Callable[[], None] = noop) -> tuple[int, int]:
    """The first offset that is kept and the next offset to be written. Raises TopicMissing or BusError.

    librdkafka keeps querying a leader that is gone, so attempts are short, and leaders are looked up between them.
    """
    known_at = time.monotonic() + PROPAGATION_SECONDS
    has_asked = False

    def query(seconds: float) -> tuple[int, int]:
        nonlocal has_asked
        if has_asked:
            with suppress(KafkaException):
                consumer.list_topics(partition.topic, timeout=WATERMARKS_ATTEMPT_SECONDS)
        has_asked = True
        try:
            low, high = consumer.get_watermark_offsets(partition, timeout=min(seconds, WATERMARKS_ATTEMPT_SECONDS))
            return int(low), int(high)
        except KafkaException as error:
            if error.args[0].code() not in UNKNOWN_PARTITION_CODES or time.monotonic() <= known_at:
                raise
            refused = error
        if _is_listed(consumer, partition):
            raise refused
        raise missing_error(consumer, partition.topic, partition.partition)

    name = partition.topic
    right = f"Describe on topic {name}"
    return retry_query(
        f"reading the ends of {name}", query, WATERMARKS_SECONDS, right, may_be_unknown=True, on_wait=on_wait
    )


def all_watermarks_of(
    consumer: Consumer, partitions: Sequence[TopicPartition], on_wait: Callable[[], None] = noop
) -> list[tuple[int, int]]:
    """`watermarks_of` each partition, in their order. Raises TopicMissing or BusError.

    Several partitions are queried together, with one request per leader. If a leader does not answer, each partition is
    queried by itself.
    """
    if len(partitions) < 2:
        return [watermarks_of(consumer, each, on_wait) for each in partitions]
    with suppress(KafkaException):
        return list(zip(*(offsets_at(consumer, partitions, end) for end in (EARLIEST, LATEST)), strict=True))
    found: list[tuple[int, int]] = []
    for each in partitions:
        on_wait()
        found.append(watermarks_of(consumer, each, on_wait))
    return found


def offsets_at(consumer: Consumer, partitions: Sequence[TopicPartition], timestamp: int) -> list[int]:
    """The offset of each partition at `timestamp`: EARLIEST or LATEST.

    Raises KafkaException, also if one partition has no answer: its offset then is the negative timestamp.
    """
    requests = [TopicPartition(each.topic, each.partition, timestamp) for each in partitions]
    answers = consumer.offsets_for_times(requests, timeout=BATCH_QUERY_SECONDS)
    for each in answers:
        if each.error is not None or each.offset < 0:
            raise KafkaException(each.error or KafkaError(KafkaError._TIMED_OUT))
    return [int(each.offset) for each in answers]


def metadata_of(client: AdminClient) -> ClusterMetadata:
    """The cluster's brokers, and topics with their partitions. Raises BusError.

    Each attempt has half of the remaining time, so the first attempt waits for a slow broker.
    """
    return retry_query("asking for the topics", lambda left: client.list_topics(timeout=left / 2), WATERMARKS_SECONDS)


def group_members(client: AdminClient, group: str, seconds: float) -> list[MemberDescription]:
    """The members of a consumer group, by the group's name on the broker. Raises KafkaException."""
    members: list[MemberDescription] = (
        client.describe_consumer_groups([group], request_timeout=seconds)[group].result().members
    )
    return members


def offset_in(answer: "Future[ListOffsetsResultInfo]") -> int:
    """The offset in an answer to `list_offsets`. Raises KafkaException.

    A timeout is visible only as a negative offset in confluent-kafka.
    """
    offset = int(answer.result().offset)
    if offset < 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return offset


def partition_count(client: Consumer | Producer, name: str, on_wait: Callable[[], None] = noop) -> int:
    """Number of partitions of the topic of this name. Raises TopicMissing or BusError."""
    found = retry_query(
        f"asking for {name}",
        lambda left: client.list_topics(name, timeout=min(left, WATERMARKS_ATTEMPT_SECONDS)).topics[name],
        WATERMARKS_SECONDS,
        on_wait=on_wait,
    )
    if found.error is not None and found.error.code() not in UNKNOWN_PARTITION_CODES:
        raise BusError(f"asking for {name}", found.error, f"Describe on topic {name}")
    if not found.partitions:
        raise TopicMissing(name)
    return len(found.partitions)


def _is_listed(consumer: Consumer, partition: TopicPartition) -> bool:
    """Whether the metadata lists the partition, so that only its leader does not know it yet, e.g. after a restart."""
    with suppress(KafkaException):
        metadata = consumer.list_topics(partition.topic, timeout=WATERMARKS_ATTEMPT_SECONDS).topics[partition.topic]
        return metadata.error is None and partition.partition in metadata.partitions
    return True  # without an answer the partition is not known to be gone


def missing_error(consumer: Consumer, name: str, partition: int = 0) -> TopicMissing | BusError:
    """The error for a partition that a broker does not know.

    The topic is missing or has fewer partitions, or the client has no right to the topic, so the broker hides it.
    """
    with suppress(KafkaException):
        found = consumer.list_topics(name, timeout=WATERMARKS_ATTEMPT_SECONDS).topics[name]
        if found.error is not None and found.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return BusError(f"looking for {name}", found.error, f"Describe on topic {name}")
        if found.error is None and 0 < len(found.partitions) <= partition:
            return PartitionMissing(name, partition, len(found.partitions), _larger(consumer, name, partition))
    return TopicMissing(name)


def _larger(consumer: Consumer, name: str, partition: int) -> tuple[str, int] | None:
    """The largest topic with the partitioning of `name`, and its partitions; None if none has the partition."""
    found = next((topic for topic in CATALOG if name.endswith(topic.name)), None)
    if found is None:
        return None
    namespace = name.removesuffix(found.name)
    alike = [f"{namespace}{topic.name}" for topic in CATALOG if topic.partition_setting is found.partition_setting]
    with suppress(KafkaException):
        existing = consumer.list_topics(timeout=WATERMARKS_ATTEMPT_SECONDS).topics
        sizes = [(len(existing[each].partitions), each) for each in alike if each in existing]
        count, largest = max(sizes, default=(0, ""))
        return (largest, count) if count > partition else None
    return None


def retry_query(
    action: str,
    query: Callable[[float], Answer],
    seconds: float,
    *rights: str,
    may_be_unknown: bool = False,
    on_wait: Callable[[], None] = noop,
) -> Answer:
    """The result of `query`, which is repeated while it raises KafkaException with a transient error.

    `query` takes the seconds that it may last; `seconds` bounds all attempts. `rights`: rights that the error names.
    `may_be_unknown`: whether the query is also repeated while the broker does not know its topic or partition.
    `on_wait` is called between two attempts; an exception of `on_wait` ends them. Raises BusError.
    """
    deadline = time.monotonic() + seconds
    while True:
        left_seconds = deadline - time.monotonic()
        try:
            return query(max(left_seconds, RETRY_SECONDS))  # a negative timeout would wait forever
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            repeats = is_transient(cause) or (may_be_unknown and cause.code() in UNKNOWN_PARTITION_CODES)
            if not repeats or left_seconds < RETRY_SECONDS:
                raise BusError(action, cause, *rights) from error
        # Outside of any exception handler: an exception that the client raises in a handler is never freed, nor are its
        # frames.
        on_wait()
        time.sleep(RETRY_SECONDS)
