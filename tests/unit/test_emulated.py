"""An emulated executor keeps the contract, loses no turn, and reuses prefixes like a prefix cache of its size."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.emulated import EmulatedExecutor, Engine, Finished, Machine, Work
from bench.policies import CACHE_THRESHOLD, RadixTree, Sticky
from bench.routing import RoseSimulation, figures
from bench.sessions import Session, Turn, Workload, reusable
from rose.schemas.turns import Refusal, TurnKey, TurnOutcome, TurnTimes
from tests.support.routing_fixtures import dispatched, request

MACHINE = Machine(
    kind="even", base_seconds=0.01, token_seconds=1e-4, lanes=3, step_tokens=64, block_tokens=8, kv_blocks=24
)


def work(name: str, context: int, new: int, blocks: tuple[int, ...] = (), room: int | None = None) -> Work:
    many = (context + new) // MACHINE.block_tokens
    private = tuple(hash((name, number)) for number in range(len(blocks), many))
    return Work(TurnKey(name, 0, 0), context, new, room or context + new, (*blocks, *private))


def drained(engine: Engine) -> list[Finished]:
    finished: list[Finished] = []
    while engine.running or engine.waiting:
        finished += engine.advance(engine.next_at)
    return finished


TURNS = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 12), st.integers(0, 8), st.sampled_from([0.0, 0.005, 0.1])),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(TURNS)
def test_accepted_turns_are_answered_once_within_the_offer(turns: list[tuple[Any, ...]]) -> None:
    def run_once() -> list[tuple[TurnKey, TurnTimes, int]]:
        executor, now, answers_of = EmulatedExecutor(MACHINE, worker="w0", slot=0), 0.0, []
        held: dict[TurnKey, int] = {}
        for number, (context, new, shared, after) in enumerate(turns):
            now += after
            answers = [result for result, _ in executor.advance(now)]
            for result in answers:
                del held[result.key]
            beat = executor.heartbeat(now)
            dispatch = dispatched(request(f"g{number}:0", context=context, max_tokens=12))
            taken = work(f"g{number}:0", context, new, tuple(range(min(shared, context // 8))), context + 12)
            refused = executor.on_dispatch(dispatch, taken, now)
            fits = len(held) < beat.max_turns and sum(held.values()) + context + 12 <= beat.token_budget
            assert (refused is None) == fits
            if refused is None:
                held[dispatch.key] = context + 12
            else:
                assert (refused.outcome, refused.refusal) == (TurnOutcome.REFUSED, Refusal.ROOM)
            answers_of += [(each.key, each.times, each.cached_tokens) for each in answers]
            assert len(executor.heartbeat(now).holds) == 8 * len(held)
        while held:
            for result, _ in executor.advance(executor.engine.next_at):
                del held[result.key]
                answers_of.append((result.key, result.times, result.cached_tokens))
        return answers_of

    assert run_once() == run_once()


@settings(max_examples=100, deadline=None)
@given(TURNS)
def test_engine_answers_each_turn_fully_and_evicts_beyond_its_capacity(turns: list[tuple[Any, ...]]) -> None:
    engine, now, finished = Engine(MACHINE), 0.0, []
    for number, (context, new, shared, after) in enumerate(turns):
        now += after
        finished += engine.advance(now)
        engine.add(work(f"t{number}", context, new, tuple(range(min(shared, context // 8)))), now)
        assert engine.running <= MACHINE.lanes
    finished += drained(engine)
    assert sorted(each.work.key for each in finished) == sorted(TurnKey(f"t{n}", 0, 0) for n in range(len(turns)))
    for each in finished:
        assert each.cached_tokens < each.work.context_tokens
        steps = -(-(each.work.context_tokens - each.cached_tokens) // MACHINE.step_tokens) + each.work.new_tokens - 1
        assert each.finished_at - each.scheduled_at >= steps * MACHINE.base_seconds - 1e-9
        assert each.scheduled_at < each.first_token_at <= each.finished_at
    assert engine.running == 0 and engine.decode_tokens_per_second() > 0


def test_prefix_is_reused_until_its_blocks_are_evicted() -> None:
    engine = Engine(MACHINE)
    prompt = tuple(range(8))

    def cached(name: str) -> int:
        engine.add(work(name, 64, 1, prompt), 0.0)
        return drained(engine)[0].cached_tokens

    assert (cached("first"), cached("again")) == (0, 56), "the last token is computed in any case, and so its block"
    engine.add(work("other", 150, 1), 0.0)
    drained(engine)
    assert cached("later") < 56, "of 24 blocks the other one took 19"


def test_turn_that_can_never_run_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="needs 26 blocks of KV"):
        Engine(MACHINE).add(work("big", 200, 1), 0.0)


def turn(name: str, blocks: tuple[int, ...], *, at: float = 0.0) -> Turn:
    context = 8 * len(blocks)
    return Turn(
        trajectory_id=name,
        context_tokens=context,
        new_tokens=4,
        pieces=blocks,
        piece_tokens=8,
        blocks=blocks,
        at=at,
        after_seconds=0.01,
    )


def test_oracle_router_knows_every_cached_prefix() -> None:
    first = Session("a", "a", [turn("a", (1, 2, 3)), turn("a", (1, 2, 3, 4))])
    second = Session("b", "b", [turn("b", (1, 2, 9), at=1.0)])
    workload = Workload(name="w", machines=[MACHINE], max_tokens=8, sessions=[second, first])
    assert sorted(reusable(workload)) == [0, 16, 24]


def test_radix_tree_follows_a_prefix_and_sticky_a_trajectory() -> None:
    tree, sticky = RadixTree(3), Sticky(3)
    held = tree.choose(turn("a", (1, 2, 3, 4)))
    assert tree.choose(turn("b", (1, 2, 3, 5))) == held
    few = round(CACHE_THRESHOLD * 10)
    assert tree.choose(turn("c", (*range(1, few + 1), *range(50, 60 - few)))) != held, "too little of it is known"
    home = sticky.choose(turn("a", (1,)))
    assert {sticky.choose(turn(name, (1,))) for name in "bc"} | {home} == {0, 1, 2}
    assert sticky.choose(turn("a", (7,))) == home


def test_simulation_is_deterministic_and_serves_every_turn_once() -> None:
    sessions = [
        Session(f"s{n}", f"s{n}", [turn(f"s{n}", tuple(range(100 * n, 100 * n + 2 + k))) for k in range(4)])
        for n in range(8)
    ]
    workload = Workload(name="w", machines=[MACHINE, MACHINE], max_tokens=8, sessions=sessions)
    found = []
    for _ in range(2):
        simulation = RoseSimulation(workload)
        simulation.run()
        keys = [each.finished.work.key[:2] for each in simulation.served]
        assert sorted(keys) == sorted((f"s{n}", k) for n in range(8) for k in range(4))
        assert simulation.router.counters.finished == 32
        found.append(figures(simulation))
    assert found[0] == found[1] and 0.0 < found[0]["reused"] <= 1.0
