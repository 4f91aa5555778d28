"""The trainers of docs/examples on a real broker. `docs/guides/custom-trainer.md` states the contract."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from docs.examples import plain_trainer
from rose.pipeline.audit import audit_log
from rose.schemas.prompts import Sampling
from rose.schemas.samples import Outcome
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.settings import BusSettings
from tests.support.brokers import AnyBroker, any_broker
from tests.support.trainer_fixtures import (
    GROUP_SIZE,
    GROUPS,
    make_policy,
    make_samples,
    result_of,
    write_prompts,
    write_samples,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer, which TRL requires."""
    from bench.warm_start import build_tokenizer

    folder = make_policy(tmp_path_factory.mktemp("policy"), vocabulary=len(build_tokenizer()))
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=2, chunks=1))
    write_prompts(settings)
    write_samples(settings, make_samples())
    return settings


def assert_settled(settings: BusSettings, *, steps: int) -> None:
    """Assert that every trajectory is settled once, that each version is another policy, and that one precedes the
    first step."""
    result = result_of(settings)
    assert len(result.outcomes) == len({name for name, _, _ in result.outcomes}) == GROUPS * GROUP_SIZE
    assert result.counts[Outcome.TRAINED] == (GROUPS - 1) * GROUP_SIZE - 1
    assert sorted(result.digests) == list(range(steps + 1))
    assert len(set(result.digests.values())) == steps + 1
    assert audit_log(settings).clean


def moved(model: Any, model_folder: Path) -> float:
    before = load_file(model_folder / "model.safetensors")
    return max(
        float((tensor.detach() - before[name]).abs().max())
        for name, tensor in model.named_parameters()
        if name in before
    )


def test_plain_torch_trainer_trains_and_settles(settings: BusSettings, model_folder: Path) -> None:
    model = plain_trainer.train(settings, model_folder, run="plain", total_groups=GROUPS, groups_per_step=3)
    assert_settled(settings, steps=4)
    assert moved(model, model_folder) > 0 and all(tensor.isfinite().all() for tensor in model.parameters())
    # starts again: all trajectories are settled
    plain_trainer.train(settings, model_folder, run="plain", total_groups=GROUPS)
    result = result_of(settings)
    assert len(result.outcomes) == GROUPS * GROUP_SIZE
    assert result.digests[5] == result.digests[0]


@any_broker
def test_trl_trainer_trains_and_settles(settings: BusSettings, model_folder: Path, tmp_path: Path) -> None:
    from docs.examples import trl_trainer

    torch.manual_seed(0)
    model = trl_trainer.train(
        settings,
        model_folder,
        run="trl",
        steps=3,
        group_size=GROUP_SIZE,
        groups_per_step=3,
        output=tmp_path / "trl",
    )
    assert_settled(settings, steps=3)
    assert moved(model, model_folder) > 0 and all(tensor.isfinite().all() for tensor in model.parameters())


@any_broker
def test_trl_trainer_leaves_groups_of_another_size_or_temperature(
    broker: AnyBroker, namespace: str, model_folder: Path, tmp_path: Path
) -> None:
    from docs.examples import trl_trainer

    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    write_samples(settings, make_samples(groups=[0], sampling=Sampling(temperature=0.7)))
    small = [one for one in make_samples(groups=[3]) if one.trajectory_id in ("g03:0", "g03:1")]
    write_samples(settings, [msgspec.structs.replace(one, group_size=2) for one in small])
    write_samples(settings, make_samples(groups=[1]))
    trl_trainer.train(
        settings,
        model_folder,
        run="trl",
        steps=1,
        group_size=GROUP_SIZE,
        groups_per_step=1,
        temperature=1.0,
        output=tmp_path / "trl",
    )
    by_group = {(name.partition(":")[0], outcome) for name, outcome, _ in result_of(settings).outcomes}
    assert by_group == {("g00", Outcome.FILTERED), ("g03", Outcome.FILTERED), ("g01", Outcome.TRAINED)}
