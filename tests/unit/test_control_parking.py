"""Elasticity: the order in which useless lenders are parked, and the lenders that stay."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import ElasticityCore
from rose.schemas.cells import ExecutorLine
from rose.schemas.grants import CapacityGrant
from tests.support.control_fixtures import CONFIG, JOB, at_work, changed, line, summary


def grants_of(
    seconds: Iterable[Sequence[ExecutorLine]], config: ControlConfig = CONFIG
) -> Iterator[tuple[ElasticityCore, list[CapacityGrant]]]:
    """Feed a core with these lines for consecutive seconds without waiting turns; return its grants."""
    control = ElasticityCore(config, JOB)
    for now, lines in enumerate(seconds):
        control.on_summary(summary(*lines), now)
        yield control, control.tick(now)


def parked_of(seconds: Iterable[Sequence[ExecutorLine]], config: ControlConfig = CONFIG) -> list[str]:
    """Return the parked lenders in order."""
    return [grant.worker for _, granted in grants_of(seconds, config) for grant in granted if not grant.lend]


RUNS = at_work("a", serving_running=4, held_turns=2, held_tokens=200, load_seconds=0.1)
ROOM = at_work("d", serving=False, by_grant=False, free_turns=4, free_tokens=400)


def test_idle_lender_is_parked_before_a_busier_server_that_runs_turns() -> None:
    dedicated = at_work("d", serving=False, by_grant=False, free_turns=1, free_tokens=100)
    idle = at_work("b", free_turns=1, free_tokens=100)
    assert parked_of([[dedicated, RUNS, idle]] * 9 + [[dedicated, RUNS, line("b")]] * 20) == ["b"], "a is needed then"
    assert parked_of([[RUNS, at_work("b"), at_work("c")]] * 5, changed(most_lenders=1)) == ["b", "c"], "over the cap"


def test_lender_with_turns_stays_while_an_idle_lender_is_only_lately_useless() -> None:
    def lines(now: int) -> list[ExecutorLine]:
        works = at_work("b", held_turns=3, held_tokens=4000, load_seconds=9.0)
        return [ROOM, RUNS, works if now < 7 else at_work("b")]

    assert parked_of(lines(now) for now in range(10)) == [], "it was of no use for long enough after 7 s"
    assert parked_of(lines(now) for now in range(30)) == ["a", "b"]


def test_lender_that_finishes_its_turns_is_parked_only_if_others_can_run_them() -> None:
    closed = at_work("a", open=False, free_turns=0, free_tokens=0, held_turns=2, held_tokens=200, load_seconds=5.0)
    full = at_work("d", serving=False, by_grant=False, free_turns=0, free_tokens=0)
    fast = msgspec.structs.replace(ROOM, decode_tokens_per_second=400.0, prefill_tokens_per_second=1e5)
    for other, expected in ((full, []), (ROOM, []), (fast, ["a"])):
        assert parked_of([[other, at_work("a", held_turns=9, held_tokens=9)]] * 5 + [[other, closed]] * 20) == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(10.0, 100.0), min_size=1, max_size=5))
def test_all_lenders_are_parked_at_once_if_no_turn_waits_or_runs(rates: list[float]) -> None:
    lines = [at_work(f"w{number}", decode_tokens_per_second=rate) for number, rate in enumerate(rates)]
    granted = [
        [each.worker for each in grants if not each.lend]
        for _, grants in grants_of([lines] * 30, changed(most_lenders=0))
    ]
    assert [each for each in granted if each] == [sorted(line.worker for line in lines)]


LENDER = st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans())
"""Running turns, user requests, and whether the gate is open."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.tuples(LENDER, LENDER, LENDER)), max_size=8))
def test_no_lender_with_turns_is_parked_before_an_idle_useless_lender(
    history: list[tuple[int, tuple[tuple[int, int, bool], ...]]],
) -> None:
    lines = [
        [
            ROOM,
            *(
                at_work(f"w{number}", held_turns=held, serving_running=busy, open=opened, load_seconds=held / 10)
                for number, (held, busy, opened) in enumerate(lenders)
            ),
        ]
        for seconds, lenders in history
        for _ in range(seconds)
    ]
    for control, granted in grants_of(lines, changed(most_lenders=0)):
        for each in granted:
            if not each.lend and control.lenders[each.worker].line.held_turns:
                left = [lender for lender in control.lenders.values() if lender.lends and not lender.line.held_turns]
                assert all(lender.idle_since is None for lender in left)
