"""Placement: what a turn would cost on every executor, and which is the cheapest.

Keeps true
- One cost in seconds: `wait + (context - cached) / prefill rate + expected new / decode rate + risk`. Affinity,
  hardware, load and freshness are terms of this sum, not special cases.
- Only open executors are chosen, never one whose room (turns, tokens) the turn would overfill, and for a turn with a
  seed only such as take seeds.
- The answer is that of a scan over all executors; the vectors only make the scan cheap.
- Costs within TIE_SECONDS are equal; among equals the rendezvous hash of the turn's key decides, whatever the order
  in which the executors were met.

`wait` has two parts. Prefills are run one after another: each one sent pushes the moment at which the executor's
prefill is free, and that moment comes nearer by itself as time passes. Decodes share the executor: what it still owes
of expected tokens is spread over the turns that it runs at once.
`risk` has three parts. An executor behind the newest policy version samples tokens that may come too late. What is
prefilled delays whoever comes next: without that, the members of a group that arrive together would each compute their
prompt on another idle executor, which is no slower for them than waiting for the first to have done it. And on a
frozen lender, whose cache cannot grow, it takes the place of a prefix that somebody comes back for: so those come back
there first, and others where else they find room.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.slack import SlackHeartbeat
from schemas.turns import PlacementCost

TIE_SECONDS = 1e-4
"""Costs closer than this are equal: no executor knows its own rates better."""

STALENESS_SECONDS = 0.25
"""Risk of one policy version that an executor is behind: its tokens may be too old to train on."""

DISPLACEMENT = 0.5
"""Risk of each second of prefill: as if every second one delayed a turn that comes after it."""

FROZEN_DISPLACEMENT = 1.0
"""The same on a frozen lender: what loses its prefix there is computed again."""

LONGEST_WAIT_SECONDS = 1e9
"""For an executor's prefill, as far as it is counted: what is slower than that has gone wrong in telling its rates."""

CLOSED = -1
"""Room of an executor that may be sent nothing."""


class Ask(NamedTuple):
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


class Choice(NamedTuple):
    """The cheapest executor for a turn."""

    worker: str
    slot: int
    incarnation: int
    cost: PlacementCost


class Load(NamedTuple):
    """What one executor holds, and what it would take on beside."""

    free_turns: int = 0
    free_tokens: int = 0
    held_turns: int = 0
    held_tokens: int = 0
    seconds: float = 0.0
    """Until it has done what it holds."""


@dataclass(slots=True)
class Seat:
    """One executor: what it offers and what it holds."""

    beat: SlackHeartbeat
    open: bool = False
    risk_seconds: float = 0.0
    """Of its policy version."""
    decode_wait_per_token: float = 0.0
    """Seconds that a new turn waits for each token that the executor owes: its decode time, spread over its lanes."""
    held_turns: int = 0
    held_tokens: int = 0
    held_new_tokens: float = 0.0
    """Expected of the turns that it holds."""

    @property
    def room_tokens(self) -> int:
        """Tokens that one more turn may hold; CLOSED when there is room for no turn."""
        if not self.open or self.held_turns >= self.beat.max_turns:
            return CLOSED
        return self.beat.token_budget - self.held_tokens

    @property
    def decode_wait_seconds(self) -> float:
        return self.held_new_tokens * self.decode_wait_per_token

    @property
    def displacement(self) -> float:
        """Risk of each second of prefill."""
        return DISPLACEMENT + FROZEN_DISPLACEMENT * self.beat.frozen


def lanes(beat: SlackHeartbeat) -> int:
    """Turns that an executor runs at once. If some wait inside the engine, it runs no more than it does now."""
    running = beat.rollout.running
    return running if beat.rollout.waiting and running else max(1, beat.max_turns)


class Placement:
    """The executors' offers as vectors, one element an executor."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self.index: dict[str, int] = {}
        self._table = np.zeros((6, 0))
        self._hash = np.zeros(0, np.uint64)
        self._seedless = np.zeros(0, np.bool_)
        """Executors that take no seeds."""
        self._resize([])

    def offer(self, beat: SlackHeartbeat, *, open: bool, lag_versions: int) -> bool:
        """Take in what an executor offers now; whether it may be able to run what it could not before."""
        index = self.index.get(beat.worker)
        if index is None:
            self.index[beat.worker] = index = len(self.seats)
            self.seats.append(Seat(beat))
            self._resize(range(index))
            digest = hashlib.blake2b(beat.worker.encode(), digest_size=8).digest()
            self._hash[index] = int.from_bytes(digest, "little")
        seat = self.seats[index]
        before, was_open = seat.beat, seat.open
        decode = 1.0 / beat.hardware.decode_tokens_per_second
        seat.beat, seat.open, seat.risk_seconds = beat, open, lag_versions * STALENESS_SECONDS
        seat.decode_wait_per_token = decode / lanes(beat)
        self._prefill[index] = 1.0 / beat.hardware.prefill_tokens_per_second
        self._price[index] = self._prefill[index] * (1 + seat.displacement)
        self._decode[index] = decode
        self._seedless[index] = not beat.seeded
        self._refresh(index)
        grew = beat.token_budget > before.token_budget or beat.max_turns > before.max_turns
        return open and (not was_open or grew)

    def close(self, worker: str) -> None:
        """Send it nothing until it makes a new offer."""
        index = self.index.get(worker)
        if index is not None:
            self.seats[index].open = False
            self._refresh(index)

    def remove(self, worker: str) -> None:
        """Forget an executor that holds nothing."""
        index = self.index.get(worker)
        if index is not None:
            del self.seats[index]
            self._resize([kept for kept in range(len(self.seats) + 1) if kept != index])
            self.index = {seat.beat.worker: place for place, seat in enumerate(self.seats)}

    def take(self, choice: Choice, ask: Ask, now: float) -> None:
        """Charge a turn to the executor that was chosen for it."""
        index = self.index[choice.worker]
        free_at = max(float(self._prefill_free_at[index]), now) + choice.cost.prefill_seconds
        self._prefill_free_at[index] = min(free_at, now + LONGEST_WAIT_SECONDS)
        self.hold(choice.worker, ask.room_tokens, ask.new_tokens)

    def hold(self, worker: str, room_tokens: int, new_tokens: float) -> None:
        """Count one more turn as held."""
        self._count(worker, 1, room_tokens, new_tokens)

    def release(self, worker: str, room_tokens: int, new_tokens: float) -> None:
        """Count one turn less as held."""
        self._count(worker, -1, -room_tokens, -new_tokens)

    def choose(self, ask: Ask, now: float) -> Choice | None:
        """The cheapest executor with room; None if there is none."""
        if not self.seats:
            return None
        cost, scratch = self._cost, self._scratch
        np.subtract(self._prefill_free_at, now, out=cost)
        np.maximum(cost, 0.0, out=cost)
        np.add(cost, self._load, out=cost)
        np.multiply(self._price, ask.context_tokens, out=scratch)
        np.add(cost, scratch, out=cost)
        np.multiply(self._decode, ask.new_tokens, out=scratch)
        np.add(cost, scratch, out=cost)
        for worker, tokens in ask.cached:
            holder = self.index.get(worker)
            if holder is not None:
                cost[holder] -= tokens * self._price[holder]
        np.putmask(cost, self._room < ask.room_tokens, np.inf)
        if ask.seeded:
            np.putmask(cost, self._seedless, np.inf)
        return self._cheapest(ask, now)

    def load_of(self, worker: str, now: float) -> Load:
        """How an executor stands; one that never made an offer holds nothing."""
        index = self.index.get(worker)
        if index is None:
            return Load()
        seat = self.seats[index]
        free_turns = max(0, seat.beat.max_turns - seat.held_turns) if seat.open else 0
        seconds = seat.decode_wait_seconds + max(0.0, float(self._prefill_free_at[index]) - now)
        held = seat.held_turns, seat.held_tokens
        return Load(free_turns, max(0, seat.room_tokens), *held, min(seconds, LONGEST_WAIT_SECONDS))

    def could_run(self, ask: Ask) -> bool:
        """Whether some open executor would have room for it if it held nothing."""
        return any(
            seat.open
            and seat.beat.max_turns > 0
            and seat.beat.token_budget >= ask.room_tokens
            and (seat.beat.seeded or not ask.seeded)
            for seat in self.seats
        )

    @property
    def refuses_seeds(self) -> bool:
        """Whether executors are open, and none of them takes a turn with a seed."""
        seeded = [seat.beat.seeded for seat in self.seats if seat.open]
        return bool(seeded) and not any(seeded)

    def _cheapest(self, ask: Ask, now: float) -> Choice | None:
        cost = self._cost
        best = int(cost.argmin())
        lowest = float(cost[best])
        if lowest == np.inf:
            return None
        cost[best] = np.inf
        second = int(cost.argmin())
        if cost[second] <= lowest + TIE_SECONDS:
            cost[best] = lowest
            best = self._settle(np.flatnonzero(cost <= lowest + TIE_SECONDS), ask.tie_key)
            cost[best] = np.inf
            second = int(cost.argmin())
        return self._choice(ask, best, None if cost[second] == np.inf else second, now)

    def _choice(self, ask: Ask, best: int, second: int | None, now: float) -> Choice:
        seat = self.seats[best]
        cached = next((tokens for worker, tokens in ask.cached if worker == seat.beat.worker), 0)
        prefill, decode = float(self._prefill[best]), float(self._decode[best])
        wait = max(0.0, float(self._prefill_free_at[best]) - now) + seat.decode_wait_seconds
        prefill_seconds = (ask.context_tokens - cached) * prefill
        cost = PlacementCost(
            wait_seconds=wait,
            prefill_seconds=prefill_seconds,
            decode_seconds=ask.new_tokens * decode,
            risk_seconds=seat.risk_seconds + seat.displacement * prefill_seconds,
            cached_tokens=cached,
            passed_over=None if second is None else self.seats[second].beat.worker,
            passed_over_seconds=0.0 if second is None else float(self._cost[second]),
        )
        return Choice(seat.beat.worker, seat.beat.slot, seat.beat.incarnation, cost)

    def _settle(self, equals: npt.NDArray[np.intp], tie_key: str) -> int:
        key = np.uint64(int.from_bytes(hashlib.blake2b(tie_key.encode(), digest_size=8).digest(), "little"))
        return int(equals[np.argmax(rendezvous(self._hash[equals], key))])

    def _count(self, worker: str, turns: int, room_tokens: int, new_tokens: float) -> None:
        index = self.index.get(worker)
        if index is None:
            return
        seat = self.seats[index]
        seat.held_turns += turns
        seat.held_tokens += room_tokens
        # An empty seat owes nothing: what sums of floats leave over must not add up, and what an executor said of its
        # own rates once is not held against it for ever.
        seat.held_new_tokens = seat.held_new_tokens + new_tokens if seat.held_turns else 0.0
        if not seat.held_turns:
            self._prefill_free_at[index] = 0.0
        self._refresh(index)

    def _refresh(self, index: int) -> None:
        seat = self.seats[index]
        self._room[index] = seat.room_tokens
        self._load[index] = seat.decode_wait_seconds + seat.risk_seconds

    def _resize(self, kept: Iterable[int]) -> None:
        """Make the vectors as long as the seats, those of the executors at `kept` first."""
        kept = list(kept)
        count = len(self.seats)
        table, hashes, seedless = np.zeros((6, count)), np.zeros(count, np.uint64), np.zeros(count, np.bool_)
        table[:, : len(kept)], hashes[: len(kept)] = self._table[:, kept], self._hash[kept]
        seedless[: len(kept)] = self._seedless[kept]
        self._table, self._hash, self._seedless = table, hashes, seedless
        self._prefill, self._price, self._decode, self._prefill_free_at, self._load, self._room = table
        self._cost, self._scratch = np.zeros_like(table[0]), np.zeros_like(table[0])


def rendezvous(workers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """One weight for every worker's hash under this key; the highest wins (highest random weight hashing)."""
    mixed = (workers ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    return mixed * np.uint64(0xD6E8FEB86659FD93)
