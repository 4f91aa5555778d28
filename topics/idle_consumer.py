"""Idle back-off: pauses of a consumer of the embedded broker, which answers an empty fetch at once.

Apache Kafka holds an empty fetch for up to `fetch.wait.max.ms`. The embedded broker does not, so a waiting consumer
would send thousands of fetches a second, and consumer and broker would keep most of a core busy. A consumer of the
embedded broker therefore rests: it pauses its partitions for a short time and then fetches again.

Keeps true
- A consumer rests only once every partition that it reads has reported its end since the last rest.
- A rest is a fixed share of the silence before it. So a consumer that waits long gets its next record a little later,
  and a busy consumer never rests.
- A rest neither loses nor repeats records: librdkafka continues after the last record that it returned.
- Partitions that the application has paused stay paused.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

MIN_SILENCE_SECONDS = 0.02
"""Silence before the first rest. A consumer whose records come more often never rests."""
REST_FRACTION = 1 / 8
"""Length of a rest as a fraction of the silence before it."""
MAX_REST_SECONDS = 0.02
"""Longest rest, and so the longest delay of a record by a rest."""
ANSWER_SECONDS = 0.1
"""How long a wake waits for an answer of the broker: longer than a running broker takes, and short for a poll."""

PartitionName = tuple[str, int]
"""A topic's name on the broker, and a partition."""


class IdleBackoff:
    """Decides when a consumer rests and wakes. Pure: `now` is seconds on any clock."""

    def __init__(self, now: float) -> None:
        self._record_at = now
        self._reads: set[PartitionName] = set()
        self._awaited: set[PartitionName] = set()
        self._rests_until: float | None = None

    @property
    def is_resting(self) -> bool:
        """Whether the consumer pauses."""
        return self._rests_until is not None

    @property
    def partitions(self) -> set[PartitionName]:
        """The partitions that the consumer reads while it does not rest."""
        return self._reads

    def add(self, partitions: Sequence[PartitionName]) -> None:
        """Add partitions that are read from now on."""
        self._reads.update(partitions)
        self._awaited.update(partitions)

    def remove(self, partitions: Sequence[PartitionName]) -> None:
        """Remove partitions that are not read any more."""
        self._reads.difference_update(partitions)
        self._awaited.difference_update(partitions)

    def on_record(self, partition: PartitionName, now: float) -> None:
        """Record that a record came; the partition may have more, so its end is awaited again."""
        self._record_at = now
        self._awaited.add(partition)

    def on_end(self, partition: PartitionName) -> None:
        """Record that the broker has reported the end of the partition."""
        self._awaited.discard(partition)

    def due_seconds(self, now: float) -> float:
        """Seconds until the next rest, or during a rest until the wake; infinite while an end is awaited."""
        if self._rests_until is not None:
            return max(0.0, self._rests_until - now)
        if self._awaited or not self._reads:
            return math.inf
        return max(0.0, self._record_at + MIN_SILENCE_SECONDS - now)

    def rest(self, now: float) -> None:
        """Begin a pause, which is longer the longer no record has come. `now`: monotonic seconds."""
        self._rests_until = now + min((now - self._record_at) * REST_FRACTION, MAX_REST_SECONDS)

    def wake(self) -> None:
        """End the pause, and await an answer of every partition."""
        self._rests_until = None
        self._awaited = set(self._reads)


class IdleConsumer(Consumer):  # type: ignore[misc]  # confluent-kafka's Consumer is untyped
    """A consumer that pauses and resumes its partitions as `IdleBackoff` decides.

    Assigned offsets must be numbers: librdkafka would resolve OFFSET_END again after each rest, and skip the records
    that came in between.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__({**config, "enable.partition.eof": True})
        self._reports_ends = bool(config.get("enable.partition.eof"))
        self._backoff = IdleBackoff(time.monotonic())

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Assign partitions and read all of them."""
        self._forget()
        self._backoff.add(_names(partitions))
        super().assign(partitions)

    def unassign(self) -> None:
        """Remove the assignment."""
        self._forget()
        super().unassign()

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Pause partitions; they do not count as idle."""
        self._backoff.remove(_names(partitions))
        super().pause(partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Resume partitions, or let them begin at the end of the pause."""
        self._backoff.add(_names(partitions))
        if not self._backoff.is_resting:
            super().resume(partitions)

    def poll(self, timeout: float) -> Message | None:
        """Return the next record, error or end of a partition; None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            left_seconds = max(0.0, deadline - time.monotonic())
            message = super().poll(min(left_seconds, self._rest_or_wake()))
            if message is not None and self._is_visible(message):
                return message
            if message is None and time.monotonic() >= deadline:
                return None

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        """Return up to `num_messages` messages, after `timeout` seconds at most."""
        return [message for message in super().consume(num_messages, timeout) if self._is_visible(message)]

    def _is_visible(self, message: Message) -> bool:
        """Pass a message to the back-off; return whether the caller shall get it."""
        error, partition = message.error(), (str(message.topic()), int(message.partition() or 0))
        if error is None:
            self._backoff.on_record(partition, time.monotonic())
        elif error.code() == KafkaError._PARTITION_EOF:
            self._backoff.on_end(partition)
            return self._reports_ends
        return True

    def _rest_or_wake(self) -> float:
        """Rest or wake if that is due. Returns the seconds until the next rest or wake is due."""
        now = time.monotonic()
        if self._backoff.due_seconds(now) == 0:
            if self._backoff.is_resting:
                self._wake()
            else:
                super().pause(_partitions(self._backoff.partitions))
                self._backoff.rest(now)
        return self._backoff.due_seconds(now)

    def _wake(self) -> None:
        partitions = _partitions(self._backoff.partitions)
        self._backoff.wake()
        if not partitions:
            return
        super().resume(partitions)
        # Without a query, librdkafka's thread would sleep for up to another second. If the broker is away, fetching
        # continues once it is back.
        with suppress(KafkaException):
            self.get_watermark_offsets(partitions[0], timeout=ANSWER_SECONDS)

    def _forget(self) -> None:
        """Reset the back-off before another assignment, over which librdkafka would keep resting partitions paused."""
        if self._backoff.is_resting:
            super().resume(_partitions(self._backoff.partitions))
        self._backoff = IdleBackoff(time.monotonic())


def _names(partitions: list[TopicPartition]) -> list[PartitionName]:
    return [(partition.topic, partition.partition) for partition in partitions]


def _partitions(names: set[PartitionName]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition) for topic, partition in names]
