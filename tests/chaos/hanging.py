"""What an operator does about a transaction whose end Apache Kafka has lost.

A lone node that comes up leads nothing for a moment; of a transaction that is ended just then it tells the partitions
nothing, as if they had been deleted (KAFKA-20734; docs/operations/known-issues.md). A reader that waits for that end
waits for ever, and says so: a person aborts the transaction, and what it may have committed there is lost. The
tool for that is not among the libraries of Kafka that these tests are run with: here another transaction of the same id
is aborted, which fences who writes under it.
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
"""What is said of it in the broker's log."""

UNDECIDED_SECONDS = 1.5 * TRANSACTION_MILLISECONDS / 1000
"""The broker has ended by then what it knows to be open."""

SECONDS = 60.0
"""Within which a broker that has come up answers who fences."""

WRITERS: dict[str, tuple[Role, str]] = {
    "environment-0": (ENVIRONMENT, f"{ENVIRONMENT_TRANSACTIONAL_PREFIX}environment-0"),
    "trainer": (TRAINER, f"{TRAINER_PREFIX}policy"),
}
"""By the name of a process, what it writes and under which transactional id."""


def lost_ends(broker_log: Path, settings: BusSettings, process: str) -> int:
    """How often the broker says that it has ended a transaction of this process so."""
    whose = f"transaction markers for {settings.name(WRITERS[process][1])},"
    return sum(LOST in line and whose in line for line in broker_log.read_text(errors="replace").splitlines())


def hangs(settings: BusSettings, process: str, partitions: Partitions) -> bool:
    """Whether a transaction is open in a topic that this process writes for longer than the broker lets it be."""
    try:
        await_transactions(settings, _places(process, partitions), seconds=UNDECIDED_SECONDS)
    except BusError as error:
        if error.code != KafkaError._TIMED_OUT:
            raise
        return True
    return False


def abort_hanging(settings: BusSettings, process: str, partitions: Partitions) -> None:
    """Abort what hangs in any partition of the topics that this process, which has been killed, writes."""
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
