"""A broker process on this machine, of any kind: start, check, stop, kill and restart.

Keeps true
- A broker that was started answers on loopback, and every partition has its leader.
- The broker never outlives its parent, however the parent ends. A single broker whose parent is killed has time to
  save.
- All data of a broker and its log are in one folder. A restart on that folder finds every record that was saved.
- The port stays the same over `restart`, so clients reconnect by themselves.
- `check` reports a broker that can no longer save the records that it acknowledges.
"""

import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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
