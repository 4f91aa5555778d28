"""Carries out the KV budget of serving and its guest between two serving steps.

Keeps true
- Before every step serving has the blocks that the step may take: serving never waits for a block of the guest.
- As many bytes are withheld from serving's pool as are available in the guest's pool. Pages that neither may use are
  returned to the system: at once if the guest grows, within the next passes after a cut.
- The guest's requests hold no more than the budget. Turns above the budget are aborted with the tokens that were
  sampled, and so are turns that could never fit in the budget.

The decisions are those of `rose.workers.lender.kv_budget`.
"""

import time
from collections.abc import Callable

from rose.workers.executor.ipc.messages import NO_LIMIT, LendingStats
from rose.workers.executor.vllm.engine import Engine
from rose.workers.lender.config import LendConfig
from rose.workers.lender.kv_budget import KvBudget, KvLimits, KvShares, KvUsage
from rose.workers.lender.vllm.kv_pool import CachePages, KvPool, blocks_are_contiguous
from rose.workers.lender.vllm.serving import ServingMemory

PIECE_BYTES = 2 << 20
"""Growth in one tick of the guest, and pages returned in one pass: a third of a millisecond each."""

CUT = "cut"
"""Reason of a guest turn that was aborted for the budget."""


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
        """KV tokens that turns may hold."""
        return self._budget_blocks * self._engine.cache.block_tokens

    @property
    def _exceeds_budget(self) -> bool:
        """Whether turns hold more than the budget, or a turn could never fit in it."""
        room = self.room_tokens
        return self._guest.used > self._budget_blocks or (
            self._engine.longest_tokens > room and any(turn.most_tokens > room for turn in self._engine.held_turns())
        )

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
            if turn.most_tokens > self.room_tokens or (turn.held_tokens and self._guest.used > self._budget_blocks):
                give_up(turn.key, CUT)
                self._stats.preempted += 1

    def _note(self, seconds: float) -> None:
        self._stats.looks += 1
        self._stats.look_seconds += seconds
        if self._cut:
            self._cut = False
            self._stats.cuts += 1
            self._stats.cut_seconds += seconds
