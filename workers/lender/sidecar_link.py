"""The sidecar link: a Unix socket over which a sidecar hands the channel's descriptors to the guest's process.

Keeps true: one sidecar is connected at a time. The channel of an ended connection is closed after the engine's loop has
left it, never while the loop uses it.
"""

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from threading import Thread

import msgspec

from rose.schemas.errors import UsageError
from rose.workers.executor.ipc.messages import EngineLost, MessageSender
from rose.workers.executor.ipc.shared_memory import DESCRIPTOR_COUNT, ChannelFds, RingBuffer, SharedMemoryInvalid

PROTOCOL = 4
"""Version of the messages and ring buffers of this release."""

CREDENTIALS = struct.Struct("3i")

EVENTFD_LINK = Path("anon_inode:[eventfd]")
"""Target of the /proc/self/fd link of an eventfd."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The only message of a sidecar on the socket. The server rejects another protocol than its own."""

    protocol: int


class ConnectionRejected(Exception):
    """A peer cannot be accepted; the message says why."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a sidecar link, with its channel."""

    connection: socket.socket
    """Becomes readable when the other end is gone."""
    channel: ChannelFds

    def close(self) -> None:
        """Close the socket and the channel."""
        self.connection.close()
        self.channel.close()


def listen(path: Path) -> socket.socket:
    """Return a listening socket at `path`, and replace the socket of a killed server there. Raises UsageError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    try:
        with suppress(FileNotFoundError):
            if path.is_socket():
                path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise UsageError(f"no socket can be made at {path}: {error}") from None
    return listener


def accept(connection: socket.socket) -> Connection:
    """Receive the hello and the channel of a peer, for which the peer has a second.

    Raises ConnectionRejected if the peer is of another user or another protocol, or its descriptors are invalid.
    """
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.getuid():
        raise ConnectionRejected(f"user {user} knocked, this server is of user {os.getuid()}")
    connection.settimeout(1.0)
    descriptors: list[int] = []
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 4096, DESCRIPTOR_COUNT)
        hello = msgspec.msgpack.decode(data, type=Hello)
        if hello.protocol != PROTOCOL:
            raise ConnectionRejected(
                f"its words are of protocol {hello.protocol}, ours of {PROTOCOL}: install one release"
            )
        channel = ChannelFds.from_descriptors(descriptors)
        if Path(f"/proc/self/fd/{channel.wake_event}").readlink() != EVENTFD_LINK:
            raise ConnectionRejected("its wake event is none")
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        os.set_blocking(channel.wake_event, False)
    except (OSError, msgspec.DecodeError, SharedMemoryInvalid, ConnectionRejected) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionRejected(str(error)) from None
    connection.setblocking(False)
    return Connection(connection, channel)


def connect(path: Path) -> Connection:
    """Connect to the server that listens at `path`, and send a new channel. Raises OSError if no server listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    end = Connection(connection, ChannelFds.create())
    try:
        socket.send_fds(connection, [msgspec.msgpack.encode(Hello(PROTOCOL))], end.channel.descriptors)
    except OSError:
        end.close()
        raise
    return end


ACCEPT_RETRY_SECONDS = 0.1
"""Wait after a failed accept: the peer may stay in the queue, and a busy loop would hold the interpreter of serving."""


class SidecarListener:
    """Accepts sidecars on a thread and holds the newest connection. A new connection ends the one before."""

    def __init__(self, path: Path, wake: Callable[[], None], *, heartbeat_seconds: float, log: Logger) -> None:
        """`wake`: wakes the engine's loop; called on the listener's thread. Raises UsageError."""
        self.connection: Connection | None = None
        self.closed: list[Connection] = []
        """Ended connections, which the engine's loop closes when it no longer uses them."""
        self._wake = wake
        self._heartbeat_seconds = heartbeat_seconds
        self._log = log
        self._path = path
        self._listener = listen(path)
        self._arm = os.eventfd(0, os.EFD_NONBLOCK)
        self._armed = self._has_guest = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._arm, selectors.EVENT_READ)
        Thread(target=self._run, name="rose-feeder", daemon=True).start()

    def arm_wakeup(self, *, has_guest: bool = False) -> None:
        """Wake the engine's loop, which is about to sleep, at the next command or when a status is due.

        `has_guest`: whether a guest must learn of a stop although no sidecar is connected.
        """
        self._has_guest = has_guest
        if not self._armed:
            self._armed = True
            os.eventfd_write(self._arm, 1)

    def _run(self) -> None:
        while True:
            heartbeats_due = self._armed and (self.connection is not None or self._has_guest)
            patience = self._heartbeat_seconds if heartbeats_due else None
            ready = {key.fileobj for key, _ in self._selector.select(patience)}
            if self._listener in ready:
                self._accept()
            elif self.connection is not None and self.connection.connection in ready:
                self._end_connection()
                self._wake()
            elif self._arm in ready:
                os.eventfd_read(self._arm)
                if self.connection is not None and self.connection.channel.wake_event not in self._selector.get_map():
                    self._selector.register(self.connection.channel.wake_event, selectors.EVENT_READ)
            else:
                self._disarm()
                self._wake()

    def _disarm(self) -> None:
        self._armed = False
        connection = self.connection
        if connection is not None and connection.channel.wake_event in self._selector.get_map():
            self._selector.unregister(connection.channel.wake_event)
            with suppress(BlockingIOError):
                os.eventfd_read(connection.channel.wake_event)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has left, or no descriptor is free
            time.sleep(ACCEPT_RETRY_SECONDS)
            return
        try:
            accepted = accept(connection)
        except ConnectionRejected as refusal:
            connection.close()
            self._log.warning("rose: connection_rejected reason=%s", refusal)
            return
        self._end_connection()
        self._selector.register(accepted.connection, selectors.EVENT_READ)
        self.connection = accepted
        self._wake()

    def _end_connection(self) -> None:
        connection = self.connection
        if connection is None:
            return
        self._disarm()
        self._selector.unregister(connection.connection)
        self.connection = None  # first: the engine's loop closes every connection that it finds in `closed`
        self.closed.append(connection)


class CurrentSidecar:
    """The sidecar whose connection the engine's loop uses, if there is one."""

    def __init__(self, listener: SidecarListener) -> None:
        self.channel: ChannelFds | None = None
        self.reports: MessageSender | None = None
        """Sender into the channel's report ring buffer; None without a usable connection."""
        self._listener = listener
        self._connection: Connection | None = None

    @property
    def changed(self) -> bool:
        """Whether another sidecar has connected, or the current one has left."""
        return self._listener.connection is not self._connection

    def switch(self) -> None:
        """Leave the current connection, and use the newest one.

        Raises OSError or SharedMemoryInvalid; there is no current sidecar then.
        """
        self.channel = self.reports = None
        while self._listener.closed:  # first: the connection that is used from now on may end at any moment
            self._listener.closed.pop().close()
        self._connection = self._listener.connection
        if self._connection is not None:
            self.reports = MessageSender(RingBuffer(self._connection.channel.reports))
            self.channel = self._connection.channel

    def report_lost(self, report: EngineLost, *, then_close: bool) -> None:
        """Report that the engine is lost, if a sidecar is connected.

        Closes the connection, which also tells the sidecar of the loss, if `then_close` is set or the ring buffer has
        no room for the report.
        """
        if self.reports is None:
            return
        self.reports.send(report)
        if then_close or len(self.reports):
            self.close()

    def close(self) -> None:
        """Shut the connection down: the sidecar notices it and restarts its executor."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.connection.shutdown(socket.SHUT_RDWR)
