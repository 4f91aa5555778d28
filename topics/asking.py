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

from topics.errors import BROKER_AWAY, BusError, PartitionMissing, TopicMissing

NO_SUCH_PLACE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
"""What client and broker say of a topic or partition that is not there."""

Answer = TypeVar("Answer")

MOVES = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
    *BROKER_AWAY,
)
"""What is said of a group in its first seconds, and while a coordinator or a leader moves to another broker."""

ASK_AGAIN_SECONDS = 0.1
"""Between two questions to a broker that tells nobody when it has come up."""

COORDINATOR_SECONDS = 30.0
"""How long a group's coordinator may take to come up before it is an error."""

ENDS_SECONDS = 30.0
"""How long a partition's leader may take to say where it begins and ends; a new leader takes some seconds."""

ENDS_TURN_SECONDS = 3.0
"""How long one question to a leader may take before the leaders are looked up again."""

AT_ONCE_SECONDS = 1.0
"""How long all leaders may take that are asked at once; then each is asked by itself."""

LATEST, EARLIEST = -1, -2
"""What a broker takes for the end and the beginning of a partition where it is asked by time."""

KNOWN_SECONDS = 1.0
"""How long a broker may take to hear of a topic that was made through another, or made anew."""


def nothing() -> None:
    """What is done between two questions by whom nobody waits for."""


def ends_of(consumer: Consumer, partition: TopicPartition, meanwhile: Callable[[], None] = nothing) -> tuple[int, int]:
    """The first offset kept and the next one to be written. Raises TopicMissing or BusError.

    librdkafka goes on asking a leader that is gone, so it is asked again in short turns, with the leaders looked up.
    """
    known_at = time.monotonic() + KNOWN_SECONDS
    asked = False

    def ask(seconds: float) -> tuple[int, int]:
        nonlocal asked
        if asked:
            with suppress(KafkaException):
                consumer.list_topics(partition.topic, timeout=ENDS_TURN_SECONDS)
        asked = True
        try:
            low, high = consumer.get_watermark_offsets(partition, timeout=min(seconds, ENDS_TURN_SECONDS))
            return int(low), int(high)
        except KafkaException as error:
            if error.args[0].code() not in NO_SUCH_PLACE or time.monotonic() <= known_at:
                raise
            refused = error
        if _listed(consumer, partition):
            raise refused
        raise missing(consumer, partition.topic, partition.partition)

    name = partition.topic
    right, moves = f"Describe on topic {name}", (*MOVES, *NO_SUCH_PLACE)
    return insist(f"reading the ends of {name}", ask, ENDS_SECONDS, right, moves=moves, meanwhile=meanwhile)


def all_ends_of(
    consumer: Consumer, partitions: Sequence[TopicPartition], meanwhile: Callable[[], None] = nothing
) -> list[tuple[int, int]]:
    """`ends_of` each, in their order. Of several, each leader is asked once for all that it has; where one of them does
    not answer, partition by partition. Raises TopicMissing or BusError.
    """
    if len(partitions) < 2:
        return [ends_of(consumer, each, meanwhile) for each in partitions]
    with suppress(KafkaException):
        return list(zip(*(ends_at(consumer, partitions, end) for end in (EARLIEST, LATEST)), strict=True))
    found: list[tuple[int, int]] = []
    for each in partitions:
        meanwhile()
        found.append(ends_of(consumer, each, meanwhile))
    return found


def ends_at(consumer: Consumer, partitions: Sequence[TopicPartition], timestamp: int) -> list[int]:
    """Of each, EARLIEST or LATEST. Raises KafkaException, also where one has no answer: it keeps its time, below 0."""
    asked = [TopicPartition(each.topic, each.partition, timestamp) for each in partitions]
    answers = consumer.offsets_for_times(asked, timeout=AT_ONCE_SECONDS)
    for each in answers:
        if each.error is not None or each.offset < 0:
            raise KafkaException(each.error or KafkaError(KafkaError._TIMED_OUT))
    return [int(each.offset) for each in answers]


def metadata_of(client: AdminClient) -> ClusterMetadata:
    """Brokers, and topics with their partitions, as a broker lists them. Raises BusError.

    Each question has half of the time that is left: of a broker that is slow, an answer to the first is waited for.
    """
    return insist("asking for the topics", lambda left: client.list_topics(timeout=left / 2), ENDS_SECONDS)


def offset_in(answer: "Future[ListOffsetsResultInfo]") -> int:
    """The offset in an answer to `list_offsets`. Raises KafkaException.

    Where nobody has answered in time confluent-kafka says so by an offset below 0 alone.
    """
    offset = int(answer.result().offset)
    if offset < 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return offset


def partitions_of(client: Consumer | Producer, name: str, meanwhile: Callable[[], None] = nothing) -> int:
    """How many partitions the topic of this name has. Raises TopicMissing or BusError."""
    found = insist(
        f"asking for {name}",
        lambda left: client.list_topics(name, timeout=min(left, ENDS_TURN_SECONDS)).topics[name],
        ENDS_SECONDS,
        meanwhile=meanwhile,
    )
    if found.error is not None and found.error.code() not in NO_SUCH_PLACE:
        raise BusError(f"asking for {name}", found.error, f"Describe on topic {name}")
    if not found.partitions:
        raise TopicMissing(name)
    return len(found.partitions)


def _listed(consumer: Consumer, partition: TopicPartition) -> bool:
    """Whether the brokers' list has it: then its leader has yet to hear of it, as one does that was started again."""
    with suppress(KafkaException):
        told = consumer.list_topics(partition.topic, timeout=ENDS_TURN_SECONDS).topics[partition.topic]
        return told.error is None and partition.partition in told.partitions
    return True  # nobody says that it is gone


def missing(consumer: Consumer, name: str, partition: int = 0) -> TopicMissing | BusError:
    """Why a partition cannot be seen: the topic is not there or has fewer, or this client has no right to the topic,
    which a broker hides as well.
    """
    with suppress(KafkaException):
        found = consumer.list_topics(name, timeout=ENDS_TURN_SECONDS).topics[name]
        if found.error is not None and found.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return BusError(f"looking for {name}", found.error, f"Describe on topic {name}")
        if found.error is None and 0 < len(found.partitions) <= partition:
            return PartitionMissing(name, partition, len(found.partitions))
    return TopicMissing(name)


def insist(
    doing: str,
    ask: Callable[[float], Answer],
    seconds: float,
    *rights: str,
    moves: Sequence[int] = MOVES,
    meanwhile: Callable[[], None] = nothing,
) -> Answer:
    """What `ask`, told how long it may take, returns; asked again while brokers move.

    `meanwhile` is called between two questions; what it raises ends them. Raises BusError.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            return ask(max(left, ASK_AGAIN_SECONDS))  # a timeout below 0 would wait for ever
        except KafkaException as error:
            if error.args[0].code() not in moves or left < ASK_AGAIN_SECONDS:
                raise BusError(doing, error.args[0], *rights) from error
        # With nothing being handled: what the client raises amid that is never freed, nor its frames.
        meanwhile()
        time.sleep(ASK_AGAIN_SECONDS)
