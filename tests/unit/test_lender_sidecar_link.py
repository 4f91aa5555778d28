"""Connections to a server's sidecar socket: accepted with their descriptors, or rejected, and closed with the
connection."""

import gc
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from rose.schemas.errors import UsageError
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.lender import sidecar_link
from rose.workers.lender.config import LendConfig, read_config
from rose.workers.lender.sidecar_link import PROTOCOL, Connection, Hello, SidecarListener, connect, listen
from tests.support.file_descriptors import no_descriptor_left
from tests.support.waiting import WAIT_SECONDS, until

BEAT_SECONDS = 0.05


class Host:
    """A loop that can be woken."""

    def __init__(self, path: Path) -> None:
        self.woken = threading.Semaphore(0)
        self.feeder = SidecarListener(
            path, self.woken.release, heartbeat_seconds=BEAT_SECONDS, log=logging.getLogger("test")
        )

    def wait(self) -> None:
        assert self.woken.acquire(timeout=WAIT_SECONDS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lend.sock"


@pytest.fixture
def host(path: Path) -> Host:
    return Host(path)


@pytest.fixture
def sidecar(host: Host, path: Path) -> Iterator[Connection]:
    with closing(connect(path)) as end:
        host.wait()
        yield end


def order(end: Connection, message: bytes) -> None:
    RingBuffer(end.channel.commands).write(message)
    end.channel.wake_engine()


def ended(end: Connection) -> bool:
    """Whether the peer has closed."""
    return bool(select.select([end.connection], [], [], 0)[0])


def test_commands_and_reports_cross_the_link(host: Host, sidecar: Connection) -> None:
    assert host.feeder.connection is not None
    order(sidecar, b"order")
    RingBuffer(host.feeder.connection.channel.reports).write(b"report")
    assert list(RingBuffer(host.feeder.connection.channel.commands).read()) == [b"order"]
    assert list(RingBuffer(sidecar.channel.reports).read()) == [b"report"]
    assert not ended(sidecar)


def test_command_wakes_the_loop_only_while_asleep_even_if_sent_before(host: Host, sidecar: Connection) -> None:
    order(sidecar, b"order")
    assert not host.woken.acquire(timeout=4 * BEAT_SECONDS)
    host.feeder.arm_wakeup()
    host.wait()
    host.feeder.arm_wakeup()
    order(sidecar, b"another")
    host.wait()


def test_sleeping_loop_is_woken_for_its_heartbeat(host: Host, sidecar: Connection) -> None:
    host.feeder.arm_wakeup()
    began = time.monotonic()
    host.wait()
    assert time.monotonic() - began > BEAT_SECONDS / 2


def test_ended_sidecar_is_detected_and_another_can_connect(host: Host, path: Path) -> None:
    for _ in range(3):
        end = connect(path)
        until(lambda: host.feeder.connection is not None)
        end.close()
        until(lambda: host.feeder.connection is None)
    assert len(host.feeder.closed) == 3


def test_connection_without_free_descriptor_does_not_end_the_interpreter(
    host: Host, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = threading.Semaphore(0)
    monkeypatch.setattr(sidecar_link, "time", SimpleNamespace(sleep=lambda _: rests.release()))
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as knocking, no_descriptor_left():
        knocking.connect(str(path))
        assert rests.acquire(timeout=WAIT_SECONDS)


def test_last_connected_sidecar_has_the_link(host: Host, path: Path, sidecar: Connection) -> None:
    first = host.feeder.connection
    with closing(connect(path)) as second:
        until(lambda: host.feeder.connection is not first and host.feeder.connection is not None)
        assert host.feeder.closed == [first]
        first.close()  # type: ignore[union-attr]
        until(lambda: ended(sidecar))
        assert not ended(second)


@pytest.mark.parametrize("wrong", ["protocol", "count", "unsealed", "bell"])
def test_peer_with_an_invalid_greeting_is_rejected(
    host: Host, path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        connection.connect(str(path))
        channel = ChannelFds.create()
        if wrong == "unsealed":
            channel = replace(channel, weights_1=os.memfd_create("a"))
        if wrong == "bell":
            channel = replace(channel, wake_event=os.memfd_create("a"))
        hello = Hello(PROTOCOL + (wrong == "protocol"))
        brought = channel.descriptors[: 4 if wrong == "count" else 5]
        socket.send_fds(connection, [msgspec.msgpack.encode(hello)], brought)
        connection.settimeout(WAIT_SECONDS)
        assert connection.recv(1) == b""
        channel.close()
    assert host.feeder.connection is None
    until(lambda: "connection_rejected" in caplog.text)
    connect(path).close()


def test_socket_of_a_killed_server_is_replaced_and_only_its_user_may_connect(path: Path) -> None:
    listen(path).close()
    with closing(listen(path)):
        assert path.stat().st_mode & 0o777 == 0o600


def test_invalid_configuration_is_reported_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "lend.json"
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(file)
    file.write_text('{"model_folder": "m", "socket": "s", "speed": 9}')
    with pytest.raises(UsageError, match="speed"):
        read_config(file)
    file.write_bytes(msgspec.json.encode(LendConfig(model_folder="m", socket="s")))
    assert read_config(file).socket == "s"


def test_failed_connection_leaves_no_descriptor_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise BrokenPipeError

    with closing(listen(path)):
        gc.collect()  # descriptors of earlier tests
        before = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(socket, "send_fds", refused)
        with pytest.raises(BrokenPipeError):
            connect(path)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
