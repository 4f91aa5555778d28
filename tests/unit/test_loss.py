"""The loss against a naive reading of its definition, one token at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.workers.trainer.loss import LossBounds, group_advantages, grpo_loss

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, -1.0]), min_size=1, max_size=16)
LOGPROBS = st.floats(min_value=-8, max_value=0)
TOKENS = st.tuples(LOGPROBS, LOGPROBS, st.sampled_from([-1.5, 0.0, 0.7]), st.sampled_from([0.0, 1.0]))
BOUNDS = LossBounds(clip_low=0.8, clip_high=1.28, importance_cap=2.0)


def naive(tokens: list[tuple[float, float, float, float]], bounds: LossBounds) -> tuple[float, list[float]]:
    """The loss, and its derivative by every logprob, from the words of the definition."""
    loss, slopes = 0.0, []
    for logprob, behaviour, advantage, mask in tokens:
        ratio = math.exp(logprob - behaviour)
        followed = (advantage > 0 and ratio > bounds.clip_high) or (advantage < 0 and ratio < bounds.clip_low)
        counts = 0.0 if followed or not mask else min(ratio, bounds.importance_cap) * advantage
        loss -= counts
        slopes.append(-counts)
    return loss, slopes


@given(
    st.lists(TOKENS, min_size=1, max_size=12),
    st.builds(
        LossBounds,
        clip_low=st.floats(0.1, 1.0),
        clip_high=st.floats(1.0, 3.0),
        importance_cap=st.floats(0.5, 5.0),
    ),
)
@settings(max_examples=300)
def test_loss_and_gradient_are_those_of_the_definition(
    tokens: list[tuple[float, float, float, float]], bounds: LossBounds
) -> None:
    logprobs, behaviour, advantages, mask = torch.tensor(tokens, dtype=torch.float64).T[:, None, :]
    logprobs = logprobs.clone().requires_grad_()
    loss = grpo_loss(logprobs, behaviour_logprobs=behaviour, advantages=advantages, loss_mask=mask, bounds=bounds)
    loss.backward()  # type: ignore[no-untyped-call]
    expected, slopes = naive(tokens, bounds)
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert logprobs.grad[0].tolist() == pytest.approx(slopes, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, -1.0),  # on policy: the plain policy gradient
        (1.0, -1.0, 1.0),
        (1.27, 1.0, -1.27),
        (1.29, 1.0, 0.0),  # pushed up far enough
        (0.81, -1.0, 0.81),
        (0.79, -1.0, 0.0),  # pulled down far enough
        (0.5, 1.0, -0.5),  # a token that has become rare may come back
        (1.5, -1.0, 1.5),  # and one that has become likely may go
        (50.0, -1.0, 2.0),  # but its weight is truncated
    ],
)
def test_where_a_token_stops_pulling(ratio: float, advantage: float, slope: float) -> None:
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros_like(logprob), torch.ones_like(logprob)
    grpo_loss(logprob, behaviour_logprobs=zero, advantages=one * advantage, loss_mask=one, bounds=BOUNDS).backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(slope)


def test_what_is_masked_may_be_anything() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    behaviour = torch.tensor([[float("nan"), -2.0, float("-inf")]])
    mask = torch.tensor([[0.0, 1.0, 0.0]])
    loss = grpo_loss(logprobs, behaviour_logprobs=behaviour, advantages=torch.ones(1, 1), loss_mask=mask, bounds=BOUNDS)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0, 0.0]]


@given(REWARDS, st.booleans(), st.floats(-3, 3))
def test_advantages_compare_within_the_group_alone(rewards: list[float], scale: bool, shift: float) -> None:
    advantages = group_advantages(rewards, scale_by_deviation=scale)
    assert sum(advantages) == pytest.approx(0, abs=1e-9)
    assert sorted(range(len(rewards)), key=lambda i: (rewards[i], i)) == sorted(
        range(len(rewards)), key=lambda i: (round(advantages[i], 9), i)
    )
    moved = group_advantages([reward + shift for reward in rewards], scale_by_deviation=scale)
    assert moved == pytest.approx(advantages, abs=1e-6)
    if max(rewards) == min(rewards):
        assert not any(advantages)
    elif scale:
        assert sum(a * a for a in advantages) == pytest.approx(len(rewards), rel=1e-2)


@pytest.mark.parametrize("scale", [True, False])
def test_what_sums_of_floats_leave_is_no_advantage(scale: bool) -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], scale_by_deviation=scale) == [0.0] * 4


def test_a_hair_between_rewards_is_no_lesson_of_full_weight() -> None:
    hair = group_advantages([0.3, 0.3, 0.3, 0.3 + 1e-5], scale_by_deviation=True)
    whole = group_advantages([0.3, 0.3, 0.3, 1.0], scale_by_deviation=True)
    assert max(hair) < 0.1 < 1.7 < max(whole)
