"""Rest for readers of a broker that answers a fetch at once though it has nothing to give.

Apache Kafka holds an empty fetch for up to `fetch.wait.max.ms`. The embedded broker does not: a reader that waits for
its next record asks it thousands of times a second, and the two keep most of a core busy. A reader of that broker rests
by itself: it pauses its partitions, and later asks once more.

Keeps true
- A reader rests only once every partition that it reads has answered that it is at its end, anew after each rest.
- A rest is a fixed share of the silence before it: who waits long hears a little later, who is busy never rests.
- Nothing is lost or doubled by it: librdkafka goes on after the last record that was handed out.
- Partitions that the application paused stay so.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

MIN_SILENCE_SECONDS = 0.02
"""Silence before the first rest. Records that come more often never meet one."""
REST_FRACTION = 1 / 8
"""Rest over silence."""
MAX_REST_SECONDS = 0.02
"""The longest rest, and so the most by which it makes a record late."""
ANSWER_SECONDS = 0.1
"""How long waking up waits for a word of the broker: longer than one that is there takes, short for who polls."""

PartitionName = tuple[str, int]
"""A topic's name on the broker, and a partition."""


class IdleBackoff:
    """When to rest and when to wake: events and seconds on any one clock in, decisions out."""

    def __init__(self, now: float) -> None:
        self._record_at = now
        self._reads: set[PartitionName] = set()
        self._awaited: set[PartitionName] = set()
        self._rests_until: float | None = None

    @property
    def is_resting(self) -> bool:
        return self._rests_until is not None

    @property
    def partitions(self) -> set[PartitionName]:
        """The partitions that it reads whenever it does not rest."""
        return self._reads

    def add(self, partitions: Sequence[PartitionName]) -> None:
        self._reads.update(partitions)
        self._awaited.update(partitions)

    def remove(self, partitions: Sequence[PartitionName]) -> None:
        self._reads.difference_update(partitions)
        self._awaited.difference_update(partitions)

    def on_record(self, partition: PartitionName, now: float) -> None:
        """A record came: more may follow."""
        self._record_at = now
        self._awaited.add(partition)

    def on_end(self, partition: PartitionName) -> None:
        """The broker says that it has no more of it."""
        self._awaited.discard(partition)

    def due_seconds(self, now: float) -> float:
        """Seconds until it is time to rest, or, while resting, to wake; infinite while an answer is awaited."""
        if self._rests_until is not None:
            return max(0.0, self._rests_until - now)
        if self._awaited or not self._reads:
            return math.inf
        return max(0.0, self._record_at + MIN_SILENCE_SECONDS - now)

    def rest(self, now: float) -> None:
        self._rests_until = now + min((now - self._record_at) * REST_FRACTION, MAX_REST_SECONDS)

    def wake(self) -> None:
        self._rests_until = None
        self._awaited = set(self._reads)


class IdleConsumer(Consumer):  # type: ignore[misc]  # it has no types
    """A consumer that pauses and resumes its partitions at a `IdleBackoff`.

    Offsets that it is assigned are numbers: librdkafka would look for OFFSET_END anew after each rest, and pass over
    what came meanwhile.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__({**config, "enable.partition.eof": True})
        self._reports_ends = bool(config.get("enable.partition.eof"))
        self._backoff = IdleBackoff(time.monotonic())

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._forget()
        self._backoff.add(_names(partitions))
        super().assign(partitions)

    def unassign(self) -> None:
        self._forget()
        super().unassign()

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._backoff.remove(_names(partitions))
        super().pause(partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._backoff.add(_names(partitions))
        if not self._backoff.is_resting:
            super().resume(partitions)

    def poll(self, timeout: float) -> Message | None:
        deadline = time.monotonic() + timeout
        while True:
            left_seconds = max(0.0, deadline - time.monotonic())
            message = super().poll(min(left_seconds, self._rest_or_wake()))
            if message is not None and self._is_visible(message):
                return message
            if message is None and time.monotonic() >= deadline:
                return None

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        return [message for message in super().consume(num_messages, timeout) if self._is_visible(message)]

    def _is_visible(self, message: Message) -> bool:
        """Tell the pace; whether the caller wants to see it."""
        error, partition = message.error(), (str(message.topic()), int(message.partition() or 0))
        if error is None:
            self._backoff.on_record(partition, time.monotonic())
        elif error.code() == KafkaError._PARTITION_EOF:
            self._backoff.on_end(partition)
            return self._reports_ends
        return True

    def _rest_or_wake(self) -> float:
        """Rest or wake if it is time to. Returns the seconds until it is again."""
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
        # librdkafka's thread sleeps for up to a second more, unless there is something to ask the broker. When that is
        # away, fetching begins again once it is back.
        with suppress(KafkaException):
            self.get_watermark_offsets(partitions[0], timeout=ANSWER_SECONDS)

    def _forget(self) -> None:
        """Before another assignment: librdkafka would keep what rests paused over it."""
        if self._backoff.is_resting:
            super().resume(_partitions(self._backoff.partitions))
        self._backoff = IdleBackoff(time.monotonic())


def _names(partitions: list[TopicPartition]) -> list[PartitionName]:
    return [(partition.topic, partition.partition) for partition in partitions]


def _partitions(names: set[PartitionName]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition) for topic, partition in names]
