"""A cluster of three Apache Kafka nodes works after the loss of one."""

import os
import select
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial, reduce
from pathlib import Path
from threading import Timer

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from rose.topics.admin import connect, create_topics
from rose.topics.catalog import ENVIRONMENT_GROUP, OUTCOMES, Partitions
from rose.topics.errors import BusError
from rose.topics.local_broker import Broker
from rose.topics.log_reader import read_to_end
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.golden.examples import OUTCOME
from tests.support.brokers import KAFKA, flags, home_of
from tests.support.kafka_cluster import Cluster
from tests.support.waiting import until

REPOSITORY = Path(__file__).parents[2]
WAIT_SECONDS = 60
PROBES = 20
FROZEN_SECONDS = 45
"""Exceeds the session of a node and the time of a hung call by far."""

pytestmark = pytest.mark.long


def write(settings: BusSettings, value: bytes) -> None:
    producer = Producer({**settings.producer("test"), "acks": "all"})
    producer.produce(settings.topic(OUTCOMES), value)
    assert producer.flush(WAIT_SECONDS) == 0


def read(settings: BusSettings, records: int) -> list[bytes | None]:
    consumer = Consumer(settings.consumer("test", "test"))
    consumer.assign([TopicPartition(settings.topic(OUTCOMES), 0, 0)])
    found = [message.value() for message in consumer.consume(records, WAIT_SECONDS)]
    consumer.close()
    return found


def test_acknowledged_records_survive_the_loss_of_their_leader(cluster: Cluster, namespace: str) -> None:
    settings, audited = cluster.settings(namespace), cluster.settings(f"{namespace}audited.")
    for each in (settings, audited):
        create_topics(each, Partitions(home=2, slots=1, samples=1, chunks=1), replication_factor=3)
    cluster.await_in_sync(WAIT_SECONDS)
    write(settings, b"to all")
    topics = AdminClient({"bootstrap.servers": cluster.bootstrap}).list_topics(timeout=WAIT_SECONDS).topics
    leader = cluster.nodes[topics[settings.topic(OUTCOMES)].partitions[0].leader - 1]
    leader.kill()
    assert not cluster.in_sync()
    write(settings, b"without the leader")
    assert read(settings, 2) == [b"to all", b"without the leader"]
    command = [sys.executable, "-m", "rose.pipeline.cli.main", "audit", *flags(audited)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=WAIT_SECONDS)
    leader.restart()
    cluster.await_in_sync(WAIT_SECONDS)
    assert read(settings, 2) == [b"to all", b"without the leader"]
    assert done.returncode == 0, done.stderr
    assert "0 lost" in done.stdout
    assert not done.stderr


def test_topics_have_a_replica_on_every_node(cluster: Cluster, namespace: str) -> None:
    settings = cluster.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1), replication_factor=3)
    topics = AdminClient({"bootstrap.servers": cluster.bootstrap}).list_topics(timeout=WAIT_SECONDS).topics
    copies = {len(part.replicas) for topic in topics.values() for part in topic.partitions.values()}
    assert copies == {3}


def coordinator_of(cluster: Cluster, transactional_id: str) -> Broker:
    """Return the coordinator by Kafka's rule: Java's hash of the id over the partitions of the coordinator topic."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    partitions = admin.list_topics("__transaction_state", timeout=WAIT_SECONDS).topics["__transaction_state"].partitions
    hashed = reduce(lambda value, byte: (31 * value + byte) % 2**32, transactional_id.encode(), 0)
    magnitude = min(hashed, 2**32 - hashed)
    leader: int = partitions[magnitude % len(partitions)].leader
    return cluster.nodes[leader - 1]


def test_commit_ends_despite_a_frozen_coordinator_and_is_decided_before_the_next(
    cluster: Cluster, namespace: str
) -> None:
    """A commit that is aborted on its way to the next coordinator may still succeed, but not later than the next
    transaction."""

    def keys() -> list[str | None]:
        return [each.key for each in read_to_end(settings, {(OUTCOMES, 0): 0}, client_id="test")]

    settings = cluster.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1), replication_factor=3)
    cluster.await_in_sync(WAIT_SECONDS)
    writer = Writer(settings, "test", transactional_id="worker")
    writer.begin()
    writer.write(OUTCOMES, OUTCOME, key="before")
    writer.flush()
    frozen = coordinator_of(cluster, settings.name("worker"))
    frozen.send_signal(signal.SIGSTOP)
    long_frozen = Timer(FROZEN_SECONDS, frozen.send_signal, [signal.SIGCONT])
    long_frozen.start()
    try:
        writer.commit()  # librdkafka may learn of the next coordinator in time
        decided: list[str | None] = ["before"]
    except BusError:
        writer.close()
        writer = Writer(settings, "test", transactional_id="worker")
        decided = keys()
    writer.begin()
    writer.write(OUTCOMES, OUTCOME, key="after")
    writer.commit()
    writer.close()
    assert long_frozen.is_alive(), "it waited until the coordinator was back"
    long_frozen.cancel()
    frozen.send_signal(signal.SIGCONT)
    cluster.await_in_sync(WAIT_SECONDS)
    assert decided in ([], ["before"])
    assert keys() == [*decided, "after"]


def group_coordinator_of(cluster: Cluster, settings: BusSettings, group: str) -> Broker:
    """Return the coordinator that the cluster reports; an offset query makes it available."""
    with closing(Reader(settings, "test", group=group)) as reader:
        reader.committed([(OUTCOMES, 0)])
    admin, name = AdminClient({"bootstrap.servers": cluster.bootstrap}), settings.name(group)
    number: int = admin.describe_consumer_groups([name])[name].result(WAIT_SECONDS).coordinator.id
    return cluster.nodes[number - 1]


def test_frozen_coordinator_is_unreachable_until_replaced(cluster: Cluster, namespace: str) -> None:
    """Two of three brokers answer."""
    settings = cluster.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1), replication_factor=3)
    cluster.await_in_sync(WAIT_SECONDS)
    frozen = group_coordinator_of(cluster, settings, ENVIRONMENT_GROUP)
    with closing(Reader(settings, "test", group=ENVIRONMENT_GROUP)) as reader:
        until(partial(_reaches, reader))
        frozen.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(BusError, match="reaching the coordinator"):
                reader.reach_coordinator((OUTCOMES, 0))
            connect(settings)
            until(partial(_reaches, reader))
        finally:
            frozen.send_signal(signal.SIGCONT)
    cluster.await_in_sync(WAIT_SECONDS)


def _reaches(reader: Reader) -> bool:
    try:
        reader.reach_coordinator((OUTCOMES, 0))
    except BusError:
        return False
    return True


PROBING = """
import sys
from threading import Event
from rose.pipeline.monitor.broker_probe import BrokerProbe
from rose.topics.settings import BusSettings
probe = BrokerProbe(BusSettings(sys.argv[1], sys.argv[2]))
print("probing", flush=True)
for line in sys.stdin:
    if line.strip() == "stop":
        break
    while probe.probe() is None:
        Event().wait(0.2)
    print("answered", flush=True)
"""


@pytest.mark.long
def test_broker_probe_survives_the_loss_of_a_coordinator(cluster: Cluster, namespace: str) -> None:
    """An AdminClient that queries the offsets of a group while its coordinator moves crashes its process."""
    settings = cluster.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1), replication_factor=3)
    cluster.await_in_sync(WAIT_SECONDS)
    coordinator = group_coordinator_of(cluster, settings, ENVIRONMENT_GROUP)
    command = [sys.executable, "-c", PROBING, settings.bootstrap, settings.namespace]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, bufsize=0) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"probing\n"
        for change in (coordinator.kill, coordinator.restart):
            child.stdin.write(b"probe\n" * PROBES)
            change()
            for _ in range(PROBES):
                assert child.stdout.readline() == b"answered\n", f"ended with {child.wait()}"
        child.stdin.write(b"stop\n")
        assert child.wait() == 0
    cluster.await_in_sync(WAIT_SECONDS)


PARENT = """
import sys
from pathlib import Path
from tests.support.kafka_cluster import start_cluster
cluster = start_cluster(Path(sys.argv[1]), kafka_home=Path(sys.argv[2]), nodes=2)
print("running", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_all_nodes_end_with_their_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(home_of(KAFKA))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        assert parent.stdout.readline().strip() == "running", parent.stderr.read()
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        nodes = [os.pidfd_open(int(child)) for child in children]
        assert len(nodes) == 2
        parent.send_signal(signal.SIGKILL)
    for node in nodes:
        assert select.select([node], [], [], WAIT_SECONDS)[0], "a node outlived its parent"
        os.close(node)
