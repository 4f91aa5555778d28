"""The index: the number of executors that a search visits, and the state kept of former executors."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any

import pytest

from rose.pipeline.routing.candidates import MIN_HEAP_ENTRIES, Candidate, PlacementQuery
from rose.pipeline.routing.placement import Placement
from rose.schemas.heartbeats import Hardware
from tests.support.routing_fixtures import heartbeat


def test_index_keeps_nothing_of_executors_that_leave_between_searches() -> None:
    placement, random, before = Placement(), Random(0), live_candidates()
    for number, speed in ((0, 1e4), (500, 2e4)):
        near = Hardware(prefill_tokens_per_second=100 * speed, decode_tokens_per_second=speed)
        placement.offer(heartbeat(number, hardware=near), is_open=True, lag_versions=0)
    for number in range(1, 500):
        odd = Hardware(
            prefill_tokens_per_second=10 ** random.uniform(-3, 0), decode_tokens_per_second=10 ** random.uniform(-3, 0)
        )
        beat = heartbeat(number, hardware=odd, token_budget=4 ** random.randint(4, 12), frozen=random.random() < 0.5)
        placement.offer(beat, is_open=True, lag_versions=0)
        for _ in range(random.randint(0, 3)):
            placement.reserve(beat.worker, 1, 1.0)
        placement.choose(PlacementQuery(10, 5.0, 15, f"g{number}"), 0.0)
        for _ in range(placement.candidates[beat.worker].held_turns):
            placement.release(beat.worker, 1, 1.0)
        placement.remove(beat.worker)
    assert live_candidates() - before <= 2 * MIN_HEAP_ENTRIES, "of 500"


def test_executor_with_room_again_is_found_again() -> None:
    """A search of a whole group records its largest room, until there is more room."""
    placement, ask = Placement(), PlacementQuery(1950, 5.0, 2000, "group-0")
    slow = Hardware(prefill_tokens_per_second=500.0, decode_tokens_per_second=50.0)

    def offers(worker: int, token_budget: int, **other: Any) -> None:
        beat = heartbeat(worker, max_turns=64, token_budget=token_budget, **other)
        placement.offer(beat, is_open=True, lag_versions=0)

    def chosen() -> str | None:
        choice = placement.choose(ask, 1.0)
        return None if choice is None else choice.worker

    offers(0, 2040)
    offers(1, 1100)
    offers(2, 9000, hardware=slow)
    placement.reserve("w0", 0, 1.0)
    placement.reserve("w1", 0, 1.0)
    assert chosen() == "w0"
    offers(0, 1100)
    assert chosen() == "w2"
    offers(0, 2040)
    assert chosen() == "w0"


def test_equal_executors_stay_equal_when_their_room_shrinks() -> None:
    """The room shrinks by heartbeats, and by held turns."""
    crowded, held, fresh = Placement(), Placement(), Placement()
    for worker in range(4):
        for placement, before, after in ((crowded, 2_048, 2_000), (held, 4_000, 4_000), (fresh, 2_000, 2_000)):
            for budget in (before, after):
                beat = heartbeat(worker, max_turns=64, token_budget=budget)
                placement.offer(beat, is_open=True, lag_versions=0)
        for tokens in (300, 300, 300, 300, 300, 600):
            held.reserve(f"w{worker}", tokens, 1.0)
    for number in range(50):
        ask = PlacementQuery(100, 5.0, 150, f"group-{number}")
        chosen = [placement.choose(ask, 1.0) for placement in (crowded, held, fresh)]
        assert len({choice.worker for choice in chosen if choice is not None}) == 1 and all(chosen)


def test_candidate_group_bounds_its_stale_entries() -> None:
    """This also holds if a candidate becomes idle repeatedly beside another, and then leaves the group."""
    placement, now = Placement(), 100.0
    even = Hardware(prefill_tokens_per_second=1_000.0, decode_tokens_per_second=100.0)
    for worker in range(3):
        beat = heartbeat(worker, max_turns=64, token_budget=10**6, hardware=even)
        placement.offer(beat, is_open=True, lag_versions=0)
    placement.reserve("w0", 10, 1.0)
    for _ in range(200):
        ask = PlacementQuery(2_000, 10_000.0, 2_010, "long", (("w1", 1_999),))
        choice = placement.choose(ask, now)
        assert choice is not None and choice.worker == "w1"
        placement.charge(choice, ask, now)
        now += 10.0
        placement.choose(PlacementQuery(10, 1.0, 20, "short"), now)
        placement.release("w1", ask.room_tokens, ask.new_tokens)
    groups = {candidate.group for candidate in placement.candidates.values()}
    assert max(len(heap) for group in groups if group for heap in (group.idle, group.busy)) <= MIN_HEAP_ENTRIES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "context"),
    [(0.0, (20, 20)), (0.0, (1_000, 2_000)), (0.9, (1_000, 2_000)), (1.0, (1_000, 2_000))],
    ids=["idle, turns of one length", "idle, of many", "nearly full, of many", "as full as can be, of many"],
)
def test_search_steps_grow_much_slower_than_the_number_of_executors(fill: float, context: tuple[int, int]) -> None:
    """This also holds if most executors are nearly full, or many have equal costs."""
    small, large = (steps_of_a_choice(workers, fill, context) for workers in (100, 1_600))
    assert large < 4 * small


def steps_of_a_choice(workers: int, fill: float, context: tuple[int, int]) -> float:
    """Return the number of executed lines per search, on average, in a fleet at this load."""
    random, placement, held, now = Random(1), Placement(), [], 1.0

    def ask(number: int) -> PlacementQuery:
        tokens = random.randint(*context)
        holders = ((f"w{random.randrange(workers)}", tokens - 1),) if number % 2 else ()
        return PlacementQuery(tokens, random.uniform(5, 50), tokens + 50, f"group-{number // 8}", holders)

    def take(number: int) -> None:
        query = ask(number)
        choice = placement.choose(query, now)
        if choice is not None:
            placement.charge(choice, query, now)
            held.append((choice.worker, query.room_tokens, query.new_tokens))

    for worker in range(workers):
        beat = heartbeat(worker, max_turns=64, token_budget=random.randint(8_000, 12_000), hardware=hardware(random))
        placement.offer(beat, is_open=True, lag_versions=0)
    for number in range(int(fill * workers * 9_000 / (sum(context) / 2 + 50))):
        now += 0.01 / workers
        take(number)
    with counting() as lines:
        for number in range(300):
            now += 0.01 / workers
            take(number)
            for _ in range(min(len(held), random.randint(0, 2))):
                placement.release(*held.pop(random.randrange(len(held))))
    return lines[0] / 300


@contextmanager
def counting() -> Iterator[list[int]]:
    """Yield a counter of executed Python lines."""
    lines = [0]

    def trace(_: FrameType, event: str, __: object) -> Any:
        lines[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def live_candidates() -> int:
    """Return the number of candidates in this process."""
    gc.collect()
    return sum(isinstance(each, Candidate) for each in gc.get_objects())


def hardware(random: Random) -> Hardware:
    """Return one of four hardware measurements."""
    speed = random.randint(1, 4) * random.uniform(0.95, 1.05)
    return Hardware(prefill_tokens_per_second=1000.0 * speed, decode_tokens_per_second=100.0 * speed)
