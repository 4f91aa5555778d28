"""Policy versions in memory that an executor's two processes share: one serves, the next is laid beside it.

Keeps true
- Bytes go in as they are and come out as they went in; tensors are views over the shared memory, no copies of it.
- A buffer is written only while nobody computes from it: the one whose version serves stays as it is.
"""

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.workers.executor.ipc.messages import TensorLayout

ALIGNMENT = 64
"""Bytes; a cache line."""


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
