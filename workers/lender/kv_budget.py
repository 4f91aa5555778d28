"""One budget of KV bytes for serving and its guest: who may hold how much of it.

Keeps true
- `serving + kept = total`, always: serving may touch what the guest may not keep. The guest's running requests may hold
  `budget`, at most `kept`. What it keeps above that are cached prefixes, for the requests that a cut preempted: they
  stay until serving's requests, its priced prefixes or half of its headroom take the room, and never grow.
- Serving never waits for a byte that the guest may hold: the decision that is told of serving's want makes room for it.
- Headroom. The guest grows only into what leaves serving `headroom` free, at serving's highest use within the last
  quiet time (remembered for one to two of them), cached prefixes with their price included.
- Cut. When serving has eaten `HIGH_WATERMARK` of its headroom, or wants more than is free, the budget is halved, and
  halved again within the same decision until neither is so, down to nothing.
- Freeze. After a cut the budget does not grow before the next policy version or before `quiet_seconds` without a cut.
  So it cannot oscillate: from one growth to the next it is halved at most log2(total / block) + 1 times. A freeze
  forbids growth alone.
- Growth comes in pieces of at most `piece_bytes` a decision, and only in decisions that allow it: it takes time that
  serving may have a use for. Room that serving wants is made at once, whatever it takes.
- Price. A byte that serving found in its prefix cache within the last quiet time vouches for `CACHED_BYTES_PER_HIT`
  bytes of that cache: a guest does not grow over them. Serving itself may give them up, and so may a cut.

On the CPU lent bytes move: both tenants have pools as large as their most, serving's blocks over `serving` are
withheld, and pages that nobody holds go back to the system. Where pools are fixed (`moves=False`: serving's cache lies
in another process, or on a GPU) a cut would give serving nothing, so the guest's whole pool is its own.

Units: bytes, seconds; `now` is any clock of the caller's. Pure.

Example (total 100, headroom 20, pieces of 100, serving uses 10)
    decide, it may grow      -> the guest gets 70
    serving uses 21          -> 9 free, over half of the headroom is eaten: cut to 35, frozen
    serving uses 10          -> 35 still
    a policy version lands   -> 59: serving needed 21 a moment ago
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from rose.schemas.errors import UsageError

HIGH_WATERMARK = 0.5
"""Share of the headroom that serving may eat before the guest is cut."""

CACHED_BYTES_PER_HIT = 20
"""Cached bytes that keep their price for each one that was hit: prefixes that are asked for once in this many quiet
times are not grown over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLimits:
    """The bytes there are. Raises UsageError."""

    total_bytes: int
    """KV memory of both tenants."""
    pool_bytes: int
    """The guest's own pool: the most that it can ever hold."""
    block_bytes: int
    """A guest's block; a smaller budget is none."""
    headroom_bytes: int
    """H: what growth leaves free for serving."""
    quiet_seconds: float
    """After so long without a cut a freeze ends, and serving's peaks are forgotten after one to two of them."""
    piece_bytes: int
    """The most by which the budget grows in a decision."""
    transferable: bool
    """Whether bytes that one tenant gives back can be used by the other: not where pools are fixed."""

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= self.pool_bytes <= self.total_bytes:
            raise UsageError("the guest's KV pool holds a block at least, and at most what there is for both tenants")
        if not 0 <= self.headroom_bytes <= self.total_bytes or self.quiet_seconds <= 0:
            raise UsageError("serving's headroom is part of the KV memory, and the quiet time is above 0 s")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUsage:
    """What the tenants hold at a moment."""

    serving_bytes: int
    """Of serving's requests, without its cached prefixes that nobody holds."""
    serving_wanted_bytes: int = 0
    """What serving's next step, and the first request that waits, need more than that."""
    serving_cached_bytes: int = 0
    """Cached prefixes that no request of serving holds."""
    serving_hit_bytes: int = 0
    """Found in serving's prefix cache since the last decision."""
    guest_bytes: int = 0
    """Of the guest's running requests."""
    guest_cached_bytes: int = 0
    """What else the guest has: free blocks and cached prefixes, those of preempted requests among them."""


@dataclass(frozen=True, slots=True)
class KvShares:
    """Who may hold what from now on."""

    budget_bytes: int
    """Of the guest's running requests."""
    kept_bytes: int
    """Of the guest, with the prefixes that no request of it holds. What it has above goes back at once: blocks without
    a prefix first, those of the requests preempted last at the very end."""
    serving_bytes: int
    """Of serving, with its cached prefixes."""
    cuts: int
    """Halvings in this decision."""
    frozen: bool
    """Whether the budget may not grow."""
    can_grow: bool
    """Whether a decision that allows growth would let it grow further."""


class RecentFold:
    """A figure over the last one to two spans of time, folded to its highest or its sum."""

    def __init__(self, span_seconds: float, fold: Callable[[int, int], int]) -> None:
        self._span_seconds = span_seconds
        self._fold = fold
        self._before = self._current = 0
        self._began = -math.inf

    def add(self, figure: int, now: float) -> int:
        """Take the newest in; returns what all that is remembered comes to. Figures are at least 0."""
        age = now - self._began
        if age >= self._span_seconds:
            self._before = self._current if age < 2 * self._span_seconds else 0
            self._current, self._began = 0, now
        self._current = self._fold(self._current, figure)
        return self._fold(self._before, self._current)


class KvBudget:
    """The guest's share of the KV memory. Asked before every step of serving."""

    def __init__(self, bounds: KvLimits) -> None:
        self._bounds = bounds
        self._budget = 0
        self._frozen_until = -math.inf
        self._version = -1
        """Of the latest decision: another one ends a freeze."""
        self._peak = RecentFold(bounds.quiet_seconds, max)
        self._hit = RecentFold(bounds.quiet_seconds, operator.add)

    def decide(self, use: KvUsage, *, most_bytes: int, policy_version: int, grow: bool, now: float) -> KvShares:
        """Share the memory out anew. `most_bytes` is what the guest is allowed: 0 takes everything back. `grow` says
        whether it may grow in this decision.
        """
        if policy_version != self._version:
            self._version, self._frozen_until = policy_version, now
        most = self._whole_blocks(min(most_bytes, self._bounds.pool_bytes))
        if not self._bounds.transferable:
            self._budget = most
            return self._shares(kept=self._bounds.pool_bytes, cuts=0, goal=most, now=now)
        priced = min(use.serving_cached_bytes, CACHED_BYTES_PER_HIT * self._hit.add(use.serving_hit_bytes, now))
        peak = self._peak.add(use.serving_bytes + max(use.serving_wanted_bytes, priced), now)
        room = self._bounds.total_bytes - use.serving_bytes
        least_free = max(int(self._bounds.headroom_bytes * (1.0 - HIGH_WATERMARK)), use.serving_wanted_bytes)
        self._budget, cuts = min(self._budget, most), 0
        while self._budget and room - self._budget < least_free:
            self._budget = self._whole_blocks(self._budget // 2)
            cuts += 1
        if cuts:
            self._frozen_until = now + self._bounds.quiet_seconds
        goal = min(self._whole_blocks(self._bounds.total_bytes - self._bounds.headroom_bytes - peak), most)
        if grow and now >= self._frozen_until:
            piece = max(self._whole_blocks(self._bounds.piece_bytes), self._bounds.block_bytes)
            self._budget = max(self._budget, min(goal, self._budget + piece))
        held = min(use.guest_bytes + use.guest_cached_bytes, most, room - max(least_free, priced))
        return self._shares(kept=max(self._budget, held), cuts=cuts, goal=goal, now=now)

    def _whole_blocks(self, count: int) -> int:
        """In whole blocks."""
        return max(0, count) // self._bounds.block_bytes * self._bounds.block_bytes

    def _shares(self, *, kept: int, cuts: int, goal: int, now: float) -> KvShares:
        frozen = now < self._frozen_until
        return KvShares(
            budget_bytes=self._budget,
            kept_bytes=kept,
            serving_bytes=self._bounds.total_bytes - kept,
            cuts=cuts,
            frozen=frozen,
            can_grow=not frozen and goal > self._budget,
        )
