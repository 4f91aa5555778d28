"""Placement equals a scan over all executors."""

import hashlib
import math
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.routing.candidates import (
    ANY_VERSION,
    PlacementQuery,
    RateBucket,
    engine_step_rate,
    rate_bucket,
    turn_bucket,
)
from rose.pipeline.routing.placement import (
    DISPLACEMENT,
    FROZEN_DISPLACEMENT,
    RECOMPUTED_DECAY,
    RECOMPUTED_WEIGHT,
    REMAINING_FRACTION,
    STALENESS_SECONDS,
    TIE_SECONDS,
    Placement,
)
from rose.pipeline.routing.rendezvous import COMPARED_WINDOW, MIN_COMPARED, compared_count
from rose.schemas.heartbeats import MAX_HELD_TURNS, Hardware, SlackHeartbeat, Tenant
from rose.schemas.turns import PlacementCost
from tests.support.routing_fixtures import heartbeat

MASK = 2**64 - 1


class Scan:
    """The same cost for each executor, from the formula."""

    def __init__(self) -> None:
        self.offers: dict[str, tuple[SlackHeartbeat, bool, int]] = {}
        self.paces: dict[str, tuple[RateBucket, RateBucket]] = {}
        self.held: dict[str, list[tuple[int, float]]] = {}
        self.owed: dict[str, float] = {}
        self.again: dict[str, float] = {}
        self.prefill_free_at: dict[str, float] = {}

    def offer(self, beat: SlackHeartbeat, is_open: bool, lag: int) -> None:
        prefill, step = self.paces.get(beat.worker, (None, None))
        self.paces[beat.worker] = (
            rate_bucket(beat.hardware.prefill_tokens_per_second, prefill),
            rate_bucket(engine_step_rate(beat), step),
        )
        self.again[beat.worker] = self.again.get(beat.worker, 0.0) * RECOMPUTED_DECAY
        self.offers[beat.worker] = beat, is_open, lag

    def cost(self, worker: str, ask: PlacementQuery, now: float) -> float:
        beat, is_open, lag = self.offers[worker]
        held = self.held.get(worker, [])
        room = beat.token_budget - sum(tokens for tokens, _ in held)
        if not is_open or len(held) >= beat.max_turns or room < ask.room_tokens or ask.seeded > beat.seeded:
            return math.inf
        if ask.pinned_version not in (ANY_VERSION, beat.policy_version):
            return math.inf
        prefill, step = (pace.token_seconds for pace in self.paces[worker])
        load = self.owed.get(worker, 0.0) * (REMAINING_FRACTION * prefill)
        load += lag * STALENESS_SECONDS + self.again[worker] * prefill
        free_at = self.prefill_free_at.get(worker, 0.0)
        wait = load + (free_at - now) if free_at > now else load
        crowd = turn_bucket(len(held))
        price = prefill * (1 + crowd + (DISPLACEMENT + (FROZEN_DISPLACEMENT if beat.frozen else 0.0)))
        new = ask.new_tokens * (step + crowd * prefill)
        return ask.context_tokens * price + new + wait - dict(ask.cached).get(worker, 0) * price

    def choose(self, ask: PlacementQuery, now: float) -> str | None:
        costs = {worker: self.cost(worker, ask, now) for worker in self.offers}
        lowest = min(costs.values(), default=math.inf)
        if lowest == math.inf:
            return None
        equals = [worker for worker, cost in costs.items() if cost <= lowest + TIE_SECONDS]
        if len(equals) > compared_count(len(self.offers)):
            round_from_key = sorted(equals, key=lambda worker: (digest(worker) - digest(ask.tie_key)) & MASK)
            equals = round_from_key[:COMPARED_WINDOW]
        return max(equals, key=lambda worker: weight(worker, ask.tie_key))

    def hold(self, worker: str, room_tokens: int, new_tokens: float) -> None:
        self.held.setdefault(worker, []).append((room_tokens, new_tokens))
        self.owed[worker] = self.owed.get(worker, 0.0) + new_tokens

    def take(self, worker: str, ask: PlacementQuery, now: float) -> None:
        prefill, _ = self.paces[worker]
        free_at = max(self.prefill_free_at.get(worker, 0.0), now)
        seconds = (ask.context_tokens - dict(ask.cached).get(worker, 0)) * prefill.token_seconds
        self.prefill_free_at[worker] = free_at + seconds
        self.hold(worker, ask.room_tokens, ask.new_tokens)

    def release(self, worker: str) -> tuple[int, float]:
        tokens, new_tokens = self.held[worker].pop()
        self.again[worker] *= 1 - RECOMPUTED_WEIGHT
        self.owed[worker] = self.owed[worker] - new_tokens if self.held[worker] else 0.0
        if not self.held[worker]:
            self.prefill_free_at[worker] = 0.0
        return tokens, new_tokens


def digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def weight(worker: str, key: str) -> int:
    mixed = (digest(worker) ^ digest(key)) * 0x9E3779B97F4A7C15 & MASK
    return (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 & MASK


RATES = st.sampled_from([500.0, 1000.0, 1000.0, 2000.0])
BEATS = st.builds(
    lambda worker, prefill, decode, turns, tokens, version, running, waiting, frozen, seeded: heartbeat(
        worker,
        hardware=Hardware(prefill_tokens_per_second=prefill, decode_tokens_per_second=decode / 10),
        max_turns=turns,
        token_budget=tokens,
        policy_version=version,
        rollout=Tenant(running=running, waiting=waiting),
        frozen=frozen,
        seeded=seeded,
    ),
    st.integers(0, 7),
    RATES,
    RATES,
    st.integers(0, 6),
    st.integers(0, 1000),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
)
ASKS = st.builds(
    lambda context, new, most, key, holders, seeded, pinned: PlacementQuery(
        context_tokens=context,
        new_tokens=new,
        room_tokens=context + most,
        tie_key=key,
        cached=tuple((f"w{worker}", min(tokens, context - 1)) for worker, tokens in holders.items()),
        seeded=seeded,
        pinned_version=pinned,
    ),
    st.integers(1, 200),
    st.floats(1, 50),
    st.integers(1, 50),
    st.sampled_from(["a", "b", "c", "d"]),
    st.dictionaries(st.integers(0, 9), st.integers(1, 200), max_size=3),
    st.booleans(),
    st.sampled_from([ANY_VERSION, ANY_VERSION, ANY_VERSION, 0, 1, 2]),
)
TIMES = st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.1, 1.0])
STEPS = st.one_of(
    st.tuples(st.just("offer"), BEATS, st.sampled_from([True, True, True, False]), st.integers(0, 2)),
    st.tuples(st.just("ask"), ASKS, TIMES, st.none()),
    st.tuples(st.just("ask"), ASKS, TIMES, st.none()),
    st.tuples(st.just("release"), st.integers(0, 7), st.none(), st.none()),
    st.tuples(st.just("again"), st.integers(0, 7), st.integers(0, 200), st.none()),
    st.tuples(st.just("owes"), st.integers(0, 7), st.sampled_from([0.01, 0.3, 2.0]), st.none()),
    st.tuples(st.just("close"), st.integers(0, 7), st.none(), st.none()),
    st.tuples(st.just("remove"), st.integers(0, 7), st.none(), st.none()),
)


@pytest.mark.slow
@settings(max_examples=200, print_blob=True)
@given(st.lists(BEATS, max_size=8), st.lists(STEPS, max_size=60))
def test_index_chooses_the_executor_of_a_full_scan(fleet: list[SlackHeartbeat], steps: list[tuple[Any, ...]]) -> None:
    placement, scan, now = Placement(), Scan(), 1.0
    for what, first, second, third in [*(("offer", beat, True, 0) for beat in fleet), *steps]:
        worker = f"w{first}"
        if what == "offer":
            placement.offer(first, is_open=second, lag_versions=third)
            scan.offer(first, second, third)
        elif what == "ask":
            now += second
            choose(placement, scan, first, now)
        elif what == "release" and scan.held.get(worker):
            placement.release(worker, *scan.release(worker))
        elif what == "again" and worker in scan.offers:
            placement.record_recomputed(worker, second)
            scan.again[worker] += RECOMPUTED_WEIGHT * second
        elif what == "owes" and worker in scan.offers:
            placement.set_prefill_backlog(worker, second, now)
            scan.prefill_free_at[worker] = max(scan.prefill_free_at.get(worker, 0.0), now + second)
        elif what == "close" and worker in scan.offers:
            placement.close(worker)
            scan.offers[worker] = scan.offers[worker][0], False, scan.offers[worker][2]
        elif what == "remove" and not scan.held.get(worker):
            placement.remove(worker)
            for book in (scan.offers, scan.paces, scan.held, scan.owed, scan.again, scan.prefill_free_at):
                book.pop(worker, None)


@pytest.mark.slow
@settings(max_examples=15, print_blob=True, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(MIN_COMPARED, 4 * MIN_COMPARED),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([3_000, 10_000, 10**6]),
)
def test_index_equals_a_full_scan_among_many_equal_executors(seed: int, workers: int, speeds: int, budget: int) -> None:
    random, placement, scan, now = Random(seed), Placement(), Scan(), 1.0
    held: list[str] = []
    for worker in range(workers):
        beat = heartbeat(worker, max_turns=random.randint(1, 8), token_budget=budget, hardware=hardware(random, speeds))
        placement.offer(beat, is_open=True, lag_versions=0)
        scan.offer(beat, True, 0)
    for number in range(300):
        now += random.choice([0.0, 0.0, 0.001, 0.05])
        context, prefix = random.choice([20, 200, 2000]), random.randint(1, 19)
        holders = {f"w{random.randrange(workers)}": prefix for _ in range(random.choice([0, 0, 1, 3]))}
        ask = PlacementQuery(
            context, random.choice([8.0, 8.0, 50.0]), context + 50, f"group-{number}", tuple(holders.items())
        )
        chosen = choose(placement, scan, ask, now)
        held += [chosen] if chosen is not None else []
        while held and random.random() < (0.3 if number < 200 else 0.7):
            left = held.pop(random.randrange(len(held)))
            placement.release(left, *scan.release(left))
        if random.random() < 0.3:
            beat, is_open, _ = scan.offers[f"w{random.randrange(workers)}"]
            beat = msgspec.structs.replace(beat, token_budget=budget * random.choice([2, 3, 3, 4, 4, 4]) // 4)
            placement.offer(beat, is_open=is_open, lag_versions=0)
            scan.offer(beat, is_open, 0)


@pytest.mark.slow
@settings(max_examples=30, print_blob=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 60), st.booleans())
def test_index_equals_a_full_scan_among_diverse_changing_executors(seed: int, workers: int, wide: bool) -> None:
    """Loads go from none to hundreds, room just suffices or just does not, and rates follow the load at random."""
    random, placement, scan, now = Random(seed), Placement(), Scan(), 1.0
    for step in range(250):
        now += random.choice([0.0, 0.0, 0.001, 0.05, 3.0])
        worker, what = f"w{(number := random.randrange(workers))}", random.random()
        held = scan.held.get(worker, [])
        if what < 0.3 or worker not in scan.offers:
            need = sum(tokens for tokens, _ in held) + random.choice([20, 63, 64, 65, 255, 256, 257, 2050])
            beat = heartbeat(
                number,
                hardware=odd_hardware(random, wide=wide),
                max_turns=min(MAX_HELD_TURNS, max(0, len(held) + random.choice([-1, 0, 1, 1, 4, 500]))),
                token_budget=max(0, need + random.choice([-1, 0, 0, 1, 4 ** random.randint(0, 9)])),
                rollout=Tenant(running=random.choice([0, 1, len(held), 2 * len(held) + 3, 2**53])),
                frozen=random.random() < 0.3,
                seeded=random.random() < 0.8,
            )
            is_open, lag = random.random() < 0.9, random.choice([0, 0, 0, 1])
            placement.offer(beat, is_open=is_open, lag_versions=lag)
            scan.offer(beat, is_open, lag)
        elif what < 0.4:
            for _ in range(random.choice([1, 2, 5, 90])):
                turn = random.choice([0, 20, 64]), random.choice([1.0, 30.0])
                placement.reserve(worker, *turn)
                scan.hold(worker, *turn)
        elif what < 0.55:
            for _ in range(random.choice([1, 3, len(held)])):
                if scan.held.get(worker):
                    placement.release(worker, *scan.release(worker))
        elif what < 0.58 and not held:
            placement.remove(worker)
            for book in (scan.offers, scan.paces, scan.held, scan.owed, scan.again, scan.prefill_free_at):
                book.pop(worker, None)
        elif what < 0.62:
            placement.set_prefill_backlog(worker, 0.3, now)
            scan.prefill_free_at[worker] = max(scan.prefill_free_at.get(worker, 0.0), now + 0.3)
        elif what < 0.66:
            placement.record_recomputed(worker, 500)
            scan.again[worker] += RECOMPUTED_WEIGHT * 500
        else:
            context = random.choice([1, 19, 20, 63, 64, 200])
            holders = {f"w{random.randrange(workers)}": random.randint(1, context) - 1 for _ in range(2)}
            cached = tuple((holder, tokens) for holder, tokens in holders.items() if tokens)
            most = random.choice([1, 44, 64 - context % 64, 2000])
            ask = PlacementQuery(
                context, random.uniform(1, 50), context + most, f"g{step}", cached, random.random() < 0.2
            )
            choose(placement, scan, ask, now)


def odd_hardware(random: Random, *, wide: bool) -> Hardware:
    """Return unrelated rates."""
    most = 5 if wide else 2
    prefill, decode = (10.0 ** random.uniform(-most / 5, most) for _ in range(2))
    return Hardware(prefill_tokens_per_second=100 * prefill, decode_tokens_per_second=decode)


def hardware(random: Random, speeds: int) -> Hardware:
    """Return one of several hardware measurements."""
    speed = random.randint(1, speeds) * random.uniform(0.95, 1.05)
    return Hardware(prefill_tokens_per_second=1000.0 * speed, decode_tokens_per_second=100.0 * speed)


def choose(placement: Placement, scan: Scan, ask: PlacementQuery, now: float) -> str | None:
    """Let both choose, compare the choices, and reserve the turn."""
    choice, expected = placement.choose(ask, now), scan.choose(ask, now)
    assert (choice.worker if choice else None) == expected
    if choice is not None:
        check_cost(scan, choice.worker, ask, now, choice.cost)
        placement.charge(choice, ask, now)
        scan.take(choice.worker, ask, now)
    assert placement.fits_when_idle(ask) or choice is None
    return expected


def check_cost(scan: Scan, worker: str, ask: PlacementQuery, now: float, cost: PlacementCost) -> None:
    total = cost.wait_seconds + cost.prefill_seconds + cost.decode_seconds + cost.risk_seconds
    assert math.isclose(total, scan.cost(worker, ask, now), rel_tol=1e-9, abs_tol=1e-9)
    others = {other: scan.cost(other, ask, now) for other in scan.offers if other != worker}
    others = {other: seconds for other, seconds in others.items() if seconds < math.inf}
    if others:
        assert cost.passed_over_seconds == min(others.values())
        assert cost.passed_over is not None and others[cost.passed_over] == min(others.values())
    else:
        assert cost.passed_over is None
