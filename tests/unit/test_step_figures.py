"""Figures of a step that warn: drift, masked tokens, entropy, staleness by token, and shares of useless samples."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rose.schemas.arrays import MIN_LOGPROB, pack_logprobs
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Ending, Sample
from rose.workers.trainer.algorithms import TrainingSample, make_algorithm
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.engine_check import mismatch
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.metrics import TRAINER, PrometheusSink, StepLine, entropy_of, tokens_by_staleness
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, select_groups
from rose.workers.trainer.step import StepMetrics, train_step
from tests.support.trainer_fixtures import FAILED_GROUP, FILTERED_GROUP, group_name, make_policy, make_samples

RULES = SelectionRules(max_staleness=100, vocabulary=40, context_tokens=64)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_policy(make_policy(tmp_path_factory.mktemp("tiny") / "policy"))


def members(number: int) -> list[Sample]:
    found = [one for one in make_samples() if one.group_id == group_name(number)]
    return sorted(found, key=lambda one: one.trajectory_id)


def selected(*groups: Sequence[Sample], version: int = 1) -> list[SelectedGroup]:
    complete = [CompleteGroup(group[0].group_id, tuple(group)) for group in groups]
    return select_groups(complete, version, rules=RULES)


def sampled_tokens(samples: Sequence[Sample]) -> int:
    return sum(sum(sample.loss_mask) for sample in samples)


def with_logprob(sample: Sample, logprob: float) -> Sample:
    return msgspec.structs.replace(sample, logprobs=pack_logprobs([logprob * one for one in sample.loss_mask]))


@pytest.mark.parametrize(
    ("differences", "expected"),
    [([], None), ([0.0, 0.0], 0.0), ([math.log(2)], 1 - math.log(2)), ([math.log(2), 0.0], (1 - math.log(2)) / 2)],
)
def test_mismatch_is_the_mean_of_ratio_minus_1_minus_log(differences: list[float], expected: float | None) -> None:
    assert mismatch(differences) == (None if expected is None else pytest.approx(expected))


def test_entropy_is_the_mean_of_the_recorded_surprise_of_all_usable_samples() -> None:
    """A group of equal rewards counts, a failed sample does not."""
    learned = [with_logprob(one, -1.0) for one in members(0)]
    equal = [with_logprob(one, -3.0) for one in members(FILTERED_GROUP)]
    failed = with_logprob(members(FAILED_GROUP)[0], -50.0)
    broken = [failed, *(with_logprob(one, -1.0) for one in members(FAILED_GROUP)[1:])]
    tokens = [sampled_tokens(one) for one in (learned, equal, broken[1:])]
    expected = (tokens[0] + 3 * tokens[1] + tokens[2]) / sum(tokens)
    assert entropy_of(selected(learned, equal, broken)) == pytest.approx(expected)
    assert entropy_of([]) is None


def test_tokens_are_counted_by_their_own_version() -> None:
    """One sample has tokens of three versions. Versions 3 and 4 are abandoned, and 5 has the weights of 2."""
    samples = members(0)
    mask = bytes([0, 0, 1, 1, 1, 1, 0, 1])
    spans = (VersionSpan(0, 3, 1), VersionSpan(3, 5, 2), VersionSpan(5, 8, 5))
    samples[0] = msgspec.structs.replace(samples[0], spans=spans, loss_mask=mask)
    group = SelectedGroup("g00", tuple(samples), selected(members(0))[0].decisions)
    assert tokens_by_staleness([group], 6, ((3, 4),)) == {1: 4, 2: 1, 3: sampled_tokens(samples[1:])}


def line_of(groups: list[SelectedGroup], done: StepMetrics) -> StepLine:
    return StepLine.of(groups, done, before=1, version=2)


def step_of(policy: Any, groups: list[SelectedGroup], *, reference: Any = None, **change: Any) -> StepMetrics:
    config = TrainerConfig(
        model_folder=Path("model"),
        run_folder=Path("run"),
        **{"minibatches": 1, "max_logprob_difference": 1e9, **change},
    )
    model = copy.deepcopy(policy)
    rows = [[TrainingSample.of(one) for one in group.trained] for group in groups if group.trained]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train_step(
        model, optimizer, rows, algorithm=make_algorithm(config), config=config, version=0, reference=reference
    )


@pytest.mark.parametrize(
    ("logprob", "positive", "negative"),
    [(MIN_LOGPROB, 1.0, 0.0), (0.0, 0.0, 1.0)],
    ids=["far above the ratio's range", "far below"],
)
def test_masked_tokens_are_counted_by_the_sign_of_their_advantage(
    policy: Any, logprob: float, positive: float, negative: float
) -> None:
    groups = selected([with_logprob(one, logprob) for one in members(0)])
    done = step_of(policy, groups)
    assert (done.clipped_share_positive, done.clipped_share_negative) == (positive, negative)
    rewarded = [one for one in members(0) if one.reward == 1.0]
    share = sampled_tokens(rewarded) / sampled_tokens(members(0))
    assert done.clipped_share == pytest.approx(positive * share + negative * (1 - share))
    assert done.rejected_share == 0


def test_rejected_tokens_are_counted_apart(policy: Any) -> None:
    groups = selected([with_logprob(one, MIN_LOGPROB) for one in members(0)])
    done = step_of(policy, groups, reject_tokens_above=5.0)
    assert (done.rejected_share, done.clipped_share, done.clipped_share_negative) == (1.0, 1.0, 1.0)


def test_divergence_from_the_reference_is_0_at_the_start_and_unknown_without_one(policy: Any) -> None:
    groups = selected(members(0))
    assert step_of(policy, groups, reference=policy, kl_coefficient=0.1).kl_reference == pytest.approx(0, abs=1e-9)
    assert step_of(policy, groups).kl_reference is None


def test_mismatch_is_that_of_tokens_of_the_same_weights(policy: Any) -> None:
    """The tiny policy gives every token a logprob near -log 40, and the engine says -1."""
    group = selected([with_logprob(one, -1.0) for one in members(0)])
    difference = 1 - math.log(40)
    expected = math.exp(difference) - 1 - difference
    assert step_of(policy, group).mismatch_kl == pytest.approx(expected, rel=0.05)
    older = [msgspec.structs.replace(one, spans=(VersionSpan(0, 64, -1),)) for one in members(0)]
    assert step_of(policy, selected(older)).mismatch_kl is None


def test_line_has_the_shares_of_samples_without_advantage_and_of_truncated_ones(policy: Any) -> None:
    truncated = [msgspec.structs.replace(members(0)[0], ended=Ending.CONTEXT), *members(0)[1:]]
    groups = selected(truncated, members(FILTERED_GROUP), members(FAILED_GROUP))
    line = line_of(groups, step_of(policy, groups))
    # 4 + 3 samples have advantages, 4 have equal rewards, and one failed.
    assert line.zero_advantage_share == pytest.approx(4 / 11)
    assert line.truncated_share == pytest.approx(1 / 12)
    assert line.token_staleness == 1.0


def test_step_without_samples_has_no_shares() -> None:
    line = line_of([], StepMetrics(reward=0.0, groups=0, groups_with_signal=0))
    assert (line.zero_advantage_share, line.truncated_share, line.entropy, line.token_staleness) == (None,) * 4


def test_figures_reach_prometheus_and_a_figure_without_value_leaves_the_last_one() -> None:
    line = line_of(selected(members(0)), StepMetrics(reward=0.5, groups=1, groups_with_signal=1, samples_with_signal=4))
    line.mismatch_kl, line.entropy, line.clipped_share_negative = 0.002, 0.75, 0.25
    line.tokens_by_staleness, line.streamed_tokens = {0: 3, 2: 1}, 12
    sink = PrometheusSink()
    before = TRAINER.get_sample_value("rose_trainer_streamed_tokens_total") or 0.0
    sink.log(1, line)
    line.mismatch_kl = None
    sink.log(2, line)
    expected = {"mismatch_kl_nats": 0.002, "entropy_nats": 0.75, "token_staleness_versions": 0.5}
    expected |= {"zero_advantage_ratio": 0.0, "truncated_ratio": 0.0}
    for name, value in expected.items():
        assert TRAINER.get_sample_value(f"rose_trainer_{name}") == value, name
    assert TRAINER.get_sample_value("rose_trainer_clipped_sign_ratio", {"advantage": "negative"}) == 0.25
    assert TRAINER.get_sample_value("rose_trainer_streamed_tokens_total") == before + 24
