"""Blocks of a tenant: none is lost, kept blocks are found, and withheld blocks hold no prefix."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from rose.workers.lender.vllm.kv_sharing import KvPool

BLOCKS = 40
BLOCK_BYTES = 4096


class Requests(RuleBasedStateMachine):
    """Requests that take, hit and free blocks, while the pool is resized between any two of them."""

    @initialize()
    def begin(self) -> None:
        self.vllm = BlockPool(BLOCKS, enable_caching=True, hash_block_size=1)
        self.pool = KvPool(self.vllm, BLOCK_BYTES)
        self.held: list[list[KVCacheBlock]] = []
        self.written: dict[bytes, int] = {}
        """The block of each prefix when it was written."""
        self.names = 0
        self.most_used = self.most_there = self.pool.blocks

    @rule(count=st.integers(1, 12))
    def takes(self, count: int) -> None:
        if count <= self.pool.free:
            self.held.append(self.vllm.get_new_blocks(count))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), full=st.integers(0, 12))
    def ends(self, which: int, full: int) -> None:
        """End a request with this many full blocks, which vLLM then caches."""
        blocks = self.held.pop(which % len(self.held))
        for block in blocks[:full]:
            if block.block_hash is None:
                self.names += 1
                name = make_block_hash_with_group_id(BlockHash(str(self.names).encode()), 0)
                self.vllm._insert_block_hash(name, block, num_tokens=1)
                self.written[name] = block.block_id
        self.vllm.free_blocks(reversed(blocks))

    @rule(which=st.integers(0, 1000))
    def finds(self, which: int) -> None:
        cached = [block for block in self.vllm.blocks if block.block_hash is not None]
        if cached:
            block = cached[which % len(cached)]
            assert block.block_id not in self.pool.withheld, "a prefix lost its bytes"
            self.vllm.touch([block])
            self.held.append([block])

    @rule(used=st.integers(0, BLOCKS - 1), there=st.integers(0, BLOCKS - 1))
    def fits(self, used: int, there: int) -> None:
        self.pool.settle()
        while self.held and self.pool.used > used:
            self.vllm.free_blocks(reversed(self.held.pop()))
        self.most_used, self.most_there = used, max(used, there)
        before = set(self.pool.withheld)
        given = self.pool.limit(self.most_used, self.most_there)
        assert before | set(given) == set(self.pool.withheld) and not before & set(given)
        assert self.pool.used <= used and self.pool.used + self.pool.free <= max(used, self.pool.used)
        assert self.pool.available <= self.most_there

    @rule(numbers=st.data())
    def grows(self, numbers: st.DataObject) -> None:
        """Make some withheld blocks free, whichever they are."""
        if withheld := self.pool.withheld:
            self.pool.release(numbers.draw(st.lists(st.sampled_from(withheld), unique=True)))

    @rule()
    def resets_its_prefixes(self) -> None:
        withheld, kept = list(self.pool.withheld), {block.block_id for block in self.pool._kept}
        done = self.pool.with_all_free(self.vllm.reset_prefix_cache)
        assert self.pool.withheld == withheld and done is not bool(self.held or kept)

    @invariant()
    def no_block_is_lost(self) -> None:
        holders = {block.block_id for blocks in self.held for block in blocks}
        kept = {block.block_id for block in self.pool._kept}
        withheld = list(self.pool.withheld)
        free = [block.block_id for block in self.vllm.free_block_queue.get_all_free_blocks()]
        assert len(set(withheld)) == len(withheld) and len(free) == len(set(free)) == self.pool.free
        assert not set(withheld) & (holders | kept | set(free)) and not set(free) & (holders | kept)
        assert len(holders | kept) + len(withheld) + len(free) == self.pool.blocks
        assert all(self.vllm.blocks[block].block_hash is None for block in withheld)


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRequests = Requests.TestCase


def of(pool: KvPool, prefixes: int) -> list[Any]:
    """Return this many blocks of an ended request, each with its own prefix, oldest first."""
    blocks = pool._pool.get_new_blocks(prefixes)
    for block in blocks:
        name = make_block_hash_with_group_id(BlockHash(str(block.block_id).encode()), 0)
        pool._pool._insert_block_hash(name, block, num_tokens=1)
    pool._pool.free_blocks(blocks)
    return list(blocks)


def test_kept_prefixes_are_the_youngest_and_evicted_oldest_first() -> None:
    pool = KvPool(BlockPool(BLOCKS, enable_caching=True, hash_block_size=1), BLOCK_BYTES)
    blocks = of(pool, 20)
    pool.limit(0, 15)
    assert [block.block_hash is not None for block in blocks] == [False] * 5 + [True] * 15
    pool.limit(0, 10)
    assert [block.block_hash is not None for block in blocks] == [False] * 10 + [True] * 10
    pool.limit(12, 12)
    pool.release(pool.withheld[: 12 - pool.free])
    assert pool.free == 12 and [block.block_hash is not None for block in blocks] == [False] * 10 + [True] * 10


def test_kept_prefix_hit_by_a_request_belongs_to_the_request() -> None:
    pool = KvPool(BlockPool(BLOCKS, enable_caching=True, hash_block_size=1), BLOCK_BYTES)
    blocks = of(pool, 10)
    pool.limit(5, 15)
    pool._pool.touch(blocks[-5:])
    pool.settle()
    pool.limit(5, 15)
    assert (pool.used, pool.free, pool.available) == (5, 0, 10)
    pool._pool.free_blocks(reversed(blocks[-5:]))
    pool.limit(5, 15)
    assert pool.used == 0 and all(block.block_hash is not None for block in blocks)


def test_prefix_held_by_a_request_is_not_reclaimable() -> None:
    pool = KvPool(BlockPool(BLOCKS, enable_caching=True, hash_block_size=1), BLOCK_BYTES)
    blocks = of(pool, 12)
    assert (pool.used, pool.cached) == (0, 12)
    pool._pool.touch(blocks[:9])
    assert (pool.used, pool.cached) == (9, 3)
