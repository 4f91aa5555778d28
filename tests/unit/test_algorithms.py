"""Algorithms: loss and advantages against direct implementations of their definitions, and algorithms by name."""

import copy
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.errors import UsageError
from rose.schemas.limits import MAX_REWARD
from rose.workers.trainer import algorithms
from rose.workers.trainer.algorithms import (
    AlgorithmError,
    TokenBatch,
    TokenLoss,
    TrainingSample,
    UnknownAlgorithm,
    make_algorithm,
)
from rose.workers.trainer.algorithms.advantages import (
    DEVIATION_EPSILON,
    group_advantages,
    leave_one_out_advantages,
)
from rose.workers.trainer.algorithms.combined import Combined
from rose.workers.trainer.checkpoint import Checkpoints
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.menu import PRESETS
from rose.workers.trainer.optimizer import make_optimizer
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, select_groups
from rose.workers.trainer.step import train_step
from tests.support.trainer_fixtures import group_name, make_policy, make_samples, save_first_version

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, -1.0]), min_size=1, max_size=16)
LOGPROBS = st.floats(min_value=-8, max_value=0)
TOKENS = st.tuples(LOGPROBS, LOGPROBS, st.sampled_from([-1.5, 0.0, 0.7]), st.sampled_from([0.0, 1.0]))
ANY_REWARDS = st.lists(st.floats(-MAX_REWARD, MAX_REWARD) | st.sampled_from([0.0, 1.0, 0.5]), max_size=16)


def config_of(**change: Any) -> TrainerConfig:
    return TrainerConfig(model_folder=Path("model"), run_folder=Path("run"), **change)


BOUNDS = config_of(clip_low=0.8, clip_high=1.28, importance_cap=2.0)


def loss_of(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, bounds: TrainerConfig
) -> TokenLoss:
    batch = TokenBatch(logprobs=logprobs, behaviour_logprobs=behaviour, advantages=advantages, loss_mask=mask.bool())
    return Combined(bounds).loss(batch)


def naive(
    tokens: list[tuple[float, float, float, float]], bounds: TrainerConfig
) -> tuple[float, list[float], list[bool]]:
    """Return the loss, its derivative by every logprob, and the clipped tokens, computed directly from the
    definition."""
    loss, slopes, clipped = 0.0, [], []
    for logprob, behaviour, advantage, mask in tokens:
        ratio = math.exp(logprob - behaviour)
        followed = (advantage > 0 and ratio > bounds.clip_high) or (advantage < 0 and ratio < bounds.clip_low)
        counts = 0.0 if followed or not mask else min(ratio, bounds.importance_cap) * advantage
        loss -= counts
        slopes.append(-counts)
        clipped.append(bool(followed and mask))
    return loss, slopes, clipped


@given(
    st.lists(TOKENS, min_size=1, max_size=12),
    st.builds(
        TrainerConfig,
        model_folder=st.just(Path("model")),
        run_folder=st.just(Path("run")),
        clip_low=st.floats(0.1, 1.0),
        clip_high=st.floats(1.0, 3.0),
        importance_cap=st.floats(0.5, 5.0),
    ),
)
@settings(max_examples=300)
def test_loss_and_gradient_are_those_of_the_definition(
    tokens: list[tuple[float, float, float, float]], bounds: TrainerConfig
) -> None:
    logprobs, behaviour, advantages, mask = torch.tensor(tokens, dtype=torch.float64).T[:, None, :]
    logprobs = logprobs.clone().requires_grad_()
    loss = loss_of(logprobs, behaviour, advantages, mask, bounds)
    loss.summed.backward()  # type: ignore[no-untyped-call]
    expected, slopes, clipped = naive(tokens, bounds)
    assert logprobs.grad is not None and loss.clipped is not None
    assert loss.clipped[0].tolist() == clipped
    assert loss.summed.item() == pytest.approx(expected, abs=1e-9)
    assert logprobs.grad[0].tolist() == pytest.approx(slopes, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, -1.0),  # on policy: the plain policy gradient
        (1.0, -1.0, 1.0),
        (1.27, 1.0, -1.27),
        (1.29, 1.0, 0.0),  # raised far enough
        (0.81, -1.0, 0.81),
        (0.79, -1.0, 0.0),  # lowered far enough
        (0.5, 1.0, -0.5),  # a token that has become rare may become likelier
        (1.5, -1.0, 1.5),  # a token that has become likely may become rarer
        (50.0, -1.0, 2.0),  # its weight is truncated
    ],
)
def test_gradient_of_a_token_vanishes_outside_the_clip_range(ratio: float, advantage: float, slope: float) -> None:
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros_like(logprob), torch.ones_like(logprob)
    loss_of(logprob, zero, one * advantage, one, BOUNDS).summed.backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(slope)


def test_masked_tokens_may_have_any_value() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    behaviour = torch.tensor([[float("nan"), -2.0, float("-inf")]])
    mask = torch.tensor([[0.0, 1.0, 0.0]])
    loss_of(logprobs, behaviour, torch.ones(1, 1), mask, BOUNDS).summed.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0, 0.0]]


@given(REWARDS, st.booleans(), st.floats(-3, 3))
def test_advantages_compare_only_within_a_group(rewards: list[float], scale: bool, shift: float) -> None:
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
def test_rounding_error_of_equal_rewards_gives_no_advantage(scale: bool) -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], scale_by_deviation=scale) == [0.0] * 4


def test_tiny_reward_difference_does_not_give_full_advantages() -> None:
    hair = group_advantages([0.3, 0.3, 0.3, 0.3 + 1e-5], scale_by_deviation=True)
    whole = group_advantages([0.3, 0.3, 0.3, 1.0], scale_by_deviation=True)
    assert max(hair) < 0.1 < 1.7 < max(whole)


def differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by more than the rounding error that the filter allows."""
    return len(rewards) > 1 and not math.isclose(min(rewards), max(rewards), rel_tol=1e-6, abs_tol=1e-12)


@given(ANY_REWARDS, st.booleans())
def test_grpo_advantages_are_those_of_the_definition(rewards: list[float], scale: bool) -> None:
    expected = [0.0] * len(rewards)
    if differ(rewards):
        mean = statistics.fmean(rewards)
        unit = statistics.pstdev(rewards) + DEVIATION_EPSILON if scale else 1.0
        expected = [(reward - mean) / unit for reward in rewards]
    spread = max(map(abs, rewards), default=0.0) * 1e-12
    assert group_advantages(rewards, scale_by_deviation=scale) == pytest.approx(expected, rel=1e-6, abs=spread)


@given(ANY_REWARDS)
def test_rloo_advantages_are_those_of_the_definition(rewards: list[float]) -> None:
    expected = [0.0] * len(rewards)
    if differ(rewards):
        others = [rewards[:place] + rewards[place + 1 :] for place in range(len(rewards))]
        expected = [reward - statistics.fmean(rest) for reward, rest in zip(rewards, others, strict=True)]
    spread = max(map(abs, rewards), default=0.0) * 1e-12
    assert leave_one_out_advantages(rewards) == pytest.approx(expected, rel=1e-9, abs=spread)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.integers(0, 15), st.floats(0.5, 5))
def test_rloo_baseline_of_a_sample_does_not_depend_on_its_own_reward(
    rewards: list[float], place: int, change: float
) -> None:
    place %= len(rewards)
    moved = [*rewards[:place], rewards[place] + change, *rewards[place + 1 :]]
    if differ(rewards) and differ(moved):
        before, after = leave_one_out_advantages(rewards)[place], leave_one_out_advantages(moved)[place]
        assert after - before == pytest.approx(change, abs=1e-9)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.3, 0.1 + 0.2], [2.0] * 5])
def test_group_without_a_difference_has_no_advantages(name: str, rewards: list[float]) -> None:
    algorithm = make_algorithm(config_of(algorithm=name))
    assert algorithm.advantages([rewarded(reward) for reward in rewards]) == [0.0] * len(rewards)


def rewarded(reward: float) -> TrainingSample:
    """Return two sampled tokens after an observed token."""
    return TrainingSample(
        tokens=[3, 5, 7],
        loss_mask=[0, 1, 1],
        behaviour_logprobs=[0.0, -3.7, -3.7],
        temperatures=[1.0] * 3,
        reward=reward,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_built_in_algorithm_is_found_by_its_name(name: str) -> None:
    assert isinstance(make_algorithm(config_of(algorithm=name)), Combined)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpro", "^unknown algorithm 'gpro': use grpo, rloo, dr_grpo, .*, or package.module:Class of your own$"),
        ("no_such_package:Own", "^algorithm 'no_such_package:Own': cannot import no_such_package .*; use grpo, rloo,"),
        ("json:Nothing", "^algorithm 'json:Nothing': json has no Nothing; use"),
        ("json:JSONDecoder", "JSONDecoder lacks advantages, loss; use"),
        ("json:__name__", "is not a class; use"),
        (":Own", "^unknown algorithm ':Own': use grpo, rloo"),
    ],
)
def test_name_without_an_algorithm_is_refused(name: str, says: str) -> None:
    with pytest.raises(UnknownAlgorithm, match=says) as refused:
        make_algorithm(config_of(algorithm=name))
    assert isinstance(refused.value, UsageError)


OWN = """
import torch
from rose.workers.trainer.algorithms import TokenLoss

class Own:
    def __init__(self, config): ...
    def advantages(self, group): return [sample.reward - 0.5 for sample in group]
    def loss(self, batch): return TokenLoss(-(batch.advantages * batch.logprobs)[batch.loss_mask].sum())
"""


@pytest.mark.parametrize(
    ("line", "replaced", "says"),
    [
        ("self, config", "self", "cannot be made with the trainer's settings as its one argument"),
        ("config): ...", "config): raise OSError('no such file')", "does not compute: OSError: no such file"),
        ("config): ...", "config): raise SystemExit", "does not compute: SystemExit"),
        ("def loss", "def losses", "Own lacks loss"),
        ("advantages(self, group)", "advantages(self)", "method advantages that does not take one argument"),
        ("loss(self, batch)", "loss(self, batch, bounds)", "method loss that does not take one argument .*'bounds'"),
        ("for sample in group]", "for sample in group[1:]]", r"Own\.advantages must return one finite number for each"),
        (
            "sample.reward - 0.5",
            "float('nan')",
            r"Own\.advantages must return one finite number .* returned \[nan, nan",
        ),
        ("return [sample.reward - 0.5 for sample in group]", "pass", "one finite number .* returned None"),
        ("return TokenLoss(", "return (", r"Own\.loss must return a TokenLoss, and returned a Tensor"),
        (".sum())", ")", "whose `summed` is a scalar tensor"),
        ("batch.logprobs", "batch.behaviour_logprobs", "computed from `batch.logprobs`"),
        ("[batch.loss_mask].sum())", ".mean(-1).mean())", r"Own\.loss gives .* make `summed` a sum over tokens"),
        (".sum())", ".mean())", r"Own\.loss gives .* make `summed` a sum over tokens, no mean"),
        (".sum())", ".sum(), torch.zeros(3, dtype=torch.bool))", "whose `clipped` has the shape of"),
        (
            "batch.logprobs",
            "(0 * batch.logprobs)",
            r"Own\.loss has no finite gradient for .* -0\.5 and 0\.5",
        ),
        ("batch.logprobs", "(batch.logprobs - batch.logprobs.detach()).sqrt()", r"has no finite gradient for"),
        ("batch.logprobs", "torch.ones(2, 3, requires_grad=True)", "no finite gradient .*: compute `summed` from"),
        ("batch.logprobs", "batch.logprobs.where(~batch.loss_mask, 0.0)", "no finite gradient for sampled tokens"),
        ("batch.advantages *", "batch.advantage *", "does not compute: AttributeError"),
    ],
)
def test_class_that_is_not_an_algorithm_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, replaced: str, says: str
) -> None:
    name = f"own_{abs(hash((line, replaced)))}"
    assert line in OWN
    (tmp_path / f"{name}.py").write_text(OWN.replace(line, replaced))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((UnknownAlgorithm, AlgorithmError), match=says):
        make_algorithm(config_of(algorithm=f"{name}:Own"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_policy(make_policy(tmp_path_factory.mktemp("tiny") / "policy"))


def weights_after_a_step(tiny: Any, name: str, groups: Sequence[Sequence[TrainingSample]]) -> torch.Tensor:
    model, config = copy.deepcopy(tiny), config_of(algorithm=name, minibatches=1)
    done = train_step(
        model,
        make_optimizer(model, learning_rate=1e-2),
        groups,
        algorithm=make_algorithm(config),
        config=config,
    )
    assert (done.skipped_minibatches, done.tokens, done.learning_rate) == (0, 4, 1e-2)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_own_algorithm_trains_a_policy_by_its_import_path(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The algorithm is the documented example."""
    example = textwrap.dedent((algorithms.__doc__ or "").split('my_module:PlainReinforce"`)\n')[1])
    imports = "from rose.workers.trainer.algorithms import *\nfrom collections.abc import Sequence\n"
    imports += "from rose.workers.trainer.config import TrainerConfig\n"
    (tmp_path / "my_module.py").write_text(imports + example)
    monkeypatch.syspath_prepend(tmp_path)
    groups = [[rewarded(0.0), rewarded(1.0)]]
    before = torch.cat([parameter.detach().flatten() for parameter in tiny.parameters()])
    after = weights_after_a_step(tiny, "my_module:PlainReinforce", groups)
    assert not torch.equal(after, before)
    assert torch.equal(after, weights_after_a_step(tiny, "my_module:PlainReinforce", groups))


@pytest.fixture
def fails_on_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerConfig:
    """The advantages of a group with a reward below 0 are NaN."""
    code = OWN.replace("sample.reward - 0.5", "sample.reward - 0.5 if sample.reward >= 0 else float('nan')")
    (tmp_path / "fails_on_negative.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return TrainerConfig(
        model_folder=make_policy(tmp_path / "policy"),
        run_folder=tmp_path,
        algorithm="fails_on_negative:Own",
        minibatches=1,
    )


def selected(rewards: Mapping[int, float]) -> list[SelectedGroup]:
    """Return three groups; `rewards` replaces the reward of a group's second sample."""
    rules = SelectionRules(max_staleness=100, vocabulary=40, context_tokens=64)
    samples = sorted(make_samples(), key=lambda one: one.trajectory_id)
    groups = []
    for number in (0, 1, 3):
        members = [one for one in samples if one.group_id == group_name(number)]
        if number in rewards:
            members[1] = msgspec.structs.replace(members[1], reward=rewards[number])
        groups.append(CompleteGroup(group_name(number), tuple(members)))
    return select_groups(groups, 1, rules=rules)


def saved_learner(config: TrainerConfig) -> Learner:
    """Return a learner with a checkpoint: a step that raises is undone to it."""
    learner = Learner(config)
    save_first_version(learner, Checkpoints(config.checkpoints, None))
    return learner


def test_group_on_which_an_algorithm_fails_is_left_out_and_the_others_are_trained(
    fails_on_one_group: TrainerConfig,
) -> None:
    learner = saved_learner(fails_on_one_group)
    groups, done = learner.learn(selected({1: -1.0}), 1)
    assert [bool(group.trained) for group in groups] == [True, False, True]
    assert "AlgorithmError: Own.advantages must return one finite number" in groups[1].decisions[0].reason
    assert done.groups == 2 and done.tokens > 0 and learner.schedule_steps == 1


def test_algorithm_that_fails_on_all_groups_ends_the_run_with_its_message(fails_on_one_group: TrainerConfig) -> None:
    learner = saved_learner(fails_on_one_group)
    with pytest.raises(AlgorithmError, match="one finite number"):
        learner.learn(selected({0: -1.0, 1: -1.0, 3: -1.0}), 1)
    assert learner.schedule_steps == 0
