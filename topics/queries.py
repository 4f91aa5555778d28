"""Questions to a broker: where a partition begins and ends, how many a topic has.

Keeps true: while leaders, coordinators and topics come up or move, a broker is asked again, for a stated time. Between
two questions, which last twice ENDS_TURN_SECONDS at most, whoever asks may do what it must not leave undone for long.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata, ListOffsetsResultInfo

from rose.topics.errors import UNAVAILABLE_CODES, BusError, PartitionMissing, TopicMissing

UNKNOWN_PARTITION_CODES = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
"""What client and broker say of a topic or partition that is not there."""

Answer = TypeVar("Answer")

TRANSIENT_CODES = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
    *UNAVAILABLE_CODES,
)
"""What is said of a group in its first seconds, and while a coordinator or a leader moves to another broker."""

RETRY_SECONDS = 0.1
"""Between two questions to a broker that tells nobody when it has come up."""

COORDINATOR_SECONDS = 30.0
"""How long a group's coordinator may take to come up before it is an error."""

WATERMARKS_SECONDS = 30.0
"""How long a partition's leader may take to say where it begins and ends; a new leader takes some seconds."""

WATERMARKS_ATTEMPT_SECONDS = 3.0
"""How long one question to a leader may take before the leaders are looked up again."""

BATCH_QUERY_SECONDS = 1.0
"""How long all leaders may take that are asked at once; then each is asked by itself."""

LATEST, EARLIEST = -1, -2
"""What a broker takes for the end and the beginning of a partition where it is asked by time."""

PROPAGATION_SECONDS = 1.0
"""How long a broker may take to hear of a topic that was made through another, or made anew."""


def noop() -> None:
    """What is done between two questions by whom nobody waits for."""


def watermarks_of(consumer: Consumer, partition: TopicPartition, on_wait: Callable[[], None] = noop) -> tuple[int, int]:
    """The first offset kept and the next one to be written. Raises TopicMissing or BusError.

    librdkafka goes on asking a leader that is gone, so it is asked again in short turns, with the leaders looked up.
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
    right, moves = f"Describe on topic {name}", (*TRANSIENT_CODES, *UNKNOWN_PARTITION_CODES)
    return retry_query(
        f"reading the ends of {name}", query, WATERMARKS_SECONDS, right, transient=moves, on_wait=on_wait
    )


def all_watermarks_of(
    consumer: Consumer, partitions: Sequence[TopicPartition], on_wait: Callable[[], None] = noop
) -> list[tuple[int, int]]:
    """`watermarks_of` each, in their order. Of several, each leader is asked once for all that it has; where one of
    them does not answer, partition by partition. Raises TopicMissing or BusError.
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
    """Of each, EARLIEST or LATEST. Raises KafkaException, also where one has no answer: it keeps its time, below 0."""
    requests = [TopicPartition(each.topic, each.partition, timestamp) for each in partitions]
    answers = consumer.offsets_for_times(requests, timeout=BATCH_QUERY_SECONDS)
    for each in answers:
        if each.error is not None or each.offset < 0:
            raise KafkaException(each.error or KafkaError(KafkaError._TIMED_OUT))
    return [int(each.offset) for each in answers]


def metadata_of(client: AdminClient) -> ClusterMetadata:
    """Brokers, and topics with their partitions, as a broker lists them. Raises BusError.

    Each question has half of the time that is left: of a broker that is slow, an answer to the first is waited for.
    """
    return retry_query("asking for the topics", lambda left: client.list_topics(timeout=left / 2), WATERMARKS_SECONDS)


def offset_in(answer: "Future[ListOffsetsResultInfo]") -> int:
    """The offset in an answer to `list_offsets`. Raises KafkaException.

    Where nobody has answered in time confluent-kafka says so by an offset below 0 alone.
    """
    offset = int(answer.result().offset)
    if offset < 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return offset


def partition_count(client: Consumer | Producer, name: str, on_wait: Callable[[], None] = noop) -> int:
    """How many partitions the topic of this name has. Raises TopicMissing or BusError."""
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
    """Whether the brokers' list has it: then its leader has yet to hear of it, as one does that was started again."""
    with suppress(KafkaException):
        metadata = consumer.list_topics(partition.topic, timeout=WATERMARKS_ATTEMPT_SECONDS).topics[partition.topic]
        return metadata.error is None and partition.partition in metadata.partitions
    return True  # nobody says that it is gone


def missing_error(consumer: Consumer, name: str, partition: int = 0) -> TopicMissing | BusError:
    """Why a partition cannot be seen: the topic is not there or has fewer, or this client has no right to the topic,
    which a broker hides as well.
    """
    with suppress(KafkaException):
        found = consumer.list_topics(name, timeout=WATERMARKS_ATTEMPT_SECONDS).topics[name]
        if found.error is not None and found.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return BusError(f"looking for {name}", found.error, f"Describe on topic {name}")
        if found.error is None and 0 < len(found.partitions) <= partition:
            return PartitionMissing(name, partition, len(found.partitions))
    return TopicMissing(name)


def retry_query(
    action: str,
    query: Callable[[float], Answer],
    seconds: float,
    *rights: str,
    transient: Sequence[int] = TRANSIENT_CODES,
    on_wait: Callable[[], None] = noop,
) -> Answer:
    """What `query`, told how long it may take, returns; asked again while brokers move.

    `on_wait` is called between two questions; what it raises ends them. Raises BusError.
    """
    deadline = time.monotonic() + seconds
    while True:
        left_seconds = deadline - time.monotonic()
        try:
            return query(max(left_seconds, RETRY_SECONDS))  # a timeout below 0 would wait for ever
        except KafkaException as error:
            if error.args[0].code() not in transient or left_seconds < RETRY_SECONDS:
                raise BusError(action, error.args[0], *rights) from error
        # With nothing being handled: what the client raises amid that is never freed, nor its frames.
        on_wait()
        time.sleep(RETRY_SECONDS)
