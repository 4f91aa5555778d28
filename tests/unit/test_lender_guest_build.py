"""The first steps of a guest: they are bounded, and their cost is known before the first turn."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.executor.step_cost import INITIAL_COST, StepCost
from rose.workers.executor.vllm.types import StepResult
from rose.workers.lender.vllm.guest_build import MAX_PROFILE_TOKENS, StepProfile, profile_sizes

BASE, TOKEN = 0.004, 0.0002
"""Seconds of a step, and of each token in it; the very first step takes ten times as long."""


class ScriptedEngine:
    version, longest_tokens = -1, 1024

    def __init__(self) -> None:
        self.left = 0
        self.steps: list[int] = []

    def add(self, name: str, context: list[int], *_: Any, **__: Any) -> None:
        self.left = len(context)

    def abort(self, name: str) -> None:
        self.left = 0

    def step(self, most_tokens: int) -> StepResult:
        tokens = min(most_tokens, self.left)
        self.left -= tokens
        self.steps.append(tokens)
        return StepResult([], tokens, (BASE + TOKEN * tokens) * (10 if len(self.steps) == 1 else 1))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def profiled(engine: Any, room_tokens: int, yield_seconds: float = 1.0) -> StepCost:
    """Run the profile with steps of as many tokens as fit, and at least one."""
    cost = StepCost(**INITIAL_COST)
    profile = StepProfile(engine, cost)
    while not profile.done:
        profile.step(max(1, cost.tokens_within(yield_seconds)), room_tokens)
    return cost


def test_first_turn_has_a_measured_price(engine: ScriptedEngine) -> None:
    cost = profiled(engine, 1000)
    assert max(engine.steps) == MAX_PROFILE_TOKENS and engine.left == 0
    for tokens in (1, 8, 64, 128):
        assert cost.seconds(tokens) == pytest.approx(BASE + TOKEN * tokens, rel=0.05)


def test_no_profiling_step_exceeds_its_bound(engine: ScriptedEngine) -> None:
    profiled(engine, 1000, yield_seconds=0.01)
    assert all(BASE + TOKEN * tokens <= 0.01 for tokens in engine.steps)


@given(st.integers(0, 2000))
def test_all_profiling_steps_fit_the_memory_with_a_token_to_spare(room_tokens: int) -> None:
    steps = profile_sizes(room_tokens)
    assert not steps or sum(steps) < room_tokens
    assert len(steps) > 1 or not steps
    assert bool(steps) is (room_tokens > 3)


def test_profiling_without_memory_ends_at_once() -> None:
    engine: Any = ScriptedEngine()
    assert not profiled(engine, 2).has_observed and engine.steps == []


def test_profiling_can_be_stopped_at_any_point(engine: Any) -> None:
    cost = StepCost(**INITIAL_COST)
    profile = StepProfile(engine, cost)
    assert profile.needs_memory(100) and not profile.needs_memory(1000)
    profile.step(64, 1000)
    profile.abort_turn("profile", "cut")
    profile.step(64, 1000)
    assert profile.done and engine.left == 0 and len(engine.steps) == 1
