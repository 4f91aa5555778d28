"""A line between an engine's process and the one beside it: messages over shared memory, one writer, one reader.

Keeps true
- Neither side ever waits for the other: a full line refuses a message whole, an empty one has none.
- What is read is what was written, whole and in order, whatever either side is in the middle of when it is killed.
- Nothing of it is left on the machine: the memory has no name, and goes with the last process that holds it.
- Neither side can take memory from under the other (which would end it): it is sealed against shrinking.

A message is visible once the writer's position has moved past it: data first, then position. That order holds on x86,
where stores are seen in the order in which they were made; elsewhere writes and reads of an `os.eventfd` between the
two order them as well.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

HEADER_BYTES = 128
"""Both positions, each on a cache line of its own."""

LENGTH = struct.Struct("<I")

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class LineFull(Exception):
    """The reader is behind; the message was not written."""


class LineBroken(Exception):
    """What lies on the line was not written by `Line.write`."""


class Line:
    """One end of a line; both processes make one over the same file descriptor."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of `memory`, in this process. Raises LineBroken."""
        check_sealed(descriptor)
        self._memory = mmap.mmap(descriptor, 0)
        self._capacity = len(self._memory) - HEADER_BYTES
        view = memoryview(self._memory)
        self._positions = view[:HEADER_BYTES].cast("Q")
        """Bytes ever written at 0, ever read at 8."""
        self._data = view[HEADER_BYTES:]

    def write(self, message: bytes) -> None:
        """Raises LineFull."""
        written, read = self._positions[0], self._positions[8]
        size = LENGTH.size + len(message)
        if size > self._capacity - (written - read):
            raise LineFull
        self._put(written, LENGTH.pack(len(message)))
        self._put(written + LENGTH.size, message)
        self._positions[0] = written + size

    def read(self) -> Iterator[bytes]:
        """Every message that is there now. Raises LineBroken."""
        end = self._positions[0]
        while (at := self._positions[8]) < end:
            (length,) = LENGTH.unpack(self._get(at, LENGTH.size))
            if at + LENGTH.size + length > end or end - at > self._capacity:
                raise LineBroken(f"a message of {length} bytes at {at}, of {end}")
            message = self._get(at + LENGTH.size, length)
            self._positions[8] = at + LENGTH.size + length
            yield message

    def __bool__(self) -> bool:
        """Whether there is a message; costs a tenth of a microsecond."""
        return self._positions[0] != self._positions[8]

    def _put(self, position: int, data: bytes) -> None:
        at = position % self._capacity
        first = min(len(data), self._capacity - at)
        self._data[at : at + first] = data[:first]
        self._data[: len(data) - first] = data[first:]

    def _get(self, position: int, length: int) -> bytes:
        at = position % self._capacity
        first = min(length, self._capacity - at)
        return bytes(self._data[at : at + first]) + bytes(self._data[: length - first])


def memory(size: int, name: str) -> int:
    """A descriptor of shared memory for a line that holds `size` bytes of messages and their lengths."""
    return sealed(HEADER_BYTES + size, name)


def sealed(size: int, name: str) -> int:
    """A descriptor of shared memory without a name, of that many bytes; it may grow and never shrinks."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def check_sealed(descriptor: int) -> None:
    """Raises LineBroken for memory that another process could still shrink."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise LineBroken("a descriptor of something else than shared memory") from None
    if seals & SEALS != SEALS:
        raise LineBroken("shared memory that can be taken away")
