"""Giving the memory of KV blocks back to the system, on a CPU.

Keeps true: only pages that lie whole within what is named are given back; the next touch of one finds zeros.

vLLM lays each layer's blocks side by side, 64 bytes off a page's beginning, so a run of blocks keeps up to a page at
each of its ends.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pages:
    """Of one KV cache in this process."""

    def __init__(self, begins: int, config: KVCacheConfig) -> None:
        """Of a cache that begins at this address."""
        self._regions = [
            (begins + tensor.offset + layer * tensor.layer_stride, tensor.block_stride)
            for tensor in config.kv_cache_tensors
            for layer in range(len(tensor.layers))
        ]
        """Of each layer, where its blocks begin, and the bytes from one to the next."""

    def give_back(self, blocks: Iterable[int]) -> None:
        """Nobody may hold these blocks. Raises OSError."""
        for first, end in _runs(sorted(blocks)):
            for region, stride in self._regions:
                _give_back(region + first * stride, region + end * stride)


def give_all_back(caches: Iterable[Tensor]) -> None:
    """Of caches that nobody reads again, before they are freed: the C library keeps what lies at the end of a thread's
    arena, once for each arena in which one lay. What the system does not take, as of a process that has its memory
    locked, is freed all the same.
    """
    for storage in (cache.untyped_storage() for cache in caches):
        with suppress(OSError):
            _give_back(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _give_back(begin: int, end: int) -> None:
    """Raises OSError."""
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and _madvise(first, size, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def lie_side_by_side(config: KVCacheConfig) -> bool:
    """Whether the blocks of a layer do, with no other layer's between them."""
    return all(tensor.block_stride <= tensor.layer_stride for tensor in config.kv_cache_tensors)


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Of ascending numbers, each gapless run: its first, and the one behind its last."""
    first = None
    for place, block in enumerate(blocks):
        if first is None:
            first = block
        if place + 1 == len(blocks) or blocks[place + 1] != block + 1:
            yield first, block + 1
            first = None
