"""The action of an operator on a transaction whose end Apache Kafka has lost.

A lone node that starts leads no partition for a moment. It does not write the end of a transaction that ends just then,
as if the partitions had been deleted (KAFKA-20734; docs/operations/known-issues.md). A reader that waits for that end
waits forever and reports that: a person aborts the transaction, and records that it may have committed there are lost.
The tool for the abort is not among the Kafka libraries of these tests: here another transaction of the same id is
aborted, which fences the writer of this id.
"""

import time
from contextlib import closing
from pathlib import Path

from confluent_kafka import KafkaError

from rose.topics.acl import ENVIRONMENT, TRAINER, Role
from rose.topics.catalog import ENVIRONMENT_TRANSACTIONAL_PREFIX, TRAINER_PREFIX, Partitions
from rose.topics.errors import BusError
from rose.topics.log_reader import await_transactions
from rose.topics.records import Place
from rose.topics.settings import TRANSACTION_MILLISECONDS, BusSettings
from rose.topics.writer import Writer

LOST = "these partitions are likely deleted already"
"""Text of the broker log about such a transaction."""

UNDECIDED_SECONDS = 1.5 * TRANSACTION_MILLISECONDS / 1000
"""Time after which the broker has ended every open transaction that it knows."""

SECONDS = 60.0
"""Time within which a started broker answers a fencing client, in seconds."""

WRITERS: dict[str, tuple[Role, str]] = {
    "environment-0": (ENVIRONMENT, f"{ENVIRONMENT_TRANSACTIONAL_PREFIX}environment-0"),
    "trainer": (TRAINER, f"{TRAINER_PREFIX}policy"),
}
"""Topics and transactional id of each process, by its name."""


def lost_ends(broker_log: Path, settings: BusSettings, process: str) -> int:
    """Return how often the broker log reports a lost end of a transaction of this process."""
    whose = f"transaction markers for {settings.name(WRITERS[process][1])},"
    return sum(LOST in line and whose in line for line in broker_log.read_text(errors="replace").splitlines())


def hangs(settings: BusSettings, process: str, partitions: Partitions) -> bool:
    """Whether a transaction of this process is open for longer than the broker allows."""
    try:
        await_transactions(settings, _places(process, partitions), seconds=UNDECIDED_SECONDS)
    except BusError as error:
        if error.code != KafkaError._TIMED_OUT:
            raise
        return True
    return False


def abort_hanging(settings: BusSettings, process: str, partitions: Partitions) -> None:
    """Abort the hanging transactions in all partitions of the topics that this killed process writes."""
    patient = time.monotonic() + SECONDS
    writing = Writer(
        settings, "operator", transactional_id=WRITERS[process][1], still_needed=lambda: time.monotonic() < patient
    )
    with closing(writing) as writer:
        writer.begin()
        for topic, partition in _places(process, partitions):
            writer.tombstone(topic, key="nothing", partition=partition)
        writer.flush()
        writer.abort()


def _places(process: str, partitions: Partitions) -> list[Place]:
    role, _ = WRITERS[process]
    return [
        (topic, partition) for topic in role.writes for partition in range(partitions.count_of(topic.partition_setting))
    ]
