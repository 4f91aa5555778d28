"""Each block is in one hand, and serving gets the blocks of its next step, whatever the guest holds."""

from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from rose.workers.executor.ipc.messages import NO_LIMIT
from rose.workers.executor.vllm.types import HeldTurn
from rose.workers.lender.config import LendConfig, MemoryConfig
from rose.workers.lender.vllm.kv_sharing import KvPool, KvSharing

BLOCK_BYTES, BLOCKS = 100, 60


class ScriptedTurns(dict[str, list[KVCacheBlock]]):
    """The guest's engine: the blocks of each of its turns."""

    version, longest_tokens, steps = 1, 1, 0
    cache = SimpleNamespace(blocks_of=lambda tokens: tokens)

    def held_turns(self) -> list[HeldTurn]:
        return [HeldTurn(name, held_tokens=len(blocks), most_tokens=1) for name, blocks in self.items()]


class KvSharingFixture:
    """Serving, and a guest with a view of serving's cache."""

    def __init__(self) -> None:
        self.serving = KvPool(BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=1), BLOCK_BYTES)
        self.guest = KvPool(BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=1), BLOCK_BYTES)
        self.guest.withhold(self.guest.blocks)
        self.turns, self.wanted_blocks = ScriptedTurns(), 0
        memory = MemoryConfig(headroom=0.1, quiet_seconds=3600.0)
        config = LendConfig(model_folder="", socket="", kv_cache_bytes=40 * BLOCK_BYTES, memory=memory)
        self.sharing = KvSharing(self, self.turns, self.guest, config, shared=True)  # type: ignore[arg-type]

    @property
    def pool(self) -> KvPool:
        return self.serving

    def lend(self, count: int) -> list[int]:
        return self.serving.withhold(count)

    def take_back(self, numbers: list[int]) -> None:
        self.serving.release(numbers)

    def take_hit_bytes(self) -> int:
        return 0

    def preempt(self, name: str, _: str) -> None:
        self.guest._pool.free_blocks(reversed(self.turns.pop(name)))

    def look(self, *, grow: bool = False, most_bytes: int = NO_LIMIT) -> None:
        self.sharing.rebalance(self.preempt, most_bytes=most_bytes, grow=grow)
        self.holds()

    def look_within(self, *, most_bytes: int = NO_LIMIT) -> bool:
        done = self.sharing.rebalance_mid_step(most_bytes=most_bytes)
        if done:
            self.holds()
        return done

    def holds(self) -> None:
        lent, withheld = set(self.serving.withheld), set(self.guest.withheld)
        assert not lent & withheld and lent | withheld == set(range(1, BLOCKS + 1)), "a block in two hands, or in none"
        assert self.guest.used * BLOCK_BYTES <= self.sharing._shares.budget_bytes
        assert self.serving.free >= self.wanted_blocks, "serving waits for a block that the guest holds"

    def begin(self, name: str, found: list[Any], new: int) -> None:
        """Begin a step of the guest."""
        self.turns.steps += 1
        self.guest._pool.touch(found)
        self.turns[name] = [*found, *self.guest._pool.get_new_blocks(new)]


def test_prefix_hits_count_before_the_choice_of_cut_turns() -> None:
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    sharing_fixture.begin("first", [], 30)
    for block in sharing_fixture.turns["first"]:
        name = make_block_hash_with_group_id(BlockHash(str(block.block_id).encode()), 0)
        sharing_fixture.guest._pool._insert_block_hash(name, block, num_tokens=1)
    sharing_fixture.wanted_blocks = 24
    sharing_fixture.look()
    assert not sharing_fixture.turns, "it was cut, and its prefix is kept"
    kept = list(sharing_fixture.guest._kept)
    assert len(kept) >= 10
    sharing_fixture.begin("second", [], 10)
    sharing_fixture.begin("resumed", kept, 2)
    sharing_fixture.wanted_blocks = 48
    sharing_fixture.look()


def test_guest_pool_grows_to_its_grant_and_no_further() -> None:
    sharing_fixture = KvSharingFixture()
    for _ in range(3):
        sharing_fixture.look(grow=True, most_bytes=20 * BLOCK_BYTES)
    assert sharing_fixture.guest.available == 20 and not sharing_fixture.sharing.can_grow
    sharing_fixture.begin("turn", [], 15)
    sharing_fixture.look(grow=True, most_bytes=10 * BLOCK_BYTES)
    assert (
        not sharing_fixture.turns and sharing_fixture.guest.available <= 10 and sharing_fixture.serving.available >= 48
    )
    sharing_fixture.look(grow=True)
    assert sharing_fixture.guest.available == 40


def test_paused_step_gives_only_memory_that_no_turn_holds() -> None:
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    there = sharing_fixture.guest.available
    sharing_fixture.begin("first", [], 15)
    assert sharing_fixture.look_within()
    sharing_fixture.wanted_blocks = 27
    assert sharing_fixture.look_within() and sharing_fixture.guest.available < there and sharing_fixture.turns, (
        "its budget was halved, and is enough"
    )
    sharing_fixture.wanted_blocks = 51
    assert not sharing_fixture.look_within() and len(sharing_fixture.turns) == 1
    sharing_fixture.look()
    assert not sharing_fixture.turns


def test_step_is_not_paused_by_a_grant_below_its_turns() -> None:
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    sharing_fixture.begin("first", [], 15)
    assert sharing_fixture.look_within(most_bytes=15 * BLOCK_BYTES) and sharing_fixture.guest.available == 15
    assert not sharing_fixture.look_within(most_bytes=14 * BLOCK_BYTES)


def test_decision_within_a_step_is_reported_and_counted_after_the_step() -> None:
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    sharing_fixture.begin("first", [], 30)
    sharing_fixture.sharing.take_stats()
    sharing_fixture.wanted_blocks = 36
    assert not sharing_fixture.look_within() and sharing_fixture.sharing.take_changed()
    sharing_fixture.look()
    stats = sharing_fixture.sharing.take_stats()
    assert stats.cuts == 1 and stats.cut_seconds > 0 and stats.frozen and stats.preempted == 1
    assert not sharing_fixture.sharing.take_changed()


def test_guest_does_not_grow_over_serving_demand_of_a_paused_step() -> None:
    seen, unseen = KvSharingFixture(), KvSharingFixture()
    seen.wanted_blocks = 36
    assert seen.look_within()
    for sharing_fixture in (seen, unseen):
        sharing_fixture.wanted_blocks = 0
        sharing_fixture.look(grow=True)
    assert seen.guest.available * BLOCK_BYTES <= (60 - 36) * BLOCK_BYTES < unseen.guest.available * BLOCK_BYTES


def test_reset_of_serving_cache_leaves_lent_blocks_with_the_guest() -> None:
    """vLLM resets a cache only if every block is free."""
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    lent = sharing_fixture.serving.withheld
    assert sharing_fixture.serving.with_all_free(sharing_fixture.serving._pool.reset_prefix_cache)
    assert sharing_fixture.serving.withheld == lent and len(lent) == 40
    sharing_fixture.holds()


def test_end_of_a_guest_gives_all_blocks_back() -> None:
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    assert sharing_fixture.serving.withheld
    sharing_fixture.sharing.close()
    assert sharing_fixture.serving.free == BLOCKS and not sharing_fixture.serving.withheld


class TwoTenants(RuleBasedStateMachine):
    """Requests of both tenants begin, grow and end, while the shares change between two steps and within steps."""

    @initialize()
    def begin(self) -> None:
        self.memory = KvSharingFixture()
        self.requests: list[list[KVCacheBlock]] = []
        self.prefixes = 0

    @rule(blocks=st.integers(1, 20))
    def serving_steps(self, blocks: int) -> None:
        """Admit a request of serving if vLLM would: the pass before the step makes room for the request."""
        self.memory.wanted_blocks = min(blocks, BLOCKS - sum(map(len, self.requests)))
        self.memory.look()
        if self.memory.wanted_blocks:
            self.requests.append(self.memory.serving._pool.get_new_blocks(self.memory.wanted_blocks))
        self.memory.wanted_blocks = 0

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100), cached=st.booleans())
    def request_ends(self, which: int, cached: bool) -> None:
        self._end(self.memory.serving, self.requests.pop(which % len(self.requests)), cached)

    @rule(blocks=st.integers(1, 10))
    def turn_begins(self, blocks: int) -> None:
        if blocks <= self.memory.guest.free:
            self.memory.begin(f"turn {self.memory.turns.steps}", [], blocks)

    @precondition(lambda self: self.memory.turns)
    @rule(which=st.integers(0, 100), cached=st.booleans())
    def turn_ends(self, which: int, cached: bool) -> None:
        name = sorted(self.memory.turns)[which % len(self.memory.turns)]
        self.memory.turns.steps += 1
        self._end(self.memory.guest, self.memory.turns.pop(name), cached)

    @rule(most=st.integers(1, BLOCKS), grow=st.booleans())
    def shares_change(self, most: int, grow: bool) -> None:
        self.memory.look(grow=grow, most_bytes=most * BLOCK_BYTES)

    @rule(wanted=st.integers(0, BLOCKS))
    def step_is_paused(self, wanted: int) -> None:
        self.memory.wanted_blocks = min(wanted, BLOCKS - sum(map(len, self.requests)))
        self.memory.look_within()
        self.memory.wanted_blocks = 0

    @rule()
    def version_ends_a_freeze(self) -> None:
        self.memory.turns.version += 1

    @invariant()
    def tenants_hold_different_blocks(self) -> None:
        serving = {block.block_id for request in self.requests for block in request}
        guest = {block.block_id for turn in self.memory.turns.values() for block in turn}
        assert not serving & guest
        assert not serving & set(self.memory.serving.withheld) and guest <= set(self.memory.serving.withheld)

    def _end(self, pool: KvPool, blocks: list[KVCacheBlock], cached: bool) -> None:
        for block in blocks if cached else ():
            self.prefixes += 1
            name = make_block_hash_with_group_id(BlockHash(str(self.prefixes).encode()), 0)
            pool._pool._insert_block_hash(name, block, num_tokens=1)
        pool._pool.free_blocks(reversed(blocks))


TwoTenants.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestTwoTenants = TwoTenants.TestCase
