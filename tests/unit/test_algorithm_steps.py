"""Algorithms of the menu in a whole step: means, logprobs under other policies, repetition, and refused settings."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.schemas.arrays import MIN_LOGPROB
from rose.workers.trainer.algorithms import (
    AlgorithmError,
    StepAlgorithm,
    TokenBatch,
    TokenLoss,
    TrainingSample,
    UnknownAlgorithm,
    make_algorithm,
)
from rose.workers.trainer.algorithms.combined import Combined
from rose.workers.trainer.checkpoint import Checkpoints
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.logprobs import pad_rows, token_logprobs
from rose.workers.trainer.menu import ADVANTAGES, AGGREGATIONS, LOSSES, PRESETS, Parts
from rose.workers.trainer.optimizer import make_optimizer
from rose.workers.trainer.packing import pack_passes
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, select_groups
from rose.workers.trainer.step import train_step
from tests.support.trainer_fixtures import group_name, make_policy, make_samples, save_first_version

NUMBERS = (0, 1, 3, 4)
"""Groups of `make_samples` in which all members can be trained on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Any:
    return load_policy(folder)


@pytest.fixture(scope="module")
def packed(policy: Any) -> Any:
    model = copy.deepcopy(policy)
    assert pack_passes(model) is None
    return model


@pytest.fixture(scope="module")
def groups() -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample) for sample in group.trained] for group in selected(NUMBERS)]


def selected(numbers: Sequence[int]) -> list[SelectedGroup]:
    samples = sorted(make_samples(), key=lambda one: one.trajectory_id)
    complete = [
        CompleteGroup(name, tuple(one for one in samples if one.group_id == name)) for name in map(group_name, numbers)
    ]
    rules = SelectionRules(max_staleness=100, vocabulary=40, context_tokens=64)
    return select_groups(complete, 1, rules=rules)


def config_of(folder: Path = Path("model"), run_folder: Path = Path("run"), **change: Any) -> TrainerConfig:
    return TrainerConfig(model_folder=folder, run_folder=run_folder, **change)


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a name of the menu with which groups of four have advantages."""
    return {"algorithm": name, "pass_at_k": 2} if name == "pass_at_k" else {"algorithm": name}


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def logprobs_of(model: Any, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """Return the logprobs of the sampled tokens, in the order of the samples."""
    tokens = pad_rows([sample.tokens for sample in samples], dtype=torch.long)
    temperatures = pad_rows([sample.temperatures for sample in samples], dtype=torch.float32, filling=1.0)
    mask = pad_rows([sample.loss_mask for sample in samples], dtype=torch.bool)
    return token_logprobs(model, tokens, temperatures)[mask]


def moved(policy: Any, groups: list[list[TrainingSample]], config: TrainerConfig, **step: Any) -> torch.Tensor:
    """Return by how much a step of plain gradient descent moves the weights."""
    model = copy.deepcopy(policy)
    algorithm = step.pop("algorithm", None) or make_algorithm(config)
    train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), groups, algorithm=algorithm, config=config, **step)
    return weights_of(model) - weights_of(policy)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_step_follows_the_mean_that_was_chosen(
    policy: Any, groups: list[list[TrainingSample]], aggregation: str
) -> None:
    """The expected loss is computed sample by sample, with the truncated ratio as weight and without a clip range."""
    chosen: dict[str, Any] = {"aggregation": aggregation, "loss": "cispo", "advantages": "mean"}
    length: dict[str, Any] = {"aggregation_tokens": 7} if aggregation == "constant" else {}
    config = config_of(**chosen, **length, minibatches=1, gradient_norm=1e9)
    model = copy.deepcopy(policy)
    losses = []
    for group in groups:
        mean = sum(sample.reward for sample in group) / len(group)
        for sample in group:
            logprobs = logprobs_of(model, [sample])
            behaviour = torch.tensor(sample.behaviour_logprobs)[torch.tensor(sample.loss_mask).bool()]
            weight = (logprobs - behaviour).exp().clamp(max=2.0).detach()
            losses.append(-weight * (sample.reward - mean) * logprobs)
    expected = {
        "token": lambda: torch.cat(losses).mean(),
        "sequence": lambda: torch.stack([loss.mean() for loss in losses]).mean(),
        "constant": lambda: torch.stack([loss.sum() / 7 for loss in losses]).mean(),
    }[aggregation]()
    expected.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(moved(policy, groups, config), -gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "decoupled_ppo"])
def test_size_and_kind_of_passes_do_not_change_the_step(
    policy: Any, packed: Any, groups: list[list[TrainingSample]], name: str
) -> None:
    config = config_of(**settings_of(name))
    large = moved(policy, groups, replace(config, microbatch_tokens=100_000))
    assert large.abs().max() > 1e-4, "something is learned"
    small = moved(packed, groups, replace(config, microbatch_tokens=60))
    torch.testing.assert_close(small, large, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_figures_stay_finite_for_any_recorded_logprobs(
    policy: Any, groups: list[list[TrainingSample]], name: str
) -> None:
    least = [
        [replace(sample, behaviour_logprobs=[MIN_LOGPROB] * len(sample.tokens)) for sample in group] for group in groups
    ]
    config, model = config_of(**settings_of(name), minibatches=1), copy.deepcopy(policy)
    optimizer = make_optimizer(model, learning_rate=1e-3)
    done = train_step(model, optimizer, least, algorithm=make_algorithm(config), config=config)
    assert done.skipped_minibatches == 0
    assert all(map(math.isfinite, (done.loss, done.importance_mean, done.kl_behaviour, done.gradient_norm)))


class Recording(Combined):
    """Keeps the batches."""

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config)
        self.batches: list[TokenBatch] = []

    def loss(self, batch: TokenBatch) -> TokenLoss:
        self.batches.append(batch)
        return super().loss(batch)


@pytest.mark.parametrize("tokens", [24, 100_000])
def test_proximal_policy_is_that_of_the_step_s_start_in_every_minibatch(
    policy: Any, groups: list[list[TrainingSample]], tokens: int
) -> None:
    config = config_of(algorithm="decoupled_ppo", minibatches=2, microbatch_tokens=tokens)
    algorithm = Recording(config)
    moved(policy, groups, config, algorithm=algorithm)
    with torch.no_grad():
        start = logprobs_of(policy, [sample for group in groups for sample in group])
    found, current = [], []
    for batch in algorithm.batches:
        assert batch.proximal_logprobs is not None
        found.append(batch.proximal_logprobs[batch.loss_mask])
        current.append(batch.logprobs.detach()[batch.loss_mask])
    torch.testing.assert_close(torch.cat(found).sort().values, start.sort().values, atol=2e-5, rtol=0)
    assert (torch.cat(found) - torch.cat(current)).abs().max() > 1e-3, "the second minibatch has other weights"


def test_algorithm_that_reads_no_other_policy_is_given_none(policy: Any, groups: list[list[TrainingSample]]) -> None:
    algorithm = Recording(config_of())
    moved(policy, groups, config_of(), algorithm=algorithm)
    assert all(batch.proximal_logprobs is None and batch.reference_logprobs is None for batch in algorithm.batches)


def test_decoupled_ppo_with_one_minibatch_is_truncated_importance_sampling(
    policy: Any, groups: list[list[TrainingSample]]
) -> None:
    once = moved(policy, groups, config_of(algorithm="decoupled_ppo", minibatches=1))
    torch.testing.assert_close(once, moved(policy, groups, config_of(algorithm="cispo", minibatches=1)))


@pytest.mark.slow
def test_strong_divergence_term_keeps_the_policy_near_the_reference(
    folder: Path, tmp_path: Path, groups: list[list[TrainingSample]]
) -> None:
    def distance(coefficient: float) -> float:
        run = tmp_path / f"{coefficient}"
        learner = Learner(config_of(folder, run, kl_coefficient=coefficient, learning_rate=1e-2))
        save_first_version(learner, Checkpoints(run, None))
        for _ in range(3):
            learner.learn(selected(NUMBERS), 1)
        samples = [sample for group in groups for sample in group]
        with torch.no_grad():
            return float((logprobs_of(learner.model, samples) - logprobs_of(load_policy(folder), samples)).abs().mean())

    assert distance(100.0) < distance(0.0) / 2


VARIANTS: dict[str, dict[str, Any]] = {
    "advantages over the step": {"algorithm": "reinforce_plus_plus"},
    "ratio of a sequence": {"algorithm": "gspo"},
    "proximal policy": {"algorithm": "decoupled_ppo"},
    "reference": {"algorithm": "dapo", "kl_coefficient": 0.1, "reject_tokens_above": 5.0, "overlong_penalty": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_after_a_restart_gives_the_same_policy_bit_for_bit(folder: Path, tmp_path: Path, variant: str) -> None:
    config = config_of(folder, tmp_path, learning_rate=1e-2, **VARIANTS[variant])
    learner, checkpoints = Learner(config), Checkpoints(tmp_path, None)
    learner.learn(selected(NUMBERS), 1)
    progress = save_first_version(learner, checkpoints)
    between = weights_of(learner.model)
    learner.learn(selected(NUMBERS[::-1]), 2)
    again = Learner(config)
    again.restore(checkpoints, progress)
    assert torch.equal(weights_of(again.model), between)
    again.learn(selected(NUMBERS[::-1]), 2)
    assert torch.equal(weights_of(again.model), weights_of(learner.model))
    assert not torch.equal(weights_of(again.model), between)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss": "clip"}, "loss must be one of truncated, ppo, dual_clip, "),
        ({"advantages": "gae"}, "advantages must be one of grpo, mean, rloo, "),
        ({"aggregation": "mean"}, "aggregation must be one of token, sequence, constant"),
        ({"algorithm": "my:Own", "loss": "ppo"}, r"loss \(ppo\) replaces a part .* algorithm \(my:Own\) is not in the"),
        ({"algorithm": "gspo", "clip_low": 0.7}, r"clip_low \(0\.7\) has no effect with advantages grpo, loss gspo"),
        ({"sapo_temperature_negative": 2.0}, "sapo_temperature_negative .* has no effect"),
        (
            {"aggregation_tokens": 5},
            "aggregation_tokens .* has no effect .* aggregation token: leave it out, or choose",
        ),
        ({"algorithm": "cispo", "clip_high": 3.0}, "clip_high .* has no effect"),
        ({"overlong_tokens": 100}, "overlong_tokens has no effect without an overlong_penalty"),
        (
            {"overlong_penalty": 1.0, "truncated": "leave_out"},
            "overlong_penalty has no effect if truncated is leave_out",
        ),
        (
            {"overlong_penalty": 1.0, "overlong_tokens": 5, "overlong_buffer_tokens": 6},
            "overlong_buffer_tokens must be from 0 to overlong_tokens",
        ),
        ({"reject_tokens_above": 0.5}, "reject_tokens_above must be from 1"),
        ({"reject_sequences_below": 0.0}, "reject_sequences_below must be above 0"),
    ],
)
def test_contradictory_settings_are_refused_in_a_sentence(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "rloo", "scale_by_deviation": False},
        {"algorithm": "my:Own", "clip_low": 0.5, "kl_coefficient": 0.1},
        {"algorithm": "gspo", "gspo_clip_low": 0.9, "aggregation": "token", "advantages": "maxrl"},
        {"loss": "dppo", "importance_cap": 20.0},
        {"overlong_penalty": 1.0},
        {"reject_tokens_below": 0.5, "reject_tokens_above": 5.0, "reject_sequences_above": 1.5},
    ],
)
def test_settings_that_have_an_effect_are_accepted(change: dict[str, Any]) -> None:
    config_of(**change)


@pytest.mark.parametrize(("name", "parts"), PRESETS.items())
def test_name_of_the_menu_is_its_three_parts(name: str, parts: Parts) -> None:
    apart = config_of(advantages=parts.advantages, loss=parts.loss, aggregation=parts.aggregation)
    assert config_of(algorithm=name).parts == apart.parts == parts


def test_documented_table_has_the_menu() -> None:
    page = Path(__file__).parents[2] / "docs/reference/algorithms.md"
    rows = [
        [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert {row[0]: Parts(*row[1:4]) for row in rows if len(row) == 6} == dict(PRESETS)
    assert [row[0] for row in rows if len(row) < 6] == [*ADVANTAGES, *LOSSES, *AGGREGATIONS]


def test_part_in_place_of_that_of_a_name_leaves_the_others() -> None:
    assert config_of(algorithm="gspo", advantages="rloo").parts == Parts("rloo", "gspo", "sequence")


OWN = """
from rose.workers.trainer.algorithms import StepAlgorithm, TokenLoss

class Own(StepAlgorithm):
    def __init__(self, config): ...
    def advantages(self, group): return [sample.reward - 0.5 for sample in group]
    def step_advantages(self, groups): return [[2 * one for one in self.advantages(group)] for group in groups]
    def loss(self, batch): return TokenLoss(-(batch.advantages * batch.logprobs)[batch.loss_mask].sum())
    def denominator(self, *, tokens, sequences): return 4 * sequences
"""


def own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str = OWN) -> TrainerConfig:
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return config_of(algorithm=f"{name}:Own", minibatches=1, gradient_norm=1e9)


def test_own_algorithm_may_compare_over_the_step_and_choose_its_mean(
    policy: Any, groups: list[list[TrainingSample]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own("over_the_step", tmp_path, monkeypatch)
    assert isinstance(make_algorithm(config), StepAlgorithm)
    plain = own("plain", tmp_path, monkeypatch, OWN.replace("(StepAlgorithm)", ""))
    tokens, sequences = sum(sum(sample.loss_mask) for group in groups for sample in group), 16
    expected = moved(policy, groups, plain) * 2 * tokens / (4 * sequences)
    torch.testing.assert_close(moved(policy, groups, config), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("line", "replaced", "says"),
    [
        ("4 * sequences", "0", r"Own\.denominator must return a finite number above 0, and returned 0"),
        ("for group in groups]", "for group in groups[1:]]", r"Own\.step_advantages must return advantages for each"),
        ("2 * one for", "one / 0 if one < 0 else one for", "does not compute: ZeroDivisionError"),
        ("def advantages", "def advantage", "Own lacks advantages"),
    ],
)
def test_own_step_algorithm_that_does_not_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, replaced: str, says: str
) -> None:
    assert line in OWN
    config = own(f"own_step_{abs(hash(line))}", tmp_path, monkeypatch, OWN.replace(line, replaced))
    with pytest.raises((AlgorithmError, UnknownAlgorithm), match=says):
        make_algorithm(config)
