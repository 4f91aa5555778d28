"""A local broker, the embedded default or an Apache Kafka node, behind one interface: start, check, stop and restart.

Keeps true
- `start_broker` returns only when the broker answers on loopback and every partition has its leader. The broker does
  not create a topic because a client names it.
- The broker never outlives its parent, however the parent ends. A single broker whose parent is killed has time to
  save.
- All data of a broker and its log are in one folder. A restart on that folder finds every record that was saved.
- The port stays the same over `restart`, so clients reconnect by themselves.
- `check` reports a broker that can no longer save the records that it acknowledges.
- Every Apache Kafka node is broker and controller in one process (KRaft). Every topic and internal topic of a cluster
  may have a replica on each node, and more than half of the replicas acknowledge.

Example:
    with start_broker(run_folder / "broker", kafka_home=settings.kafka_home) as broker:
        ...  # broker.bootstrap is "127.0.0.1:PORT"
        broker.check()
"""

import base64
import importlib.metadata
import importlib.util
import itertools
import os
import random
import re
import shutil
import signal
import socket
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
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from rose.schemas.errors import RoseError
from rose.topics.processes import die_with_parent
from rose.topics.settings import BusSettings

HOST = "127.0.0.1"
"""Brokers started here listen on loopback only, and have neither authentication nor encryption."""
PORTS = range(20_000, 32_000)
"""Range of ports for brokers, below the ephemeral range. A client that reconnects to a stopped broker on an ephemeral
port could be given the same port as its source, connect to itself, and so prevent the restart of the broker."""
START_SECONDS = 180.0
"""How long a broker may take to answer. Apache Kafka needs about 4 s on an idle machine and 6 s after it was killed,
but more than a minute where many processes want few cores."""
STOP_SECONDS = 60.0
"""How long a broker may take to save and end after SIGTERM."""
RESERVE_BYTES = 256 * 2**20
"""Free disk space below which a broker counts as out of space: some seconds of writing on a busy machine."""

_POLL_SECONDS = 0.05
QUIET: Mapping[str, str | int] = {"log_level": 0, "reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 250}
"""Settings of clients that poll for a broker which may be down."""

_RESERVED: list[socket.socket] = []
"""One socket for each port that `free_ports` has returned, open until this process ends."""


class BrokerFailed(RoseError):
    """The broker cannot be started, died, or cannot save records. The message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerKind:
    """How one kind of broker is run, and where it saves."""

    name: str
    command: list[str]
    node: int = 1
    """Id of the broker in its cluster."""
    snapshot: Path | None = None
    """The file into which the embedded broker writes its whole state after each change; None for other brokers."""
    orphan_signal: signal.Signals = signal.SIGTERM
    """Signal that the kernel sends to the broker when its parent has ended."""
    client_settings: Mapping[str, str] = field(default_factory=dict)
    """librdkafka settings that clients of the broker need."""


class Broker:
    """A broker process on this machine; a context manager that stops it.

    Launch it from a thread that lives as long as the broker should: the broker ends with that thread.
    """

    def __init__(self, kind: BrokerKind, data_folder: Path, port: int) -> None:
        self._kind = kind
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0  # position in the log, in bytes, at which the present start begins
        self.name = kind.name
        """Kind and version, e.g. "noida-db 0.2.3" or "Apache Kafka 4.3.1"."""
        self.bootstrap = f"{HOST}:{port}"
        self.embedded = kind.snapshot is not None
        self.data_folder = data_folder
        self.log = data_folder / "broker.log"
        """The broker's output, over all its starts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def settings(self, namespace: str = "", properties: Mapping[str, str] | None = None) -> BusSettings:
        """Settings for clients of this broker, with additional librdkafka settings."""
        properties_used = {**self._kind.client_settings, **(properties or {})}
        return BusSettings(self.bootstrap, namespace, properties_used, embedded=self.embedded)

    def alive(self) -> bool:
        """Whether the process runs. `check` also tells whether it can save."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise BrokerFailed if the broker died, or if the disk is too full. Cheap enough to call often.

        The embedded broker acknowledges records that it cannot save, prints nothing and exits with status 0 (measured
        by tests/conformance/test_disk.py), so the free space is checked here.
        """
        self._check_space()  # first, because a full disk is what ends Apache Kafka
        if not self.alive():
            raise BrokerFailed(f"{self.name} died: {self._exit_reason()}")

    def stop(self) -> None:
        """Let the broker save and end. Does nothing if it is down. Raises BrokerFailed if it could not save in time."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokerFailed(f"{self.name} did not stop in {STOP_SECONDS:.0f} s and was killed") from None
        unsaved = self._save_error()
        if unsaved is not None and unsaved.exists():
            raise BrokerFailed(
                f"{self.name} could not save its last records to {self.data_folder}: the disk is full, "
                "so what was written since it filled up is lost; free some space and run again"
            )

    def kill(self) -> None:
        """End the broker at once, as a crash would (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it was started. After SIGSTOP, returns once all its threads are stopped."""
        if self._process is None:
            return
        self._process.send_signal(number)
        if number is signal.SIGSTOP and self._process.returncode is None:  # until then, other threads may still run
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def restart(self) -> None:
        """Start the broker again on the same port and data, and wait until it answers. Stops it first if it runs."""
        self.stop()
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start the process. Raises BrokerFailed if its port is taken or the disk is too full."""
        if _is_taken(self._port):
            raise BrokerFailed(f"port {self._port} of {HOST} is taken by another program: free it, or name another")
        unsaved = self._save_error()
        if unsaved is not None:
            unsaved.unlink(missing_ok=True)  # left by a kill during a save; `stop` takes a new one for a failed save
        self._check_space()
        with self.log.open("ab") as log:
            self._started_at = log.tell()
            self._process = subprocess.Popen(
                self._kind.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C does not reach the broker: its parent ends it last
                preexec_fn=die_with_parent(os.getpid(), self._kind.orphan_signal),
            )

    def await_ready(self) -> None:
        """Wait until the launched broker answers and its cluster knows it. Raises BrokerFailed."""
        process = self._process
        assert process is not None, "launch it first"
        admin = AdminClient({"bootstrap.servers": self.bootstrap, **QUIET, **self._kind.client_settings})
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                process.wait(_POLL_SECONDS)
                raise BrokerFailed(f"{self.name} did not start: {self._exit_reason()}")
            except subprocess.TimeoutExpired:
                pass  # it runs
            try:
                cluster = admin.list_topics(timeout=1)
            except KafkaException:
                continue
            leaders = [partition.leader for topic in cluster.topics.values() for partition in topic.partitions.values()]
            if self._kind.node in cluster.brokers and min(leaders, default=1) >= 0:
                if self._kind.snapshot is not None:
                    _forbid_auto_create(admin)
                return
        self.kill()
        raise BrokerFailed(f"{self.name} did not answer on {self.bootstrap} in {START_SECONDS:.0f} s; see {self.log}")

    def _check_space(self) -> None:
        """Raise BrokerFailed if the disk is too full.

        The embedded broker writes its new state to a second file before it replaces the old one, so it needs that much
        space, too.
        """
        snapshot, unsaved = self._kind.snapshot, self._save_error()
        needed = RESERVE_BYTES + (_size(snapshot) if snapshot is not None else 0)
        free = shutil.disk_usage(self.data_folder).free + (_size(unsaved) if unsaved is not None else 0)
        if free < needed:
            raise BrokerFailed(
                f"the disk is too full for {self.name}: {free / 2**20:.0f} MiB free under {self.data_folder}, "
                f"{needed / 2**20:.0f} MiB needed; free some space, or keep the run on another disk"
            )

    def _save_error(self) -> Path | None:
        return None if self._kind.snapshot is None else self._kind.snapshot.with_suffix(".tmp")

    def _exit_reason(self) -> str:
        """Exit status of a broker that has ended, with the last error in its log."""
        assert self._process is not None
        with self.log.open("rb") as log:
            log.seek(self._started_at)
            lines = log.read().decode(errors="replace").splitlines()
        telling = [line.strip() for line in lines if re.search(r"\b(error:|ERROR|FATAL)", line)]
        status = self._process.returncode
        end = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{end}{f', {telling[-1]}' if telling else ''} (its log: {self.log})"


def free_ports(count: int) -> list[int]:
    """Free ports of loopback, which this function returns to no other process while this process runs."""
    looked_at = random.SystemRandom().sample(PORTS, len(PORTS))  # independent of the seed of `random`
    free = itertools.islice((port for port in looked_at if _reserve(port) and not _is_taken(port)), count)
    return list(free)


def _forbid_auto_create(admin: AdminClient) -> None:
    """Turn off the creation of topics by name on the embedded broker, which has no start option for that."""
    never = ConfigEntry("auto.create.topics.enable", "false", incremental_operation=AlterConfigOpType.SET)
    broker = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[never])
    admin.incremental_alter_configs([broker])[broker].result()


def _reserve(port: int) -> bool:
    """Reserve a port among the callers of `free_ports`: a broker listens on it only seconds later."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0rose-port-{port}")  # an abstract name, freed with its process and local to the network
    except OSError:
        claim.close()
        return False
    _RESERVED.append(claim)
    return True


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores closed connections of a killed broker
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


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
    templates = files("rose.topics")
    filled = {
        "@NODE@": str(place.node),
        "@PORT@": str(place.port),
        "@CONTROLLER_PORT@": str(place.controller_port),
        "@VOTERS@": ",".join(f"{each.node}@{HOST}:{each.controller_port}" for each in places),
        "@LOG_FOLDER@": str(place.folder / "log"),
        "@COPIES@": str(len(places)),
        "@ACKNOWLEDGED@": str(len(places) // 2 + 1),
    }
    settings = (templates / "kafka-server.properties.in").read_text(encoding="utf-8") + addition.settings
    for word, value in filled.items():
        settings = settings.replace(word, value)
    _server(place).write_text(settings, encoding="utf-8")
    logging = (templates / "kafka-log4j2.yaml").read_text(encoding="utf-8") + addition.logging
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
    outputs = [formatter.communicate()[0] for formatter in formatters]
    for place, formatter, output in zip(new, formatters, outputs, strict=True):
        if formatter.returncode != 0:
            raise BrokerFailed(f"Apache Kafka could not format {place.folder / 'log'}: {output.strip()}")


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
    completed = subprocess.run([java, "-version"], capture_output=True, encoding="utf-8", errors="replace", check=False)
    version = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', completed.stderr + completed.stdout)
    if version is None or int(version[2]) < JAVA_VERSION:
        raise BrokerFailed(f"{java} is {f'Java {version[1]}' if version else 'no Java'}; {advice}")
    return java


def start_broker(
    data_folder: Path, *, kafka_home: Path | None = None, port: int | None = None, kafka_java: Sequence[str] = LONE_JAVA
) -> Broker:
    """Start a broker on loopback with its data and log in `data_folder`, and wait until it answers.

    `kafka_home`: a folder with Apache Kafka's `libs/`; None starts the embedded broker. `port`: None picks a free port.
    `kafka_java`: Java's options for Apache Kafka. Call this from a thread that lives as long as the broker should: the
    broker ends with that thread. Raises BrokerFailed with a sentence that names the cause and the remedy.
    """
    data_folder.mkdir(parents=True, exist_ok=True)
    data_folder = data_folder.resolve()
    if port is None:
        [port] = free_ports(1)
    kind = (
        _embedded_kind(data_folder, port)
        if kafka_home is None
        else lone_node(data_folder, port, kafka_home, kafka_java)
    )
    broker = Broker(kind, data_folder, port)
    broker.launch()
    broker.await_ready()
    return broker


def _embedded_kind(data_folder: Path, port: int) -> BrokerKind:
    package = importlib.util.find_spec("noida_db")
    if package is None or package.origin is None:
        raise BrokerFailed(
            "the embedded broker is not installed: pip install 'rose-rollouts[embedded]', "
            "or name an Apache Kafka (KAFKA_HOME) or a running cluster (--bootstrap-server)"
        )
    binary = Path(package.origin).with_name("noida-db")
    own = data_folder / "noida-db"
    options = ["--data-dir", str(own), "--host", HOST, "--only", "kafka", "--kafka-port", str(port)]
    own.mkdir(exist_ok=True)
    return BrokerKind(
        name=f"noida-db {importlib.metadata.version('noida-db')}",
        command=[str(binary), "start", *options],
        snapshot=own / "kafka.json",
    )
