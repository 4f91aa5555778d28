"""How the process beside a server and the guest in it meet: a unix socket over which memory is handed.

Keeps true
- Either side may start, end and come back without the other: the socket's file is the server's, and who knocks brings
  everything that the two share. The end of the connection is the end of the link, whoever ended it, and however.
- Only the user of the server is listened to, and only memory that nobody can shrink is mapped.

One message opens a link: a `Hello` and the descriptors that it counts. Nothing else ever travels over the socket.
"""

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemas.errors import UsageError
from workers.executor.line import Line, LineBroken, check_sealed, memory, sealed

PROTOCOL = 1
"""Of the words and lines of this release."""

LINE_BYTES = 4 << 20
"""Of each line: some hundred turns with their contexts."""

MOST_SHELVES = 2
FIXED = 3
"""Descriptors before the shelves: orders, reports, wake."""

CREDENTIALS = struct.Struct("3i")


class Hello(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    shelves: int


class LinkRefused(Exception):
    """Who knocked cannot be taken in; the message says why."""


@dataclass(frozen=True, slots=True)
class GuestEnd:
    """The server's end of a link."""

    connection: socket.socket
    orders: Line
    reports: Line
    wake: int
    """An eventfd that the other side writes to after its orders."""
    shelves: tuple[int, ...]

    def close(self) -> None:
        self.connection.close()
        for descriptor in (self.wake, *self.shelves):
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class BesideEnd:
    """The other end: writes orders, reads reports, fills shelves."""

    connection: socket.socket
    orders: Line
    reports: Line
    shelves: tuple[int, ...]
    _wake: int

    def order(self, message: bytes) -> None:
        """Write an order and wake the guest. Raises LineFull."""
        self.orders.write(message)
        os.eventfd_write(self._wake, 1)

    @property
    def ended(self) -> bool:
        """Whether the server has ended the link."""
        try:
            return self.connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.connection.close()
        for descriptor in (self._wake, *self.shelves):
            os.close(descriptor)


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


def welcome(connection: socket.socket) -> GuestEnd:
    """Take in who knocked, within a second; the connection stays open as long as the link. Raises LinkRefused."""
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.getuid():
        raise LinkRefused(f"user {user} knocked, this server is of user {os.getuid()}")
    connection.settimeout(1.0)
    descriptors: list[int] = []
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 4096, FIXED + MOST_SHELVES)
        hello = msgspec.msgpack.decode(data, type=Hello)
        if hello.protocol != PROTOCOL:
            raise LinkRefused(f"its words are of protocol {hello.protocol}, ours of {PROTOCOL}: install one release")
        if len(descriptors) != FIXED + hello.shelves:
            raise LinkRefused(f"{len(descriptors)} descriptors came with it")
        orders, reports, wake, *shelves = descriptors
        for shelf in shelves:
            check_sealed(shelf)
        end = GuestEnd(connection, Line(orders), Line(reports), wake, tuple(shelves))
    except (OSError, msgspec.DecodeError, LineBroken, LinkRefused) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise LinkRefused(str(error)) from None
    os.close(orders)
    os.close(reports)
    os.set_blocking(wake, False)
    connection.setblocking(False)
    return end


def knock(path: Path, *, shelf_bytes: int) -> BesideEnd:
    """Open a link with the server that listens at `path`. Raises OSError while none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    orders, reports = memory(LINE_BYTES, "rose-orders"), memory(LINE_BYTES, "rose-reports")
    wake = os.eventfd(0)
    shelves = tuple(sealed(shelf_bytes, "rose-shelf") for _ in range(MOST_SHELVES))
    hello = msgspec.msgpack.encode(Hello(PROTOCOL, len(shelves)))
    socket.send_fds(connection, [hello], [orders, reports, wake, *shelves])
    end = BesideEnd(connection, Line(orders), Line(reports), shelves, wake)
    os.close(orders)
    os.close(reports)
    return end
