"""The KV memory that serving and its guest share, divided between two serving steps.

Keeps true
- Before every step serving has the blocks that the step may take: serving never waits for a block of the guest.
- Serving's scheduling is not changed by the observation of its memory.
- Where the guest has a view of serving's cache (`shared_cache`), a block is available to the guest exactly while it is
  withheld from serving's pool. Lending and taking back are changes of two lists: no byte is moved or freed.
- The guest's requests hold no more than the budget. Turns above the budget are aborted with the tokens that were
  sampled, and so are turns that could never fit in the budget.
- Every block of a pool is in one state: held by requests, free, kept (a cached prefix that no request holds and that
  may still be found) or withheld (neither found nor used).
- Free blocks are withheld in the order in which vLLM would evict them: blocks without a prefix, then prefixes by age.
  Kept prefixes are withheld by age too.

The decisions are those of `rose.workers.lender.kv_budget`. Units: blocks, unless a name says bytes.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from rose.workers.executor.ipc.messages import NO_LIMIT, LendingStats
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.engine_core import in_process_worker
from rose.workers.executor.vllm.model_runner import zero_new_blocks
from rose.workers.executor.vllm.types import block_bytes
from rose.workers.lender.config import LendConfig
from rose.workers.lender.kv_budget import KvBudget, KvLimits, KvShares, KvUsage
from rose.workers.lender.vllm.shared_cache import layout_of


class KvPool:
    """vLLM's block pool of one tenant, with kept and withheld blocks."""

    def __init__(self, pool: BlockPool, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._pool = pool
        self._withheld: dict[int, KVCacheBlock] = {}
        """Withheld blocks by number."""
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
    def withheld(self) -> Sequence[int]:
        """Numbers of the withheld blocks, the longest withheld first."""
        return list(self._withheld)

    def settle(self) -> None:
        """Release the kept blocks that a request has found. `used` is exact after that."""
        found = [block for block in self._kept if block.ref_cnt > 1]
        if found:
            self._release(found)

    def withhold(self, count: int) -> list[int]:
        """Withhold `count` further blocks, which must be free. Return their numbers."""
        return self._withhold(self._pool.get_new_blocks(count))

    def release(self, numbers: Sequence[int]) -> None:
        """Make withheld blocks free."""
        self._pool.free_blocks([self._withheld.pop(number) for number in numbers])

    def with_all_free(self, call: Callable[[], bool]) -> bool:
        """Call a function of the pool that needs every block to be free. Return what the function returns."""
        blocks = list(self._withheld.values())
        self._pool.free_blocks(blocks)
        try:
            return call()
        finally:
            self._pool.touch(blocks)

    def limit(self, most_used: int, most_available: int) -> list[int]:
        """Withhold blocks so that requests hold at most `most_used`, up to kept prefixes. Return the blocks' numbers.

        `most_available` limits the blocks of requests and the kept prefixes together. Call `settle` before, and abort
        requests above `most_used`.
        """
        wanted_free, wanted_kept = max(0, most_used - self.used), most_available - max(most_used, self.used)
        surplus, withheld = len(self._kept) - max(0, wanted_kept), []
        if surplus > 0:
            again = min(surplus, max(0, wanted_free - self.free))
            self._release(self._kept[len(self._kept) - again :])
            withheld += self._withhold_kept(surplus - again)
        surplus = self.free - wanted_free
        if surplus > 0:
            self._keep(min(surplus, wanted_kept - len(self._kept)))
        return withheld + self.withhold(max(0, self.free - wanted_free))

    def _withhold(self, blocks: Sequence[KVCacheBlock]) -> list[int]:
        self._withheld.update((block.block_id, block) for block in blocks)
        return [block.block_id for block in blocks]

    def _release(self, blocks: list[KVCacheBlock]) -> None:
        going = {block.block_id for block in blocks}
        self._kept = [block for block in self._kept if block.block_id not in going]
        self._pool.free_blocks(blocks)

    def _withhold_kept(self, count: int) -> list[int]:
        oldest, self._kept = self._kept[:count], self._kept[count:]
        self._pool.evict_blocks({block.block_id for block in oldest})
        return self._withhold(oldest)

    def _keep(self, count: int) -> None:
        """Keep the youngest free blocks that hold a prefix, up to `count`."""
        if count > 0:
            cached = [
                block for block in self._pool.free_block_queue.get_all_free_blocks() if block.block_hash is not None
            ]
            kept = cached[-count:]
            self._pool.touch(kept)
            self._kept += kept


PIECE_BLOCKS = 256
"""Blocks by which the guest grows in one tick: a fraction of a millisecond."""

CUT = "cut"
"""Reason of a guest turn that was aborted for the budget."""


class ServingMemory:
    """The KV memory of one serving engine core."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        config = core.scheduler.kv_cache_config
        ranks = core.vllm_config.parallel_config.world_size
        self.layout = layout_of(config)
        """Where the blocks of the cache are on each rank; None if a guest cannot have a view of the cache."""
        within = isinstance(core.model_executor, UniProcExecutor)
        self.runner = in_process_worker(core).model_runner if within else None
        """vLLM's model runner, which has the cache; None if the cache is in other processes."""
        self.pool = KvPool(self._manager.block_pool, ranks * block_bytes(config))
        self._hit_tokens = 0
        self._was_lent: set[int] | None = None
        """Blocks that a guest may have written to since serving last had them; None before the first."""
        self._wrap()

    def _wrap(self) -> None:
        record, reset = self._manager.record_prefix_cache_stats, self._manager.block_pool.reset_prefix_cache

        def record_found(request: Request, num_hits: int) -> None:
            self._hit_tokens += num_hits
            record(request, num_hits)

        self._manager.record_prefix_cache_stats = record_found
        self._manager.block_pool.reset_prefix_cache = lambda: self.pool.with_all_free(reset)
        self._manager.block_pool.get_usage = lambda: self.pool.used / max(1, self.pool.blocks)

    def lend(self, count: int) -> list[int]:
        """Withhold `count` free blocks for the guest. Return their numbers."""
        numbers = self.pool.withhold(count)
        if current_platform.is_cpu():
            if self._was_lent is None:
                self._was_lent = set()
                self._zero_lent_blocks(self._was_lent)
            self._was_lent.update(numbers)
        return numbers

    def take_back(self, numbers: Sequence[int]) -> None:
        """Give lent blocks back to serving. On a GPU they are zeroed first; on a CPU when a request gets them."""
        if not current_platform.is_cpu():
            self.zero(numbers)
        self.pool.release(numbers)

    def zero(self, numbers: Sequence[int]) -> None:
        """Zero blocks of a cache in this process, on the current stream."""
        if numbers and self.layout is not None and self.runner is not None:
            self.layout.zero(self.runner.kv_caches[0].untyped_storage(), numbers)

    def _zero_lent_blocks(self, lent: set[int]) -> None:
        """Have serving's runners zero a block of `lent` when a request gets the block.

        The CPU kernel reads a whole block and weights the entries behind a request's last token with 0. What a guest
        has written there may be NaN as numbers of serving's type.
        """
        all_blocks, take = self._scheduler.needs_kv_cache_zeroing, self._manager.take_new_block_ids

        def take_lent() -> list[int]:
            found = [number for number in take() if all_blocks or number in lent]
            lent.difference_update(found)
            return found

        zero_new_blocks(self._scheduler)
        self._manager.take_new_block_ids = take_lent

    @property
    def wanted_blocks(self) -> int:
        """Most blocks that the next step may take, for running and waiting requests; never more than a step can get.

        If a seat is free, all waiting requests count: vLLM skips a request that cannot start (its adapter, grammar or
        prefix is not there) for the next one, and a request takes no seat while it receives its prefix. If no seat is
        free, vLLM looks at no waiting request. With speculative decoding a step also takes slots for drafted tokens. A
        request whose prefix another engine sends holds the blocks of the prefix already (`kv_holding_waiting`).
        """
        scheduler, running = self._scheduler, self._scheduler.running
        drafted = 1 + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens if scheduler.num_spec_tokens else 0
        blocks: int = scheduler._spec_decode_step_blocks
        most = self.pool.blocks - self.pool.used
        waiting = scheduler.waiting if len(running) < scheduler.max_num_active_reqs else ()
        if waiting or scheduler.kv_holding_waiting:
            blocks += self._manager.watermark_blocks
        for request in chain(running, scheduler.kv_holding_waiting):
            tokens = request.num_tokens + request.num_output_placeholders + drafted  # placeholders: batches in flight
            blocks += self._blocks_of(tokens) - self._blocks_of(request.num_computed_tokens)
        for request in waiting:
            if blocks >= most:  # a queue may be long
                break
            blocks += self._blocks_of(request.num_tokens + drafted)
        return min(blocks, most)

    def _blocks_of(self, tokens: int) -> int:
        """Return the blocks of a request in all groups of layers, also those that a window has left behind.

        The blocks of drafted states in recurrent layers do not count: a cache with such layers is never lent.
        """
        return sum(-(-tokens // size) for size in self._manager.coordinator.group_block_sizes)

    def take_hit_bytes(self) -> int:
        """Return the bytes that serving found in its prefix cache since the last call."""
        found, self._hit_tokens = self._hit_tokens, 0
        return sum(found * self.pool.block_bytes // size for size in self._manager.coordinator.group_block_sizes)


def guest_pool(engine: Engine) -> KvPool:
    """Return the guest's KV pool, with all blocks withheld."""
    pool = KvPool(engine.cache.pool, engine.cache.block_bytes)
    pool.withhold(pool.blocks)
    return pool


class KvSharing:
    """The shared KV memory of serving and one guest. Times are those of `time.monotonic`."""

    def __init__(
        self, serving: ServingMemory, engine: Engine, guest: KvPool, config: LendConfig, *, shared: bool
    ) -> None:
        """`guest`: all blocks are withheld. `shared`: whether the guest has a view of serving's cache."""
        self._serving = serving
        self._engine = engine
        self._guest = guest
        self._shared = shared
        total = serving.pool.blocks * serving.pool.block_bytes
        own = guest.blocks * guest.block_bytes
        bounds = KvLimits(
            total_bytes=total if shared else total + own,
            pool_bytes=min(own, config.kv_cache_bytes // guest.block_bytes * guest.block_bytes),
            block_bytes=guest.block_bytes,
            headroom_bytes=int(config.memory.headroom * total),
            quiet_seconds=config.memory.quiet_seconds,
            piece_bytes=PIECE_BLOCKS * guest.block_bytes,
            transferable=shared,
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

    def rebalance(
        self, give_up: Callable[[str, str], None] | None, *, most_bytes: int = NO_LIMIT, grow: bool = False
    ) -> None:
        """Decide the shares and carry them out.

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

        Return False, with nothing carried out, if a turn would have to be aborted.
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
        given_back = guest.limit(self._budget_blocks, self._shares.kept_bytes // guest.block_bytes)
        if self._shared:
            serving.take_back(given_back)
        if (missing := self._budget_blocks - guest.used - guest.free) > 0:
            guest.release(serving.lend(missing) if self._shared else guest.withheld[-missing:])

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
        self._serving.take_back(self._serving.pool.withheld)

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
