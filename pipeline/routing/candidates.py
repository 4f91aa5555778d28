"""The index of executors that may be sent turns, and the search for the two cheapest.

A **candidate** is one executor. Candidates of the same cost class and turn bucket, with room of about one size, form a
**group**: they differ only in how long a turn would wait. So a search looks at the first candidate of each group, not
at every executor.

Keeps true
- Of two candidates of one group, the one with the lesser wait is the cheaper for every turn.
- A candidate stands in one group by one entry, whose key is never above the candidate's wait. A search corrects the
  first entry of a heap until its key is exact. So a key has to be lowered at once, and may be raised when its entry
  comes up.
- A group's `max_room` is never below the room of its candidates, and `max_free_room` never below the room of any that
  stands in it, so a search passes over groups whose candidates are all too full.
- A search visits the groups by the cost of a context token. It ends at the group where the context alone, with the
  cheapest decode of any group, costs more than the second best candidate found.
- An empty group holds nothing, and there are at most a few times as many groups as groups with candidates. So executors
  that come, go or report other rates cost no memory.

A wait is the candidate's `load_seconds` plus the prefills before the turn, which end at `prefill_free_at`. Until then
`prefill_free_at + load_seconds` orders the `busy` candidates; `load_seconds` orders the `idle` ones.

Example, at 10 s
    idle: w1 has a load of 0.3 s   busy: w2 has none, its prefill is free at 10.2 s  -> w2 is the first
    w2 is sent a prefill of 1 s: its key stays 10.2, below its 11.2                  -> corrected when it comes up: w1
    at 12 s w2 comes up among the busy                                               -> moved to the idle, and first
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import msgspec

from rose.pipeline.routing.rates import RateBucket
from rose.schemas.heartbeats import SlackHeartbeat

TIME_TOLERANCE_SECONDS = 1e-6
"""What a sum of times in unix seconds may be off by."""

CLOSED = -1
"""Room of an executor that may be sent nothing."""

MIN_HEAP_ENTRIES = 64
"""Entries that a heap may have before those that mean nothing are dropped; so it is with groups."""

HeapEntry = tuple[float, int, "Candidate"]
"""What the seat would wait at least (of the busy: until when), its number, and itself."""


class CostClass(NamedTuple):
    """What peers have in common."""

    prefill: RateBucket
    step: RateBucket
    """Of a step, whatever it computes: `seconds` is what it takes beside those of its tokens."""
    frozen: bool
    seeded: bool


class PlacementQuery(msgspec.Struct, frozen=True, gc=False):
    """A turn, as far as its place depends on it."""

    context_tokens: int
    new_tokens: float
    """Expected."""
    room_tokens: int
    """What it may come to hold: its context and the most that it may generate."""
    tie_key: str
    """Equal costs are settled by a hash of this."""
    cached: tuple[tuple[str, int], ...] = ()
    """Executors that have a prefix of the context in cache, and how many tokens of it; each at most once."""
    seeded: bool = False
    """Whether it draws by a seed."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One executor: what it offers, what it holds, and where it is found."""

    number: int
    """No two seats ever have the same."""
    hash: int
    heartbeat: SlackHeartbeat
    cost_class: CostClass
    prefill_token_seconds: float = 0.0
    """Seconds of a token of context that is not cached, and what that takes from others."""
    decode_token_seconds: float = 0.0
    """Seconds of a new token, and what that takes from others."""
    turn_bucket: float = 0.0
    """Turns that it holds, as far as costs tell them apart."""
    is_open: bool = False
    token_budget: int = CLOSED
    """Tokens that it could hold if it held nothing; CLOSED where it may be sent nothing."""
    staleness_seconds: float = 0.0
    """Risk of its policy version."""
    risk_seconds: float = 0.0
    """Of a turn there, whatever its length."""
    recomputed_tokens: float = 0.0
    """Tokens that were computed again elsewhere because it took a turn back: the running mean over its turns."""
    held_turns: int = 0
    held_tokens: int = 0
    held_new_tokens: float = 0.0
    """Expected of the turns that it holds."""
    room: int = CLOSED
    """Tokens that one more turn may hold; CLOSED when there is room for no turn."""
    load_seconds: float = 0.0
    """Seconds: what any turn there takes from those that it holds, and what it risks."""
    prefill_free_at: float = 0.0
    """When the prefills that it was sent are over."""
    group: "CandidateGroup | None" = None
    entry: HeapEntry | None = None
    """The one that counts; None where it would not be found."""
    is_busy: bool = False
    """Whether that is among the busy."""
    last_search: int = 0
    """The newest that has looked at it by itself."""

    @property
    def exact_key(self) -> float:
        """Of an entry, among the busy or the idle, that is exact."""
        return self.prefill_free_at + self.load_seconds if self.is_busy else self.load_seconds

    def wait_seconds(self, now: float) -> float:
        """Seconds that a turn would wait, and what it risks there whatever its length."""
        return self.load_seconds if self.prefill_free_at <= now else self.load_seconds + (self.prefill_free_at - now)


@dataclass(slots=True, eq=False)
class CandidateGroup:
    """Seats that are alike, with room of about one size."""

    number: int
    """No two groups ever have the same."""
    prefill_token_seconds: float
    decode_token_seconds: float
    """Of each of its seats."""
    seeded: bool
    min_room: int
    """Room of the smallest that belongs here."""
    max_room: int
    """Room of the biggest."""
    reinsert: Callable[[Candidate], None]
    """Have a seat stand where it belongs now, which is not here."""
    max_free_room: int = CLOSED
    """What no seat that stands here has more room than; exact after a search that has looked at all of them."""
    size: int = 0
    """That stand here."""
    max_entries: int = MIN_HEAP_ENTRIES
    """That a heap may have: at least twice those that count."""
    idle: list[HeapEntry] = field(default_factory=list)
    busy: list[HeapEntry] = field(default_factory=list)

    def cheapest(self, room_tokens: int, now: float, search: int, max_wait_seconds: float) -> Candidate | None:
        """Who waits least, of those with room that this search has not looked at yet; None if all wait for longer than
        `max_wait_seconds`.
        """
        idle, busy, best, best_wait = self.idle, self.busy, None, max_wait_seconds
        while idle:
            entry = idle[0]
            key, number, candidate = entry
            if key > max_wait_seconds:
                break
            if candidate.entry is not entry:
                heappop(idle)
            elif candidate.room < self.min_room and candidate.room < room_tokens:
                heappop(idle)
                self.reinsert(candidate)
            elif candidate.prefill_free_at > now:
                heappop(idle)
                self.add(candidate, now)
            elif candidate.load_seconds > key:
                candidate.entry = (candidate.load_seconds, number, candidate)
                heapreplace(idle, candidate.entry)
            elif candidate.last_search == search or candidate.room < room_tokens:
                return self._search_heaps(room_tokens, now, search, max_wait_seconds)
            else:
                best, best_wait = candidate, key
                break
        until = now + best_wait + TIME_TOLERANCE_SECONDS
        while busy:
            entry = busy[0]
            key, number, candidate = entry
            if key > until:
                break
            if candidate.entry is not entry:
                heappop(busy)
            elif candidate.room < self.min_room and candidate.room < room_tokens:
                heappop(busy)
                self.reinsert(candidate)
            elif candidate.prefill_free_at <= now:
                heappop(busy)
                self.add(candidate, now)
                if (
                    candidate.load_seconds < best_wait
                    and candidate.last_search != search
                    and candidate.room >= room_tokens
                ):
                    best, best_wait = candidate, candidate.load_seconds
                    until = now + best_wait + TIME_TOLERANCE_SECONDS
            elif candidate.prefill_free_at + candidate.load_seconds > key:
                candidate.entry = (candidate.prefill_free_at + candidate.load_seconds, number, candidate)
                heapreplace(busy, candidate.entry)
            elif candidate.last_search == search or candidate.room < room_tokens:
                return self._search_heaps(room_tokens, now, search, max_wait_seconds)
            else:
                return candidate if candidate.load_seconds + (candidate.prefill_free_at - now) < best_wait else best
        return best

    def _search_heaps(self, room_tokens: int, now: float, search: int, max_wait_seconds: float) -> Candidate | None:
        """As `cheapest`, where the first of a heap is of no use: down the heaps as far as keys allow."""
        best, best_wait, roomiest = None, max_wait_seconds, CLOSED
        for heap, since, tolerance in ((self.idle, 0.0, 0.0), (self.busy, now, TIME_TOLERANCE_SECONDS)):
            pending = [0]
            while pending:
                position = pending.pop()
                if position >= len(heap):
                    continue
                if heap[position][0] - since >= best_wait + tolerance:
                    roomiest = self.max_free_room  # it does not look at what is below
                    continue
                entry = heap[position]
                candidate = entry[2]
                if candidate.entry is entry:
                    roomiest = max(roomiest, candidate.room)
                    if candidate.last_search != search and candidate.room >= room_tokens:
                        wait = candidate.wait_seconds(now)
                        if wait < best_wait:
                            best, best_wait = candidate, wait
                pending += (2 * position + 1, 2 * position + 2)
        self.max_free_room = roomiest
        return best

    def within(
        self, base_seconds: float, max_seconds: float, room_tokens: int, now: float, limit: int
    ) -> list[Candidate]:
        """Those with room where what costs `base_seconds` seconds costs `max_seconds` with the wait; no more than
        `limit` are named.

        What comes up is mended, so that what has changed since is looked at once and not by every search.
        """
        found: list[Candidate] = []
        looked_at: list[HeapEntry] = []
        while (
            len(found) < limit
            and (entry := self._pop(room_tokens, now, max_seconds - base_seconds + TIME_TOLERANCE_SECONDS)) is not None
        ):
            looked_at.append(entry)
            candidate = entry[2]
            if candidate.room >= room_tokens and base_seconds + candidate.wait_seconds(now) <= max_seconds:
                found.append(candidate)
        for entry in looked_at:
            heappush(self.busy if entry[2].is_busy else self.idle, entry)
        return found

    def _pop(self, room_tokens: int, now: float, max_wait_seconds: float) -> HeapEntry | None:
        """Take off a heap the next exact entry of a seat that waits for no longer than `max_wait_seconds`.

        Who got too full both for `room_tokens` and to stand here goes where it belongs: there nobody looks for it now.
        """
        while True:
            if self.idle and self.idle[0][0] <= max_wait_seconds:
                entry = heappop(self.idle)
            elif self.busy and self.busy[0][0] - now <= max_wait_seconds:
                entry = heappop(self.busy)
            else:
                return None
            key, _, candidate = entry
            if candidate.entry is not entry:
                continue
            if candidate.room < self.min_room and candidate.room < room_tokens:
                self.reinsert(candidate)
            elif (candidate.prefill_free_at > now) is candidate.is_busy and key >= candidate.exact_key:
                return entry
            else:
                self.add(candidate, now)

    def add(self, candidate: Candidate, now: float) -> None:
        """Have it found by what it would wait at `now`. What means nothing is dropped where it has become much."""
        candidate.is_busy = candidate.prefill_free_at > now
        candidate.entry = (candidate.exact_key, candidate.number, candidate)
        heap = self.busy if candidate.is_busy else self.idle
        heappush(heap, candidate.entry)
        if len(heap) > self.max_entries:
            self.compact()

    def compact(self) -> None:
        """Drop the entries that mean nothing."""
        for heap in (self.idle, self.busy):
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)
        self.max_entries = max(MIN_HEAP_ENTRIES, 2 * len(self.idle), 2 * len(self.busy))


@dataclass(slots=True)
class CheapestTwo:
    """What a search has found: the cheapest seat, the next to it, and their costs."""

    best: Candidate | None = None
    best_cost: float = math.inf
    runner_up: Candidate | None = None
    runner_up_cost: float = math.inf

    def consider(self, candidate: Candidate, cost: float) -> None:
        """Look at one more."""
        if cost < self.best_cost:
            self.runner_up, self.runner_up_cost = self.best, self.best_cost
            self.best, self.best_cost = candidate, cost
        elif cost < self.runner_up_cost:
            self.runner_up, self.runner_up_cost = candidate, cost


class CandidateIndex:
    """All seats that may be sent turns, in groups of peers."""

    def __init__(self) -> None:
        self.now = 0.0
        """Of the newest search."""
        self._numbers = 0
        self._groups: list[tuple[float, int, CandidateGroup]] = []
        """Those with seats, by price and number. Another list whenever that changes: a search may be looking at it."""
        self._least_decode = 0.0
        """Of theirs."""
        self._groups_by_class: dict[tuple[CostClass, float, int], CandidateGroup] = {}
        self._max_groups = MIN_HEAP_ENTRIES
        """That there may be before those without a seat are forgotten: at least twice those that have one."""

    def add(self, candidate: Candidate) -> None:
        """Let it stand where it belongs, and nowhere if it has no room."""
        self.remove(candidate)
        if candidate.room < 0:
            return
        size = candidate.room.bit_length()
        group = self._groups_by_class.get((candidate.cost_class, candidate.turn_bucket, size))
        if group is None:
            group = self._join_group(candidate, size)
        candidate.group = group
        group.size += 1
        group.max_free_room = max(group.max_free_room, candidate.room)
        if group.size == 1:
            groups = self._groups.copy()
            insort(groups, (group.prefill_token_seconds, group.number, group))
            self._least_decode = (
                min(self._least_decode, group.decode_token_seconds) if self._groups else group.decode_token_seconds
            )
            self._groups = groups
        group.add(candidate, self.now)

    def remove(self, candidate: Candidate) -> None:
        """Let it stand nowhere."""
        group, candidate.group, candidate.entry = candidate.group, None, None
        if group is None:
            return
        group.size -= 1
        if not group.size:
            group.idle.clear()
            group.busy.clear()
            group.max_free_room = CLOSED
            groups = self._groups.copy()
            del groups[bisect_left(groups, (group.prefill_token_seconds, group.number))]
            self._groups = groups
            if group.decode_token_seconds <= self._least_decode:
                self._least_decode = min((last.decode_token_seconds for _, _, last in groups), default=0.0)

    def update(self, candidate: Candidate) -> None:
        """Its wait or its room has changed: see to it that it is still found."""
        group, entry = candidate.group, candidate.entry
        if group is None or entry is None or candidate.room > group.max_room:
            self.add(candidate)
        else:
            if candidate.room > group.max_free_room:
                group.max_free_room = candidate.room
            # Its key, without a call: this runs several times a turn.
            if (
                candidate.prefill_free_at + candidate.load_seconds if candidate.is_busy else candidate.load_seconds
            ) < entry[0]:
                group.add(candidate, self.now)

    def search(self, query: PlacementQuery, now: float, search: int, found: CheapestTwo) -> None:
        """Add the two cheapest without a cached prefix to what was found, of those not looked at by this search."""
        self.now = now
        room_tokens, context, new, seeded = query.room_tokens, query.context_tokens, query.new_tokens, query.seeded
        second, home, cheapest = found.runner_up_cost, None, new * self._least_decode
        for price, _, group in self._groups:
            if context * price + cheapest >= second:
                break
            limit = second - context * price - new * group.decode_token_seconds
            idle, busy = group.idle, group.busy
            if (
                ((idle and idle[0][0] < limit) or (busy and busy[0][0] - now < limit + TIME_TOLERANCE_SECONDS))
                and group.max_free_room >= room_tokens
                and (group.seeded or not seeded)
            ):
                candidate = group.cheapest(room_tokens, now, search, limit)
                if candidate is not None:
                    found.consider(
                        candidate, context * price + new * group.decode_token_seconds + candidate.wait_seconds(now)
                    )
                    second = found.runner_up_cost
                    if found.best is candidate:
                        home = group
        if home is None or found.best is None:
            return
        found.best.last_search = search
        base = context * home.prefill_token_seconds + new * home.decode_token_seconds
        candidate = home.cheapest(room_tokens, now, search, second - base)
        if candidate is not None:
            found.consider(candidate, base + candidate.wait_seconds(now))

    def candidates_within(
        self, query: PlacementQuery, now: float, max_seconds: float, max_count: int
    ) -> list[Candidate]:
        """Those where the turn costs `max_seconds` seconds at most without a cached prefix; no more than `max_count`
        are named.
        """
        found: list[Candidate] = []
        room_tokens, context, new = query.room_tokens, query.context_tokens, query.new_tokens
        for price, _, group in self._groups:
            if group.max_free_room < room_tokens or (query.seeded and not group.seeded):
                continue
            base = context * price + new * group.decode_token_seconds
            limit, idle, busy = max_seconds - base + TIME_TOLERANCE_SECONDS, group.idle, group.busy
            if (idle and idle[0][0] <= limit) or (busy and busy[0][0] - now <= limit):
                found += group.within(base, max_seconds, room_tokens, now, max_count - len(found))
        return found

    def _join_group(self, candidate: Candidate, size: int) -> CandidateGroup:
        if len(self._groups_by_class) >= self._max_groups:
            self._groups_by_class = {key: group for key, group in self._groups_by_class.items() if group.size}
            self._max_groups = max(MIN_HEAP_ENTRIES, 2 * len(self._groups_by_class))
        self._numbers += 1
        min_room, max_room = 2**size // 2, 2**size - 1
        group = CandidateGroup(
            self._numbers,
            candidate.prefill_token_seconds,
            candidate.decode_token_seconds,
            candidate.cost_class.seeded,
            min_room,
            max_room,
            self.add,
        )
        self._groups_by_class[candidate.cost_class, candidate.turn_bucket, size] = group
        return group
