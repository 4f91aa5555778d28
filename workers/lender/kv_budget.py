"""The KV budget: how many KV bytes serving and its guest may hold.

Keeps true
- `serving + kept = total`, always: serving may use all bytes that the guest may not keep. The guest's running requests
  may hold `budget` bytes, at most `kept`. The guest keeps the rest as cached prefixes of requests that a cut preempted.
  These prefixes stay until serving's requests, serving's priced prefixes or half of the headroom take their room, and
  never grow.
- Serving never waits for bytes that the guest may hold: the decision that learns of serving's need makes room for it.
- Headroom. The guest grows only so far that serving keeps `headroom_bytes` free at serving's peak use. The peak is that
  of the last one to two quiet times, and includes the priced prefixes.
- Cut. When serving has used `HIGH_WATERMARK` of its headroom, or needs more than is free, the budget is halved, and
  halved again within the same decision until neither holds, down to 0.
- Freeze. After a cut the budget does not grow before the next policy version or before `quiet_seconds` without a cut.
  The budget therefore cannot oscillate: between two growths it is halved at most log2(total / block) + 1 times. A
  freeze forbids only growth.
- Growth is at most `piece_bytes` in a decision, and happens only in decisions that allow it, because it takes time that
  serving may need. Room that serving needs is made at once, however long it takes.
- Price. Each byte that serving found in its prefix cache within the last one to two quiet times protects
  `CACHED_BYTES_PER_HIT` bytes of this cache: the guest does not grow over them. Serving may evict protected bytes, and
  no cut is made to keep them.

Where the guest has a view of serving's cache, lent bytes change hands. Where each tenant has a cache of its own
(`transferable=False`) a cut would give serving nothing, so the guest keeps its whole pool.

Units: bytes, seconds; `now` is of any one clock. Pure.

Example (total 100, headroom 20, pieces of 100, serving uses 10)
    decide, with growth      -> the guest gets 70
    serving uses 21          -> 9 free, more than half of the headroom is used: cut to 35, frozen
    serving uses 10          -> still 35
    a policy version comes   -> 59: serving needed 21 a moment ago
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from rose.schemas.errors import UsageError

HIGH_WATERMARK = 0.5
"""Share of the headroom that serving may use before the guest's budget is cut."""

CACHED_BYTES_PER_HIT = 20
"""Cached bytes that each hit byte protects from growth: prefixes that are hit once in so many quiet times stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLimits:
    """Sizes and times of a KV budget. Raises UsageError for values that contradict each other."""

    total_bytes: int
    """KV memory of both tenants."""
    pool_bytes: int
    """The most that the guest can ever hold."""
    block_bytes: int
    """Size of one block of the guest; budgets are whole blocks."""
    headroom_bytes: int
    """H: bytes that growth leaves free for serving."""
    quiet_seconds: float
    """A freeze ends after so long without a cut. Serving's peaks are forgotten after one to two such times."""
    piece_bytes: int
    """The most by which the budget grows in one decision."""
    transferable: bool
    """Whether one tenant can use the bytes that the other gives back; False for fixed pools."""

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= self.pool_bytes <= self.total_bytes:
            raise UsageError("kv_cache_bytes holds a block at least, and no more than what there is for both tenants")
        if not 0 <= self.headroom_bytes <= self.total_bytes or self.quiet_seconds <= 0:
            raise UsageError("serving's headroom is part of the KV memory, and the quiet time is above 0 s")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUsage:
    """The KV bytes that the tenants hold at one moment."""

    serving_bytes: int
    """Bytes of serving's requests, without cached prefixes that no request holds."""
    serving_wanted_bytes: int = 0
    """Bytes that serving's next step may take in addition, for running and waiting requests."""
    serving_cached_bytes: int = 0
    """Bytes of cached prefixes that no request of serving holds."""
    serving_hit_bytes: int = 0
    """Bytes that were found in serving's prefix cache since the last decision."""
    guest_bytes: int = 0
    """Bytes of the guest's running requests."""
    guest_cached_bytes: int = 0
    """Other bytes of the guest: free blocks and cached prefixes, including the prefixes of preempted requests."""


@dataclass(frozen=True, slots=True)
class KvShares:
    """The KV bytes that each tenant may hold from now on."""

    budget_bytes: int
    """The most bytes of the guest's running requests."""
    kept_bytes: int
    """The most bytes of the guest, with prefixes that none of its requests holds. Bytes above are given back at once:
    blocks without a prefix first, blocks of the most recently preempted requests last."""
    serving_bytes: int
    """The most bytes of serving, with its cached prefixes."""
    cuts: int
    """Number of halvings in this decision."""
    frozen: bool
    """Whether a freeze forbids growth."""
    can_grow: bool
    """Whether the budget would grow in a decision that allows growth."""


class RecentFold:
    """The maximum or the sum of a figure over the last one to two spans of time."""

    def __init__(self, span_seconds: float, fold: Callable[[int, int], int]) -> None:
        self._span_seconds = span_seconds
        self._fold = fold
        self._before = self._current = 0
        self._began = -math.inf

    def add(self, figure: int, now: float) -> int:
        """Add the newest figure, which is at least 0. Return the fold of all figures that are remembered."""
        age = now - self._began
        if age >= self._span_seconds:
            self._before = self._current if age < 2 * self._span_seconds else 0
            self._current, self._began = 0, now
        self._current = self._fold(self._current, figure)
        return self._fold(self._before, self._current)


class KvBudget:
    """Decides the guest's share of the KV memory before every serving step."""

    def __init__(self, bounds: KvLimits) -> None:
        self._bounds = bounds
        self._budget = 0
        self._frozen_until = -math.inf
        self._version = -1
        """Policy version of the latest decision: another version ends a freeze."""
        self._peak = RecentFold(bounds.quiet_seconds, max)
        self._hit = RecentFold(bounds.quiet_seconds, operator.add)

    def decide(self, use: KvUsage, *, most_bytes: int, policy_version: int, grow: bool, now: float) -> KvShares:
        """Decide the shares from the present use.

        `most_bytes`: the most that the guest is allowed; 0 takes everything back. `policy_version`: the version that
        the guest serves. `grow`: whether the budget may grow in this decision.
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
        """Round `count` bytes down to whole blocks."""
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
