"""Policy versions in memory that an executor's two processes share: one serves, the next is laid beside it.

Keeps true
- Bytes go in as they are and come out as they went in; tensors are views over the shared memory, no copies of it.
- A slab is written only while nobody computes from it: the one whose version serves stays as it is.
"""

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a cache line."""


class Laid(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies."""

    name: str
    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    begin: int
    """In bytes from the beginning of the slab."""


def lay(slab: int, tensors: Mapping[str, Tensor]) -> tuple[Laid, ...]:
    """Copy the tensors into the slab with this descriptor; what lay there before is overwritten."""
    layout, end = [], 0
    for name, tensor in tensors.items():
        layout.append(Laid(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if os.fstat(slab).st_size < end:
        os.ftruncate(slab, end)
    for name, there in Lying(slab, layout):
        there.copy_(tensors[name])
    return tuple(layout)


@dataclass(frozen=True, slots=True)
class Lying:
    """A version that lies in the slab with this descriptor."""

    slab: int
    layout: Sequence[Laid]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name. They keep the slab's memory mapped, and touch it only where they are read."""
        memory = mmap.mmap(self.slab, 0)
        for laid in self.layout:
            dtype: torch.dtype = getattr(torch, laid.dtype)
            count = math.prod(laid.shape)
            yield laid.name, torch.frombuffer(memory, dtype=dtype, count=count, offset=laid.begin).view(laid.shape)
