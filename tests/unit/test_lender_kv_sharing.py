"""Serving gets the blocks of its next step regardless of prefix hits of the guest's requests."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from rose.workers.executor.ipc.messages import NO_LIMIT
from rose.workers.executor.vllm.types import HeldTurn
from rose.workers.lender.config import LendConfig, MemoryConfig
from rose.workers.lender.vllm.kv_sharing import KvPool, KvSharing

SERVING_BYTES, GUEST_BYTES = 300, 100
"""Bytes of a block."""


class ScriptedTurns(dict[str, list[KVCacheBlock]]):
    """The guest's engine: the blocks of each of its turns."""

    version, longest_tokens, steps = 1, 1, 0
    cache = SimpleNamespace(blocks_of=lambda tokens: tokens)

    def held_turns(self) -> list[HeldTurn]:
        return [HeldTurn(name, held_tokens=len(blocks), most_tokens=1) for name, blocks in self.items()]


class KvSharingFixture:
    """Serving with 20 blocks, and a guest that may hold twice as many of a third of their size."""

    def __init__(self) -> None:
        self.serving = KvPool(BlockPool(21, enable_caching=True, hash_block_size=1), SERVING_BYTES, None)
        self.guest = KvPool(BlockPool(41, enable_caching=True, hash_block_size=1), GUEST_BYTES, None)
        self.guest.withhold(self.guest.blocks)
        self.turns, self.wanted_blocks = ScriptedTurns(), 0
        config = LendConfig(model_folder="", socket="", memory=MemoryConfig(headroom=0.1, quiet_seconds=3600.0))
        self.sharing = KvSharing(self, self.turns, self.guest, config)  # type: ignore[arg-type]

    transferable = True

    @property
    def pool(self) -> KvPool:
        return self.serving

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
        lent = self.guest.available * GUEST_BYTES
        assert self.serving.available * SERVING_BYTES + lent <= self.serving.blocks * SERVING_BYTES, (
            "a byte in two hands"
        )
        assert self.guest.used * GUEST_BYTES <= self.sharing._shares.budget_bytes
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
    sharing_fixture.wanted_blocks = 8
    sharing_fixture.look()
    assert not sharing_fixture.turns, "it was cut, and its prefix is kept"
    kept = list(sharing_fixture.guest._kept)
    assert len(kept) >= 10
    sharing_fixture.begin("second", [], 10)
    sharing_fixture.begin("resumed", kept, 2)
    sharing_fixture.wanted_blocks = 16
    sharing_fixture.look()


def test_guest_pool_grows_to_its_grant_and_no_further() -> None:
    sharing_fixture = KvSharingFixture()
    for _ in range(3):
        sharing_fixture.look(grow=True, most_bytes=20 * GUEST_BYTES)
    assert sharing_fixture.guest.available == 20 and not sharing_fixture.sharing.can_grow
    sharing_fixture.begin("turn", [], 15)
    sharing_fixture.look(grow=True, most_bytes=10 * GUEST_BYTES)
    assert (
        not sharing_fixture.turns and sharing_fixture.guest.available <= 10 and sharing_fixture.serving.available >= 16
    )
    sharing_fixture.look(grow=True)
    assert sharing_fixture.guest.available == 40


def test_paused_step_gives_only_memory_that_no_turn_holds() -> None:
    """This also holds after a reset of serving's cache, which takes lent memory back until the next check."""
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    there = sharing_fixture.guest.available
    sharing_fixture.begin("first", [], 15)
    sharing_fixture.serving.withhold(0)
    assert sharing_fixture.look_within()
    sharing_fixture.wanted_blocks = 9
    assert sharing_fixture.look_within() and sharing_fixture.guest.available < there and sharing_fixture.turns, (
        "its budget was halved, and is enough"
    )
    sharing_fixture.wanted_blocks = 17
    assert not sharing_fixture.look_within() and len(sharing_fixture.turns) == 1
    sharing_fixture.look()
    assert not sharing_fixture.turns


def test_step_is_not_paused_by_a_grant_below_its_turns() -> None:
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    sharing_fixture.begin("first", [], 15)
    assert sharing_fixture.look_within(most_bytes=15 * GUEST_BYTES) and sharing_fixture.guest.available == 15
    assert not sharing_fixture.look_within(most_bytes=14 * GUEST_BYTES)


def test_decision_within_a_step_is_reported_and_counted_after_the_step() -> None:
    sharing_fixture = KvSharingFixture()
    sharing_fixture.look(grow=True)
    sharing_fixture.begin("first", [], 30)
    sharing_fixture.sharing.take_stats()
    sharing_fixture.wanted_blocks = 12
    assert not sharing_fixture.look_within() and sharing_fixture.sharing.take_changed()
    sharing_fixture.look()
    stats = sharing_fixture.sharing.take_stats()
    assert stats.cuts == 1 and stats.cut_seconds > 0 and stats.frozen and stats.preempted == 1
    assert not sharing_fixture.sharing.take_changed()


def test_guest_does_not_grow_over_serving_demand_of_a_paused_step() -> None:
    seen, unseen = KvSharingFixture(), KvSharingFixture()
    seen.wanted_blocks = 12
    assert seen.look_within()
    for sharing_fixture in (seen, unseen):
        sharing_fixture.wanted_blocks = 0
        sharing_fixture.look(grow=True)
    assert seen.guest.available * GUEST_BYTES <= (20 - 12) * SERVING_BYTES < unseen.guest.available * GUEST_BYTES
