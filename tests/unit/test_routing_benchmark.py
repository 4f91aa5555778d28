"""The routing benchmark: its workloads, its policies of other projects, and its simulation of the router."""

import pytest

from bench.policies import CACHE_THRESHOLD, RadixTree, Sticky
from bench.routing import RoseSimulation, figures
from bench.sessions import Machine, Session, Turn, Workload, reusable

MACHINE = Machine(
    kind="even", base_seconds=0.01, token_seconds=1e-4, lanes=3, step_tokens=64, block_tokens=8, kv_blocks=24
)


def test_step_of_a_machine_has_its_fixed_time_and_the_time_of_its_tokens() -> None:
    cost = MACHINE.cost()
    assert cost.step_seconds(decoding=3, context_tokens=999) == pytest.approx(0.01 + 3e-4)
    assert cost.step_seconds(decoding=3, context_tokens=0, chunks=[(61, 500)]) == pytest.approx(0.01 + 64e-4)
    assert cost.kv_cache_tokens == 21 * 8


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
        assert len(simulation.served) == 32
        assert sum(executor.overfilled for executor in simulation.executors) == 0
        assert simulation.router.counters.finished == 32
        found.append(figures(simulation))
    assert found[0] == found[1] and 0.0 < found[0]["reused"] <= 1.0
