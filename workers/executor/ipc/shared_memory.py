"""Policy versions in memory that an executor's two processes share: one serves, the next is laid beside it.

Keeps true
- Bytes go in as they are and come out as they went in; tensors are views over the shared memory, no copies of it.
- A buffer is written only while nobody computes from it: the one whose version serves stays as it is.
"""

import fcntl
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import msgspec
import torch
from torch import Tensor

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


ALIGNMENT = 64
"""Bytes; a cache line."""


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies."""

    name: str
    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    offset: int
    """In bytes from the beginning of the buffer."""


def write_tensors(descriptor: int, tensors: Mapping[str, Tensor]) -> tuple[TensorLayout, ...]:
    """Copy the tensors into the buffer with this descriptor; what lay there before is overwritten."""
    layout, end = [], 0
    for name, tensor in tensors.items():
        layout.append(TensorLayout(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if os.fstat(descriptor).st_size < end:
        os.ftruncate(descriptor, end)
    for name, target in StagedTensors(descriptor, layout):
        target.copy_(tensors[name])
    return tuple(layout)


@dataclass(frozen=True, slots=True)
class StagedTensors:
    """A version that lies in the buffer with this descriptor."""

    descriptor: int
    layout: Sequence[TensorLayout]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name. They keep the buffer's memory mapped, and touch it only where they are read."""
        memory = mmap.mmap(self.descriptor, 0)
        for entry in self.layout:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            count = math.prod(entry.shape)
            yield entry.name, torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
