"""One budget of KV bytes: serving never waits for the guest, the guest's share does not oscillate, no byte is lost."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rose.schemas.errors import UsageError
from rose.workers.lender.kv_budget import HIGH_WATERMARK, KvBudget, KvLimits, KvShares, KvUsage

QUIET = 10.0


def bounds(
    *,
    total: int = 100,
    pool: int | None = None,
    block: int = 1,
    headroom: int = 20,
    piece: int = 100,
    moves: bool = True,
) -> KvLimits:
    return KvLimits(
        total_bytes=total,
        pool_bytes=total if pool is None else pool,
        block_bytes=block,
        headroom_bytes=headroom,
        quiet_seconds=QUIET,
        piece_bytes=piece,
        transferable=moves,
    )


def decide(
    memory: KvBudget, serving: int, *, now: float, version: int = 0, most: int = 10**9, grow: bool = True, **use: int
) -> KvShares:
    use_now = KvUsage(serving_bytes=serving, **use)
    return memory.decide(use_now, most_bytes=most, policy_version=version, grow=grow, now=now)


class KvBudgetMachine(RuleBasedStateMachine):
    """Two tenants that take and return KV memory in any order."""

    @initialize(
        total=st.integers(50, 5_000),
        block=st.integers(1, 40),
        headroom=st.floats(0, 0.6),
        pool=st.floats(0.1, 1),
        piece=st.integers(1, 5_000),
    )
    def begin(self, total: int, block: int, headroom: float, pool: float, piece: int) -> None:
        self.bounds = bounds(
            total=total, block=block, headroom=int(headroom * total), pool=max(block, int(pool * total)), piece=piece
        )
        self.memory = KvBudget(self.bounds)
        self.now, self.version, self.most = 0.0, 0, total
        self.serving = self.wanted_bytes = self.cached = self.hit = 0
        self.guest: dict[str, int] = {}
        self.guest_cached = 0
        self.halvings = 0
        """Number of halvings since the last growth."""
        self.thaws_at = -math.inf
        """Time before which the budget does not grow without a new version."""
        self.version_at_cut = -1
        self.names = 0
        self.shares = self.look()

    def look(self, *, grow: bool = False) -> KvShares:
        before = getattr(self, "shares", None)
        use = KvUsage(
            serving_bytes=self.serving,
            serving_wanted_bytes=self.wanted_bytes,
            serving_cached_bytes=self.cached,
            serving_hit_bytes=self.hit,
            guest_bytes=sum(self.guest.values()),
            guest_cached_bytes=self.guest_cached,
        )
        shares = self.memory.decide(use, most_bytes=self.most, policy_version=self.version, grow=grow, now=self.now)
        self.judge(before, shares, grow=grow)
        while sum(self.guest.values()) > shares.budget_bytes:
            self.guest_cached += self.guest.pop(next(iter(self.guest)))
        over = sum(self.guest.values()) + self.guest_cached - shares.kept_bytes
        self.guest_cached -= max(0, over)
        assert self.guest_cached >= 0, "cached prefixes are enough to give back"
        self.cached, self.hit = min(self.cached, shares.serving_bytes - self.serving), 0
        self.shares = shares
        return shares

    def judge(self, before: KvShares | None, shares: KvShares, *, grow: bool) -> None:
        """Check the invariants of consecutive decisions."""
        if before is not None and shares.budget_bytes > before.budget_bytes:
            assert self.now >= self.thaws_at or self.version != self.version_at_cut, "it grew while it was frozen"
            assert grow and not shares.cuts
            piece = max(self.bounds.piece_bytes, self.bounds.block_bytes)
            assert before.budget_bytes + piece >= shares.budget_bytes
            self.halvings = 0
        if before is not None and grow and before.can_grow and not (shares.cuts or shares.frozen):
            assert shares.budget_bytes > before.budget_bytes or not shares.can_grow, "it would grow for ever"
        self.halvings += shares.cuts
        assert self.halvings <= math.log2(self.bounds.total_bytes) + 1, "it is cut for ever"
        if shares.cuts:
            self.thaws_at, self.version_at_cut = self.now + QUIET, self.version
            assert shares.frozen

    @rule(share=st.floats(0, 1))
    def serving_takes(self, share: float) -> None:
        """Allocate new serving blocks within its share. The rest is requested, and granted by the next decision."""
        self.wanted_bytes = int(share * (self.bounds.total_bytes - self.serving))
        self.look()
        assert self.serving + self.wanted_bytes <= self.shares.serving_bytes or self.shares.kept_bytes == 0
        self.serving = min(self.serving + self.wanted_bytes, self.shares.serving_bytes)
        self.wanted_bytes = 0
        self.cached = min(self.cached, self.shares.serving_bytes - self.serving)

    @rule(share=st.floats(0, 1), cached=st.booleans())
    def serving_gives_back(self, share: float, cached: bool) -> None:
        freed = int(share * self.serving)
        self.serving -= freed
        self.cached += freed if cached else 0

    @rule(share=st.floats(0, 1))
    def serving_finds_prefixes(self, share: float) -> None:
        self.hit += int(share * self.cached)

    @rule(share=st.floats(0, 1))
    def the_guest_takes(self, share: float) -> None:
        held = sum(self.guest.values())
        taken = int(share * (self.shares.budget_bytes - held))
        if taken > 0:
            self.names += 1
            self.guest[str(self.names)] = taken
            self.guest_cached = min(self.guest_cached, self.shares.kept_bytes - held - taken)

    @rule()
    def a_turn_of_the_guest_ends(self) -> None:
        if self.guest:
            self.guest_cached += self.guest.pop(next(iter(self.guest)))

    @rule()
    def the_guest_has_its_turn(self) -> None:
        self.look(grow=True)

    @rule(seconds=st.floats(0, 2 * QUIET))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule()
    def a_version_lands(self) -> None:
        self.version += 1
        self.look()

    @rule(share=st.floats(0, 1))
    def the_grant_changes(self, share: float) -> None:
        self.most = int(share * self.bounds.total_bytes)
        self.look()

    @invariant()
    def bytes_are_conserved(self) -> None:
        shares, guest = self.shares, sum(self.guest.values())
        assert shares.serving_bytes + shares.kept_bytes == self.bounds.total_bytes
        assert 0 <= guest <= shares.budget_bytes <= shares.kept_bytes <= self.bounds.pool_bytes
        assert shares.budget_bytes <= self.most and shares.budget_bytes % self.bounds.block_bytes == 0
        assert self.serving + self.cached <= shares.serving_bytes
        assert guest + self.guest_cached <= shares.kept_bytes


KvBudgetMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestTenants = KvBudgetMachine.TestCase


def test_worked_example_of_the_documentation_holds() -> None:
    memory = KvBudget(bounds())
    assert decide(memory, 10, now=0).budget_bytes == 70
    cut = decide(memory, 21, now=1, guest_bytes=60)
    assert (cut.budget_bytes, cut.cuts, cut.frozen, cut.can_grow) == (35, 1, True, False)
    assert decide(memory, 10, now=2).budget_bytes == 35
    thawed = decide(memory, 10, now=3, version=1)
    assert (thawed.budget_bytes, thawed.frozen) == (59, False)


@given(st.integers(20, 70), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_recent_serving_demand_that_returns_cuts_no_guest_turn(peak: int, history: list[tuple[float, float]]) -> None:
    """Versions may activate meanwhile: growth remembers the peak."""
    memory, now = KvBudget(bounds()), 0.0
    assert decide(memory, peak, now=now).budget_bytes == 80 - peak
    for version, (serving, pause) in enumerate(history):
        now += pause * (QUIET - now) / 2
        shares = decide(memory, int(serving * peak), now=now, version=version)
        assert (shares.cuts, shares.budget_bytes) == (0, 80 - peak)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_serving_gets_its_demand_within_one_decision(serving: int, wanted_bytes: int, guest: int) -> None:
    """The decision is one in which the guest would grow, or a later one."""
    memory = KvBudget(bounds(headroom=0))
    growing = decide(KvBudget(bounds(headroom=0)), serving, now=0, serving_wanted_bytes=wanted_bytes)
    assert growing.serving_bytes >= min(100, serving + wanted_bytes)
    budget = decide(memory, 0, now=0).budget_bytes
    shares = decide(memory, serving, now=1, serving_wanted_bytes=wanted_bytes, guest_bytes=min(guest, budget))
    assert shares.serving_bytes >= min(100, serving + wanted_bytes)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_preempted_turn_keeps_its_prefixes_until_serving_takes_the_memory(first: int, use: int, later: int) -> None:
    memory = KvBudget(bounds())
    budget = decide(memory, 0, now=0).budget_bytes
    cut = decide(memory, first, now=1, guest_bytes=budget)
    held = cut.kept_bytes
    running = min(budget, cut.budget_bytes)
    after = decide(memory, later, now=2, guest_bytes=running, guest_cached_bytes=held - running)
    free = int(20 * (1 - HIGH_WATERMARK))
    assert after.kept_bytes == max(after.budget_bytes, min(held, 100 - later - free))


def test_guest_grows_over_cached_prefixes_only_without_recent_hits() -> None:
    memory = KvBudget(bounds())
    assert decide(memory, 10, now=0, serving_cached_bytes=50, serving_hit_bytes=3).budget_bytes == 20
    assert decide(memory, 10, now=QUIET - 1, serving_cached_bytes=50).budget_bytes == 20
    assert decide(memory, 10, now=QUIET, serving_cached_bytes=50).budget_bytes == 20
    assert decide(memory, 10, now=3 * QUIET, serving_cached_bytes=50).budget_bytes == 70


def test_fixed_pool_belongs_entirely_to_the_guest() -> None:
    memory = KvBudget(bounds(pool=40, moves=False))
    for serving in (0, 60):
        shares = decide(memory, serving, now=0, serving_wanted_bytes=30)
        assert (shares.budget_bytes, shares.kept_bytes, shares.serving_bytes, shares.cuts) == (40, 40, 60, 0)
    withdrawn = decide(memory, 0, now=1, most=0, guest_bytes=30)
    assert withdrawn.budget_bytes == 0


@pytest.mark.parametrize("wrong", [{"pool": 0}, {"pool": 101}, {"block": 0}, {"headroom": 101}, {"headroom": -1}])
def test_impossible_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bounds(**wrong)
