"""Elasticity: lenders that are woken because held turns share steps, in a fleet that spreads its turns evenly."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import ElasticityCore
from rose.schemas.cells import ExecutorLine
from rose.schemas.grants import CapacityGrant
from tests.support.control_fixtures import CONFIG, JOB, at_work, changed, line, summary

WAKE_SECONDS = 6.0
WARM_UP_SECONDS = 40
"""Time of the runs in which contexts grow, so that the cost of tokens is learned."""


@dataclass
class CrowdedFleet:
    """Executors whose steps take `base + token * held tokens` seconds, and lenders that follow their grants."""

    dedicated: int
    lenders: int
    config: ControlConfig = CONFIG
    base: float = 0.008
    token: float = 5e-8
    slow: float = 1.0
    """How much longer the steps of lenders take."""
    waiting_users: frozenset[str] = frozenset()
    now: float = 0.0
    woken_at: dict[str, float] = field(default_factory=dict)
    changes: list[tuple[float, CapacityGrant]] = field(default_factory=list)
    control: ElasticityCore = field(init=False)

    def __post_init__(self) -> None:
        self.control = ElasticityCore(self.config, JOB)

    @property
    def lending(self) -> set[str]:
        return set(self.woken_at)

    def run(self, seconds: int, turns: int, contexts: Iterable[int] = ()) -> None:
        """Run for some seconds with this many held turns. `contexts`: tokens of a turn, by second; else 10,000."""
        growing = iter(contexts)
        for _ in range(seconds):
            self._second(turns, next(growing, 10_000))

    def warm_up(self, turns: int) -> None:
        self.run(WARM_UP_SECONDS, turns, range(2_000, 10_000, 8_000 // WARM_UP_SECONDS))

    def _second(self, turns: int, tokens: int) -> None:
        self.now += 1.0
        names = [f"d{number}" for number in range(self.dedicated)]
        opened = [name for name, at in self.woken_at.items() if self.now - at >= WAKE_SECONDS]
        names += opened
        lines = []
        for place, name in enumerate(names):
            held = turns // len(names) + (place < turns % len(names))
            seconds = (self.slow if name in opened else 1.0) * (self.base + self.token * tokens * max(1, held))
            work: dict[str, object] = {
                "held_turns": held,
                "held_tokens": held * tokens,
                "decode_tokens_per_second": 1.0 / seconds,
                "lanes": 64,
                "free_turns": 64 - held,
                "free_tokens": 10**9,
                "load_seconds": 0.3 * held,
            }
            of_pool = {} if name in opened else {"serving": False, "by_grant": False}
            lines.append(at_work(name, **work, **of_pool))
        for number in range(self.lenders):
            name = f"l{number}"
            if name not in opened:
                lines.append(self._parked(name))
        self.control.on_summary(summary(*lines), self.now)
        for grant in self.control.tick(self.now):
            if grant.lend != (grant.worker in self.woken_at):
                self.changes.append((self.now, grant))
            if grant.lend:
                self.woken_at.setdefault(grant.worker, self.now)
            else:
                self.woken_at.pop(grant.worker, None)

    def _parked(self, name: str) -> ExecutorLine:
        return line(name, serving_waiting=int(name in self.waiting_users))


def test_lenders_are_woken_for_held_turns_that_share_steps_and_parked_after_these_turns() -> None:
    fleet = CrowdedFleet(2, 4, changed(most_lenders=0))
    fleet.warm_up(64)
    fleet.run(30, 64)
    assert fleet.lending == {"l0", "l1", "l2", "l3"}, "no turn has waited"
    reason = fleet.changes[0][1].reason
    assert reason.startswith("64 turns share the steps of 2 executors, ") and "ms with it and 3 more" in reason
    fleet.run(40, 0)
    assert fleet.lending == set()


def test_as_many_lenders_are_woken_as_add_the_least_gain_and_they_stay() -> None:
    fleet = CrowdedFleet(2, 6, changed(most_lenders=0, min_gain=0.25))
    fleet.warm_up(30)
    fleet.run(400, 30)
    assert len(fleet.lending) == 3, "with a third lender, 5 of 30 turns add 27 % to a step; with a fourth, 24 %"
    assert len(fleet.changes) == 3


def test_turns_with_an_executor_each_wake_no_lender() -> None:
    fleet = CrowdedFleet(8, 4)
    fleet.warm_up(64)
    fleet.changes.clear()
    fleet.run(60, 0)
    fleet.changes.clear()
    fleet.run(120, 8, range(10_000, 30_000, 160))
    assert fleet.changes == []


def test_crowd_that_does_not_outlast_a_wake_wakes_no_lender() -> None:
    fleet = CrowdedFleet(2, 4)
    for _ in range(10):
        fleet.run(15, 64, range(2_000, 17_000, 1_000))
        fleet.run(15, 0)
    assert fleet.changes == [], "a wake is expected to take 20 s"


def test_lender_whose_users_wait_is_not_woken_for_held_turns() -> None:
    fleet = CrowdedFleet(2, 2, waiting_users=frozenset({"l0"}))
    fleet.warm_up(64)
    fleet.run(60, 64)
    assert fleet.lending == {"l1"}


def test_lender_that_proves_slower_than_the_crowd_is_not_woken_again() -> None:
    fleet = CrowdedFleet(4, 1, slow=4.0)
    fleet.warm_up(64)
    fleet.run(40, 64, range(5_000, 25_000, 500))
    assert any(grant.lend for _, grant in fleet.changes), "its steps were not known"
    fleet.run(60, 0)
    fleet.changes.clear()
    fleet.run(300, 64)
    assert fleet.changes == []


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 120),
    st.floats(0.001, 0.05),
    st.floats(1e-9, 1e-6),
    st.floats(0.5, 3.0),
    st.floats(0.05, 0.9),
    st.integers(0, 3),
)
def test_number_of_lenders_settles_within_the_cap_for_constant_held_turns(
    dedicated: int, turns: int, base: float, token: float, slow: float, min_gain: float, cap: int
) -> None:
    config = changed(most_lenders=cap, min_gain=min_gain)
    fleet = CrowdedFleet(dedicated, 6, config, base=base, token=token, slow=slow)
    fleet.warm_up(turns)
    for _ in range(60):
        fleet.run(10, turns)
        assert not cap or len(fleet.lending) <= cap
    assert all(at < 400 for at, _ in fleet.changes), "still changing"
    assert turns > dedicated or not fleet.changes


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 100), st.integers(0, 100), st.floats(0.1, 0.6))
def test_more_held_turns_never_wake_fewer_lenders(dedicated: int, turns: int, more: int, min_gain: float) -> None:
    lending = []
    for each in (turns, turns + more):
        fleet = CrowdedFleet(dedicated, 6, changed(most_lenders=0, min_gain=min_gain))
        fleet.warm_up(each)
        fleet.run(100, each)
        lending.append(len(fleet.lending))
    assert lending[0] <= lending[1]
