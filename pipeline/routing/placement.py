"""Placement: the cost of a turn on each executor, and the choice of the cheapest executor.

Keeps true
- One cost in seconds: `wait + (context - cached) / prefill rate + expected new * seconds of a step + risk`. Affinity,
  hardware, load and freshness are terms of this sum, not special cases.
- The cost is the time of the turn itself plus the time by which it delays other turns. So the least cost makes all
  turns as short as a choice for one turn at a time can.
- Only open executors are chosen, only executors with room for the turn (turns, tokens), for a turn with a seed only
  executors that take seeds, and for a turn with a pinned version only executors that have proven that version.
- The choice equals that of a scan over all executors; the `candidates` index only makes it cheap.
- `LargestBudget.tokens` is the greatest of the present budgets. While a `Shortage` lasts, every candidate with room for
  at least its `min_tokens` is in `with_room`, so a full fleet is not searched again.
- Costs within TIE_SECONDS are equal. Among equals the turn's key decides (`rendezvous`), whatever the order in which
  executors were added.

Terms of the cost
- Rates are rate buckets, learned from heartbeats (`rates`).
- `wait`: prefills run one after another, so a turn waits for the prefills that were dispatched before it. Each dispatch
  moves the time at which the executor's prefill is free. Prompts that the engine reports as not begun also count,
  however long ago they were dispatched.
- `risk`, shared steps: turns on one executor share its steps, and each token in a step makes the step longer for all
  turns. So the held turns (`turn_bucket`) make each step longer for this turn; each context token that this turn
  computes delays all held turns; and the new tokens of this turn delay each held turn for as long as that turn runs.
  The last part is computed as if this turn ran longer than all held turns: it is then the same for every turn, which
  keeps the candidates of a group in one order, but prices a turn of a few tokens too high next to long turns. A cached
  prefix is therefore worth more on a busy executor.
- `risk`, staleness: an executor behind the newest policy version samples tokens that may be too old to train on.
- `risk`, preemption: an executor that preempted turns may do so again. The tokens that other executors computed again
  are averaged over all turns of the executor.
- `risk`, displacement: a prefill delays the next turn. Without this term, the members of a group that arrive together
  would each compute their prompt on another idle executor, which is as fast for them as waiting for the first prefill.
- `risk`, frozen lender: its cache cannot grow, so a prefill evicts a prefix that another turn may need. With this term
  turns with a cached prefix are placed there first, and other turns go to other executors that have room.

Example: 32 context tokens and 4 new tokens; a token takes 0.1 ms, and a step takes 3 ms and the time of its tokens
    idle executor, none cached        32 * 0.1 * (1 + 0.5) + 4 * 3.0                             = 17 ms
    16 like turns held, 31 cached     1 * 0.1 * (1 + 0.5 + 16) + 4 * (3.0 + 1.6) + 32 * 0.1      = 23 ms
    16 like turns held, none cached   32 * 0.1 * (1 + 0.5 + 16) + 4 * (3.0 + 1.6) + 32 * 0.1     = 78 ms
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rose.pipeline.routing.candidates import (
    ANY_VERSION,
    CLOSED,
    Candidate,
    CandidateIndex,
    CheapestTwo,
    CostClass,
    PlacementQuery,
    engine_step_rate,
    rate_bucket,
    turn_bucket,
)
from rose.pipeline.routing.rendezvous import HashRing, compared_count, name_hash
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.turns import PlacementCost

UNLIMITED = 2**62
"""More tokens than any turn needs."""

MAX_TRACKED = 4
"""Most candidates with room while a shortage lasts; one more ends the shortage. A search of the index costs about as
much as considering five candidates individually, unless much of the fleet has nearly as much room as is needed."""


@dataclass(slots=True)
class LargestBudget:
    """The largest token budget of the open executors."""

    tokens: int = CLOSED
    _counts: dict[int, int] = field(default_factory=dict)

    def replace(self, old: int, new: int) -> bool:
        """Replace one budget by another, where CLOSED means none; return whether the largest budget grew."""
        largest_before, counts = self.tokens, self._counts
        if old != CLOSED:
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if new != CLOSED:
            counts[new] = counts.get(new, 0) + 1
        if new > largest_before:
            self.tokens = new
        elif old == largest_before and old not in counts:
            self.tokens = max(counts, default=CLOSED)
        return self.tokens > largest_before


@dataclass(slots=True)
class Shortage:
    """No candidate had `min_tokens` tokens of room; since then only the candidates in `with_room` may have it."""

    min_tokens: int = UNLIMITED
    _grown: dict[int, Candidate] = field(default_factory=dict)

    def record(self, room_tokens: int) -> None:
        """Record that no candidate has `room_tokens` tokens of room."""
        self.min_tokens = min(self.min_tokens, room_tokens)
        self._grown = {
            number: candidate for number, candidate in self._grown.items() if candidate.room >= self.min_tokens
        }

    def on_room_grown(self, candidate: Candidate) -> None:
        """Record that a candidate has at least `min_tokens` tokens of room now."""
        self._grown[candidate.number] = candidate
        if len(self._grown) > MAX_TRACKED:
            self.min_tokens = UNLIMITED
            self._grown.clear()

    @property
    def with_room(self) -> list[Candidate]:
        """Return the candidates whose room has grown."""
        return list(self._grown.values())


TIE_SECONDS = 1e-4
"""Costs closer than this are equal: measured rates are not more exact."""

STALENESS_SECONDS = 0.25
"""Risk of one policy version that an executor is behind: its tokens may be too old to train on."""

DISPLACEMENT = 0.5
"""Risk in seconds for each second of prefill: every second prefill is taken to delay a later turn."""

FROZEN_DISPLACEMENT = 1.0
"""Additional risk in seconds for each second of prefill on a frozen lender: an evicted prefix is computed again."""

REMAINING_FRACTION = 0.5
"""Fraction of a held turn's expected new tokens that are still to be generated: each turn is taken to be half done."""

MAX_WAIT_SECONDS = 1e9
"""Bound on the wait for an executor's prefill. A longer wait comes from wrong rates in heartbeats."""

RECOMPUTED_WEIGHT = 1 / 32
"""Weight of the newest turn in an executor's mean of recomputed tokens. The mean covers about the last fifty turns."""

RECOMPUTED_DECAY = 0.999
"""Factor on `recomputed_tokens` at each heartbeat. It halves the mean in about 700 heartbeats, so an executor that is
avoided because of preemptions is tried again."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The cheapest executor for a turn."""

    worker: str
    slot: int
    incarnation: int
    cost: PlacementCost


class ExecutorLoad(NamedTuple):
    """Turns and tokens that one executor holds and could still take."""

    free_turns: int = 0
    free_tokens: int = 0
    held_turns: int = 0
    held_tokens: int = 0
    seconds: float = 0.0
    """Seconds that the executor needs for the held turns with all lanes busy, and for its outstanding prefills."""


def lanes(heartbeat: SlackHeartbeat) -> int:
    """Turns that an executor runs at once: all turns that it may hold.

    A turn that waits inside the engine waits for its prefill, which is counted as prefill.
    """
    return max(1, heartbeat.max_turns)


class Placement:
    """All candidates, with the turns that they hold, and the search for the cheapest."""

    def __init__(self) -> None:
        self.candidates: dict[str, Candidate] = {}
        self._ring = HashRing()
        self._index = CandidateIndex()
        self._next_number = self._searches = 0
        self._largest_budgets = LargestBudget(), LargestBudget()
        """Largest token budgets: of all open executors, and of the open executors that take seeds."""
        self._shortages = Shortage(), Shortage()
        """Shortages for turns without a seed, and for turns with a seed."""
        self._min_shortage = UNLIMITED
        """Least `min_tokens` of both shortages."""

    def offer(self, heartbeat: SlackHeartbeat, *, is_open: bool, lag_versions: int) -> bool:
        """Update a candidate from its newest heartbeat.

        `is_open`: whether the executor may be sent turns. `lag_versions`: policy versions behind the newest. Returns
        whether the largest budget grew, or the executor is open again or with another version, so a turn may fit that
        fitted on no executor before.
        """
        candidate = self.candidates.get(heartbeat.worker)
        if candidate is None:
            candidate = self._new_candidate(heartbeat)
        previous, candidate.heartbeat = candidate.heartbeat, heartbeat
        staleness_seconds = lag_versions * STALENESS_SECONDS
        changed = self._update_rates(candidate, previous)
        if candidate.recomputed_tokens or staleness_seconds != candidate.staleness_seconds:
            candidate.recomputed_tokens *= RECOMPUTED_DECAY
            candidate.staleness_seconds = staleness_seconds
            self._update_risk(candidate)
            changed = True
        if is_open is candidate.is_open and not changed:
            return False
        opened = is_open and (not candidate.is_open or heartbeat.policy_version != previous.policy_version)
        grew = self._update_budget(candidate, previous, is_open=is_open)
        self._update_costs(candidate)
        return grew or opened

    def close(self, worker: str) -> None:
        """Place no turn on this executor until its next offer."""
        candidate = self.candidates.get(worker)
        if candidate is not None:
            self._update_budget(candidate, candidate.heartbeat, is_open=False)
            self._update_costs(candidate)

    def remove(self, worker: str) -> None:
        """Remove an executor that holds no turns."""
        candidate = self.candidates.get(worker)
        if candidate is not None:
            self.close(worker)
            del self.candidates[worker]
            self._ring.remove(candidate)
            self._index.remove(candidate)

    def charge(self, choice: Choice, query: PlacementQuery, now: float) -> None:
        """Charge a turn to the executor that was chosen for it."""
        candidate = self.candidates[choice.worker]
        free_at = candidate.prefill_free_at if candidate.prefill_free_at > now else now
        free_at += choice.cost.prefill_seconds
        candidate.prefill_free_at = min(free_at, now + MAX_WAIT_SECONDS)
        self._add_held(candidate, query.room_tokens, query.new_tokens)

    def set_prefill_backlog(self, worker: str, prefill_seconds: float, now: float) -> None:
        """Raise an executor's outstanding prefill to at least `prefill_seconds`, as reported by its heartbeat."""
        candidate = self.candidates.get(worker)
        if candidate is not None and now + prefill_seconds > candidate.prefill_free_at:
            candidate.prefill_free_at = now + min(prefill_seconds, MAX_WAIT_SECONDS)
            self._index.update(candidate)

    def reserve(self, worker: str, room_tokens: int, new_tokens: float) -> None:
        """Count a turn as held without charging its prefill."""
        candidate = self.candidates.get(worker)
        if candidate is not None:
            self._add_held(candidate, room_tokens, new_tokens)

    def release(self, worker: str, room_tokens: int, new_tokens: float) -> None:
        """Count a turn as held no more. The arguments are those of its `charge` or `reserve`."""
        candidate = self.candidates.get(worker)
        if candidate is None:
            return
        candidate.held_turns -= 1
        candidate.held_tokens -= room_tokens
        # An executor without turns has no load: rounding errors of sums must not add up, and a wait that came from
        # wrong rates must not stay.
        if candidate.held_turns:
            candidate.held_new_tokens -= new_tokens
        else:
            candidate.held_new_tokens = candidate.prefill_free_at = 0.0
        if candidate.recomputed_tokens:
            candidate.recomputed_tokens *= 1 - RECOMPUTED_WEIGHT
            self._update_risk(candidate)
        self._update_costs(candidate)

    def record_recomputed(self, worker: str, tokens: int) -> None:
        """Charge an executor for `tokens` tokens that another executor computes again after a preemption by it."""
        candidate = self.candidates.get(worker)
        if candidate is not None:
            candidate.recomputed_tokens += RECOMPUTED_WEIGHT * tokens
            self._update_risk(candidate)
            self._update_costs(candidate)

    def choose(self, query: PlacementQuery, now: float) -> Choice | None:
        """The cheapest executor with room for the turn; None if no executor has room."""
        shortage = self._shortages[query.seeded]
        self._searches += 1
        found = CheapestTwo()
        if query.room_tokens >= shortage.min_tokens:
            for candidate in shortage.with_room:
                self._consider(candidate, query, now, found)
        else:
            for worker, _ in query.cached:
                holder = self.candidates.get(worker)
                if holder is not None:
                    self._consider(holder, query, now, found)
            self._index.search(query, now, self._searches, found)
        if found.best is None:
            if query.pinned_version == ANY_VERSION:  # executors of other versions may have room
                shortage.record(query.room_tokens)
                self._min_shortage = min(each.min_tokens for each in self._shortages)
            return None
        if found.runner_up_cost <= found.best_cost + TIE_SECONDS:
            self._break_tie(query, now, found)
        return self._choice(query, now, found)

    def costs(self, query: PlacementQuery, now: float) -> dict[str, float]:
        """The cost of the turn in seconds on each executor that has room for it; slow, for explanations."""
        return {
            worker: self._cost(candidate, query, now)
            for worker, candidate in self.candidates.items()
            if _fits(candidate, query)
        }

    def load_of(self, worker: str, now: float) -> ExecutorLoad:
        """The load of an executor; an empty load if the executor never made an offer."""
        candidate = self.candidates.get(worker)
        if candidate is None:
            return ExecutorLoad()
        free_turns = max(0, candidate.heartbeat.max_turns - candidate.held_turns) if candidate.is_open else 0
        decoded = lanes(candidate.heartbeat) * candidate.heartbeat.hardware.decode_tokens_per_second
        seconds = candidate.held_new_tokens / decoded + max(0.0, candidate.prefill_free_at - now)
        return ExecutorLoad(
            free_turns,
            max(0, candidate.room),
            candidate.held_turns,
            candidate.held_tokens,
            min(seconds, MAX_WAIT_SECONDS),
        )

    def fits_when_idle(self, query: PlacementQuery) -> bool:
        """Whether some open executor would have room for the turn if it held nothing."""
        if self._largest_budgets[query.seeded].tokens < query.room_tokens:
            return False
        return query.pinned_version == ANY_VERSION or any(
            candidate.token_budget >= query.room_tokens and _may_run(candidate, query)
            for candidate in self.candidates.values()
        )

    def has_version(self, version: int) -> bool:
        """Whether an open executor has proven this policy version."""
        return any(each.is_open and each.heartbeat.policy_version == version for each in self.candidates.values())

    @property
    def refuses_seeds(self) -> bool:
        """Whether there are open executors, and all of them refuse turns with a seed."""
        seeded = [candidate.heartbeat.seeded for candidate in self.candidates.values() if candidate.is_open]
        return bool(seeded) and not any(seeded)

    def _new_candidate(self, heartbeat: SlackHeartbeat) -> Candidate:
        self._next_number += 1
        prefill = rate_bucket(heartbeat.hardware.prefill_tokens_per_second, None)
        cost_class = CostClass(
            prefill,
            rate_bucket(engine_step_rate(heartbeat), None),
            heartbeat.frozen,
            heartbeat.seeded,
            heartbeat.policy_version,
        )
        candidate = self.candidates[heartbeat.worker] = Candidate(
            self._next_number, name_hash(heartbeat.worker), heartbeat, cost_class
        )
        _update_token_costs(candidate)
        self._ring.add(candidate)
        return candidate

    @staticmethod
    def _update_rates(candidate: Candidate, previous: SlackHeartbeat) -> bool:
        """Update the cost class from the newest heartbeat; return whether rates, flags or limits have changed."""
        heartbeat, cost_class = candidate.heartbeat, candidate.cost_class
        prefill = rate_bucket(heartbeat.hardware.prefill_tokens_per_second, cost_class.prefill)
        step = rate_bucket(engine_step_rate(heartbeat), cost_class.step)
        if (
            prefill is not cost_class.prefill
            or step is not cost_class.step
            or heartbeat.frozen is not cost_class.frozen
            or heartbeat.seeded is not cost_class.seeded
            or heartbeat.policy_version != cost_class.version
        ):
            candidate.cost_class = CostClass(
                prefill, step, heartbeat.frozen, heartbeat.seeded, heartbeat.policy_version
            )
            _update_token_costs(candidate)
            Placement._update_risk(candidate)
            return True
        return heartbeat.token_budget != previous.token_budget or heartbeat.max_turns != previous.max_turns

    def _update_budget(self, candidate: Candidate, previous: SlackHeartbeat, *, is_open: bool) -> bool:
        """Update the candidate's token budget and the largest budgets; return whether a largest budget grew."""
        heartbeat = candidate.heartbeat
        budget = heartbeat.token_budget if is_open and heartbeat.max_turns else CLOSED
        if budget == candidate.token_budget and heartbeat.seeded == previous.seeded:
            candidate.is_open = is_open
            return False
        grew = False
        for largest, counted, counts in zip(
            self._largest_budgets, (True, previous.seeded), (True, heartbeat.seeded), strict=True
        ):
            grew |= largest.replace(candidate.token_budget if counted else CLOSED, budget if counts else CLOSED)
        candidate.is_open, candidate.token_budget = is_open, budget
        return grew

    def _add_held(self, candidate: Candidate, room_tokens: int, new_tokens: float) -> None:
        candidate.held_turns += 1
        candidate.held_tokens += room_tokens
        candidate.held_new_tokens += new_tokens
        self._update_costs(candidate)

    @staticmethod
    def _update_risk(candidate: Candidate) -> None:
        candidate.risk_seconds = (
            candidate.staleness_seconds + candidate.recomputed_tokens * candidate.cost_class.prefill.token_seconds
        )

    def _update_costs(self, candidate: Candidate) -> None:
        candidate.load_seconds = (
            candidate.held_new_tokens * (REMAINING_FRACTION * candidate.cost_class.prefill.token_seconds)
            + candidate.risk_seconds
        )
        bucket, heartbeat = turn_bucket(candidate.held_turns), candidate.heartbeat
        if bucket != candidate.turn_bucket:
            candidate.turn_bucket = bucket
            _update_token_costs(candidate)
        candidate.room = (
            CLOSED
            if not candidate.is_open or candidate.held_turns >= heartbeat.max_turns
            else heartbeat.token_budget - candidate.held_tokens
        )
        if candidate.room >= self._min_shortage:
            self._note_room_growth(candidate)
        self._index.update(candidate)

    def _note_room_growth(self, candidate: Candidate) -> None:
        for shortage, seeded in zip(self._shortages, (True, candidate.heartbeat.seeded), strict=True):
            if seeded and candidate.room >= shortage.min_tokens:
                shortage.on_room_grown(candidate)
        self._min_shortage = min(each.min_tokens for each in self._shortages)

    def _consider(self, candidate: Candidate, query: PlacementQuery, now: float, found: CheapestTwo) -> None:
        """Consider one candidate individually, with its cached prefix."""
        if _fits(candidate, query):
            found.consider(candidate, self._cost(candidate, query, now))
        candidate.last_search = self._searches

    @staticmethod
    def _cost(candidate: Candidate, query: PlacementQuery, now: float) -> float:
        cost = (
            query.context_tokens * candidate.prefill_token_seconds
            + query.new_tokens * candidate.decode_token_seconds
            + candidate.wait_seconds(now)
        )
        return cost - _cached_tokens(candidate, query) * candidate.prefill_token_seconds

    def _break_tie(self, query: PlacementQuery, now: float, found: CheapestTwo) -> None:
        """Choose among the candidates of equal cost by the turn's key."""
        max_seconds, cheapest = found.best_cost + TIE_SECONDS, found.best
        assert cheapest is not None
        near = self._index.candidates_within(query, now, max_seconds, compared_count(len(self._ring)) + 1)
        equals = {candidate.number: candidate for candidate in (cheapest, *near)}
        for worker, _ in query.cached:
            holder = self.candidates.get(worker)
            if holder is not None and self._costs_no_more(holder, query, now, max_seconds):
                equals[holder.number] = holder
        best = self._ring.choose(
            name_hash(query.tie_key),
            equals.values(),
            lambda candidate: self._costs_no_more(candidate, query, now, max_seconds),
        )
        if best is not cheapest:
            found.runner_up, found.runner_up_cost, found.best = cheapest, found.best_cost, best

    def _costs_no_more(self, candidate: Candidate, query: PlacementQuery, now: float, max_seconds: float) -> bool:
        return _fits(candidate, query) and self._cost(candidate, query, now) <= max_seconds

    def _choice(self, query: PlacementQuery, now: float, found: CheapestTwo) -> Choice:
        best, runner_up = found.best, found.runner_up
        assert best is not None
        cost_class, heartbeat, token_seconds = best.cost_class, best.heartbeat, best.cost_class.prefill.token_seconds
        cached = _cached_tokens(best, query)
        computed, shared_seconds = query.context_tokens - cached, token_seconds * best.turn_bucket
        cost = PlacementCost(
            wait_seconds=max(0.0, best.prefill_free_at - now),
            prefill_seconds=computed * token_seconds,
            decode_seconds=query.new_tokens * (cost_class.step.token_seconds + shared_seconds),
            risk_seconds=best.load_seconds
            + computed * (_displacement_risk(cost_class) * token_seconds + shared_seconds),
            cached_tokens=cached,
            passed_over=None if runner_up is None else runner_up.heartbeat.worker,
            passed_over_seconds=0.0 if runner_up is None else found.runner_up_cost,
        )
        return Choice(heartbeat.worker, heartbeat.slot, heartbeat.incarnation, cost)


def _fits(candidate: Candidate, query: PlacementQuery) -> bool:
    """Whether the candidate may run the turn and has room for it now."""
    return candidate.room >= query.room_tokens and _may_run(candidate, query)


def _may_run(candidate: Candidate, query: PlacementQuery) -> bool:
    """Whether the candidate has what the turn demands of an executor, apart from room."""
    heartbeat = candidate.heartbeat
    if query.seeded and not heartbeat.seeded:
        return False
    return query.pinned_version in (ANY_VERSION, heartbeat.policy_version)


def _cached_tokens(candidate: Candidate, query: PlacementQuery) -> int:
    for worker, tokens in query.cached:
        if worker == candidate.heartbeat.worker:
            return tokens
    return 0


def _displacement_risk(cost_class: CostClass) -> float:
    """Risk in seconds for each second of prefill."""
    return DISPLACEMENT + FROZEN_DISPLACEMENT * cost_class.frozen


def _update_token_costs(candidate: Candidate) -> None:
    """Compute the token costs after a change of cost class or turn bucket, which also changes the candidate's group."""
    cost_class, bucket = candidate.cost_class, candidate.turn_bucket
    candidate.prefill_token_seconds = cost_class.prefill.token_seconds * (1 + bucket + _displacement_risk(cost_class))
    candidate.decode_token_seconds = cost_class.step.token_seconds + bucket * cost_class.prefill.token_seconds
    candidate.entry = None
