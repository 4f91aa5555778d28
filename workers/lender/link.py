"""How the process beside a server and the guest in it meet: a unix socket over which memory is handed.

Keeps true
- Either side may start, end and come back without the other: the socket's file is the server's, and who knocks brings
  everything that the two share. The end of the connection is the end of the link, whoever ended it, and however.
- Only the user of the server is listened to, and only memory that nobody can shrink is mapped.

One message opens a link: a `Hello` and the descriptors of `Wires`. Nothing else ever travels over the socket.
"""

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemas.errors import UsageError
from workers.executor.line import LineBroken
from workers.executor.wires import COUNT, Wires

PROTOCOL = 2
"""Of the words and lines of this release."""

CREDENTIALS = struct.Struct("3i")

BELL = Path("anon_inode:[eventfd]")
"""What the kernel calls one."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of whoever connects: nothing follows where the protocols differ."""

    protocol: int


class LinkRefused(Exception):
    """Who knocked cannot be taken in; the message says why."""


@dataclass(frozen=True, slots=True)
class End:
    """One end of a link."""

    connection: socket.socket
    """Becomes readable once the other end is gone."""
    wires: Wires

    def close(self) -> None:
        self.connection.close()
        self.wires.close()


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


def welcome(connection: socket.socket) -> End:
    """Take in who knocked, within a second; the connection stays open as long as the link. Raises LinkRefused."""
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.getuid():
        raise LinkRefused(f"user {user} knocked, this server is of user {os.getuid()}")
    connection.settimeout(1.0)
    descriptors: list[int] = []
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 4096, COUNT)
        hello = msgspec.msgpack.decode(data, type=Hello)
        if hello.protocol != PROTOCOL:
            raise LinkRefused(f"its words are of protocol {hello.protocol}, ours of {PROTOCOL}: install one release")
        wires = Wires.handed(descriptors)
        if Path(f"/proc/self/fd/{wires.bell}").readlink() != BELL:
            raise LinkRefused("its bell is none")
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        os.set_blocking(wires.bell, False)
    except (OSError, msgspec.DecodeError, LineBroken, LinkRefused) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise LinkRefused(str(error)) from None
    connection.setblocking(False)
    return End(connection, wires)


def knock(path: Path) -> End:
    """Open a link with the server that listens at `path`. Raises OSError while none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    end = End(connection, Wires.new())
    try:
        socket.send_fds(connection, [msgspec.msgpack.encode(Hello(PROTOCOL))], end.wires.descriptors)
    except OSError:
        end.close()
        raise
    return end
