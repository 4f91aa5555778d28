"""The sidecar, as the guest meets it: one at a time, who is told of what it could not know, or hung up on.

Keeps true: a link that is over is closed once it is left, and never while it is in use.
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

PROTOCOL = 2
"""Of the words and lines of this release."""

CREDENTIALS = struct.Struct("3i")

EVENTFD_LINK = Path("anon_inode:[eventfd]")
"""What the kernel calls one."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of whoever connects: nothing follows where the protocols differ."""

    protocol: int


class ConnectionRejected(Exception):
    """Who knocked cannot be taken in; the message says why."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a link."""

    connection: socket.socket
    """Becomes readable once the other end is gone."""
    channel: ChannelFds

    def close(self) -> None:
        self.connection.close()
        self.channel.close()


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, in place of what a server that was killed left there. Raises UsageError."""
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
    """Accept a peer within a second; the connection stays open as long as the link. Raises ConnectionRejected."""
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
    """Open a link with the server that listens at `path`. Raises OSError while none does."""
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
"""After a knock that cannot be answered: it may stay, and the interpreter is serving's."""


class SidecarListener:
    """Holds the newest link; a new one ends the one before it."""

    def __init__(self, path: Path, wake: Callable[[], None], *, heartbeat_seconds: float, log: Logger) -> None:
        """`wake` is called on the feeder's thread. Raises UsageError."""
        self.connection: Connection | None = None
        self.closed: list[Connection] = []
        """Links that are over, for the engine's loop to close when it no longer uses them."""
        self.has_guest = False
        """As the engine's loop says before it sleeps."""
        self._wake = wake
        self._heartbeat_seconds = heartbeat_seconds
        self._log = log
        self._path = path
        self._listener = listen(path)
        self._arm = os.eventfd(0, os.EFD_NONBLOCK)
        self._armed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._arm, selectors.EVENT_READ)
        Thread(target=self._run, name="rose-feeder", daemon=True).start()

    def arm_wakeup(self) -> None:
        """The engine's loop is about to sleep: wake it at the next order, or when a heartbeat is due."""
        if not self._armed:
            self._armed = True
            os.eventfd_write(self._arm, 1)

    def _run(self) -> None:
        while True:
            heartbeats_due = self._armed and (self.connection is not None or self.has_guest)
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
        except OSError:  # who knocked has left, or no descriptor is
            time.sleep(ACCEPT_RETRY_SECONDS)
            return
        try:
            accepted = accept(connection)
        except ConnectionRejected as refusal:
            connection.close()
            self._log.warning("rose: who knocked was sent away: %s", refusal)
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
        self.connection = None  # first: who empties `closed` closes what it finds there
        self.closed.append(connection)


class CurrentSidecar:
    """At the link that was taken last, if there is one."""

    def __init__(self, listener: SidecarListener) -> None:
        self.channel: ChannelFds | None = None
        self.reports: MessageSender | None = None
        """While there is a link that could be taken."""
        self._listener = listener
        self._connection: Connection | None = None

    @property
    def changed(self) -> bool:
        """Whether another has come, or this one has left."""
        return self._listener.connection is not self._connection

    def switch(self) -> None:
        """Leave the link, and take the newest. Raises OSError or SharedMemoryInvalid, and nobody is there then."""
        self.channel = self.reports = None
        while self._listener.closed:  # first: the link that is taken now may end at any moment
            self._listener.closed.pop().close()
        self._connection = self._listener.connection
        if self._connection is not None:
            self.reports = MessageSender(RingBuffer(self._connection.channel.reports))
            self.channel = self._connection.channel

    def report_lost(self, report: EngineLost, *, then_close: bool) -> None:
        """Where it has no room, or is the `then_close` word, as no engine is to blame, the end of the link says as
        much.
        """
        if self.reports is None:
            return
        self.reports.send(report)
        if then_close or len(self.reports):
            self.close()

    def close(self) -> None:
        """Nobody answers: who is at the other end begins anew."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.connection.shutdown(socket.SHUT_RDWR)
