"""Loading a policy, its logprobs, and one training step, with the shipped model."""

import copy
import json
import math
import random
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.plain_engine import Task, sample_trajectories
from rose.schemas.arrays import MIN_LOGPROB
from rose.workers.environments.calculator import Calculator
from rose.workers.environments.turn_format import TurnFormat
from rose.workers.trainer.algorithms import TrainingSample, make_algorithm
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.engine_check import EngineMismatch, check_engines
from rose.workers.trainer.logprobs import pad_rows, padded_batches, token_logprobs
from rose.workers.trainer.optimizer import make_optimizer
from rose.workers.trainer.packing import pack_passes
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.step import dry_run_group, dry_run_policy, train_step
from rose.workers.weights.model_folder import FolderError
from tests.support.model_families import tiny_policy

SHIPPED = Path(__file__).parents[2] / "workers" / "models" / "calculator"
STANDARD = TrainerConfig(model_folder=SHIPPED, run_folder=Path("run"))
GRPO = make_algorithm(STANDARD)
ONE_UPDATE = replace(STANDARD, minibatches=1)


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy(SHIPPED)


@pytest.fixture(scope="module")
def groups(policy: Any) -> list[list[TrainingSample]]:
    """Four groups of four trajectories that the shipped policy has played."""
    tasks = [Task(environment=Calculator, seed=seed, arguments={}) for seed in range(4) for _ in range(4)]
    played = sample_trajectories(
        policy, TurnFormat(SHIPPED), tasks, generator=torch.Generator().manual_seed(3), max_tokens=16
    )
    samples = [
        TrainingSample(
            tokens=one.tokens,
            loss_mask=one.loss_mask,
            behaviour_logprobs=one.logprobs,
            temperatures=[1.0] * len(one.tokens),
            reward=index % 4,
        )
        for index, one in enumerate(played)
    ]
    return [samples[first : first + 4] for first in range(0, 16, 4)]


def parameters_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def updated(policy: Any, groups: list[list[TrainingSample]], config: TrainerConfig) -> torch.Tensor:
    model = copy.deepcopy(policy)
    train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), groups, algorithm=GRPO, config=config)
    return parameters_of(model)


def logprob_of(model: Any, sample: TrainingSample) -> float:
    with torch.no_grad():
        logprobs = token_logprobs(model, torch.tensor([list(sample.tokens)]))
    return float((logprobs[0] * torch.tensor(sample.loss_mask)).sum())


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
def test_padded_batches_hold_every_sample_once_within_their_budget(lengths: list[int], budget: int) -> None:
    batches = list(padded_batches(lengths, tokens=budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= budget


def test_logprob_depends_neither_on_padding_nor_on_the_cache(policy: Any, groups: list[list[TrainingSample]]) -> None:
    """The sampler decodes with a KV cache in uneven batches; the trainer computes whole sequences."""
    samples = [sample for group in groups for sample in group]
    with torch.no_grad():
        together = token_logprobs(policy, pad_rows([sample.tokens for sample in samples], dtype=torch.long))
        for row, sample in zip(together, samples, strict=True):
            alone = token_logprobs(policy, torch.tensor([list(sample.tokens)]))[0]
            recorded, mask = torch.tensor(sample.behaviour_logprobs), torch.tensor(sample.loss_mask).bool()
            assert len({*sample.loss_mask}) == 2
            torch.testing.assert_close(row[: len(sample.tokens)], alone, atol=2e-5, rtol=0)
            torch.testing.assert_close(alone[mask], recorded[mask], atol=5e-5, rtol=0)


@pytest.mark.parametrize(("sampled_by", "shift", "refused"), [(3, 0.2, True), (3, 0.02, False), (2, 0.2, False)])
def test_step_on_tokens_with_divergent_engine_logprobs_is_refused_without_change(
    policy: Any, groups: list[list[TrainingSample]], sampled_by: int, shift: float, refused: bool
) -> None:
    model = copy.deepcopy(policy)
    shifted = [
        [
            replace(
                each, oldest_version=sampled_by, behaviour_logprobs=[one - shift for one in each.behaviour_logprobs]
            )
            for each in group
        ]
        for group in groups
    ]
    optimizer = make_optimizer(model, learning_rate=1e-3)
    with pytest.raises(EngineMismatch, match=r"version 3 sampled differ by 0\.2 nats") if refused else nullcontext():
        train_step(model, optimizer, shifted, algorithm=GRPO, config=STANDARD, version=3)
    assert torch.equal(parameters_of(model), parameters_of(policy)) is refused


@pytest.mark.parametrize(("shift", "refused"), [(2.0, True), (0.2, True), (0.02, False)])
def test_one_engine_among_many_that_computes_another_policy_is_named(
    policy: Any, groups: list[list[TrainingSample]], shift: float, refused: bool
) -> None:
    """The engine is named even if it sampled none of the first minibatch and the mean over all workers is small."""

    def of(sample: TrainingSample, worker: str, shift: float) -> TrainingSample:
        logprobs = [one - shift for one in sample.behaviour_logprobs]
        return replace(sample, oldest_version=3, behaviour_logprobs=logprobs, workers=[worker] * len(logprobs))

    fleet = [
        [of(each, f"w{place % 8}", shift * (place % 8 == 7)) for each in group]
        for place, group in enumerate(groups * 8)
    ]
    model = copy.deepcopy(policy)
    with (
        pytest.raises(EngineMismatch, match=r"engine of worker w7 computes .* by (2|0\.2) nats")
        if refused
        else nullcontext()
    ):
        train_step(model, make_optimizer(model, learning_rate=1e-3), fleet, algorithm=GRPO, config=STANDARD, version=3)
    assert torch.equal(parameters_of(model), parameters_of(policy)) is refused


def test_engine_that_differs_only_far_into_a_context_is_refused(policy: Any) -> None:
    """Many short samples agree; of the long one the second half does not."""
    samples = [*(recorded(policy, 20, agree=20) for _ in range(30)), recorded(policy, 400, agree=200)]
    with pytest.raises(EngineMismatch, match="the logprobs of 399 tokens"):
        check_engines(policy, samples, STANDARD, version=3)


def test_engine_that_differs_is_named_beside_workers_with_few_tokens(policy: Any) -> None:
    samples = [recorded(policy, 100, agree=0), *(recorded(policy, 30, agree=30, worker=f"w{n}") for n in range(1, 9))]
    with pytest.raises(EngineMismatch, match="the engine of worker w0 computes another policy"):
        check_engines(policy, samples, STANDARD, version=3)


def recorded(policy: Any, length: int, *, agree: int, worker: str = "w0") -> TrainingSample:
    """Return a sample of version 3 whose recorded logprobs are those of the policy up to the place `agree`."""
    tokens = [2 + place % 50 for place in range(length)]
    with torch.no_grad():
        logprobs = token_logprobs(policy, torch.tensor([tokens]))[0].tolist()
    return TrainingSample(
        tokens=tokens,
        loss_mask=[0] + [1] * (length - 1),
        behaviour_logprobs=[value - (place >= agree) for place, value in enumerate(logprobs)],
        temperatures=[1.0] * length,
        reward=1.0,
        oldest_version=3,
        workers=[worker] * length,
    )


def test_step_raises_the_probability_of_rewarded_samples(policy: Any, groups: list[list[TrainingSample]]) -> None:
    model = copy.deepcopy(policy)
    samples = [sample for group in groups for sample in group]
    before = [logprob_of(model, sample) for sample in samples]
    metrics = train_step(model, make_optimizer(model, learning_rate=1e-3), groups, algorithm=GRPO, config=ONE_UPDATE)
    moved = [logprob_of(model, sample) - old for sample, old in zip(samples, before, strict=True)]
    best = [change for change, sample in zip(moved, samples, strict=True) if sample.reward == 3]
    worst = [change for change, sample in zip(moved, samples, strict=True) if sample.reward == 0]
    assert sum(best) > sum(worst)
    assert metrics.importance_mean == pytest.approx(1, abs=1e-3) and metrics.kl_behaviour < 1e-4
    assert (metrics.groups, metrics.groups_with_signal, metrics.skipped_minibatches) == (4, 4, 0)
    assert metrics.tokens == sum(sum(sample.loss_mask) for sample in samples)


@pytest.mark.parametrize("packed", [False, True])
def test_passes_of_another_size_or_kind_do_not_change_the_step(
    policy: Any, groups: list[list[TrainingSample]], packed: bool
) -> None:
    large = updated(policy, groups, replace(STANDARD, microbatch_tokens=100_000))
    model = copy.deepcopy(policy)
    if packed:
        assert pack_passes(model) is None
    for tokens in (128, 1_000, 100_000):
        other = updated(model, groups, replace(STANDARD, microbatch_tokens=tokens))
        torch.testing.assert_close(other, large, atol=1e-5, rtol=0)
    assert (large - parameters_of(policy)).abs().max() > 1e-3


def test_groups_with_equal_rewards_do_not_change_the_policy(policy: Any, groups: list[list[TrainingSample]]) -> None:
    alike = [replace(sample, reward=1.0) for sample in groups[0]]
    assert torch.equal(updated(policy, [alike], ONE_UPDATE), parameters_of(policy))
    assert torch.equal(updated(policy, [groups[1], alike], ONE_UPDATE), updated(policy, [groups[1]], ONE_UPDATE))


def test_non_finite_gradient_is_not_applied(policy: Any, groups: list[list[TrainingSample]]) -> None:
    model = copy.deepcopy(policy)
    broken = [replace(sample, behaviour_logprobs=[math.nan] * len(sample.tokens)) for sample in groups[0]]
    metrics = train_step(model, make_optimizer(model, learning_rate=1.0), [broken], algorithm=GRPO, config=ONE_UPDATE)
    assert metrics.skipped_minibatches == 1
    assert torch.equal(parameters_of(model), parameters_of(policy))


def test_minibatch_that_was_not_applied_is_named_and_left_out_of_means(
    policy: Any, groups: list[list[TrainingSample]]
) -> None:
    """The second of two minibatches has its own groups and, after a group without a signal, the third."""
    alike = [replace(sample, reward=1.0) for sample in groups[1]]
    broken = [replace(sample, behaviour_logprobs=[math.nan] * len(sample.tokens)) for sample in groups[2]]
    model, same = copy.deepcopy(policy), copy.deepcopy(policy)
    whole = train_step(
        model,
        make_optimizer(model, learning_rate=1e-3),
        [groups[0], alike, broken, groups[3]],
        algorithm=GRPO,
        config=STANDARD,
    )
    assert (whole.skipped_minibatches, whole.skipped_groups) == (1, (2,))
    applied = train_step(
        same, make_optimizer(same, learning_rate=1e-3), [groups[0], groups[3]], algorithm=GRPO, config=ONE_UPDATE
    )
    assert torch.equal(parameters_of(model), parameters_of(same))
    assert whole.tokens == applied.tokens > 0 and whole.gradient_norm == applied.gradient_norm
    for name in ("loss", "importance_mean", "kl_behaviour", "clipped_share"):
        assert getattr(whole, name) == getattr(applied, name)


def test_step_figures_stay_finite_for_any_recorded_logprobs(policy: Any, groups: list[list[TrainingSample]]) -> None:
    least = [replace(sample, behaviour_logprobs=[MIN_LOGPROB] * len(sample.tokens)) for sample in groups[0]]
    model = copy.deepcopy(policy)
    done = train_step(model, make_optimizer(model, learning_rate=1e-3), [least], algorithm=GRPO, config=ONE_UPDATE)
    assert done.skipped_minibatches == 0 and done.importance_mean > 1e30
    assert all(map(math.isfinite, (done.loss, done.importance_mean, done.kl_behaviour, done.gradient_norm)))


def test_tokens_are_evaluated_at_their_sampling_temperature(policy: Any, groups: list[list[TrainingSample]]) -> None:
    """This holds for each token, also with different temperatures in one trajectory; padding changes nothing."""
    mixed, short = groups[0][0], replace(groups[0][1], tokens=groups[0][1].tokens[:9])
    temperatures = [0.7 if at % 2 else 1.3 for at in range(len(mixed.tokens))]
    tokens = pad_rows([mixed.tokens, short.tokens], dtype=torch.long)
    drawn_at = pad_rows([temperatures, [0.7] * 9], dtype=torch.float32, filling=1.0)
    with torch.no_grad():
        logits = policy(input_ids=tokens).logits
        found = token_logprobs(policy, tokens, temperatures=drawn_at)
    assert found.isfinite().all()
    for at in range(1, len(mixed.tokens)):
        expected = torch.log_softmax(logits[0, at - 1] / temperatures[at], -1)[mixed.tokens[at]]
        assert found[0, at].item() == pytest.approx(expected.item(), abs=1e-5)


def test_sample_of_one_token_is_trained(policy: Any, groups: list[list[TrainingSample]]) -> None:
    one = TrainingSample(tokens=[3], loss_mask=[0], behaviour_logprobs=[0.0], temperatures=[1.0], reward=7.0)
    changed = updated(policy, [[one, *groups[0]], [one, replace(one, reward=0.0)]], STANDARD)
    assert changed.isfinite().all() and not torch.equal(changed, parameters_of(policy))


def test_trial_of_a_group_raises_the_error_of_a_step_and_changes_no_weight(
    policy: Any, groups: list[list[TrainingSample]]
) -> None:
    model = copy.deepcopy(policy)
    dry_run_group(model, groups[0], algorithm=GRPO, config=STANDARD)
    outside = replace(groups[0][0], tokens=[10**6] * len(groups[0][0].tokens))
    with pytest.raises(IndexError):
        dry_run_group(model, [outside, *groups[0][1:]], algorithm=GRPO, config=STANDARD)
    assert torch.equal(parameters_of(model), parameters_of(policy))


def test_policy_with_finite_weights_and_nan_logits_is_reported(policy: Any, groups: list[list[TrainingSample]]) -> None:
    model = copy.deepcopy(policy)
    assert dry_run_policy(model, groups, config=STANDARD) and dry_run_policy(model, [], config=STANDARD)
    model.model.norm.weight.data.fill_(3e38)
    assert not dry_run_policy(model, groups, config=STANDARD)


def test_step_is_reproducible_bit_for_bit(policy: Any, groups: list[list[TrainingSample]]) -> None:
    assert torch.equal(updated(policy, groups, STANDARD), updated(policy, groups, STANDARD))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_folder_with_a_non_finite_weight_is_refused_with_its_name(tmp_path: Path, value: float) -> None:
    """One of two tied weights may be NaN: no number equals NaN, not even NaN."""
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 1] = value
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FolderError, match=r"model: (lm_head|.*embed_tokens)\.weight holds a value that is not finite"):
        load_policy(folder)


def test_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"no readable config\.json"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", None),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 64),
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "no such model"}'),
    ],
)
def test_broken_folder_is_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(FolderError, match=f"^{re.escape(str(folder))}") as refused:
        load_policy(folder)
    assert "\n" not in str(refused.value)


def test_weights_that_lack_a_tensor_are_refused_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FolderError, match=r"do not fit.*model\.norm\.weight"):
        load_policy(folder)


def test_missing_head_is_refused_with_the_setting_that_ties_it(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FolderError, match=r"lm_head\.weight; add the tensor, or set tie_word_embeddings to true"):
        load_policy(tmp_path)


def test_weights_of_another_shape_are_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 17}))
    weights, size = load_file(folder / "model.safetensors"), config["hidden_size"]
    theirs = tuple(weights["model.layers.0.mlp.down_proj.weight"].shape)
    with pytest.raises(FolderError, match="do not fit") as refused:
        load_policy(folder)
    name = r"model\.layers\.0\.mlp\.down_proj\.weight"
    assert re.search(rf"{name} of shape \({theirs[0]}, {theirs[1]}\) instead of \({size}, 17\)", str(refused.value))
    assert "\n" not in str(refused.value)


def test_key_error_of_a_library_is_reported_with_its_type_and_key(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "SiLU"}))
    with pytest.raises(FolderError, match=r"does not load as a causal language model: KeyError: 'SiLU'"):
        load_policy(folder)


def test_same_seed_plays_the_same_trajectories(policy: Any) -> None:
    seeds = random.Random(5).sample(range(10**6), 5)
    tasks = [Task(environment=Calculator, seed=seed, arguments={}) for seed in seeds]
    first, second = (
        sample_trajectories(
            policy, TurnFormat(SHIPPED), tasks, generator=torch.Generator().manual_seed(1), max_tokens=16
        )
        for _ in range(2)
    )
    assert [one.tokens for one in first] == [two.tokens for two in second]
    assert all(one.last is not None and one.last.done for one in first)
