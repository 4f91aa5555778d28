"""Two real engines over one KV memory, without a server: serving never waits, and no block has two owners.

The test steps the serving engine, and preempts guest turns as the host would.
"""

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker import gpu_model_runner

from rose.schemas.prompts import Sampling
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.engine_core import in_process_worker
from rose.workers.executor.vllm.types import EngineConfig, FinishedTurn
from rose.workers.lender.config import LendConfig, MemoryConfig
from rose.workers.lender.vllm.guest_build import build_guest
from rose.workers.lender.vllm.guest_device import GuestDevice
from rose.workers.lender.vllm.host_process import globals_for_build
from rose.workers.lender.vllm.kv_sharing import KvPool, KvSharing, ServingMemory
from rose.workers.lender.vllm.shared_cache import CacheView
from tests.support.engine_fixtures import sampled_logprobs, tokens_of
from tests.support.lender_server_fixtures import MODEL, VOCABULARY
from tests.support.model_families import tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
TOTAL = 32 * MIB
"""Memory of serving, less one block that vLLM keeps."""

BLOCK, TOKENS = 64 << 10, 64
"""Bytes of a block, and tokens of the guest in a block: serving's numbers have twice the size."""

TURNS, CONTEXT, SAMPLED = 48, 256, 200


@dataclass
class ServingWithGuest:
    """A serving engine and a guest in one loop."""

    serving: Engine
    guest: Engine
    memory: ServingMemory
    sharing: KvSharing
    finished_turns: list[FinishedTurn] = field(default_factory=list)
    changes: int = 0

    def preempt(self, name: str, reason: str) -> None:
        assert reason == "cut"
        finished = self.guest.abort(name)
        assert finished is not None
        self.finished_turns.append(finished)

    def look(self, *, grow: bool = False) -> None:
        self.sharing.rebalance(self.preempt, grow=grow)
        self.changes += self.sharing.take_changed()
        pool, guest = self.memory.pool, self.sharing._guest
        lent, withheld = set(pool.withheld), set(guest.withheld)
        assert not lent & withheld and len(lent) + len(withheld) == pool.blocks == guest.blocks
        assert guest.used * guest.block_bytes <= self.sharing._shares.budget_bytes

    def passes(self, count: int = 1) -> list[FinishedTurn]:
        """Run passes of the serving loop; the guest steps while serving is idle."""
        ended = []
        for _ in range(count):
            waited = len(self.serving._scheduler.waiting)
            self.look()
            if len(self.serving):
                ended += self.serving.step().finished
                preempted = [each for each in self.serving._scheduler.waiting if each.num_preemptions]
                assert not preempted and (not waited or not self.serving._scheduler.waiting), "serving waits for blocks"
            elif self.sharing.can_grow:
                self.look(grow=True)
            elif len(self.guest):
                ended += self.guest.step().finished
        return ended

    def ask(self, requests: int, first: int) -> None:
        for number in range(first, first + requests):
            sampling = Sampling(max_tokens=64, temperature=0.0)
            self.serving.add(f"request {number}", prompt(number, 320), sampling, policy_version=-1)

    def serve(self) -> None:
        while len(self.serving):
            self.passes()

    @property
    def budget(self) -> int:
        return self.sharing._shares.budget_bytes

    @property
    def frozen(self) -> bool:
        return self.sharing._shares.frozen


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (number * 31 + place * (number % 7 + 2)) % (VOCABULARY - 3) for place in range(tokens)]


@pytest.fixture(scope="module")
def pair() -> Iterator[ServingWithGuest]:
    serving = Engine(
        EngineConfig(model_folder=MODEL, max_model_len=512, max_running=64, kv_cache_bytes=TOTAL, step_tokens=32_768)
    )
    zero_no_blocks(serving)
    config = LendConfig(
        model_folder=str(MODEL),
        socket="",
        dtype="bfloat16",
        max_turns=TURNS,
        max_model_len=512,
        kv_cache_bytes=24 * MIB,
        step_tokens=1024,
        memory=MemoryConfig(quiet_seconds=3600.0),
    )
    memory = ServingMemory(serving._core)
    cache = kv_cache(serving)
    cache.random_()
    before = cache.clone()
    guest, pool = guest_of(memory, config)
    null_block = block_bytes_of(memory, 0)
    assert torch.equal(cache[~null_block], before[~null_block]), "a build changes no block"
    cache.zero_()
    sharing = KvSharing(memory, guest, pool, config, shared=True)
    yield ServingWithGuest(serving, guest, memory, sharing)
    guest.close()
    serving.close()


def zero_no_blocks(engine: Engine) -> None:
    """Make the scheduler of one of ROSE's engines like that of a server."""
    engine._scheduler.needs_kv_cache_zeroing = False
    for manager in engine._scheduler.kv_cache_manager.coordinator.single_type_managers:
        manager._record_new_block_ids = False


def kv_cache(engine: Engine) -> torch.Tensor:
    """Return the bytes of an engine's KV cache."""
    storage = in_process_worker(engine._core).model_runner.kv_caches[0].untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def block_bytes_of(memory: ServingMemory, number: int) -> torch.Tensor:
    """Return which bytes of serving's cache belong to a block."""
    layout = memory.layout
    assert layout is not None
    mask = torch.zeros(layout.size, dtype=torch.bool)
    for region in range(layout.regions):
        first = region * layout.region_stride + number * layout.width
        mask[first : first + layout.width] = True
    return mask


def guest_of(memory: ServingMemory, config: LendConfig, *, shares: bool = True) -> tuple[Engine, KvPool]:
    """Return a guest's engine and its pool. `shares`: whether its cache must be a view of serving's."""
    view = CacheView(memory.runner)
    swap = globals_for_build()
    swap.set(gpu_model_runner, "allocate_kv_cache", view.allocate)
    with swap.as_guest_build():
        guest, pool, shared = build_guest(config, memory.layout, view, GuestDevice(), logging.getLogger())
    assert shared is shares
    return guest, pool


def test_guest_grows_in_pieces_and_allocates_nothing(pair: ServingWithGuest) -> None:
    assert kv_cache(pair.guest).data_ptr() == kv_cache(pair.serving).data_ptr()
    budgets = []
    while True:
        pair.passes()
        if not pair.sharing.can_grow:
            break
        budgets.append(pair.budget)
    assert 0 < budgets[0] < pair.budget and pair.budget > 20 * MIB


def test_cut_preempts_whole_turns_which_hit_their_prefixes_again(pair: ServingWithGuest) -> None:
    turns = [(f"turn {number}", prompt(1000 + number, CONTEXT)) for number in range(TURNS)]
    for name, context in turns:
        pair.guest.add(name, context, Sampling(max_tokens=SAMPLED, temperature=0.0), policy_version=-1)
    ended = pair.passes(120)
    budget = pair.budget
    assert not ended
    pair.ask(9, 0)
    pair.serve()
    assert pair.budget == budget // 2 // BLOCK * BLOCK and pair.frozen and pair.changes == 1
    assert 0 < len(pair.finished_turns) < TURNS
    rest = {finished.name: finished for finished in pair.finished_turns}
    pair.finished_turns.clear()
    while len(pair.guest):
        pair.passes()
    contexts = {name: context + tokens_of(rest[name]) for name, context in turns if name in rest}
    for name, context in contexts.items():
        left = SAMPLED - len(tokens_of(rest[name]))
        pair.guest.add(name, context, Sampling(max_tokens=left, temperature=0.0), policy_version=-1)
    resumed = []
    while len(pair.guest):
        resumed += pair.passes()
    assert not pair.finished_turns and len(resumed) == len(rest)
    reusable = sum((len(context) - 1) // TOKENS * TOKENS for context in contexts.values())
    assert sum(finished.cached_tokens for finished in resumed) >= 0.8 * reusable
    assert all(len(tokens_of(finished)) + len(tokens_of(rest[finished.name])) <= SAMPLED for finished in resumed)


def test_freeze_ends_with_a_version(pair: ServingWithGuest) -> None:
    pair.passes(3)
    assert pair.frozen
    pair.guest.version = 7
    pair.passes(20)
    assert not pair.frozen and pair.budget > 12 * MIB


def test_serving_computes_the_same_in_blocks_where_a_guest_left_nan(pair: ServingWithGuest) -> None:
    """The CPU kernel reads a whole block, and 0 times NaN is NaN."""
    alone = greedy_answer(pair, "alone")
    lent = pair.memory.pool.withheld
    assert lent and not len(pair.guest)
    numbers = torch.tensor(lent)
    for layer in in_process_worker(pair.guest._core).model_runner.kv_caches:
        layer[numbers] = float("nan")
    pair.sharing.rebalance(None)
    assert pair.serving._core.reset_prefix_cache()
    assert greedy_answer(pair, "after") == alone
    pair.passes(20)


def greedy_answer(pair: ServingWithGuest, name: str) -> list[int]:
    """Return what serving samples for one request, whose blocks are those that were freed last."""
    pair.serving.add(name, prompt(77, 70), Sampling(max_tokens=30, temperature=0.0), policy_version=-1)
    finished = []
    while len(pair.serving):
        finished += pair.serving.step().finished
    assert np.isfinite(sampled_logprobs(finished[0])).all()
    return tokens_of(finished[0])


def test_serving_can_reset_its_cache_and_reports_only_its_own_usage(pair: ServingWithGuest) -> None:
    assert pair.budget > 0 and pair.serving._scheduler.get_kv_cache_usage() == 0.0
    assert pair.serving._core.reset_prefix_cache()
    pair.passes(20)


def test_lent_memory_returns_without_a_borrower(pair: ServingWithGuest) -> None:
    pair.sharing.rebalance(None)
    assert pair.budget == 0
    pair.passes(30)
    assert pair.budget > 12 * MIB


def test_burst_is_accepted_in_one_scheduler_pass_and_may_cut_the_guest_to_zero(pair: ServingWithGuest) -> None:
    for number in range(TURNS):
        sampling = Sampling(max_tokens=SAMPLED, temperature=0.0)
        pair.guest.add(f"late {number}", prompt(2000 + number, CONTEXT), sampling, policy_version=7)
    pair.passes(60)
    pair.ask(40, 100)
    pair.passes()
    assert len(pair.serving._scheduler.running) == 40 and 0 < pair.budget < 6 * MIB and pair.finished_turns
    pair.serve()
    assert pair.budget == 0 and len(pair.guest) == 0, "their answers took the rest"
    pair.finished_turns.clear()
    pair.guest.add("too late", prompt(1, 40), Sampling(max_tokens=4, temperature=0.0), policy_version=7)
    pair.passes()
    assert [tokens_of(finished) for finished in pair.finished_turns] == [[]]
    pair.sharing.close()
    assert pair.memory.pool.available == pair.memory.pool.blocks


def test_guest_has_an_own_uncut_pool_if_the_serving_cache_is_elsewhere(pair: ServingWithGuest) -> None:
    config = LendConfig(model_folder=str(MODEL), socket="", max_model_len=512)
    sharing = KvSharing(pair.memory, pair.guest, pair.sharing._guest, config, shared=False)
    pair.ask(40, 200)
    sharing.rebalance(pair.preempt)
    changes = sharing.take_stats()
    assert (changes.budget_bytes, changes.cuts, changes.frozen) == (pair.sharing._guest.blocks * BLOCK, 0, False)
    assert not sharing.can_grow and pair.memory.pool.available == pair.memory.pool.blocks
    sharing.rebalance(None)
    assert pair.sharing._guest.available == 0


def test_guest_with_other_layers_writes_within_its_blocks(tmp_path: Path) -> None:
    """Six layers of the guest share the places of four of serving, whose block holds 96 tokens."""
    tiny_policy("qwen3", tmp_path, num_hidden_layers=6)
    large = EngineConfig(model_folder=MODEL, max_model_len=512, kv_cache_bytes=TOTAL, block_tokens=96)
    sizes: dict[str, Any] = {"socket": "", "max_turns": 4, "max_model_len": 128, "kv_cache_bytes": 24 * MIB}
    with closing(Engine(large)) as serving:
        memory, cache = ServingMemory(serving._core), kv_cache(serving)
        same = LendConfig(model_folder=str(MODEL), dtype="float32", **sizes)
        first, _ = guest_of(memory, same)
        first.close()
        config = LendConfig(model_folder=str(tmp_path), dtype="float32", **sizes)
        guest, pool = guest_of(memory, config)
        sharing = KvSharing(memory, guest, pool, config, shared=True)
        sharing.rebalance(lambda name, reason: None, grow=True)
        lent = memory.pool.withheld
        assert lent and guest.cache.block_bytes == memory.pool.block_bytes
        layers = in_process_worker(guest._core).model_runner.kv_caches
        assert len(layers) == 6 and guest.cache.groups[0][0] < 96
        for number in (lent[0], lent[-1]):
            before = cache.clone()
            for layer in layers:
                layer[number] = 1.0
            changed = cache != before
            assert changed.any() and not changed[~block_bytes_of(memory, number)].any()
        sharing.close()
        assert not memory.pool.withheld
        guest.close()


def test_guest_that_cannot_share_leaves_serving_cache_alone(tmp_path: Path) -> None:
    """A guest before it shared the cache of the same server."""
    small = EngineConfig(model_folder=MODEL, dtype="bfloat16", max_model_len=512, kv_cache_bytes=TOTAL)
    sizes: dict[str, Any] = {"socket": "", "max_turns": 4, "max_model_len": 128, "kv_cache_bytes": 4 * MIB}
    with closing(Engine(small)) as serving:
        memory, cache = ServingMemory(serving._core), kv_cache(serving)
        first, _ = guest_of(memory, LendConfig(model_folder=str(MODEL), dtype="bfloat16", **sizes))
        first.close()
        before = cache.clone()
        config = LendConfig(model_folder=str(MODEL), dtype="float32", **sizes)
        guest, pool = guest_of(memory, config, shares=False)
        sharing = KvSharing(memory, guest, pool, config, shared=False)
        sharing.rebalance(lambda name, reason: None, grow=True)
        guest.add("turn", prompt(1, 40), Sampling(max_tokens=8, temperature=0.0), policy_version=-1)
        while len(guest):
            guest.step()
        assert torch.equal(cache, before) and not memory.pool.withheld
        guest.close()
