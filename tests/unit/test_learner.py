"""The check of engines by the samples of a step: groups without a signal count, and so do versions of equal weights."""

import pytest

from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.engine_check import EngineMismatch
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, select_groups
from tests.support.trainer_fixtures import FILTERED_GROUP, group_name, make_policy, make_samples


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    folder = tmp_path_factory.mktemp("tiny")
    return Learner(TrainerConfig(model_folder=make_policy(folder / "policy"), run_folder=folder))


@pytest.fixture
def without_signal() -> list[SelectedGroup]:
    """A group of version 0 with equal rewards. No engine recorded its logprobs: they differ from the policy's."""
    name = group_name(FILTERED_GROUP)
    members = tuple(one for one in make_samples() if one.group_id == name)
    rules = SelectionRules(max_staleness=100, vocabulary=40, context_tokens=64)
    return select_groups([CompleteGroup(name, members)], 3, rules=rules)


@pytest.mark.parametrize(("version", "since"), [(0, None), (3, 0)])
def test_engine_that_differs_is_refused_before_any_group_has_a_signal(
    learner: Learner, without_signal: list[SelectedGroup], version: int, since: int | None
) -> None:
    assert not any(group.trained for group in without_signal)
    with pytest.raises(EngineMismatch, match=r"look whether executors have the trainer's config\.json"):
        learner.learn(without_signal, version, since=since)


def test_samples_of_other_weights_check_no_engine(learner: Learner, without_signal: list[SelectedGroup]) -> None:
    assert learner.learn(without_signal, 3, since=1)[1].tokens == 0
