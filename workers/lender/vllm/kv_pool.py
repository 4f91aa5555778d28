"""The KV blocks of one tenant, of which some are withheld from the tenant.

Keeps true
- Every block is in one state: held by requests, free, kept (a cached prefix that no request holds and that may still be
  found) or withheld (neither found nor used).
- The pages of withheld blocks are returned to the system in bounded pieces, the longest withheld blocks first.
- Free blocks are withheld in the order in which vLLM would evict them: blocks without a prefix, then prefixes by age.
  Kept prefixes are withheld by age too.

Units: blocks, unless a name says bytes.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from torch import Tensor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class CachePages:
    """The memory pages of one KV cache in this process."""

    def __init__(self, begins: int, config: KVCacheConfig) -> None:
        """`begins`: address of the cache."""
        self._regions = [
            (begins + tensor.offset + layer * tensor.layer_stride, tensor.block_stride)
            for tensor in config.kv_cache_tensors
            for layer in range(len(tensor.layers))
        ]
        """Address of the first block, and bytes from one block to the next, for each layer."""

    def return_blocks(self, blocks: Iterable[int]) -> None:
        """Return the pages of `blocks`, which no request may hold, to the system. Raises OSError."""
        for first, end in _runs(sorted(blocks)):
            for region, stride in self._regions:
                _return_range(region + first * stride, region + end * stride)


def return_all_pages(caches: Iterable[Tensor]) -> None:
    """Return the pages of caches that are about to be freed and are not read again.

    The C library would keep memory at the end of a thread's arena, once for each arena with a cache. Pages that the
    system does not take, as in a process with locked memory, are left to the free.
    """
    for storage in (cache.untyped_storage() for cache in caches):
        with suppress(OSError):
            _return_range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _return_range(start: int, end: int) -> None:
    """Return the whole pages between two addresses. Raises OSError."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and _madvise(first, size, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def blocks_are_contiguous(config: KVCacheConfig) -> bool:
    """Whether the blocks of each layer are contiguous, without blocks of other layers in between."""
    return all(tensor.block_stride <= tensor.layer_stride for tensor in config.kv_cache_tensors)


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the gapless runs of ascending numbers: the first number, and the last number plus one."""
    first = None
    for place, block in enumerate(blocks):
        if first is None:
            first = block
        if place + 1 == len(blocks) or blocks[place + 1] != block + 1:
            yield first, block + 1
            first = None


class KvPool:
    """vLLM's block pool of one tenant, with kept and withheld blocks."""

    def __init__(self, pool: BlockPool, block_bytes: int, pages: CachePages | None) -> None:
        """`pages`: pages of the cache; None if they cannot be returned to the system."""
        self.block_bytes = block_bytes
        self._pool = pool
        self._pages = pages
        self._withheld: list[KVCacheBlock] = []
        self._returned = 0
        """Number of blocks at the start of `_withheld` whose pages are returned."""
        self._kept: list[KVCacheBlock] = []
        """Kept blocks, the oldest first."""

    @property
    def blocks(self) -> int:
        """All blocks, without the one that vLLM reserves."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def available(self) -> int:
        """Blocks that are not withheld."""
        return self.blocks - len(self._withheld)

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return int(self._pool.get_num_free_blocks())

    @property
    def used(self) -> int:
        """Blocks that requests hold, as of the last `settle`."""
        return self.available - self.free - len(self._kept)

    @property
    def cached(self) -> int:
        """Free blocks that hold a prefix: an estimate, which counts every used block as a cached one."""
        return min(self.free, max(0, len(self._pool.cached_block_hash_to_block) - self.used))

    @property
    def has_unreturned_pages(self) -> bool:
        """Whether withheld blocks have pages that are not returned."""
        return self._pages is not None and self._returned < len(self._withheld)

    def settle(self) -> None:
        """Release the kept blocks that a request has found. `used` is exact after that."""
        found = [block for block in self._kept if block.ref_cnt > 1]
        if found:
            self._release(found)

    def withhold(self, count: int) -> None:
        """Withhold `count` blocks in total: withhold further free blocks, or free withheld ones."""
        more = count - len(self._withheld)
        if more > 0:
            self._withheld += self._pool.get_new_blocks(more)
        elif more < 0:
            back = self._withheld[more:]
            del self._withheld[more:]
            self._returned = min(self._returned, len(self._withheld))
            self._pool.free_blocks(back)

    def limit(self, most_used: int, most_available: int) -> None:
        """Let requests hold `most_used` blocks, and withhold the rest, up to kept prefixes.

        `most_available` limits the blocks of requests and the kept prefixes together. Call `settle` before, and abort
        requests above `most_used`.
        """
        wanted_free, wanted_kept = max(0, most_used - self.used), most_available - max(most_used, self.used)
        surplus = len(self._kept) - max(0, wanted_kept)
        if surplus > 0:
            again = min(surplus, max(0, wanted_free - self.free))
            self._release(self._kept[len(self._kept) - again :])
            self._withhold_kept(surplus - again)
        surplus = self.free - wanted_free
        if surplus > 0:
            self._keep(min(surplus, wanted_kept - len(self._kept)))
        self.withhold(len(self._withheld) + self.free - wanted_free)

    def return_pages(self, most_bytes: int) -> None:
        """Return the pages of withheld blocks, up to `most_bytes` and at least one block. Raises OSError."""
        if self._pages is None or self._returned == len(self._withheld):
            return
        end = self._returned + max(1, most_bytes // self.block_bytes)
        piece = self._withheld[self._returned : end]
        self._pages.return_blocks(block.block_id for block in piece)
        self._returned += len(piece)

    def _release(self, blocks: list[KVCacheBlock]) -> None:
        going = {block.block_id for block in blocks}
        self._kept = [block for block in self._kept if block.block_id not in going]
        self._pool.free_blocks(blocks)

    def _withhold_kept(self, count: int) -> None:
        oldest, self._kept = self._kept[:count], self._kept[count:]
        self._pool.evict_blocks({block.block_id for block in oldest})
        self._withheld += oldest

    def _keep(self, count: int) -> None:
        """Keep the youngest free blocks that hold a prefix, up to `count`."""
        if count > 0:
            cached = [
                block for block in self._pool.free_block_queue.get_all_free_blocks() if block.block_hash is not None
            ]
            kept = cached[-count:]
            self._pool.touch(kept)
            self._kept += kept
