"""The executor's pure cores: what it takes on, and what it believes a step costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.arrays import pack_tokens
from schemas.prompts import Sampling
from schemas.turns import PlacementCost, TurnDispatch, TurnKey, TurnRequest
from workers.executor.inbox import Inbox, Verdict, tokens_of
from workers.executor.step_cost import StepCost

NOW = 100.0


def dispatch(
    name: str = "g:0",
    *,
    attempt: int = 0,
    incarnation: int = 7,
    context_tokens: int = 10,
    lease_until: float = NOW + 10,
    min_version: int = -1,
    max_version: int | None = None,
) -> TurnDispatch:
    request = TurnRequest(
        trajectory_id=name,
        group_id="g",
        home=0,
        turn=0,
        attempt=attempt,
        context=pack_tokens([1] * context_tokens),
        sampling=Sampling(max_tokens=5),
        min_policy_version=min_version,
        max_policy_version=max_version,
        requested_at=NOW - 1,
        deadline=NOW + 60,
    )
    cost = PlacementCost(wait_seconds=0, prefill_seconds=0, decode_seconds=0)
    return TurnDispatch(
        request=request,
        worker="executor-0",
        slot=0,
        incarnation=incarnation,
        lease_until=lease_until,
        dispatched_at=NOW,
        cost=cost,
    )


def inbox(*, max_turns: int = 4, token_budget: int = 1000) -> Inbox:
    return Inbox(7, max_turns=max_turns, token_budget=token_budget)


def test_a_turn_meant_for_an_earlier_start_is_dropped() -> None:
    answer = inbox().offer(dispatch(incarnation=6), 0, NOW)
    assert (answer.verdict, answer.reason) == (Verdict.DROP, "incarnation")


def test_a_turn_is_taken_once_and_its_next_attempt_is_another_turn() -> None:
    box = inbox()
    assert box.offer(dispatch(), 0, NOW).verdict is Verdict.TAKE
    assert box.offer(dispatch(), 0, NOW).verdict is Verdict.DROP
    assert box.offer(dispatch(attempt=1), 0, NOW).verdict is Verdict.TAKE


def test_nothing_runs_before_a_version_is_proven() -> None:
    assert inbox().offer(dispatch(), -1, NOW).verdict is Verdict.REFUSE


@pytest.mark.parametrize(("version", "verdict"), [(2, Verdict.REFUSE), (3, Verdict.TAKE), (5, Verdict.TAKE)])
def test_the_version_bounds_of_a_request_hold(version: int, verdict: Verdict) -> None:
    assert inbox().offer(dispatch(min_version=3, max_version=5), version, NOW).verdict is verdict


def test_a_version_over_the_bound_is_refused() -> None:
    assert "too new" in inbox().offer(dispatch(max_version=5), 6, NOW).reason


def test_a_lease_that_has_run_out_is_refused() -> None:
    assert inbox().offer(dispatch(lease_until=NOW - 0.001), 0, NOW).verdict is Verdict.REFUSE


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 60), st.booleans()), max_size=80))
def test_what_is_held_never_passes_the_offer_and_comes_back_once(
    history: list[tuple[int, int, int, bool]],
) -> None:
    box = inbox(max_turns=3, token_budget=100)
    held: dict[TurnKey, TurnDispatch] = {}
    for name, attempt, context_tokens, release in history:
        offered = dispatch(f"g:{name}", attempt=attempt, context_tokens=context_tokens)
        if release and held:
            key = next(iter(held))
            assert box.release(key) is held.pop(key)
        elif box.offer(offered, 0, NOW).verdict is Verdict.TAKE:
            assert offered.request.key not in held
            held[offered.request.key] = offered
        assert len(box) == len(held) <= 3
        assert box.tokens == sum(map(tokens_of, held.values())) <= 100
    for key in list(held):
        box.release(key)
        with pytest.raises(KeyError):
            box.release(key)
    assert (len(box), box.tokens) == (0, 0)


@given(
    base=st.floats(1e-4, 1e-1),
    per_token=st.floats(1e-6, 1e-3),
    sizes=st.lists(st.integers(1, 500), min_size=30, max_size=60).filter(lambda sizes: max(sizes) > 4 * min(sizes)),
)
def test_the_fit_finds_a_linear_cost(base: float, per_token: float, sizes: list[int]) -> None:
    cost = StepCost(base_seconds=1.0, token_seconds=1.0)
    for tokens in sizes:
        cost.observe(tokens, base + per_token * tokens)
    for tokens in (1, 100, 500):
        assert cost.seconds(tokens) == pytest.approx(base + per_token * tokens, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), max_size=50))
def test_every_rate_stays_finite_and_positive(steps: list[tuple[int, float]]) -> None:
    cost = StepCost(base_seconds=0.001, token_seconds=0.0001)
    for tokens, seconds in steps:
        cost.observe(tokens, seconds)
        assert 0 < cost.prefill_tokens_per_second < 1e9
        assert 0 < cost.decode_tokens_per_second(0) < 1e9
