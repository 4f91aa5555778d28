"""Gradients that are computed while a step waits for groups: the step is that of the whole batch."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.samples import Outcome
from rose.workers.trainer.algorithms import (
    StepAlgorithm,
    TrainingSample,
    UnknownAlgorithm,
    make_algorithm,
)
from rose.workers.trainer.algorithms.advantages import STEP_ADVANTAGES
from rose.workers.trainer.algorithms.combined import Combined
from rose.workers.trainer.checkpoint import Checkpoints
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.early_gradients import EarlyGradients
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.menu import WHOLE_STEP_ADVANTAGES
from rose.workers.trainer.packing import pack_passes
from rose.workers.trainer.passes import Passes
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.ranks import ALONE
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, select_groups
from rose.workers.trainer.step import StepMetrics, train_step
from tests.support.model_families import tiny_policy
from tests.support.trainer_fixtures import VOCABULARY, group_name, make_policy, make_samples, save_first_version

NUMBERS = (0, 1, 2, 3, 4, 5, 6)
"""Groups of `make_samples`: one has equal rewards, one a failed member."""

GROUPS_WITH_SIGNAL = (0, 1, 3, 4, 5, 6)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A policy in float64. A GPT-NeoX computes all of it in that type; other models have norms in float32."""
    folder = tmp_path_factory.mktemp("neox")
    tiny_policy("gpt_neox", folder, vocab_size=VOCABULARY)
    return load_policy(folder).double()


@pytest.fixture(scope="module")
def packed(padded: Any) -> Any:
    model = copy.deepcopy(padded).float()
    assert pack_passes(model) is None
    return model.double()


def selected(numbers: Sequence[int]) -> list[SelectedGroup]:
    samples = sorted(make_samples(), key=lambda one: one.trajectory_id)
    complete = [
        CompleteGroup(name, tuple(one for one in samples if one.group_id == name)) for name in map(group_name, numbers)
    ]
    return select_groups(complete, 1, rules=SelectionRules(max_staleness=100, vocabulary=40, context_tokens=64))


def training_groups(numbers: Sequence[int]) -> list[list[TrainingSample]]:
    return [[TrainingSample.of(sample) for sample in group.trained] for group in selected(numbers) if group.trained]


def config_of(folder: Path = Path("model"), run_folder: Path = Path("run"), **change: Any) -> TrainerConfig:
    fields: dict[str, Any] = {"max_logprob_difference": 1e9, "stream_gradients": True}
    return TrainerConfig(model_folder=folder, run_folder=run_folder, **(fields | change))


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def moved(
    policy: Any, groups: list[list[TrainingSample]], config: TrainerConfig, *, reference: Any = None
) -> tuple[torch.Tensor, StepMetrics]:
    """Return by how much a step of plain gradient descent moves the weights, with gradients computed early if set."""
    model, algorithm = copy.deepcopy(policy), make_algorithm(config)
    early = None
    if config.stream_gradients:
        early = EarlyGradients(Passes(model, algorithm, config, ALONE, reference))
        for group in groups:
            early.add(group)
        assert torch.equal(weights_of(model), weights_of(policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    done = train_step(
        model, optimizer, groups, algorithm=algorithm, config=config, reference=reference, early=early, version=1
    )
    return weights_of(model) - weights_of(policy), done


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_step_with_early_gradients_is_the_step_of_the_whole_batch(
    padded: Any, packed: Any, data: st.DataObject
) -> None:
    """In float64, for any order and number of groups, algorithm, clip bound, minibatches and size of passes."""
    numbers = data.draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=7, unique=True))
    change: dict[str, Any] = {
        "algorithm": data.draw(st.sampled_from(["grpo", "dr_grpo", "dapo", "gspo", "sapo", "cispo", "decoupled_ppo"])),
        "minibatches": data.draw(st.integers(1, 3)),
        "microbatch_tokens": data.draw(st.sampled_from([1, 40, 100, 200, 100_000])),
        "gradient_norm": data.draw(st.sampled_from([1e-3, 1e9])),
        "kl_coefficient": data.draw(st.sampled_from([0.0, 0.1])),
    }
    policy = data.draw(st.sampled_from([padded, packed]))
    config = config_of(**change)
    streamed, done = moved(policy, training_groups(numbers), config, reference=padded)
    whole, expected = moved(policy, training_groups(numbers), replace(config, stream_gradients=False), reference=padded)
    torch.testing.assert_close(streamed, whole, rtol=1e-10, atol=1e-12)
    for name in ("tokens", "groups_with_signal", "samples_with_signal", "skipped_minibatches"):
        assert getattr(done, name) == getattr(expected, name)
    for name in ("loss", "gradient_norm", "kl_behaviour", "clipped_share", "kl_reference", "clipped_share_positive"):
        value = getattr(expected, name)
        assert getattr(done, name) == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), name
    assert done.used_early


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_every_group_weighs_as_much_as_in_the_whole_batch(padded: Any, aggregation: str) -> None:
    """The denominator depends on all groups, and no group has it when its gradient is computed."""
    config = config_of(aggregation=aggregation, minibatches=1, microbatch_tokens=1, gradient_norm=1e9)
    streamed, _ = moved(padded, training_groups(NUMBERS), config)
    whole, _ = moved(padded, training_groups(NUMBERS), replace(config, stream_gradients=False))
    assert whole.abs().max() > 1e-4, "something is learned"
    torch.testing.assert_close(streamed, whole, rtol=0, atol=1e-14)


def learner_of(folder: Path, run_folder: Path, **change: Any) -> Learner:
    learner = Learner(config_of(folder, run_folder, learning_rate=1e-2, **change))
    save_first_version(learner, Checkpoints(run_folder, None))
    return learner


def learnt(learner: Learner, groups: list[SelectedGroup], early: int) -> tuple[list[SelectedGroup], StepMetrics]:
    """Learn a step whose first groups come early."""
    for group in groups[:early]:
        learner.add_early(group)
    return learner.learn(groups, 1)


@pytest.mark.parametrize("tokens", [1, 100, 100_000])
def test_time_at_which_groups_come_changes_no_bit(folder: Path, tmp_path: Path, tokens: int) -> None:
    found, others = [], []
    for early in (0, 3, 6, 7):
        learner = learner_of(folder, tmp_path / f"{early}", microbatch_tokens=tokens)
        groups, done = learnt(learner, selected(NUMBERS), early)
        found.append(weights_of(learner.model))
        others.append(([group.decisions for group in groups], done.loss, done.gradient_norm))
    assert all(torch.equal(weights, found[0]) for weights in found)
    assert others == [others[0]] * 4


def test_tokens_of_the_first_minibatch_are_computed_as_its_groups_come(folder: Path, tmp_path: Path) -> None:
    """The first of two minibatches has three of six groups with a signal; the group without a signal is in none."""
    learner = learner_of(folder, tmp_path, microbatch_tokens=1, minibatches=2)
    groups = selected(NUMBERS)
    sampled = [sum(sum(sample.loss_mask) for sample in group.trained) for group in groups]
    counts = [learner.add_early(group) for group in groups[:5]]
    # Groups 0, 1, 3, 4 have a signal: the first and the third belong to the first minibatch.
    assert counts == [sampled[0], sampled[0], sampled[0], sampled[0] + sampled[3], sampled[0] + sampled[3]]
    _, done = learner.learn(groups, 1)
    assert done.streamed_tokens == sampled[0] + sampled[3]
    assert done.tokens == sum(sampled)
    _, next_step = learner.learn(groups, 2)
    assert next_step.streamed_tokens == 0


def test_groups_that_are_not_in_the_step_leave_no_trace(folder: Path, tmp_path: Path) -> None:
    learner, other = (learner_of(folder, tmp_path / name, microbatch_tokens=1) for name in ("one", "two"))
    before = weights_of(learner.model)
    learner.add_early(selected([6])[0])
    assert torch.equal(weights_of(learner.model), before)
    _, done = learner.learn(selected([0, 1]), 1)
    other.learn(selected([0, 1]), 1)
    assert done.streamed_tokens == 0
    assert torch.equal(weights_of(learner.model), weights_of(other.model))


def raise_on(learner: Learner, group: SelectedGroup, error: Exception) -> None:
    """Have the policy raise for a pass that begins with the tokens of one of the group's samples."""
    rows = [TrainingSample.of(sample).tokens for sample in group.trained]

    def look(_module: torch.nn.Module, _arguments: object, given: dict[str, torch.Tensor]) -> None:
        passed = given["input_ids"][0].tolist()
        if any(passed[: len(row) - 1] == list(row[:-1]) for row in rows):
            raise error

    learner.model.register_forward_pre_hook(look, with_kwargs=True)


def test_group_that_fails_early_is_marked_and_the_step_learns_from_the_others(folder: Path, tmp_path: Path) -> None:
    found = []
    for early in (0, 5):
        learner, groups = learner_of(folder, tmp_path / f"{early}", microbatch_tokens=1), selected(NUMBERS)
        raise_on(learner, groups[3], ValueError("no such row"))
        judged, done = learnt(learner, groups, early)
        assert {sample.outcome for sample in judged[3].decisions} == {Outcome.INFRA_FAILED}
        assert [bool(group.trained) for group in judged] == [True, True, False, False, True, True, True]
        found.append((weights_of(learner.model), done.tokens))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_lack_of_memory_is_raised_when_it_comes(folder: Path, tmp_path: Path) -> None:
    learner, groups = learner_of(folder, tmp_path, microbatch_tokens=1), selected(NUMBERS)
    raise_on(learner, groups[0], MemoryError())
    with pytest.raises(MemoryError):
        learner.add_early(groups[0])


@pytest.mark.parametrize("advantages", sorted(WHOLE_STEP_ADVANTAGES))
def test_advantages_over_the_step_are_refused(advantages: str) -> None:
    with pytest.raises(ValueError, match=f"the advantages {advantages} compare all samples of a step, so no gradient"):
        config_of(advantages=advantages)
    config_of(advantages=advantages, stream_gradients=False)


def test_menu_names_the_advantages_over_the_step() -> None:
    assert set(STEP_ADVANTAGES) == WHOLE_STEP_ADVANTAGES


OWN = """
from rose.workers.trainer.algorithms.combined import Combined

class Own(Combined):
    def step_advantages(self, groups):
        return [[{factor} * one for one in self.advantages(group)] for group in groups]
"""


@pytest.mark.parametrize(("factor", "refused"), [("2", False), ("len(groups)", True)])
def test_own_advantages_over_the_step_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: str, refused: bool
) -> None:
    name = f"own_{refused}"
    (tmp_path / f"{name}.py").write_text(OWN.replace("{factor}", factor))
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(algorithm=f"{name}:Own")
    assert isinstance(make_algorithm(replace(config, stream_gradients=False)), StepAlgorithm)
    if refused:
        with pytest.raises(UnknownAlgorithm, match=r"Own\.step_advantages compares all samples of a step, so no"):
            make_algorithm(config)
    else:
        make_algorithm(config)


class OverManyGroups(Combined):
    """Compares over the step only if the step has more than two groups, which the trial at the start does not show."""

    def step_advantages(self, groups: Sequence[Sequence[TrainingSample]]) -> Sequence[Sequence[float]]:
        return [[one * max(2, len(groups)) for one in self.advantages(group)] for group in groups]


def test_early_gradients_of_other_advantages_are_not_used(padded: Any) -> None:
    config = config_of(microbatch_tokens=1)
    groups, models = training_groups(GROUPS_WITH_SIGNAL), [copy.deepcopy(padded) for _ in range(2)]
    algorithm = OverManyGroups(config)
    early = EarlyGradients(Passes(models[0], algorithm, config, ALONE, None))
    for group in groups:
        early.add(group)
    for model, used in zip(models, (early, None), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        done = train_step(model, optimizer, groups, algorithm=algorithm, config=config, early=used)
        assert not done.used_early
    assert torch.equal(weights_of(models[0]), weights_of(models[1]))
