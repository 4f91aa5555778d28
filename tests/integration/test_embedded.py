"""The broker launcher: one sentence for every missing part, and no broker left behind."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from rose.topics.admin import connect, create_topics
from rose.topics.catalog import PROMPTS, Partitions
from rose.topics.local_broker import Broker, BrokerFailed, free_ports, start_broker
from rose.topics.reader import Reader
from tests.support.brokers import embedded_first, home_of, start

REPOSITORY = Path(__file__).parents[2]
WAIT_SECONDS = 60


def test_missing_embedded_broker_is_reported_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "noida_db", None)
    with pytest.raises(BrokerFailed, match=r"pip install 'rose-rollouts\[embedded\]'.*KAFKA_HOME.*--bootstrap-server"):
        start_broker(tmp_path)


def test_folder_without_kafka_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokerFailed, match=f"no Apache Kafka in {tmp_path}/kafka: .*libs/"):
        start_broker(tmp_path / "data", kafka_home=tmp_path / "kafka")


@pytest.fixture
def kafka_home(tmp_path: Path) -> Path:
    """A folder that looks like an Apache Kafka until Java is started."""
    libs = tmp_path / "kafka" / "libs"
    libs.mkdir(parents=True)
    (libs / "kafka_2.13-4.3.1.jar").touch()
    return tmp_path / "kafka"


def test_missing_java_is_reported(tmp_path: Path, kafka_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerFailed, match="no Java found; Apache Kafka needs Java 17 or newer: install it, or set"):
        start_broker(tmp_path / "data", kafka_home=kafka_home)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(BrokerFailed, match=f"no Java found in {tmp_path};"):
        start_broker(tmp_path / "data", kafka_home=kafka_home)


@pytest.mark.parametrize(
    ("version_text", "named"),
    [('openjdk version "11.0.25" 2024-10-15', "Java 11.0.25"), ('java version "1.8.0_291"', "Java 1.8.0_291")],
)
def test_too_old_java_is_named(
    version_text: str, named: str, tmp_path: Path, kafka_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{version_text}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(BrokerFailed, match=f"{java} is {named}; Apache Kafka needs Java 17 or newer"):
        start_broker(tmp_path / "data", kafka_home=kafka_home)


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BrokerFailed, match=f"port {port} of 127.0.0.1 is taken"):
            start_broker(tmp_path, port=port)


def test_free_port_is_reserved_while_its_process_lives() -> None:
    asking = "import rose.topics.local_broker as b; b.PORTS = range({0}, {0} + 1); print(b.free_ports(1))"
    [own] = free_ports(1)
    ask = [sys.executable, "-c", asking.format(own)]
    assert subprocess.run(ask, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout == "[]\n"


def test_folder_of_a_running_broker_is_refused(tmp_path: Path) -> None:
    with start_broker(tmp_path), pytest.raises(BrokerFailed, match=r"did not start: exit status 1, .*already running"):
        start_broker(tmp_path)


def test_damaged_data_is_refused_and_kept(tmp_path: Path) -> None:
    damaged = tmp_path / "noida-db" / "kafka.json"
    damaged.parent.mkdir()
    damaged.write_text('{"topics": [')
    with pytest.raises(BrokerFailed, match=r"did not start: .*parse.*broker\.log"):
        start_broker(tmp_path)
    assert damaged.read_text() == '{"topics": ['


def test_broker_identifies_itself_and_its_death_is_detected(own_broker: Broker) -> None:
    assert own_broker.name.split()[-1][0].isdigit()
    assert listening_addresses(int(own_broker.bootstrap.removeprefix("127.0.0.1:"))) <= LOOPBACK
    own_broker.check()
    assert own_broker.alive()
    own_broker.kill()
    assert not own_broker.alive()
    with pytest.raises(BrokerFailed, match=f"{own_broker.name} died: killed by signal 9"):
        own_broker.check()
    own_broker.stop()


def test_broker_asked_to_stop_stops_serving_at_once(own_broker: Broker) -> None:
    """All threads stop, also answering threads, because one that continued would answer new requests."""
    client, done = connect(own_broker.settings()), Event()

    def ask() -> None:
        while not done.is_set():
            client.list_topics(timeout=WAIT_SECONDS)

    asking_thread = Thread(target=ask)
    asking_thread.start()
    try:
        for _ in range(300):
            own_broker.send_signal(signal.SIGSTOP)
            assert {"T"} in [states(child) for child in children()]
            own_broker.send_signal(signal.SIGCONT)
    finally:
        own_broker.send_signal(signal.SIGCONT)
        done.set()
        asking_thread.join()


def children() -> list[str]:
    return " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()


def states(process: str) -> set[str]:
    """Return one letter per thread, as in /proc: T is stopped."""
    return {file.read_text().rpartition(") ")[2][0] for file in Path(f"/proc/{process}/task").glob("*/stat")}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as in /proc/net, plain and mapped into IPv6."""


def listening_addresses(port: int) -> set[str]:
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


PARENT = """
import sys
from pathlib import Path
from rose.topics.local_broker import start_broker
broker = start_broker(Path(sys.argv[1]), kafka_home=Path(sys.argv[2]) if sys.argv[2] else None)
print(broker.bootstrap, flush=True)
sys.stdin.read()
"""


@embedded_first
@pytest.mark.slow
def test_broker_saves_and_ends_with_its_killed_parent(broker_kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(home_of(broker_kind) or "")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        bootstrap = parent.stdout.readline().strip()
        assert bootstrap, parent.stderr.read()
        [child] = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        broker = os.pidfd_open(int(child))
        write(bootstrap, "kept")
        parent.send_signal(signal.SIGKILL)
    assert select.select([broker], [], [], WAIT_SECONDS)[0], "the broker outlived its parent"
    os.close(broker)
    with start(broker_kind, tmp_path) as again:
        assert read(again.bootstrap) == b"kept"


def write(bootstrap: str, value: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic("saved", 1, 1)])["saved"].result()
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    producer.produce("saved", value)
    assert producer.flush(WAIT_SECONDS) == 0


def read(bootstrap: str) -> object:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "by-hand", "log_level": 0})
    consumer.assign([TopicPartition("saved", 0, 0)])
    message = consumer.poll(WAIT_SECONDS)
    consumer.close()
    return message and message.value()


@pytest.mark.slow
def test_group_of_a_new_broker_has_no_offsets(own_broker: Broker, namespace: str) -> None:
    """Apache Kafka starts the coordinator of the group only at this request."""
    settings = own_broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    reader = Reader(settings, "test", group="first")
    try:
        assert reader.committed([(PROMPTS, 0)]) == {(PROMPTS, 0): None}
    finally:
        reader.close()
