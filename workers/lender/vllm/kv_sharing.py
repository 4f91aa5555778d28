"""The KV memory that serving and its guest share, divided between two serving steps.

Keeps true
- Before every step serving has the blocks that the step may take: serving never waits for a block of the guest.
- Serving's scheduling is not changed by the observation of its memory.
- As many bytes are withheld from serving's pool as are available in the guest's pool. Pages that neither may use are
  returned to the system: at once if the guest grows, within the next passes after a cut.
- The guest's requests hold no more than the budget. Turns above the budget are aborted with the tokens that were
  sampled, and so are turns that could never fit in the budget.
- Every block of a pool is in one state: held by requests, free, kept (a cached prefix that no request holds and that
  may still be found) or withheld (neither found nor used).
- The pages of withheld blocks are returned to the system in bounded pieces, the longest withheld blocks first.
- Free blocks are withheld in the order in which vLLM would evict them: blocks without a prefix, then prefixes by age.
  Kept prefixes are withheld by age too.

The decisions are those of `rose.workers.lender.kv_budget`. Units: blocks, unless a name says bytes.
"""

import ctypes
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from torch import Tensor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from rose.workers.executor.ipc.messages import NO_LIMIT, LendingStats
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.engine_core import kv_cache_address
from rose.workers.executor.vllm.types import block_bytes
from rose.workers.lender.config import LendConfig
from rose.workers.lender.kv_budget import KvBudget, KvLimits, KvShares, KvUsage

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


PIECE_BYTES = 2 << 20
"""Growth in one tick of the guest, and pages returned in one pass: a third of a millisecond each."""

CUT = "cut"
"""Reason of a guest turn that was aborted for the budget."""


class ServingMemory:
    """The KV memory of one serving engine core."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        config = core.scheduler.kv_cache_config
        within = isinstance(core.model_executor, UniProcExecutor) and blocks_are_contiguous(config)
        ranks = core.vllm_config.parallel_config.world_size
        self.transferable = within
        """Whether the cache is in this process, so that its bytes can be lent."""
        pages = CachePages(kv_cache_address(core), config) if within else None
        self.pool = KvPool(self._manager.block_pool, ranks * block_bytes(config), pages)
        self._hit_tokens = 0
        self._wrap()

    def _wrap(self) -> None:
        record, reset = self._manager.record_prefix_cache_stats, self._manager.block_pool.reset_prefix_cache

        def record_found(request: Request, num_hits: int) -> None:
            self._hit_tokens += num_hits
            record(request, num_hits)

        def reset_all() -> bool:
            self.pool.withhold(0)  # until the next decision: vLLM resets a cache only if no block is held
            done: bool = reset()
            return done

        self._manager.record_prefix_cache_stats = record_found
        self._manager.block_pool.reset_prefix_cache = reset_all
        self._manager.block_pool.get_usage = lambda: self.pool.used / max(1, self.pool.blocks)

    @property
    def wanted_blocks(self) -> int:
        """Most blocks that the next step may take, for running requests and for waiting requests that can start."""
        size, running = self._scheduler.block_size, self._scheduler.running
        blocks: int = self._manager.watermark_blocks if self._scheduler.waiting else 0
        for request in running:
            tokens = request.num_tokens + request.num_output_placeholders  # of batches in flight
            blocks += -(-tokens // size) - -(-request.num_computed_tokens // size)
        for request in islice(self._scheduler.waiting, self._scheduler.max_num_running_reqs - len(running)):
            blocks += -(-request.num_tokens // size)
        return blocks

    def take_hit_bytes(self) -> int:
        """Return the bytes that serving found in its prefix cache since the last call."""
        found, self._hit_tokens = self._hit_tokens, 0
        return found * self.pool.block_bytes // int(self._scheduler.block_size)


def guest_pool(engine: Engine) -> KvPool:
    """Return the guest's KV pool, with all blocks withheld and their pages returned to the system.

    Takes a while, as a part of the build.
    """
    cache = engine.cache
    begins = cache.address if blocks_are_contiguous(cache.config) else None
    pages = None if begins is None else CachePages(begins, cache.config)
    pool = KvPool(cache.pool, cache.block_bytes, pages)
    pool.withhold(pool.blocks)
    pool.return_pages(NO_LIMIT)
    return pool


class KvSharing:
    """The shared KV memory of serving and one guest. Times are those of `time.monotonic`."""

    def __init__(self, serving: ServingMemory, engine: Engine, guest: KvPool, config: LendConfig) -> None:
        self._serving = serving
        self._engine = engine
        self._guest = guest
        own = guest.blocks * guest.block_bytes
        total = serving.pool.blocks * serving.pool.block_bytes + (0 if serving.transferable else own)
        bounds = KvLimits(
            total_bytes=total,
            pool_bytes=min(own, total),
            block_bytes=guest.block_bytes,
            headroom_bytes=int(config.memory.headroom * total),
            quiet_seconds=config.memory.quiet_seconds,
            piece_bytes=PIECE_BYTES,
            transferable=serving.transferable,
        )
        self._budget = KvBudget(bounds)
        self._shares = KvShares(0, 0, total, 0, frozen=False, can_grow=False)
        self._stats = LendingStats()
        self._changed = False
        """Whether a change must be reported at once."""
        self._cut = False
        """Whether a cut was decided and is not carried out yet."""
        self._settled = -1
        """Number of engine steps when the guest's pool was last settled."""

    @property
    def can_grow(self) -> bool:
        """Whether the budget would grow in a decision that allows growth."""
        return self._shares.can_grow

    @property
    def busy(self) -> bool:
        """Whether the next pass has work: growth, or pages to return."""
        return self._shares.can_grow or self._guest.has_unreturned_pages

    def rebalance(
        self, give_up: Callable[[str, str], None] | None, *, most_bytes: int = NO_LIMIT, grow: bool = False
    ) -> None:
        """Decide the shares and carry them out. Raises OSError.

        `give_up`: aborts a turn of the engine, by name and with a reason; None without a sidecar, which takes all
        memory back. `most_bytes`: KV bytes that are granted. `grow`: whether the budget may grow.
        """
        began = time.perf_counter()
        self._decide(most_bytes if give_up is not None else 0, grow=grow)
        if give_up is not None:
            self._abort_above_budget(give_up)
        self._apply_shares()
        self._note(time.perf_counter() - began)

    def rebalance_mid_step(self, *, most_bytes: int) -> bool:
        """Decide the shares and carry them out during a guest step, in which no turn can be aborted.

        Return False, with nothing carried out, if a turn would have to be aborted. Raises OSError.
        """
        began = time.perf_counter()
        self._decide(most_bytes, grow=False)
        if self._exceeds_budget:
            return False
        self._apply_shares()
        self._note(time.perf_counter() - began)
        return True

    def _decide(self, most_bytes: int, *, grow: bool) -> None:
        before = self._shares
        if self._engine.steps != self._settled:  # a check of each kept block before each serving step costs too much
            self._settled = self._engine.steps
            self._guest.settle()
        self._shares = shares = self._budget.decide(
            self._usage(),
            most_bytes=most_bytes,
            policy_version=self._engine.version,
            grow=grow,
            now=time.monotonic(),
        )
        self._cut |= shares.cuts > 0
        self._changed |= shares.cuts > 0 or shares.frozen is not before.frozen

    def _apply_shares(self) -> None:
        guest, serving = self._guest, self._serving
        guest.limit(self._budget_blocks, self._shares.kept_bytes // guest.block_bytes)
        if serving.transferable:
            serving.pool.withhold(-(-guest.available * guest.block_bytes // serving.pool.block_bytes))
            serving.pool.return_pages(PIECE_BYTES)
        guest.return_pages(PIECE_BYTES)

    @property
    def _budget_blocks(self) -> int:
        return self._shares.budget_bytes // self._guest.block_bytes

    @property
    def room_tokens(self) -> int:
        """Tokens of the longest turn that fits in the budget."""
        lengths = range(1, self._engine.longest_tokens + 1)
        return bisect_right(lengths, self._budget_blocks, key=self._engine.cache.blocks_of)

    @property
    def _exceeds_budget(self) -> bool:
        """Whether turns hold more than the budget, or a turn could never fit in it."""
        return self._guest.used > self._budget_blocks or (
            not self._fits(self._engine.longest_tokens)
            and not all(self._fits(turn.most_tokens) for turn in self._engine.held_turns())
        )

    def _fits(self, tokens: int) -> bool:
        """Whether a turn of this length fits in the budget."""
        return self._engine.cache.blocks_of(tokens) <= self._budget_blocks

    def take_changed(self) -> bool:
        """Return whether a change must be reported at once, and reset it."""
        news, self._changed = self._changed, False
        return news

    def take_stats(self) -> LendingStats:
        """Return the budget now, and the counts since the last call."""
        stats, self._stats = self._stats, LendingStats()
        stats.budget_bytes, stats.frozen = self._shares.budget_bytes, self._shares.frozen
        return stats

    def close(self) -> None:
        """Give all KV memory to serving, because the guest is gone."""
        self._serving.pool.withhold(0)

    def _usage(self) -> KvUsage:
        serving, guest = self._serving.pool, self._guest
        return KvUsage(
            serving_bytes=serving.used * serving.block_bytes,
            serving_wanted_bytes=self._serving.wanted_blocks * serving.block_bytes,
            serving_cached_bytes=serving.cached * serving.block_bytes,
            serving_hit_bytes=self._serving.take_hit_bytes(),
            guest_bytes=guest.used * guest.block_bytes,
            guest_cached_bytes=(guest.available - guest.used) * guest.block_bytes,
        )

    def _abort_above_budget(self, give_up: Callable[[str, str], None]) -> None:
        """Abort turns that could never fit in the budget, and turns with the fewest tokens until the budget holds."""
        if not self._exceeds_budget:
            return
        for turn in sorted(self._engine.held_turns(), key=lambda turn: turn.held_tokens):
            if not self._fits(turn.most_tokens) or (turn.held_tokens and self._guest.used > self._budget_blocks):
                give_up(turn.key, CUT)
                self._stats.preempted += 1

    def _note(self, seconds: float) -> None:
        self._stats.looks += 1
        self._stats.look_seconds += seconds
        if self._cut:
            self._cut = False
            self._stats.cuts += 1
            self._stats.cut_seconds += seconds
