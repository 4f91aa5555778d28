"""Apache Kafka on loopback: a single node, or a cluster that survives the loss of one node.

Keeps true
- Every node is broker and controller in one process (KRaft), with its data and log in a folder of its own.
- In a cluster of three nodes, every topic and internal topic may have a replica on each node, and two replicas
  acknowledge. While two nodes run, no acknowledged record is lost and the cluster works.

Example:
    with start_cluster(folder, kafka_home=home) as cluster:
        ...  # cluster.bootstrap names all nodes
        cluster.nodes[1].kill()  # its leaders move
        cluster.nodes[1].restart()
"""

import base64
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from rose.topics.local_broker.process import HOST, QUIET, Broker, BrokerFailed, BrokerKind, free_ports
from rose.topics.settings import BusSettings

_SPARING = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
LONE_JAVA = ("-Xmx512m", *_SPARING)
"""Java's options for a single node. The process takes about 460 MB, and its start half the CPU time of a start with
Java's default garbage collector and compilers."""
CLUSTER_JAVA = ("-Xmx256m", *_SPARING)
"""Java's options for each node of a cluster. The process takes about 330 MB."""
JAVA_VERSION = 17
"""The oldest Java that runs an Apache Kafka 4 broker."""
LOOK_SECONDS = 0.2
"""Time between two checks whether the replicas are in sync."""

_JAR = re.compile(r"kafka_\d+\.\d+-(\d+\.\d+\.\d+)\.jar")


@dataclass(frozen=True, slots=True)
class _Place:
    """Ports and folder of one node of a cluster."""

    node: int
    port: int
    controller_port: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Settings of a node in addition to those of a plain node."""

    settings: str = ""
    """Lines appended to server.properties, which override earlier lines. `@PORT@` and the like stand for values."""
    logging: str = ""
    """Lines appended to the list of loggers in log4j2.yaml."""
    format_options: tuple[str, ...] = ()
    """Options of the tool that formats a new node."""
    client: Mapping[str, str] = field(default_factory=dict)
    """librdkafka settings that clients of the node need."""


PLAIN = Addition()


class Cluster:
    """A cluster of several nodes on this machine, made by `start_cluster`. As a context manager it stops them."""

    def __init__(self, nodes: tuple[Broker, ...]) -> None:
        self.nodes = nodes
        """The nodes, which can be killed and restarted one by one. The node with id n is nodes[n - 1]."""
        self.name = f"{len(nodes)} nodes of {nodes[0].name}"
        self.bootstrap = ",".join(node.bootstrap for node in nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def settings(self, namespace: str = "", properties: Mapping[str, str] | None = None) -> BusSettings:
        """Settings for clients of this cluster."""
        return BusSettings(self.bootstrap, namespace, properties or {})

    def in_sync(self) -> bool:
        """Whether all nodes answer and each reports all replicas in sync, so that one node may be lost.

        Every node is queried, because for some seconds the others still report a node that is gone.
        """
        return all(node.alive() and self._knows_all(node) for node in self.nodes)

    def await_in_sync(self, seconds: float) -> None:
        """Wait until every partition has all its replicas in sync. Raises BrokerFailed after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.in_sync():
            if time.monotonic() > deadline:
                raise BrokerFailed(f"{self.name}: the copies were not in sync after {seconds:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _knows_all(self, node: Broker) -> bool:
        try:
            found = AdminClient({"bootstrap.servers": node.bootstrap, **QUIET}).list_topics(timeout=2)
        except KafkaException:
            return False
        partitions = [partition for topic in found.topics.values() for partition in topic.partitions.values()]
        return len(found.brokers) == len(self.nodes) and all(
            partition.leader >= 0 and len(partition.isrs) == len(partition.replicas) for partition in partitions
        )

    def stop(self) -> None:
        """Kill all nodes: an orderly stop needs a quorum, which the last nodes lack. Acknowledged records are kept."""
        for node in self.nodes:
            node.kill()


def lone_node(
    data_folder: Path, port: int, kafka_home: Path, java: Sequence[str] = LONE_JAVA, addition: Addition = PLAIN
) -> BrokerKind:
    """A single node with a formatted folder. Raises BrokerFailed without Kafka or Java, or if the formatting fails.

    `kafka_home`: a folder with Kafka's `libs/`. `java`: Java's options.
    """
    own = data_folder / "apache-kafka"
    own.mkdir(exist_ok=True)
    [kind] = _kinds([_Place(1, port, free_ports(1)[0], own)], kafka_home, java, addition)
    return kind


def start_cluster(data_folder: Path, *, kafka_home: Path, nodes: int = 3) -> Cluster:
    """Start a cluster on loopback with a folder for each node in `data_folder`, and wait until all nodes answer.

    Call this from a thread that lives as long as the cluster should. Raises BrokerFailed.
    """
    folders = [data_folder.resolve() / f"node-{node}" for node in range(1, nodes + 1)]
    ports = free_ports(2 * nodes)
    places = []
    for number, folder in enumerate(folders):
        (folder / "apache-kafka").mkdir(parents=True, exist_ok=True)
        places.append(_Place(number + 1, ports[2 * number], ports[2 * number + 1], folder / "apache-kafka"))
    kinds = _kinds(places, kafka_home, CLUSTER_JAVA)
    started = [Broker(kind, place.folder.parent, place.port) for kind, place in zip(kinds, places, strict=True)]
    cluster = Cluster(tuple(started))
    try:
        for node in started:  # all are launched first, because a node answers only once there is a quorum
            node.launch()
        for node in started:
            node.await_ready()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _kinds(
    places: list[_Place], kafka_home: Path, options: Sequence[str], addition: Addition = PLAIN
) -> list[BrokerKind]:
    """Write the configuration of the nodes of one cluster, format new folders, and return how the nodes are run."""
    libs = kafka_home / "libs"
    found = sorted(match[1] for jar in libs.glob("kafka_*.jar") if (match := _JAR.fullmatch(jar.name)))
    if not found:
        raise BrokerFailed(f"no Apache Kafka in {kafka_home}: KAFKA_HOME is a folder with libs/kafka_SCALA-VERSION.jar")
    java = [_java(), *options]
    jars = ["-cp", f"{libs.resolve()}/*"]
    for place in places:
        _write_configuration(place, places, addition)
    _format(places, [*java, *jars], addition.format_options)
    return [
        BrokerKind(
            name=f"Apache Kafka {found[-1]}",
            command=[*java, f"-Dlog4j2.configurationFile={_logging(place)}", *jars, "kafka.Kafka", str(_server(place))],
            node=place.node,
            orphan_signal=signal.SIGTERM if len(places) == 1 else signal.SIGKILL,
            client_settings=addition.client,
        )
        for place in places
    ]


def _write_configuration(place: _Place, places: list[_Place], addition: Addition) -> None:
    templates = files("rose.topics.apache_kafka")
    filled = {
        "@NODE@": str(place.node),
        "@PORT@": str(place.port),
        "@CONTROLLER_PORT@": str(place.controller_port),
        "@VOTERS@": ",".join(f"{each.node}@{HOST}:{each.controller_port}" for each in places),
        "@LOG_FOLDER@": str(place.folder / "log"),
        "@COPIES@": str(len(places)),
        "@ACKNOWLEDGED@": str(len(places) // 2 + 1),
    }
    settings = (templates / "server.properties.in").read_text(encoding="utf-8") + addition.settings
    for word, value in filled.items():
        settings = settings.replace(word, value)
    _server(place).write_text(settings, encoding="utf-8")
    logging = (templates / "log4j2.yaml").read_text(encoding="utf-8") + addition.logging
    _logging(place).write_text(logging, encoding="utf-8")


def _format(places: list[_Place], java: list[str], options: Sequence[str]) -> None:
    """Format the folders of new nodes, in parallel. Raises BrokerFailed."""
    tool = "kafka.tools.StorageTool", "format"
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    new = [place for place in places if not (place.folder / "log" / "meta.properties").exists()]
    formatters = [
        subprocess.Popen(
            # with "=", because an id may begin with "-"
            [*java, *tool, f"--cluster-id={cluster_id}", "-c", str(_server(place)), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        for place in new
    ]
    said = [formatter.communicate()[0] for formatter in formatters]
    for place, formatter, told in zip(new, formatters, said, strict=True):
        if formatter.returncode != 0:
            raise BrokerFailed(f"Apache Kafka could not format {place.folder / 'log'}: {told.strip()}")


def _server(place: _Place) -> Path:
    return place.folder / "server.properties"


def _logging(place: _Place) -> Path:
    return place.folder / "log4j2.yaml"


def _java() -> str:
    """The Java program of JAVA_HOME if that is set, otherwise on the PATH. Raises BrokerFailed if it is too old."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=None if home is None else f"{home}/bin")
    advice = f"Apache Kafka needs Java {JAVA_VERSION} or newer: install it, or set JAVA_HOME"
    if java is None:
        raise BrokerFailed(f"no Java found{'' if home is None else f' in {home}'}; {advice}")
    said = subprocess.run([java, "-version"], capture_output=True, encoding="utf-8", errors="replace", check=False)
    version = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', said.stderr + said.stdout)
    if version is None or int(version[2]) < JAVA_VERSION:
        raise BrokerFailed(f"{java} is {f'Java {version[1]}' if version else 'no Java'}; {advice}")
    return java
