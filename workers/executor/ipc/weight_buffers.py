"""Weight buffers: policy versions in memory that executor and engine share.

One serves; the next version is written to the other.

Keeps true
- Bytes are not converted; tensors are views of the shared memory, not copies.
- A buffer is written only while no engine computes from it: the buffer whose version serves is not changed.
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
    """Copy the tensors into the buffer of `descriptor`, over its earlier content. Return where each tensor lies."""
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
    """The tensors of a version in the buffer of `descriptor`."""

    descriptor: int
    layout: Sequence[TensorLayout]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors. The tensors keep the buffer mapped, and touch its pages only when they are read."""
        memory = mmap.mmap(self.descriptor, 0)
        for entry in self.layout:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            count = math.prod(entry.shape)
            yield entry.name, torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
