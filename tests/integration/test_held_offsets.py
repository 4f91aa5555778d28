"""Offsets that Apache Kafka holds for an ended transaction, as after a crash of its coordinator."""

import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from rose.topics.catalog import PROMPTS
from rose.topics.errors import BusError
from rose.topics.local_broker import Broker
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.brokers import KAFKA, start
from tests.support.bus_fixtures import with_topics
from tests.support.waiting import until

INIT_PRODUCER_ID, TXN_OFFSET_COMMIT = 22, 28
PLACE = (PROMPTS, 0)
WAIT_SECONDS = 30
SHORT_SECONDS = 3.0

pytestmark = pytest.mark.slow


def string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def ask(broker: Broker, key: int, body: bytes) -> bytes:
    """Send one request of version 0 of Kafka's protocol; return the answer after the throttle time."""
    host, port = broker.bootstrap.split(":")
    request = struct.pack(">hhi", key, 0, 0) + string("test") + body
    with socket.create_connection((host, int(port)), WAIT_SECONDS) as line, line.makefile("rb") as answer:
        line.sendall(struct.pack(">i", len(request)) + request)
        [size] = struct.unpack(">i", answer.read(4))
        return answer.read(size)[8:]


def hang(broker: Broker, settings: BusSettings, name: str) -> None:
    """Make the group hold an offset of a transaction that its coordinator does not know, so that it never ends."""
    body, answer = string(settings.name(name)) + struct.pack(">i", 10_000), b""

    def is_owner() -> bool:
        nonlocal answer
        answer = ask(broker, INIT_PRODUCER_ID, body)
        # otherwise the transaction of the last owner is still ending, or the coordinator is not available
        return answer[:2] == bytes(2)

    until(is_owner)
    _, producer, epoch = struct.unpack(">hqh", answer)
    topic = string(settings.topic(PROMPTS)) + struct.pack(">iiqh", 1, PLACE[1], 99, -1)
    whose = string(settings.name(name)) + string(settings.name("test")) + struct.pack(">qh", producer, epoch)
    assert ask(broker, TXN_OFFSET_COMMIT, whose + struct.pack(">i", 1) + topic)[-2:] == bytes(2)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker that accepts offsets without a check of the open transaction, as all brokers before Kafka 3.6."""
    with start(KAFKA, tmp_path / "broker") as running:
        believes = ConfigEntry(
            "transaction.partition.verification.enable", "false", incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[believes])
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        admin.incremental_alter_configs([resource])[resource].result(WAIT_SECONDS)
        yield running


@pytest.fixture
def settings(broker: Broker) -> BusSettings:
    return with_topics(broker.settings())


@pytest.fixture
def reader(settings: BusSettings) -> Iterator[Reader]:
    with closing(Reader(settings, "test", group="test")) as reader, closing(owner(settings)) as writer:
        writer.begin()
        writer.commit({PLACE: 7}, reader)
        yield reader


def owner(settings: BusSettings) -> Writer:
    return Writer(settings, "test", transactional_id="test")


def test_held_offsets_are_returned_after_a_transaction_of_the_same_id_ends(
    broker: Broker, settings: BusSettings, reader: Reader
) -> None:
    hang(broker, settings, "test")
    with closing(owner(settings)):
        with pytest.raises(BusError) as refused:
            reader.committed([PLACE], seconds=SHORT_SECONDS)
        assert refused.value.code == KafkaError._TIMED_OUT, "the next owner of the id ends nothing"
    until(lambda: answers_to_new_writer(settings, reader) == [{PLACE: 7}] * 2)


def answers_to_new_writer(settings: BusSettings, reader: Reader) -> list[dict[Place, int | None]]:
    """Ask twice for the committed offsets. If the broker is too busy to answer, a worker tries again too."""
    with closing(owner(settings)) as writer:
        try:
            return [writer.committed_offsets(reader, [PLACE]) for _ in range(2)]
        except BusError as error:
            if not error.outcome_unknown:
                raise
            return []


@pytest.mark.long
def test_offsets_held_by_another_id_are_reported_with_the_command_that_ends_it(
    broker: Broker, settings: BusSettings, reader: Reader
) -> None:
    hang(broker, settings, "another")
    with closing(owner(settings)) as writer, pytest.raises(BusError, match=r"kafka-transactions\.sh"):
        writer.committed_offsets(reader, [PLACE])
