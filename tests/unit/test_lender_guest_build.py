"""The build of a guest: its first steps are bounded, their cost is known, and a failed build leaves nothing."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.executor.step_cost import INITIAL_COST, StepCost
from rose.workers.executor.vllm.types import StepResult
from rose.workers.lender.config import LendConfig
from rose.workers.lender.vllm import guest_build
from rose.workers.lender.vllm.guest_build import MAX_PROFILE_TOKENS, StepProfile, profile_sizes
from rose.workers.lender.vllm.guest_device import CPU

MODEL = Path(__file__).parents[2] / "workers" / "models" / "calculator"
LOG = logging.getLogger("guest")
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


class NoRoom:
    """A model backend without memory at some point of the build."""

    ranks = 2

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at
        self.holds = True

    def patch_model(self, *_: object) -> Any:
        self._take("fit")
        return SimpleNamespace(allocate_spare=lambda: self._take("spare"))

    executor = None

    def block_bytes(self, _: object) -> int:
        return 64

    def release(self) -> None:
        self.holds = False

    def _take(self, what: str) -> None:
        if what == self._fails_at:
            raise MemoryError(what)


@pytest.mark.parametrize("fails_at", ["fit", "spare"])
def test_build_that_fails_at_its_end_leaves_no_model_in_memory(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would hold the model for the life of the server, and another model after the next attempt."""
    scheduler = SimpleNamespace(
        block_size=16,
        kv_cache_config=SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=64)], kv_cache_groups=[], num_blocks=4),
        kv_cache_manager=SimpleNamespace(block_pool=None, coordinator=SimpleNamespace(single_type_managers=())),
        shutdown=lambda: None,
    )
    core = SimpleNamespace(scheduler=scheduler, structured_output_manager=SimpleNamespace(clear_backend=lambda: None))
    monkeypatch.setattr("rose.workers.executor.vllm.engine.start_core", lambda *_: core)
    place: Any = NoRoom(fails_at)
    monkeypatch.setattr(guest_build, "GuestBackend", lambda *_: place)
    with pytest.raises(MemoryError, match=fails_at):
        guest_build.build_guest(LendConfig(model_folder=str(MODEL), socket=""), None, None, CPU, LOG)
    assert not place.holds
