"""Serving has the blocks of its next step whatever the guest's requests found among the prefixes that it kept."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from rose.workers.executor.ipc.messages import NO_LIMIT
from rose.workers.executor.vllm.types import HeldTurn
from rose.workers.lender.config import LendConfig, MemoryConfig
from rose.workers.lender.vllm.kv_pool import KvPool
from rose.workers.lender.vllm.kv_sharing import KvSharing

SERVING_BYTES, GUEST_BYTES = 300, 100
"""Of a block."""


class Turns(dict[str, list[KVCacheBlock]]):
    """The guest's engine: the blocks of each of its turns."""

    version, longest_tokens, steps = 1, 1, 0
    cache = SimpleNamespace(block_tokens=1)

    def held_turns(self) -> list[HeldTurn]:
        return [HeldTurn(name, held_tokens=len(blocks), most_tokens=1) for name, blocks in self.items()]


class World:
    """Serving's 20 blocks, and a guest that may hold twice as many of a third of their size."""

    def __init__(self) -> None:
        self.serving = KvPool(BlockPool(21, enable_caching=True, hash_block_size=1), SERVING_BYTES, None)
        self.guest = KvPool(BlockPool(41, enable_caching=True, hash_block_size=1), GUEST_BYTES, None)
        self.guest.withhold(self.guest.blocks)
        self.turns, self.wanted_blocks = Turns(), 0
        config = LendConfig(model_folder="", socket="", memory=MemoryConfig(headroom=0.1, quiet_seconds=3600.0))
        self.sharing = KvSharing(self, self.turns, self.guest, config)  # type: ignore[arg-type]

    transferable = True

    @property
    def pool(self) -> KvPool:
        return self.serving

    def take_hit_bytes(self) -> int:
        return 0

    def give_up(self, name: str, _: str) -> None:
        self.guest._pool.free_blocks(reversed(self.turns.pop(name)))

    def look(self, *, grow: bool = False, most_bytes: int = NO_LIMIT) -> None:
        self.sharing.rebalance(self.give_up, most_bytes=most_bytes, grow=grow)
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
        """In a step of the guest."""
        self.turns.steps += 1
        self.guest._pool.touch(found)
        self.turns[name] = [*found, *self.guest._pool.get_new_blocks(new)]


def test_prefix_hits_count_before_the_choice_of_cut_turns() -> None:
    world = World()
    world.look(grow=True)
    world.begin("first", [], 30)
    for block in world.turns["first"]:
        name = make_block_hash_with_group_id(BlockHash(str(block.block_id).encode()), 0)
        world.guest._pool._insert_block_hash(name, block, num_tokens=1)
    world.wanted_blocks = 8
    world.look()
    assert not world.turns, "it was cut, and its prefix is kept"
    kept = list(world.guest._kept)
    assert len(kept) >= 10
    world.begin("second", [], 10)
    world.begin("resumed", kept, 2)
    world.wanted_blocks = 16
    world.look()


def test_guest_pool_grows_to_its_grant_and_no_further() -> None:
    world = World()
    for _ in range(3):
        world.look(grow=True, most_bytes=20 * GUEST_BYTES)
    assert world.guest.available == 20 and not world.sharing.can_grow
    world.begin("turn", [], 15)
    world.look(grow=True, most_bytes=10 * GUEST_BYTES)
    assert not world.turns and world.guest.available <= 10 and world.serving.available >= 16
    world.look(grow=True)
    assert world.guest.available == 40


def test_paused_step_gives_only_memory_that_no_turn_holds() -> None:
    """Also where serving's cache was reset meanwhile, which takes back what it lends until the next look."""
    world = World()
    world.look(grow=True)
    there = world.guest.available
    world.begin("first", [], 15)
    world.serving.withhold(0)
    assert world.look_within()
    world.wanted_blocks = 9
    assert world.look_within() and world.guest.available < there and world.turns, "its budget was halved, and is enough"
    world.wanted_blocks = 17
    assert not world.look_within() and len(world.turns) == 1
    world.look()
    assert not world.turns


def test_step_is_not_paused_by_a_grant_below_its_turns() -> None:
    world = World()
    world.look(grow=True)
    world.begin("first", [], 15)
    assert world.look_within(most_bytes=15 * GUEST_BYTES) and world.guest.available == 15
    assert not world.look_within(most_bytes=14 * GUEST_BYTES)


def test_decision_within_a_step_is_reported_and_counted_after_the_step() -> None:
    world = World()
    world.look(grow=True)
    world.begin("first", [], 30)
    world.sharing.take_stats()
    world.wanted_blocks = 12
    assert not world.look_within() and world.sharing.take_changed()
    world.look()
    told = world.sharing.take_stats()
    assert told.cuts == 1 and told.cut_seconds > 0 and told.frozen and told.preempted == 1
    assert not world.sharing.take_changed()


def test_guest_does_not_grow_over_serving_demand_of_a_paused_step() -> None:
    seen, unseen = World(), World()
    seen.wanted_blocks = 12
    assert seen.look_within()
    for world in (seen, unseen):
        world.wanted_blocks = 0
        world.look(grow=True)
    assert seen.guest.available * GUEST_BYTES <= (20 - 12) * SERVING_BYTES < unseen.guest.available * GUEST_BYTES
