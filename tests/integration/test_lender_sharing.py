"""Two real engines over one KV budget, without a server: serving never waits, and no byte has two owners.

The test steps the serving engine, and preempts guest turns as the host would.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import pytest

from rose.schemas.prompts import Sampling
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import EngineConfig, FinishedTurn
from rose.workers.lender.config import LendConfig, MemoryConfig
from rose.workers.lender.vllm.guest_build import build_engine
from rose.workers.lender.vllm.kv_sharing import KvSharing, ServingMemory, guest_pool
from tests.support.engine_fixtures import tokens_of
from tests.support.lender_server_fixtures import MODEL, VOCABULARY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
TOTAL = 32 * MIB
"""Memory of serving, less one block that vLLM keeps."""

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
        lent = guest.available * guest.block_bytes
        assert pool.available * pool.block_bytes + lent <= pool.blocks * pool.block_bytes
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
    guest = build_engine(config)
    memory = ServingMemory(serving._core)
    yield ServingWithGuest(serving, guest, memory, KvSharing(memory, guest, guest_pool(guest), config))
    guest.close()
    serving.close()


def resident() -> float:
    return float(psutil.Process().memory_info().rss / MIB)


def test_guest_grows_in_pieces_and_serving_returns_its_pages_to_the_system(pair: ServingWithGuest) -> None:
    before = resident()
    assert pair.memory.transferable
    budgets = []
    while True:
        pair.passes()
        if not pair.sharing.can_grow:
            break
        budgets.append(pair.budget)
    assert len(budgets) >= 10 and pair.budget > 20 * MIB
    assert resident() < before - 20


def test_cut_preempts_whole_turns_which_hit_their_prefixes_again(pair: ServingWithGuest) -> None:
    turns = [(f"turn {number}", prompt(1000 + number, CONTEXT)) for number in range(TURNS)]
    for name, context in turns:
        pair.guest.add(name, context, Sampling(max_tokens=SAMPLED, temperature=0.0), policy_version=-1)
    ended = pair.passes(120)
    budget = pair.budget
    assert not ended
    pair.ask(9, 0)
    pair.serve()
    assert pair.budget == budget // 2 // 32768 * 32768 and pair.frozen and pair.changes == 1
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
    reusable = sum((len(context) - 1) // 32 * 32 for context in contexts.values())
    assert sum(finished.cached_tokens for finished in resumed) >= 0.8 * reusable
    assert all(len(tokens_of(finished)) + len(tokens_of(rest[finished.name])) <= SAMPLED for finished in resumed)


def test_freeze_ends_with_a_version(pair: ServingWithGuest) -> None:
    pair.passes(3)
    assert pair.frozen
    pair.guest.version = 7
    pair.passes(20)
    assert not pair.frozen and pair.budget > 12 * MIB


def test_serving_can_reset_its_cache_and_reports_only_its_own_usage(pair: ServingWithGuest) -> None:
    assert pair.budget > 0 and pair.serving._scheduler.get_kv_cache_usage() == 0.0
    assert pair.serving._core.reset_prefix_cache()
    pair.passes(20)


def test_lent_memory_returns_without_a_borrower(pair: ServingWithGuest) -> None:
    pair.sharing.rebalance(None)
    assert pair.memory.pool.available == pair.memory.pool.blocks and pair.budget == 0
    while pair.sharing.busy:
        pair.sharing.rebalance(None)
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
    pair.memory.transferable = False
    config = LendConfig(model_folder=str(MODEL), socket="", max_model_len=512)
    sharing = KvSharing(pair.memory, pair.guest, pair.sharing._guest, config)
    pair.ask(40, 200)
    sharing.rebalance(pair.preempt)
    changes = sharing.take_stats()
    assert (changes.budget_bytes, changes.cuts, changes.frozen) == (pair.sharing._guest.blocks * 32768, 0, False)
    assert not sharing.busy and pair.memory.pool.available == pair.memory.pool.blocks
    sharing.rebalance(None)
    while sharing.busy:
        sharing.rebalance(None)
    assert pair.sharing._guest.available == 0
