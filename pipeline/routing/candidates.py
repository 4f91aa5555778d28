"""The index of executors that may be sent turns, and the search for the two cheapest.

A **candidate** is one executor. Candidates of the same cost class and turn bucket, with room of about one size, form a
**group**: they differ only in how long a turn would wait. So a search looks at the first candidate of each group, not
at every executor.

Keeps true
- Of two candidates of one group, the candidate with the shorter wait is cheaper for every turn.
- A candidate is in one group by one valid entry, whose key is never above the candidate's wait. A search corrects the
  first entry of a heap until its key is exact. So a key has to be lowered at once, and may be raised when its entry
  is the first of its heap.
- A group's `max_room` and `max_free_room` are never below the room of its candidates, so a search skips groups whose
  candidates are all too full.
- A search visits the groups by the cost of a context token. It ends at the group where the context alone, with the
  cheapest decode of any group, costs more than the second best candidate found.
- An empty group has no entries, and there are at most a few times as many groups as groups with candidates. So
  executors that come, go or report other rates cost no memory.
- A rate is rounded to one of BUCKETS_PER_OCTAVE buckets per octave. So executors of the same hardware share a bucket,
  and a group, although their measurements differ. The bucket is at most one step from the newest reading. A reading
  within one step does not change the bucket.

A wait is the candidate's `load_seconds` plus the prefills before the turn, which end at `prefill_free_at`. Until then
`prefill_free_at + load_seconds` orders the `busy` candidates; `load_seconds` orders the `idle` ones.

Example, rates in tokens a second
    a reading of 1000  -> the bucket of 1024
    950, 1080, 1100    -> still 1024: readings from 861 to 1218 are within a step
    500                -> 512

Example, at 10 s
    idle: w1 has a load of 0.3 s   busy: w2 has no load, its prefill is free at 10.2 s  -> w2 is the cheapest
    w2 is sent a prefill of 1 s: its key stays 10.2, though 11.2 is exact               -> a search corrects it: w1
    at 12 s a search finds w2 among the busy                                            -> w2 moves to the idle: w2
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import msgspec

from rose.schemas.heartbeats import SlackHeartbeat

BUCKETS_PER_OCTAVE = 4
"""Rate buckets per octave. One step is 19 %, the largest error of a cost; the number of tokens that a turn will
generate is known far less exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class RateBucket:
    """A rounded rate. Equal rates share one object, so buckets are compared by identity."""

    token_seconds: float
    """Seconds of a token (or step) at this rate."""
    min_rate: float
    """Least reading, in tokens a second, that keeps this bucket."""
    max_rate: float
    """Greatest reading, in tokens a second, that keeps this bucket."""


def rate_bucket(rate: float, previous: RateBucket | None) -> RateBucket:
    """The bucket after a reading of `rate` (tokens or steps a second), which must be positive.

    `previous`: the bucket before the reading; None at the first reading.
    """
    if previous is not None and previous.min_rate <= rate <= previous.max_rate:
        return previous
    return _bucket(round(BUCKETS_PER_OCTAVE * math.log2(rate)))


@cache
def _bucket(number: int) -> RateBucket:
    """The bucket of this number. The rates that a heartbeat may report have some two hundred buckets."""
    below, rate, above = (2.0 ** ((number + away) / BUCKETS_PER_OCTAVE) for away in (-1, 0, 1))
    return RateBucket(1.0 / rate, below, above)


def engine_step_rate(heartbeat: SlackHeartbeat) -> float:
    """Steps a second that the executor's engine would take if its steps had no tokens.

    The decode rate in a heartbeat was measured with `rollout.running` turns, each with one token in every step. A step
    is taken to last at least as long as one token, so the result is positive for any measurement.
    """
    hardware = heartbeat.hardware
    token_seconds = 1.0 / hardware.prefill_tokens_per_second
    seconds = 1.0 / hardware.decode_tokens_per_second - max(1, heartbeat.rollout.running) * token_seconds
    return 1.0 / max(seconds, token_seconds)


TURN_BUCKETS_PER_OCTAVE = 2
"""Turn buckets per octave: for example, executors with 10 to 13 turns share a bucket."""


@cache
def turn_bucket(turns: int) -> float:
    """The number of turns that an executor holds, rounded to a turn bucket; 0 for no turns."""
    return 2.0 ** (round(TURN_BUCKETS_PER_OCTAVE * math.log2(turns)) / TURN_BUCKETS_PER_OCTAVE) if turns > 0 else 0.0


TIME_TOLERANCE_SECONDS = 1e-6
"""Largest rounding error of a sum of times in unix seconds."""

CLOSED = -1
"""Room of an executor that may not be sent turns."""

ANY_VERSION = -1
"""Stands for the pinned version of a turn that any version may sample."""

MIN_HEAP_ENTRIES = 64
"""Entries that a heap may have before invalid entries are dropped, and groups before empty groups are dropped."""

HeapEntry = tuple[float, int, "Candidate"]
"""Lower bound of a candidate's wait (for a busy candidate, of the time until which it waits), its number, and the
candidate."""


class CostClass(NamedTuple):
    """Rates and flags that the candidates of a group have in common."""

    prefill: RateBucket
    step: RateBucket
    """Rate of steps without tokens: `token_seconds` is the fixed time of a step."""
    frozen: bool
    seeded: bool
    version: int
    """Policy version that the executor has proven."""


class PlacementQuery(msgspec.Struct, frozen=True, gc=False):
    """The properties of a turn that decide its placement."""

    context_tokens: int
    new_tokens: float
    """Expected number of new tokens."""
    room_tokens: int
    """Tokens of the whole context and the most tokens that the turn may generate."""
    tie_key: str
    """A hash of this key decides between equal costs."""
    cached: tuple[tuple[str, int], ...] = ()
    """Executors with a cached prefix of the context, and the length of the prefix in tokens; each at most once."""
    seeded: bool = False
    """Whether the turn samples with a seed."""
    pinned_version: int = ANY_VERSION
    """Policy version that the executor must have."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One executor in the placement index: its offer, the turns that it holds, its costs, and its group."""

    number: int
    """Unique: no number is used twice."""
    hash: int
    heartbeat: SlackHeartbeat
    cost_class: CostClass
    prefill_token_seconds: float = 0.0
    """Cost of a context token that is not cached: its own time and the delay of other turns."""
    decode_token_seconds: float = 0.0
    """Cost of a new token: its own time and the delay by other turns."""
    turn_bucket: float = 0.0
    """Number of held turns, rounded (`rates.turn_bucket`)."""
    is_open: bool = False
    token_budget: int = CLOSED
    """Tokens that the executor could hold if it held nothing; CLOSED if it may not be sent turns."""
    staleness_seconds: float = 0.0
    """Risk of its policy version."""
    risk_seconds: float = 0.0
    """Risk of a turn on this executor that does not depend on the turn's length."""
    recomputed_tokens: float = 0.0
    """Tokens that other executors computed again after preemptions by this executor: running mean over its turns."""
    held_turns: int = 0
    held_tokens: int = 0
    held_new_tokens: float = 0.0
    """Expected new tokens of the held turns."""
    room: int = CLOSED
    """Tokens that one more turn may hold. Below 0 if there is no room for a turn; CLOSED if none may be sent."""
    load_seconds: float = 0.0
    """Cost of any turn on this executor: the delay of the held turns, and `risk_seconds`."""
    prefill_free_at: float = 0.0
    """When the dispatched prefills end, on the router's clock."""
    group: "CandidateGroup | None" = None
    entry: HeapEntry | None = None
    """The valid entry; None if no search would find the candidate."""
    is_busy: bool = False
    """Whether the valid entry is in the busy heap."""
    last_search: int = 0
    """Number of the newest search that has considered this candidate individually."""

    @property
    def exact_key(self) -> float:
        """The exact key of the valid entry, in the heap that the entry is in."""
        return self.prefill_free_at + self.load_seconds if self.is_busy else self.load_seconds

    def wait_seconds(self, now: float) -> float:
        """Seconds that a turn waits for prefills, and `load_seconds`."""
        return self.load_seconds if self.prefill_free_at <= now else self.load_seconds + (self.prefill_free_at - now)


@dataclass(slots=True, eq=False)
class CandidateGroup:
    """Candidates of one cost class and turn bucket, with room of about one size."""

    number: int
    """Unique: no number is used twice."""
    prefill_token_seconds: float
    decode_token_seconds: float
    """Cost of a new token on each candidate of the group."""
    seeded: bool
    version: int
    min_room: int
    """Least room of a candidate that belongs to the group."""
    max_room: int
    """Most room of a candidate that belongs to the group."""
    reinsert: Callable[[Candidate], None]
    """Moves a candidate to the group that it belongs to now."""
    max_free_room: int = CLOSED
    """Upper bound of the candidates' room; exact after a search that has looked at all candidates."""
    size: int = 0
    """Number of candidates in the group."""
    max_entries: int = MIN_HEAP_ENTRIES
    """Entries that a heap may have before `compact`: at least twice the valid entries."""
    idle: list[HeapEntry] = field(default_factory=list)
    busy: list[HeapEntry] = field(default_factory=list)

    def cheapest(self, room_tokens: int, now: float, search: int, max_wait_seconds: float) -> Candidate | None:
        """The candidate with the shortest wait that has room and was not considered by this search yet.

        `search`: number of the search. None if all candidates wait for `max_wait_seconds` or longer.
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
        """`cheapest` for the case that the first entry of a heap is unusable: searches both heaps as far as keys allow.

        Sets `max_free_room`.
        """
        best, best_wait, roomiest = None, max_wait_seconds, CLOSED
        for heap, since, tolerance in ((self.idle, 0.0, 0.0), (self.busy, now, TIME_TOLERANCE_SECONDS)):
            pending = [0]
            while pending:
                position = pending.pop()
                if position >= len(heap):
                    continue
                if heap[position][0] - since >= best_wait + tolerance:
                    roomiest = self.max_free_room  # the entries below this one are not examined
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
        """At most `limit` candidates with room whose wait and `base_seconds` are together at most `max_seconds`.

        The entries that the search examines are corrected, so later searches need not correct them again.
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
        """Pop the next exact entry of a candidate that waits for at most `max_wait_seconds`; None if there is none.

        A candidate with less room than `room_tokens` and `min_room` moves to the group that it belongs to.
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
        """Push an entry with the candidate's exact key at `now`. Compacts a heap with too many invalid entries."""
        candidate.is_busy = candidate.prefill_free_at > now
        candidate.entry = (candidate.exact_key, candidate.number, candidate)
        heap = self.busy if candidate.is_busy else self.idle
        heappush(heap, candidate.entry)
        if len(heap) > self.max_entries:
            self.compact()

    def compact(self) -> None:
        """Drop the invalid entries."""
        for heap in (self.idle, self.busy):
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)
        self.max_entries = max(MIN_HEAP_ENTRIES, 2 * len(self.idle), 2 * len(self.busy))


@dataclass(slots=True)
class CheapestTwo:
    """Result of a search: the cheapest candidate, the second cheapest, and their costs in seconds."""

    best: Candidate | None = None
    best_cost: float = math.inf
    runner_up: Candidate | None = None
    runner_up_cost: float = math.inf

    def consider(self, candidate: Candidate, cost: float) -> None:
        """Add a candidate with its cost in seconds."""
        if cost < self.best_cost:
            self.runner_up, self.runner_up_cost = self.best, self.best_cost
            self.best, self.best_cost = candidate, cost
        elif cost < self.runner_up_cost:
            self.runner_up, self.runner_up_cost = candidate, cost


class CandidateIndex:
    """All candidates that may be sent turns, in groups."""

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the newest search."""
        self._numbers = 0
        self._groups: list[tuple[float, int, CandidateGroup]] = []
        """Groups with candidates, by cost of a context token and number. Each change makes a new list, because a search
        may iterate over the old list."""
        self._least_decode = 0.0
        """Least `decode_token_seconds` of these groups."""
        self._groups_by_class: dict[tuple[CostClass, float, int], CandidateGroup] = {}
        self._max_groups = MIN_HEAP_ENTRIES
        """Groups that there may be before empty groups are dropped: at least twice the groups with candidates."""

    def add(self, candidate: Candidate) -> None:
        """Move a candidate to the group that it belongs to, or to no group if it has no room."""
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
        """Remove a candidate from its group, if it is in a group."""
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
        """Keep the index valid after a change of a candidate's wait, room or costs."""
        group, entry = candidate.group, candidate.entry
        if group is None or entry is None or candidate.room > group.max_room:
            self.add(candidate)
        else:
            if candidate.room > group.max_free_room:
                group.max_free_room = candidate.room
            # `exact_key` without the call: this runs several times a turn.
            if (
                candidate.prefill_free_at + candidate.load_seconds if candidate.is_busy else candidate.load_seconds
            ) < entry[0]:
                group.add(candidate, self.now)

    def search(self, query: PlacementQuery, now: float, search: int, found: CheapestTwo) -> None:
        """Add to `found` the two cheapest candidates without a cached prefix that this search has not considered yet.

        `search`: number of the search, greater than all before.
        """
        self.now = now
        room_tokens, context, new, seeded = query.room_tokens, query.context_tokens, query.new_tokens, query.seeded
        pinned, second, home = query.pinned_version, found.runner_up_cost, None
        cheapest = new * self._least_decode
        for price, _, group in self._groups:
            if context * price + cheapest >= second:
                break
            limit = second - context * price - new * group.decode_token_seconds
            idle, busy = group.idle, group.busy
            if (
                ((idle and idle[0][0] < limit) or (busy and busy[0][0] - now < limit + TIME_TOLERANCE_SECONDS))
                and group.max_free_room >= room_tokens
                and (group.seeded or not seeded)
                and pinned in (ANY_VERSION, group.version)
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
        """Candidates where the turn costs at most `max_seconds` without a cached prefix; at most `max_count`."""
        found: list[Candidate] = []
        room_tokens, context, new = query.room_tokens, query.context_tokens, query.new_tokens
        for price, _, group in self._groups:
            if group.max_free_room < room_tokens or (query.seeded and not group.seeded):
                continue
            if query.pinned_version not in (ANY_VERSION, group.version):
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
            candidate.cost_class.version,
            min_room,
            max_room,
            self.add,
        )
        self._groups_by_class[candidate.cost_class, candidate.turn_bucket, size] = group
        return group
