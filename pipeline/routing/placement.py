"""Placement: what a turn would cost on every executor, and which is the cheapest.

Keeps true
- One cost in seconds: `wait + (context - cached) / prefill rate + expected new * seconds of a step + risk`. Affinity,
  hardware, load and freshness are terms of this sum, not special cases.
- It is what the turn takes, and what it takes from others: who is sent where that sum is least makes the turns of all
  as short as one choice at a time can.
- Only open executors are chosen, never one whose room (turns, tokens) the turn would overfill, and for a turn with a
  seed only such as take seeds.
- The answer is that of a scan over all executors; the `index` only makes it cheap.
- Costs within TIE_SECONDS are equal; among equals the turn's key decides (`ring`), whatever the order in which the
  executors were met.

Rates are those that heartbeats taught (`pace`). Prefills are run one after another, and `wait` is for those that were
sent before: each pushes the moment at which the executor's prefill is free, and that moment comes nearer by itself as
time passes; but prompts that its engine says have not begun lie before it still, however long ago they were sent.
Whoever runs there shares the steps: each token that is computed in one makes it longer for all. So those that an
executor holds, its `crowd`, make each step longer for this turn; each token of context that this turn computes delays
all of them; and its new tokens delay each of them for as long as that one still runs (as if this turn ran longer: what
they owe is then the same for every turn, which keeps peers in one order; a turn of a few tokens is priced too high
beside long ones). That is the first part of `risk`, and why a prefix is worth more where many run.
It has four others. An executor behind the newest policy version samples tokens that may come too late. One that took
turns back before may do so again: what was computed again elsewhere is spread over all turns that it was given. What is
prefilled delays whoever comes next: without that, the members of a group that arrive together would each compute their
prompt on another idle executor, which is no slower for them than waiting for the first to have done it. And on a
frozen lender, whose cache cannot grow, it takes the place of a prefix that somebody comes back for: so those come back
there first, and others where else they find room.

Example: 32 tokens of context and 4 new ones, where a token takes 0.1 ms, and a step 3 ms beside that of its tokens
    an idle executor without them        32 * 0.1 * (1 + 0.5) + 4 * 3.0                             = 17 ms
    with 31 cached, beside 16 like it    1 * 0.1 * (1 + 0.5 + 16) + 4 * (3.0 + 1.6) + 32 * 0.1      = 23 ms
    with none cached, beside 16 like it  32 * 0.1 * (1 + 0.5 + 16) + 4 * (3.0 + 1.6) + 32 * 0.1     = 78 ms
"""

from typing import NamedTuple

import msgspec

from pipeline.routing.index import Found, Index
from pipeline.routing.pace import crowd_of, learned, step_rate
from pipeline.routing.peers import CLOSED, Ask, Kind, Seat
from pipeline.routing.ring import Ring, compared, name_hash
from pipeline.routing.room import NEVER, Largest, Shortage
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

LEFT = 0.5
"""Of what was expected of the turns that an executor holds, what they still owe: as if each was half way."""

LONGEST_WAIT_SECONDS = 1e9
"""For an executor's prefill, as far as it is counted: what is slower than that has gone wrong in telling its rates."""

AGAIN_WEIGHT = 1 / 32
"""Of the newest turn in what an executor's taking back costs: the last fifty or so count."""

AGAIN_KEPT = 0.999
"""Of that cost, from heartbeat to heartbeat: half of it after 700, so who is shunned for it is tried again."""


class Choice(msgspec.Struct, frozen=True, gc=False):
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
    """In which it does as much as it holds, with all its lanes busy."""


def lanes(beat: SlackHeartbeat) -> int:
    """Turns that an executor runs at once: all that it holds. What waits inside its engine waits for a step that has
    room for its prefill, which is counted as that.
    """
    return max(1, beat.max_turns)


class Placement:
    """The executors' seats, and the way to the cheapest."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}
        self._ring = Ring()
        self._index = Index()
        self._numbers = self._searches = 0
        self._largest = Largest(), Largest()
        """Token budgets of the open: of all, and of those that take seeds."""
        self._shortages = Shortage(), Shortage()
        """For turns without a seed, and with one."""
        self._short = NEVER
        """The least of theirs."""

    def offer(self, beat: SlackHeartbeat, *, open: bool, lag_versions: int) -> bool:
        """Take in what an executor offers; whether some turn can run that could not before, were all idle."""
        seat = self.seats.get(beat.worker)
        if seat is None:
            seat = self._seat(beat)
        before, seat.beat = seat.beat, beat
        staleness_seconds = lag_versions * STALENESS_SECONDS
        changed = self._learn(seat, before)
        if seat.again_tokens or staleness_seconds != seat.staleness_seconds:
            seat.again_tokens *= AGAIN_KEPT
            seat.staleness_seconds = staleness_seconds
            self._weigh(seat)
            changed = True
        if open is seat.open and not changed:
            return False
        more = self._open(seat, before, open=open)
        self._refresh(seat)
        return more

    def close(self, worker: str) -> None:
        """Send it nothing until it makes a new offer."""
        seat = self.seats.get(worker)
        if seat is not None:
            self._open(seat, seat.beat, open=False)
            self._refresh(seat)

    def remove(self, worker: str) -> None:
        """Forget an executor that holds nothing."""
        seat = self.seats.get(worker)
        if seat is not None:
            self.close(worker)
            del self.seats[worker]
            self._ring.remove(seat)
            self._index.leave(seat)

    def take(self, choice: Choice, ask: Ask, now: float) -> None:
        """Charge a turn to the executor that was chosen for it."""
        seat = self.seats[choice.worker]
        free_at = seat.free_at if seat.free_at > now else now
        free_at += choice.cost.prefill_seconds
        seat.free_at = min(free_at, now + LONGEST_WAIT_SECONDS)
        self._hold(seat, ask.room_tokens, ask.new_tokens)

    def owes(self, worker: str, prefill_seconds: float, now: float) -> None:
        """So much prefill has not begun there, whatever was expected."""
        seat = self.seats.get(worker)
        if seat is not None and now + prefill_seconds > seat.free_at:
            seat.free_at = now + min(prefill_seconds, LONGEST_WAIT_SECONDS)
            self._index.mend(seat)

    def hold(self, worker: str, room_tokens: int, new_tokens: float) -> None:
        """Count one more turn as held."""
        seat = self.seats.get(worker)
        if seat is not None:
            self._hold(seat, room_tokens, new_tokens)

    def release(self, worker: str, room_tokens: int, new_tokens: float) -> None:
        """Count one turn less as held."""
        seat = self.seats.get(worker)
        if seat is None:
            return
        seat.held_turns -= 1
        seat.held_tokens -= room_tokens
        # An empty seat owes nothing: what sums of floats leave over must not add up, and what an executor said of its
        # own rates once is not held against it for ever.
        if seat.held_turns:
            seat.held_new_tokens -= new_tokens
        else:
            seat.held_new_tokens = seat.free_at = 0.0
        if seat.again_tokens:
            seat.again_tokens *= 1 - AGAIN_WEIGHT
            self._weigh(seat)
        self._refresh(seat)

    def computed_again(self, worker: str, tokens: int) -> None:
        """Another executor computes so many tokens of a turn that this one took back."""
        seat = self.seats.get(worker)
        if seat is not None:
            seat.again_tokens += AGAIN_WEIGHT * tokens
            self._weigh(seat)
            self._refresh(seat)

    def choose(self, ask: Ask, now: float) -> Choice | None:
        """The cheapest executor with room; None if there is none."""
        shortage = self._shortages[ask.seeded]
        self._searches += 1
        found = Found()
        if ask.room_tokens >= shortage.least:
            for seat in shortage.grown:
                self._look(seat, ask, now, found)
        else:
            for worker, _ in ask.cached:
                holder = self.seats.get(worker)
                if holder is not None:
                    self._look(holder, ask, now, found)
            self._index.search(ask, now, self._searches, found)
        if found.best is None:
            shortage.found(ask.room_tokens)
            self._short = min(each.least for each in self._shortages)
            return None
        if found.second <= found.lowest + TIE_SECONDS:
            self._settle(ask, now, found)
        return self._choice(ask, now, found)

    def load_of(self, worker: str, now: float) -> Load:
        """How an executor stands; one that never made an offer holds nothing."""
        seat = self.seats.get(worker)
        if seat is None:
            return Load()
        free_turns = max(0, seat.beat.max_turns - seat.held_turns) if seat.open else 0
        decoded = lanes(seat.beat) * seat.beat.hardware.decode_tokens_per_second
        seconds = seat.held_new_tokens / decoded + max(0.0, seat.free_at - now)
        return Load(
            free_turns, max(0, seat.room), seat.held_turns, seat.held_tokens, min(seconds, LONGEST_WAIT_SECONDS)
        )

    def could_run(self, ask: Ask) -> bool:
        """Whether some open executor would have room for it if it held nothing."""
        return self._largest[ask.seeded].most >= ask.room_tokens

    @property
    def refuses_seeds(self) -> bool:
        """Whether executors are open, and none of them takes a turn with a seed."""
        seeded = [seat.beat.seeded for seat in self.seats.values() if seat.open]
        return bool(seeded) and not any(seeded)

    def _seat(self, beat: SlackHeartbeat) -> Seat:
        self._numbers += 1
        prefill = learned(beat.hardware.prefill_tokens_per_second, None)
        kind = Kind(prefill, learned(step_rate(beat), None), beat.frozen, beat.seeded)
        seat = self.seats[beat.worker] = Seat(self._numbers, name_hash(beat.worker), beat, kind)
        _reprice(seat)
        self._ring.add(seat)
        return seat

    @staticmethod
    def _learn(seat: Seat, before: SlackHeartbeat) -> bool:
        """What the newest heartbeat says of rates and bounds; most say nothing new."""
        beat, kind = seat.beat, seat.kind
        prefill = learned(beat.hardware.prefill_tokens_per_second, kind.prefill)
        step = learned(step_rate(beat), kind.step)
        if (
            prefill is not kind.prefill
            or step is not kind.step
            or beat.frozen is not kind.frozen
            or beat.seeded is not kind.seeded
        ):
            seat.kind = Kind(prefill, step, beat.frozen, beat.seeded)
            _reprice(seat)
            Placement._weigh(seat)
            return True
        return beat.token_budget != before.token_budget or beat.max_turns != before.max_turns

    def _open(self, seat: Seat, before: SlackHeartbeat, *, open: bool) -> bool:
        """Keep the largest budgets; whether one of them has grown."""
        beat = seat.beat
        budget = beat.token_budget if open and beat.max_turns else CLOSED
        if budget == seat.budget and beat.seeded == before.seeded:
            seat.open = open
            return False
        grew = False
        for largest, was, now in zip(self._largest, (True, before.seeded), (True, beat.seeded), strict=True):
            grew |= largest.swap(seat.budget if was else CLOSED, budget if now else CLOSED)
        seat.open, seat.budget = open, budget
        return grew

    def _hold(self, seat: Seat, room_tokens: int, new_tokens: float) -> None:
        seat.held_turns += 1
        seat.held_tokens += room_tokens
        seat.held_new_tokens += new_tokens
        self._refresh(seat)

    @staticmethod
    def _weigh(seat: Seat) -> None:
        seat.risk_seconds = seat.staleness_seconds + seat.again_tokens * seat.kind.prefill.seconds

    def _refresh(self, seat: Seat) -> None:
        seat.load = seat.held_new_tokens * (LEFT * seat.kind.prefill.seconds) + seat.risk_seconds
        crowd, beat = crowd_of(seat.held_turns), seat.beat
        if crowd != seat.crowd:
            seat.crowd = crowd
            _reprice(seat)
        seat.room = (
            CLOSED if not seat.open or seat.held_turns >= beat.max_turns else beat.token_budget - seat.held_tokens
        )
        if seat.room >= self._short:
            self._grew(seat)
        self._index.mend(seat)

    def _grew(self, seat: Seat) -> None:
        for shortage, seeded in zip(self._shortages, (True, seat.beat.seeded), strict=True):
            if seeded and seat.room >= shortage.least:
                shortage.grew(seat)
        self._short = min(each.least for each in self._shortages)

    def _look(self, seat: Seat, ask: Ask, now: float, found: Found) -> None:
        """Look at one seat by itself, what it has cached included."""
        if seat.room >= ask.room_tokens and (seat.beat.seeded or not ask.seeded):
            found.take(seat, self._cost(seat, ask, now))
        seat.search = self._searches

    @staticmethod
    def _cost(seat: Seat, ask: Ask, now: float) -> float:
        cost = ask.context_tokens * seat.price + ask.new_tokens * seat.decode + seat.wait(now)
        return cost - _cached(seat, ask) * seat.price

    def _settle(self, ask: Ask, now: float, found: Found) -> None:
        """Decide between equals by the turn's key."""
        most, cheapest = found.lowest + TIE_SECONDS, found.best
        assert cheapest is not None
        named = self._index.within(ask, now, most, compared(len(self._ring)) + 1)
        equals = {seat.number: seat for seat in (cheapest, *named)}
        for worker, _ in ask.cached:
            holder = self.seats.get(worker)
            if holder is not None and self._is_equal(holder, ask, now, most):
                equals[holder.number] = holder
        best = self._ring.first(
            name_hash(ask.tie_key), equals.values(), lambda seat: self._is_equal(seat, ask, now, most)
        )
        if best is not cheapest:
            found.passed, found.second, found.best = cheapest, found.lowest, best

    def _is_equal(self, seat: Seat, ask: Ask, now: float, most: float) -> bool:
        fits = seat.room >= ask.room_tokens and (seat.beat.seeded or not ask.seeded)
        return fits and self._cost(seat, ask, now) <= most

    def _choice(self, ask: Ask, now: float, found: Found) -> Choice:
        best, passed = found.best, found.passed
        assert best is not None
        kind, beat, token_seconds = best.kind, best.beat, best.kind.prefill.seconds
        cached = _cached(best, ask)
        computed, shared_seconds = ask.context_tokens - cached, token_seconds * best.crowd
        cost = PlacementCost(
            wait_seconds=max(0.0, best.free_at - now),
            prefill_seconds=computed * token_seconds,
            decode_seconds=ask.new_tokens * (kind.step.seconds + shared_seconds),
            risk_seconds=best.load + computed * (_displacement(kind) * token_seconds + shared_seconds),
            cached_tokens=cached,
            passed_over=None if passed is None else passed.beat.worker,
            passed_over_seconds=0.0 if passed is None else found.second,
        )
        return Choice(beat.worker, beat.slot, beat.incarnation, cost)


def _cached(seat: Seat, ask: Ask) -> int:
    for worker, tokens in ask.cached:
        if worker == seat.beat.worker:
            return tokens
    return 0


def _displacement(kind: Kind) -> float:
    """Risk of each second of prefill."""
    return DISPLACEMENT + FROZEN_DISPLACEMENT * kind.frozen


def _reprice(seat: Seat) -> None:
    """Its kind or its crowd has changed, and with that whose peer it is."""
    kind, crowd = seat.kind, seat.crowd
    seat.price = kind.prefill.seconds * (1 + crowd + _displacement(kind))
    seat.decode = kind.step.seconds + crowd * kind.prefill.seconds
    seat.entry = None
