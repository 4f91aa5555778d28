"""The memory that executor and engine share: a ring buffer in each direction, and the descriptors of the channel.

Keeps true
- Neither side waits for the other: a full ring buffer refuses a whole message, and an empty ring buffer yields none.
- Messages are read completely and in order, at whatever point either side is killed.
- Nothing is left on the machine: the memory has no name, and is freed with the last process that holds it.
- Neither side can shrink memory that the other has mapped, which would kill the other: the memory is sealed.

A message is visible when the writer's position is past it: data first, then position. x86 keeps this order of stores;
on other processors, writes and reads of an `os.eventfd` between the two order them as well.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

HEADER_BYTES = 128
"""Size of the two positions, each on its own cache line."""

LENGTH = struct.Struct("<I")

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class RingBufferFull(Exception):
    """The ring buffer has no room; the message was not written."""


class SharedMemoryInvalid(Exception):
    """A descriptor is not sealed shared memory, or its content was not written by `RingBuffer.write`."""


class RingBuffer:
    """One end of a ring buffer with one writer and one reader; both processes map the same memory."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: memory of `create_ring_memory`, valid in this process. Raises SharedMemoryInvalid."""
        check_sealed(descriptor)
        self._memory = mmap.mmap(descriptor, 0)
        self._capacity = len(self._memory) - HEADER_BYTES
        view = memoryview(self._memory)
        self._positions = view[:HEADER_BYTES].cast("Q")
        """Index 0: total bytes written. Index 8: total bytes read."""
        self._data = view[HEADER_BYTES:]

    def write(self, message: bytes) -> None:
        """Write one message. Raises RingBufferFull."""
        written, read = self._positions[0], self._positions[8]
        size = LENGTH.size + len(message)
        if size > self._capacity - (written - read):
            raise RingBufferFull
        self._put(written, LENGTH.pack(len(message)))
        self._put(written + LENGTH.size, message)
        self._positions[0] = written + size

    def read(self) -> Iterator[bytes]:
        """Yield the messages that are there at the call. Raises SharedMemoryInvalid."""
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
    """Return a descriptor of shared memory for a ring buffer of `size` bytes of messages and their lengths."""
    return create_sealed_memory(HEADER_BYTES + size, name)


def create_sealed_memory(size: int, name: str) -> int:
    """Return a descriptor of `size` bytes of shared memory, which can grow and cannot shrink.

    `name` is only a label in /proc.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def check_sealed(descriptor: int) -> None:
    """Raise SharedMemoryInvalid if `descriptor` is not memory that is sealed against shrinking."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise SharedMemoryInvalid("a descriptor of something else than shared memory") from None
    if seals & SEALS != SEALS:
        raise SharedMemoryInvalid("shared memory that can be taken away")


RING_BUFFER_BYTES = 8 << 20
"""Size of each ring buffer: holds several of the largest turns that a record can have."""

DESCRIPTOR_COUNT = 5
"""Number of descriptors in a `ChannelFds`."""


@dataclass(frozen=True, slots=True)
class ChannelFds:
    """The descriptors of a channel, valid in this process."""

    commands: int
    """Ring buffer to the engine."""
    reports: int
    """Ring buffer from the engine."""
    wake_event: int
    """An eventfd, written after each command because the engine may sleep."""
    weights_0: int
    weights_1: int
    """Weight buffers: shared memory that grows to hold one policy version each."""

    @classmethod
    def create(cls) -> "ChannelFds":
        """Create a channel. The other process inherits the descriptors by a fork, or receives them over a socket."""
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
        """Check the descriptors that another process has sent, in the order of `descriptors`.

        Raises SharedMemoryInvalid if their number is wrong, or a memory is not sealed.
        """
        if len(descriptors) != DESCRIPTOR_COUNT:
            raise SharedMemoryInvalid(f"{len(descriptors)} descriptors came, not {DESCRIPTOR_COUNT}")
        channel = cls(*descriptors)
        for memory_of in (channel.commands, channel.reports, *channel.weight_buffers):
            check_sealed(memory_of)
        return channel

    @property
    def weight_buffers(self) -> tuple[int, int]:
        """Descriptors of the two weight buffers."""
        return self.weights_0, self.weights_1

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All descriptors, in the order in which they are sent."""
        return tuple(astuple(self))

    def wake_engine(self) -> None:
        """Wake the engine."""
        os.eventfd_write(self.wake_event, 1)

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)
