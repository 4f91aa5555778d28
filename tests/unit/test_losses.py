"""Losses of the menu against their definitions written out token by token, and against numbers of verl and TRL."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rose.workers.trainer.algorithms import StepAlgorithm, TokenBatch, make_algorithm
from rose.workers.trainer.algorithms.losses import LOSSES
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.menu import AGGREGATIONS
from rose.workers.trainer.menu import LOSSES as NAMES


def config_of(**change: Any) -> TrainerConfig:
    return TrainerConfig(model_folder=Path("model"), run_folder=Path("run"), **change)


LOGPROB = st.floats(-6, 0)
TOKEN = st.tuples(LOGPROB, LOGPROB, LOGPROB, LOGPROB)
"""Logprobs under the current, the sampling, the proximal and the reference policy."""
ROW = st.tuples(st.lists(st.tuples(TOKEN, st.booleans()), min_size=1, max_size=5), st.sampled_from([-1.5, 0.0, 0.7]))
ROWS = st.lists(ROW.filter(lambda row: any(sampled for _, sampled in row[0])), min_size=1, max_size=4)
"""Tokens of a sequence, each with whether it was sampled, and the sequence's advantage."""

Rows = list[tuple[list[tuple[tuple[float, float, float, float], bool]], float]]


def batch_of(rows: Rows) -> TokenBatch:
    """Return the rows in float64. Values outside of the mask are NaN, but for the current policy, where they are 0."""
    width = max(len(tokens) for tokens, _ in rows)
    values = torch.full((4, len(rows), width), float("nan"), dtype=torch.float64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for place, (tokens, _) in enumerate(rows):
        for at, (logprobs, sampled) in enumerate(tokens):
            mask[place, at] = sampled
            if sampled:
                values[:, place, at] = torch.tensor(logprobs, dtype=torch.float64)
    return TokenBatch(
        logprobs=torch.where(mask, values[0], 0.0).requires_grad_(),
        behaviour_logprobs=values[1],
        advantages=torch.tensor([[advantage] for _, advantage in rows], dtype=torch.float64),
        loss_mask=mask,
        proximal_logprobs=torch.where(mask, values[2], 0.0),
        reference_logprobs=torch.where(mask, values[3], 0.0),
    )


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(value, low, high)


def naive_truncated(logprob: Tensor, behaviour: Tensor, proximal: Tensor, a: float, c: TrainerConfig) -> Tensor:
    ratio = (logprob - behaviour).exp().detach()
    if (a > 0 and ratio > c.clip_high) or (a < 0 and ratio < c.clip_low):
        return 0 * logprob
    return -torch.clamp(ratio, max=c.importance_cap) * a * (logprob - logprob.detach() + 1)


def naive_ppo(logprob: Tensor, behaviour: Tensor, proximal: Tensor, a: float, c: TrainerConfig) -> Tensor:
    ratio = (logprob - behaviour).exp()
    return -torch.min(ratio * a, clip(ratio, c.clip_low, c.clip_high) * a)


def naive_dual_clip(logprob: Tensor, behaviour: Tensor, proximal: Tensor, a: float, c: TrainerConfig) -> Tensor:
    once = -naive_ppo(logprob, behaviour, proximal, a, c)
    return -torch.max(once, torch.full_like(once, c.dual_clip * a)) if a < 0 else -once


def naive_cispo(logprob: Tensor, behaviour: Tensor, proximal: Tensor, a: float, c: TrainerConfig) -> Tensor:
    return -torch.clamp((logprob - behaviour).exp(), max=c.importance_cap).detach() * a * logprob


def naive_sapo(logprob: Tensor, behaviour: Tensor, proximal: Tensor, a: float, c: TrainerConfig) -> Tensor:
    ratio = (logprob - behaviour).exp()
    temperature = c.sapo_temperature_positive if a > 0 else c.sapo_temperature_negative
    return -4 / temperature / (1 + torch.exp(-temperature * (ratio - 1))) * a


def naive_dppo(logprob: Tensor, behaviour: Tensor, proximal: Tensor, a: float, c: TrainerConfig) -> Tensor:
    moved = float(logprob.detach().exp() - behaviour.exp())
    if (a > 0 and moved > c.dppo_threshold) or (a < 0 and moved < -c.dppo_threshold):
        return 0 * logprob
    return naive_cispo(logprob, behaviour, proximal, a, c)


def naive_decoupled(logprob: Tensor, behaviour: Tensor, proximal: Tensor, a: float, c: TrainerConfig) -> Tensor:
    weight = torch.clamp((proximal - behaviour).exp(), max=c.importance_cap)
    return weight * naive_ppo(logprob, proximal, proximal, a, c)


BY_TOKEN: dict[str, Callable[[Tensor, Tensor, Tensor, float, TrainerConfig], Tensor]] = {
    "truncated": naive_truncated,
    "ppo": naive_ppo,
    "dual_clip": naive_dual_clip,
    "cispo": naive_cispo,
    "sapo": naive_sapo,
    "dppo": naive_dppo,
    "decoupled": naive_decoupled,
}


def naive_losses(name: str, batch: TokenBatch, config: TrainerConfig) -> list[list[Tensor]]:
    """Return the losses of the sampled tokens of each row, from the definitions."""
    assert batch.proximal_logprobs is not None
    rows: list[list[Tensor]] = []
    for place in range(len(batch.logprobs)):
        at, a = batch.loss_mask[place], float(batch.advantages[place])
        logprobs, behaviour, proximal = (
            tensor[place][at] for tensor in (batch.logprobs, batch.behaviour_logprobs, batch.proximal_logprobs)
        )
        if name == "gspo":
            ratio = (logprobs - behaviour).mean().exp()
            loss = -torch.min(ratio * a, clip(ratio, config.gspo_clip_low, config.gspo_clip_high) * a)
            rows.append([loss] * len(logprobs))
        else:
            tokens = zip(logprobs, behaviour, proximal, strict=True)
            rows.append([BY_TOKEN[name](*token, a, config) for token in tokens])
    return rows


def naive_mean(rows: list[list[Tensor]], aggregation: str, config: TrainerConfig) -> Tensor:
    if aggregation == "token":
        return torch.stack([loss for row in rows for loss in row]).mean()
    if aggregation == "sequence":
        return torch.stack([torch.stack(row).mean() for row in rows]).mean()
    return torch.stack([torch.stack(row).sum() / config.aggregation_tokens for row in rows]).mean()


def mean_loss(batch: TokenBatch, config: TrainerConfig) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss as a step takes it, its gradient by the logprobs, and the clipped tokens."""
    algorithm = make_algorithm(config)
    assert isinstance(algorithm, StepAlgorithm)
    loss = algorithm.loss(batch)
    divisor = algorithm.denominator(tokens=int(batch.loss_mask.sum()), sequences=len(batch.logprobs))
    (gradient,) = torch.autograd.grad(loss.summed / divisor, batch.logprobs)
    return loss.summed.detach() / divisor, gradient, loss.clipped


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
@given(rows=ROWS)
@settings(max_examples=60)
def test_loss_and_gradient_are_those_of_the_definition(name: str, aggregation: str, rows: Rows) -> None:
    config, batch = config_of(loss=name, aggregation=aggregation), batch_of(rows)
    loss, gradient, clipped = mean_loss(batch, config)
    expected = naive_mean(naive_losses(name, batch, config), aggregation, config)
    (slopes,) = torch.autograd.grad(expected, batch.logprobs)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, slopes)
    assert clipped is not None and not gradient[clipped].any()
    assert not gradient[~batch.loss_mask].any()


@pytest.mark.parametrize("name", NAMES)
@given(rows=ROWS)
@settings(max_examples=30)
def test_tokens_on_policy_have_the_plain_policy_gradient(name: str, rows: Rows) -> None:
    same: Rows = [([((token[0],) * 4, sampled) for token, sampled in tokens], a) for tokens, a in rows]
    batch = batch_of(same)
    _, gradient, clipped = mean_loss(batch, config_of(loss=name))
    plain = -batch.advantages * batch.loss_mask / batch.loss_mask.sum()
    torch.testing.assert_close(gradient, plain)
    assert clipped is not None and not clipped.any()


@pytest.mark.parametrize("start", [False, True], ids=["current", "proximal"])
@given(rows=ROWS, bounds=st.tuples(*[st.none() | st.floats(0.1, 1), st.none() | st.floats(1, 4)] * 2))
@settings(max_examples=100)
def test_tokens_and_sequences_outside_the_bounds_are_left_out(
    start: bool, rows: Rows, bounds: tuple[float | None, float | None, float | None, float | None]
) -> None:
    """`start`: whether the batch has the logprobs at the step's start, which the ratio is then of."""
    names = [f"reject_{unit}_{side}" for unit in ("tokens", "sequences") for side in ("below", "above")]
    config = config_of(loss="cispo", **dict(zip(names, bounds, strict=True)))
    batch = batch_of(rows)
    if not start:
        batch = replace(batch, proximal_logprobs=None)
    compared = batch.logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
    _, whole, _ = mean_loss(batch, config_of(loss="cispo"))
    _, gradient, clipped = mean_loss(batch, config)
    assert clipped is not None
    for place in range(len(batch.logprobs)):
        at = batch.loss_mask[place]
        log_ratios = (compared - batch.behaviour_logprobs)[place][at]
        sequence = outside(float(log_ratios.mean().exp()), bounds[2], bounds[3])
        expected = [sequence or outside(float(one.exp()), bounds[0], bounds[1]) for one in log_ratios]
        assert clipped[place][at].tolist() == expected
        kept = torch.where(torch.tensor(expected), 0.0, whole[place][at])
        torch.testing.assert_close(gradient[place][at], kept)


def outside(ratio: float, below: float | None, above: float | None) -> bool:
    return (below is not None and ratio < below) or (above is not None and ratio > above)


@given(rows=ROWS)
def test_divergence_from_the_reference_is_added_to_every_sampled_token(rows: Rows) -> None:
    batch = batch_of(rows)
    assert batch.reference_logprobs is not None
    loss, gradient, _ = mean_loss(batch, config_of(kl_coefficient=0.3))
    plain, slopes, _ = mean_loss(batch, config_of())
    apart = (batch.reference_logprobs - batch.logprobs)[batch.loss_mask]
    expected = (0.3 * (apart.exp() - apart - 1)).mean()
    torch.testing.assert_close(loss, plain + expected.detach())
    torch.testing.assert_close(gradient, slopes + torch.autograd.grad(expected, batch.logprobs)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(rows=ROWS)
@settings(max_examples=20)
def test_loss_of_rows_does_not_depend_on_how_they_are_put_into_passes(name: str, aggregation: str, rows: Rows) -> None:
    config = config_of(
        loss=name, aggregation=aggregation, reject_tokens_above=3.0, reject_sequences_below=0.3, kl_coefficient=0.1
    )
    algorithm = make_algorithm(config)
    whole = algorithm.loss(batch_of(rows)).summed
    alone = [algorithm.loss(batch_of([row])).summed for row in rows]
    torch.testing.assert_close(whole, torch.stack(alone).sum())


def test_every_name_of_the_menu_has_a_loss() -> None:
    assert set(LOSSES) == set(NAMES)


# The batch of the recorded numbers: log ratios to the sampling policy of four sequences, the last two padded.
RATIOS = [[0.05, -0.3, 0.6, 0.9], [-0.02, 0.4, -0.6, 1.3], [0.15, -0.9, 0.02, 0.0], [-0.4, 0.21, 0.0, 0.0]]
BEHAVIOUR = [[-1.0, -0.4, -2.0, -1.5], [-0.7, -3.0, -0.2, -1.4], [-0.3, -0.1, -2.5, -0.8], [-1.2, -0.6, -1.0, -1.0]]
SAMPLED = [[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
PROXIMAL = [[0.1, -0.1, 0.3, 0.2], [0.0, 0.0, -0.2, 0.4], [-0.05, -0.2, 0.1, 0.0], [-0.1, 0.35, 0.0, 0.0]]
REFERENCE = [[0.1, -0.2, 0.0, 0.3], [0.0, 0.0, 0.5, -0.4], [0.2, 0.1, -0.3, 0.0], [-0.6, 0.4, 0.0, 0.0]]
ADVANTAGES = [1.2, -0.7, 0.4, -1.1]

PPO = [
    [-0.10512711, -0.074081822, 0, 0],
    [0.057178256, 0, 0, 0.214042306],
    [-0.038727808, -0.013552322, -0.034006711, 0],
    [0, 0.113087155, 0, 0],
]
CISPO = [
    [-0.10512711, -0.074081822, -0.18221188, -0.2],
    [0.057178256, 0, 0.032014012, 0.116666667],
    [-0.038727808, -0.013552322, -0.034006711, 0],
    [0.061446004, 0.113087155, 0, 0],
]
SAPO = [
    [-0.078793539, -0.054638628, -0.115939994, -0.112884874],
    [0.057172077, 0, 0.030282847, 0.046152775],
    [-0.038475337, -0.012425866, -0.034003242, 0],
    [0.089462088, 0.167103085, 0, 0],
]
GSPO_BOUNDS = {"gspo_clip_low": 0.9, "gspo_clip_high": 1.2}


@pytest.mark.parametrize(
    ("source", "change", "loss", "gradient"),
    [
        ("TRL dapo; verl vanilla", {"loss": "ppo"}, -0.017188056, PPO),
        (
            "TRL grpo",
            {"loss": "ppo", "aggregation": "sequence"},
            0.184824421,
            [
                [-0.078845332, -0.055561367, 0, 0],
                [0.057178256, 0, 0, 0.214042306],
                [-0.038727808, -0.013552322, -0.034006711, 0],
                [0, 0.169630733, 0, 0],
            ],
        ),
        (
            "TRL dr_grpo",
            {"algorithm": "dr_grpo", "aggregation_tokens": 4},
            -0.012891042,
            [[one * 3 / 4 for one in row] for row in PPO],  # 12 tokens, 4 sequences of at most 4
        ),
        (
            "verl vanilla, clip_ratio_c 3",
            {"loss": "dual_clip"},
            -0.056230362,
            [PPO[0], [0.057178256, 0, 0, 0], PPO[2], PPO[3]],
        ),
        ("TRL cispo, verl cispo", {"loss": "cispo"}, 0.409658981, CISPO),
        (
            "verl dppo_tv, clip_ratio 0.15 and clip_ratio_c 2",
            {"loss": "dppo", "dppo_threshold": 0.15},
            0.315270191,
            [
                [-0.10512711, -0.074081822, -0.18221188, 0],
                [0.057178256, 0, 0, 0.116666667],
                CISPO[2],
                CISPO[3],
            ],
        ),
        (
            "TRL grpo by sequence; verl gspo, seq-mean-token-mean",
            {"algorithm": "gspo", **GSPO_BOUNDS},
            0.031198584,
            [
                [0, 0, 0, 0],
                [0.073174014, 0, 0.073174014, 0.073174014],
                [-0.026133671, -0.026133671, -0.026133671, 0],
                [0.125038778, 0.125038778, 0, 0],
            ],
        ),
        (
            "verl gspo, token-mean",
            {"loss": "gspo", **GSPO_BOUNDS},
            -0.172160601,
            [
                [0, 0, 0, 0],
                [0.073174014, 0, 0.073174014, 0.073174014],
                [-0.026133671, -0.026133671, -0.026133671, 0],
                [0.083359186, 0.083359186, 0, 0],
            ],
        ),
        ("TRL sapo, verl sapo", {"algorithm": "sapo"}, -0.007554862, SAPO),
        (
            "verl vanilla with rollout_is_weights, threshold 1.3",
            {"loss": "decoupled", "importance_cap": 1.3},
            -0.136376465,
            [
                [-0.10512711, -0.074081822, 0, 0],
                [0.057178256, 0, 0, 0.186519903],
                PPO[2],
                [0, 0.103598523, 0, 0],
            ],
        ),
        (
            "TRL dapo, beta 0.3",
            {"loss": "ppo", "kl_coefficient": 0.3},
            0.055181906,
            [
                [-0.106408887, -0.076711095, 0.011279709, 0.011279709],
                [0.056673222, 0, -0.050104151, 0.234475218],
                [-0.040009586, -0.056509368, -0.027160437, 0],
                [0.004531731, 0.107855916, 0, 0],
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loss_and_gradient_are_those_of_a_reference_implementation(
    source: str, change: dict[str, Any], loss: float, gradient: list[list[float]]
) -> None:
    """`source`: the mode of `GRPOTrainer._compute_loss` of TRL 1.16.0, or of `core_algos` of verl 0.9.1; in float64."""
    behaviour, mask = torch.tensor(BEHAVIOUR, dtype=torch.float64), torch.tensor(SAMPLED, dtype=torch.bool)
    others = [behaviour + torch.tensor(one, dtype=torch.float64) for one in (RATIOS, PROXIMAL, REFERENCE)]
    batch = TokenBatch(
        logprobs=torch.where(mask, others[0], 0.0).requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None],
        loss_mask=mask,
        proximal_logprobs=others[1],
        reference_logprobs=others[2],
    )
    found, slopes, _ = mean_loss(batch, config_of(**change))
    expected = torch.tensor(gradient, dtype=torch.float64)
    assert float(found) == pytest.approx(loss, abs=2e-8), source
    torch.testing.assert_close(slopes, expected, rtol=0, atol=2e-8)
