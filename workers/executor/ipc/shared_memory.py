"""The memory that an executor's two processes share: a ring buffer each way, the descriptors of all of it.

Keeps true
- Neither side waits for the other: a full ring buffer refuses a message whole, an empty one has none.
- What is read is what was written, whole and in order, whatever either side is in the middle of when it is killed.
- Nothing is left on the machine: the memory has no name, and goes with the last process that holds it.
- Neither side can take memory from under the other, which would end it: the memory is sealed against shrinking.

A message is visible once the writer's position has moved past it: data first, then position. That order holds on x86,
where stores are seen in the order in which they were made; elsewhere writes and reads of an `os.eventfd` between the
two order them as well.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

HEADER_BYTES = 128
"""Both positions, each on a cache line of its own."""

LENGTH = struct.Struct("<I")

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class RingBufferFull(Exception):
    """The reader is behind; the message was not written."""


class SharedMemoryInvalid(Exception):
    """What lies on the line was not written by `RingBuffer.write`."""


class RingBuffer:
    """One end of a line; both processes make one over the same file descriptor."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of `create_ring_memory`, in this process. Raises SharedMemoryInvalid."""
        check_sealed(descriptor)
        self._memory = mmap.mmap(descriptor, 0)
        self._capacity = len(self._memory) - HEADER_BYTES
        view = memoryview(self._memory)
        self._positions = view[:HEADER_BYTES].cast("Q")
        """Bytes ever written at 0, ever read at 8."""
        self._data = view[HEADER_BYTES:]

    def write(self, message: bytes) -> None:
        """Raises RingBufferFull."""
        written, read = self._positions[0], self._positions[8]
        size = LENGTH.size + len(message)
        if size > self._capacity - (written - read):
            raise RingBufferFull
        self._put(written, LENGTH.pack(len(message)))
        self._put(written + LENGTH.size, message)
        self._positions[0] = written + size

    def read(self) -> Iterator[bytes]:
        """Every message that is there now. Raises SharedMemoryInvalid."""
        end = self._positions[0]
        while (at := self._positions[8]) < end:
            (length,) = LENGTH.unpack(self._get(at, LENGTH.size))
            if at + LENGTH.size + length > end or end - at > self._capacity:
                raise SharedMemoryInvalid(f"a message of {length} bytes at {at}, of {end}")
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


def create_ring_memory(size: int, name: str) -> int:
    """A descriptor of shared memory for a line that holds `size` bytes of messages and their lengths."""
    return create_sealed_memory(HEADER_BYTES + size, name)


def create_sealed_memory(size: int, name: str) -> int:
    """A descriptor of shared memory without a name, of that many bytes; it may grow and never shrinks."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def check_sealed(descriptor: int) -> None:
    """Raises SharedMemoryInvalid for memory that another process could still shrink."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise SharedMemoryInvalid("a descriptor of something else than shared memory") from None
    if seals & SEALS != SEALS:
        raise SharedMemoryInvalid("shared memory that can be taken away")


RING_BUFFER_BYTES = 8 << 20
"""Of each line: several of the largest turns that a record holds."""

DESCRIPTOR_COUNT = 5
"""Descriptors that a `ChannelFds` has."""


@dataclass(frozen=True, slots=True)
class ChannelFds:
    """Descriptors, valid in this process."""

    commands: int
    """Of the line to the engine."""
    reports: int
    """Of the line from it."""
    wake_event: int
    """An eventfd, rung after an order for an engine that may be asleep."""
    weights_0: int
    weights_1: int
    """Shared memory that grows to hold a policy version each."""

    @classmethod
    def create(cls) -> "ChannelFds":
        """Made once, by the process that the other is forked from, or that hands them to it."""
        lines = (
            create_ring_memory(RING_BUFFER_BYTES, "rose-orders"),
            create_ring_memory(RING_BUFFER_BYTES, "rose-reports"),
        )
        return cls(
            *lines,
            os.eventfd(0, os.EFD_CLOEXEC),
            create_sealed_memory(0, "rose-buffer-0"),
            create_sealed_memory(0, "rose-buffer-1"),
        )

    @classmethod
    def from_descriptors(cls, descriptors: Sequence[int]) -> "ChannelFds":
        """Of descriptors that another process has handed over, in their order. Raises SharedMemoryInvalid."""
        if len(descriptors) != DESCRIPTOR_COUNT:
            raise SharedMemoryInvalid(f"{len(descriptors)} descriptors came, not {DESCRIPTOR_COUNT}")
        channel = cls(*descriptors)
        for memory_of in (channel.commands, channel.reports, *channel.weight_buffers):
            check_sealed(memory_of)
        return channel

    @property
    def weight_buffers(self) -> tuple[int, int]:
        return self.weights_0, self.weights_1

    @property
    def descriptors(self) -> tuple[int, ...]:
        """In the order in which they are handed over."""
        return tuple(astuple(self))

    def wake_engine(self) -> None:
        """Wake the engine."""
        os.eventfd_write(self.wake_event, 1)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
