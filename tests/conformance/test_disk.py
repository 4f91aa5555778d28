"""Behaviour of a broker with a full disk."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from rose.topics.local_broker import RESERVE_BYTES, Broker, BrokerFailed
from tests.conformance.bus_driver import WAIT_SECONDS, Cluster, produce
from tests.support.brokers import embedded_first, start

pytestmark = [pytest.mark.slow, embedded_first]

DISK_BYTES = RESERVE_BYTES + 128 * 2**20
RECORDS = 100


@contextmanager
def mounted(disk: Path) -> Iterator[Path]:
    """Mount a disk of DISK_BYTES at this new folder."""
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk cannot be mounted here (it takes root)")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@dataclass
class FullBroker:
    """A broker that received 10 MB while its disk had room for 1 MB."""

    broker: Broker
    filler: Path
    cluster: Cluster
    topic: str
    answers: list[KafkaError | None]
    """The error, or None, of each record."""
    sent: list[bytes | None]

    @property
    def acknowledged(self) -> int:
        return sum(error is None for error in self.answers)


@contextmanager
def filled(kind: str, disk: Path) -> Iterator[FullBroker]:
    broker = start(kind, disk / "broker")
    try:
        cluster = Cluster(broker.bootstrap, "full.")
        topic, filler, answers = cluster.topic("written"), fill(disk, leave_bytes=2**20), []
        producer = cluster.producer(compression_type="none", message_timeout_ms=5000)
        sent: list[bytes | None] = [os.urandom(100_000) for _ in range(RECORDS)]
        for value in sent:
            producer.produce(topic, value, on_delivery=lambda error, _: answers.append(error))
            producer.poll(0)
        producer.flush(WAIT_SECONDS)
        yield FullBroker(broker, filler, cluster, topic, answers, sent)
    finally:
        broker.kill()


def fill(disk: Path, *, leave_bytes: int) -> Path:
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - leave_bytes)
    return filler


@pytest.fixture(scope="module")
def full(broker_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FullBroker]:
    with mounted(tmp_path_factory.mktemp("full") / "disk") as disk, filled(broker_kind, disk) as broker:
        yield broker


@pytest.mark.embedded_fault("acknowledges records that it cannot save, and says nothing", raises=AssertionError)
def test_record_that_cannot_be_saved_is_not_acknowledged(full: FullBroker) -> None:
    assert len(full.answers) == RECORDS
    assert any(error is not None for error in full.answers)


def test_launcher_reports_a_full_disk_and_its_losses(full: FullBroker) -> None:
    with pytest.raises(BrokerFailed, match=r"disk is too full for .*MiB free.*free some space"):
        full.broker.check()
    if full.broker.alive():
        with pytest.raises(BrokerFailed, match="could not save its last records"):
            full.broker.stop()


def test_all_records_are_saved_once_the_disk_has_room_again(broker_kind: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk, filled(broker_kind, disk) as full:
        full.filler.unlink()
        if not full.broker.alive():  # Apache Kafka ended at the full disk without damage
            full.broker.restart()
        producer = full.cluster.producer()
        delivered = produce(producer, full.topic, [b"room again"])
        assert producer.flush(WAIT_SECONDS) == 0 and len(delivered) == 1
        full.broker.check()
        before = full.cluster.values(full.topic)
        assert before[-1] == b"room again"
        assert before[: full.acknowledged] == full.sent[: full.acknowledged]
        full.broker.restart()
        assert full.cluster.values(full.topic) == before


def test_broker_does_not_start_on_a_full_disk(broker_kind: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        fill(disk, leave_bytes=RESERVE_BYTES // 2)
        with pytest.raises(BrokerFailed, match="disk is too full"):
            start(broker_kind, disk / "broker")
