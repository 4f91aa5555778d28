"""Step costs of serving and guest are learned from steps: noise, stalls and changes are distinguished."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.executor.step_cost import StepCost
from rose.workers.lender.admission import ArrivalRate, ServingCost

STEP_TOKENS = 512
NOW = 1000.0
EXACT = 1e-6
"""Tolerance of float sums, in seconds."""


def test_stall_of_the_serving_loop_gives_no_credit() -> None:
    """Steps take 1 ms and 0.5 ms a token: the time of tokens earns no credit, neither before nor after a stall."""
    cost, draw, earned = ServingCost(step_tokens=STEP_TOKENS), random.Random(5), []
    for number in range(600):
        decoding = draw.randint(1, 20)
        seconds = 5.0 if number == 400 else (0.001 + 0.0005 * decoding) * draw.uniform(0.95, 1.05)
        fixed = cost.observe(prompt_tokens=0, decoding=decoding, seconds=seconds)
        earned += [fixed] if number >= 400 else []
    assert max(earned) < 0.002 and sum(earned) / len(earned) < 0.0015


def test_permanent_cost_change_is_followed() -> None:
    cost = ServingCost(step_tokens=STEP_TOKENS)
    for number in range(700):
        cost.observe(prompt_tokens=0, decoding=8, seconds=0.05 if number >= 500 else 0.002)
    assert cost.decode.seconds(8) == pytest.approx(0.05, rel=0.2)


@given(st.integers(0, 2**32), st.floats(0.02, 0.5))
def test_nine_of_ten_steps_end_within_the_cautious_price(seed: int, noise: float) -> None:
    """The error follows the noise, and falls again once the noise is gone."""
    draw = random.Random(seed)
    cost, within = StepCost(base_seconds=1.0, token_seconds=1.0), 0
    for number in range(1500):
        tokens = draw.randint(1, 200)
        taken = (0.002 + 0.00005 * tokens) * math.exp(draw.gauss(0, noise))
        within += number >= 500 and taken <= cost.cautious_seconds(tokens)
        cost.observe(tokens, taken)
    assert 850 <= within <= 1000 and 0.5 * noise < cost.error < 4 * noise
    for _ in range(500):
        tokens = draw.randint(1, 200)
        cost.observe(tokens, 0.002 + 0.00005 * tokens)
    assert cost.error < 0.05


@given(st.floats(0, 10), st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3))
def test_tokens_within_is_the_largest_fitting_number(seconds: float, base: float, token: float) -> None:
    cost = StepCost(base_seconds=base, token_seconds=token)
    tokens = cost.tokens_within(seconds)
    assert tokens == 0 or cost.bounded_seconds(tokens) <= seconds + EXACT
    assert cost.bounded_seconds(tokens + 1) >= seconds - EXACT


@given(st.integers(0, 2**32), st.floats(0.05, 0.6))
def test_bounded_steps_end_within_their_bound_in_99_of_100_cases_without_stalls(seed: int, noise: float) -> None:
    draw = random.Random(seed)
    cost, beyond = StepCost(base_seconds=0.003, token_seconds=0.0001), 0
    for number in range(2000):
        tokens = max(1, cost.tokens_within(draw.uniform(0.01, 0.02)))
        taken = (0.002 + 0.00005 * tokens) * (1 + draw.uniform(0, noise) * (draw.random() < 0.2))
        beyond += number >= 500 and taken > 0.02
        if draw.random() < 0.01:
            taken *= 20
        cost.observe(tokens, taken)
    assert beyond <= 15 and cost.tokens_within(0.02) > 100, "a stall makes no step smaller"


def test_growing_decode_contexts_are_followed() -> None:
    """A decode costs 2 ms and 0.5 us per context token; conversations of 100 to 2,000 tokens come and go."""
    cost, draw = ServingCost(step_tokens=STEP_TOKENS), random.Random(7)
    contexts = [draw.randint(100, 2000) for _ in range(8)]
    late = 0
    for number in range(3000):
        if number % 40 == 0:
            contexts[draw.randrange(8)] = draw.randint(100, 2000)
        contexts = [context + 1 for context in contexts]
        taken = 0.002 + 5e-7 * sum(contexts)
        late += number > 500 and taken > cost.step_seconds(0, 8)
        cost.observe(prompt_tokens=0, decoding=8, seconds=taken)
    assert late < 0.1 * 2500 and cost.decode.error < 0.2


def test_long_prompt_price_covers_all_its_steps() -> None:
    cost = ServingCost(step_tokens=100)
    for tokens in (10, 50, 90) * 500:
        cost.observe(prompt_tokens=tokens, decoding=10, seconds=0.002 + 0.0001 * (tokens + 10))
    exact = 5 * 0.002 + 0.0001 * (450 + 5 * 10)
    assert cost.prefill_seconds(450, 10) == pytest.approx(exact, rel=0.03)
    assert cost.prefill_seconds(0, 10) == 0.0


def test_rare_prompts_have_a_small_price_and_old_prompts_none() -> None:
    rare, often = ArrivalRate(), ArrivalRate()
    rare.on_arrival(100, NOW)
    for number in range(1000):
        often.on_arrival(100, NOW - 10 + number / 100)
    assert 0 < rare.expected_tokens(0.01, NOW) < 100 < often.expected_tokens(0.01, NOW) < 400
    assert rare.expected_tokens(0.01, NOW + 100) == 0 == ArrivalRate().expected_tokens(1.0, NOW)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("late", [0.015, 0.021, 0.024])
def test_wrong_token_price_that_allows_one_step_size_is_corrected(seed: int, late: float) -> None:
    """The price was learned in a slow moment of the machine: without a step of another size it would stay forever."""
    draw = random.Random(seed)
    cost, sizes = StepCost(base_seconds=0.01, token_seconds=0.0001), []
    for tokens, seconds in ((1, 0.008), (2, late), (1, 0.008), (2, late), (1, 0.009)):
        cost.observe(tokens, seconds)
    assert max(1, cost.tokens_within(0.02)) == 1
    for _ in range(3000):
        tokens = max(1, cost.tokens_within(0.02))
        assert tokens == 1 or cost.cautious_seconds(tokens) <= 0.02 + EXACT
        sizes.append(tokens)
        cost.observe(tokens, (0.0077 + 0.0004 * tokens) * (1.9 if draw.random() < 0.05 else 1 + 0.05 * draw.random()))
    assert min(sizes[-100:]) >= 4


def test_decodes_of_one_size_do_not_lower_the_token_price() -> None:
    """The token price of steps with prompts is used for plans while it is recent, and reported forever."""
    cost = StepCost(base_seconds=0.01, token_seconds=0.0001)
    for number in range(50):
        cost.observe(8 + 64 * (number % 2), 0.004 + 0.0005 * (8 + 64 * (number % 2)))
    rate, most = cost.prefill_tokens_per_second, cost.tokens_within(0.02)
    for _ in range(1000):
        cost.observe(8, 0.008)
    assert cost.prefill_tokens_per_second == pytest.approx(rate, rel=0.01)
    assert most <= 32 and 16 <= cost.tokens_within(0.02) <= 32
    for _ in range(5000):
        cost.observe(8, 0.008)
    assert cost.prefill_tokens_per_second == pytest.approx(rate, rel=0.01)
    assert cost.bounded_seconds(cost.tokens_within(0.02)) <= 0.02 + EXACT
