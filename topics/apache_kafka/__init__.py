"""Apache Kafka on loopback: the nodes of a cluster, which is a single node unless more are asked for.

Keeps true
- Every node is broker and controller in one process (KRaft), with its data and log in a folder of its own.
- Every topic and internal topic may have a replica on each node, and more than half of the replicas acknowledge.
"""

import base64
import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from rose.topics.local_broker.process import HOST, BrokerFailed, BrokerKind, free_ports

SPARING_JAVA = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Java's options for a start that takes little CPU time."""
LONE_JAVA = ("-Xmx512m", *SPARING_JAVA)
"""Java's options for a single node. The process takes about 460 MB, and its start half the CPU time of a start with
Java's default garbage collector and compilers."""
JAVA_VERSION = 17
"""The oldest Java that runs an Apache Kafka 4 broker."""

_JAR = re.compile(r"kafka_\d+\.\d+-(\d+\.\d+\.\d+)\.jar")


@dataclass(frozen=True, slots=True)
class NodePlace:
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


def lone_node(
    data_folder: Path, port: int, kafka_home: Path, java: Sequence[str] = LONE_JAVA, addition: Addition = PLAIN
) -> BrokerKind:
    """A single node with a formatted folder. Raises BrokerFailed without Kafka or Java, or if the formatting fails.

    `kafka_home`: a folder with Kafka's `libs/`. `java`: Java's options.
    """
    own = data_folder / "apache-kafka"
    own.mkdir(exist_ok=True)
    [kind] = node_kinds([NodePlace(1, port, free_ports(1)[0], own)], kafka_home, java, addition)
    return kind


def node_kinds(
    places: list[NodePlace], kafka_home: Path, options: Sequence[str], addition: Addition = PLAIN
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


def _write_configuration(place: NodePlace, places: list[NodePlace], addition: Addition) -> None:
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


def _format(places: list[NodePlace], java: list[str], options: Sequence[str]) -> None:
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


def _server(place: NodePlace) -> Path:
    return place.folder / "server.properties"


def _logging(place: NodePlace) -> Path:
    return place.folder / "log4j2.yaml"


def _java() -> str:
    """The Java program of JAVA_HOME if that is set, otherwise on the PATH. Raises BrokerFailed if it is too old."""
    home = os.environ.get("JAVA_HOME") or None
    java = shutil.which("java", path=None if home is None else f"{home}/bin")
    advice = f"Apache Kafka needs Java {JAVA_VERSION} or newer: install it, or set JAVA_HOME"
    if java is None:
        raise BrokerFailed(f"no Java found{'' if home is None else f' in {home}'}; {advice}")
    said = subprocess.run([java, "-version"], capture_output=True, encoding="utf-8", errors="replace", check=False)
    version = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', said.stderr + said.stdout)
    if version is None or int(version[2]) < JAVA_VERSION:
        raise BrokerFailed(f"{java} is {f'Java {version[1]}' if version else 'no Java'}; {advice}")
    return java
