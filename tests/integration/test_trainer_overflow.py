"""A trainer with overflowing numbers: no affected sample counts as trained, and no such policy is kept or published."""

from collections.abc import Collection
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.pipeline.audit import audit_log
from rose.schemas.arrays import pack_tokens
from rose.schemas.errors import UsageError
from rose.schemas.samples import Outcome, SampleOutcome
from rose.topics.catalog import CHUNKS, MANIFESTS, OUTCOMES
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.workers.trainer.learner import NoProgress, PolicyRefused
from rose.workers.trainer.loop import Trainer
from rose.workers.trainer.main import run_trainer
from rose.workers.trainer.metrics import STEP_LOG, read_step_log
from rose.workers.weights.config import WeightsConfig
from tests.support.brokers import AnyBroker
from tests.support.trainer_fixtures import (
    FAILED_GROUP,
    GROUP_SIZE,
    GROUPS,
    GROUPS_PER_STEP,
    STEPS,
    config_of,
    group_name,
    log_with_samples,
    make_policy,
    make_samples,
    result_of,
    trainer_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return log_with_samples(broker, namespace)


def overflow_on(trainer: Trainer, groups: Collection[str]) -> None:
    """Make the policy return NaN for a batch with a sample of these groups."""
    spoiled = [one.tokens[:-4] for one in make_samples() if one.group_id in groups]

    def spoil(_module: object, _arguments: object, given: dict[str, torch.Tensor], output: Any) -> None:
        rows = [pack_tokens(row.tolist()) for row in given["input_ids"]]
        if any(row.startswith(one) for row in rows for one in spoiled):
            output.last_hidden_state = output.last_hidden_state * torch.nan

    trainer.learner.model.base_model.register_forward_hook(spoil, with_kwargs=True)


def spoiled_folder(folder: Path, value: float) -> Path:
    make_policy(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def on_log(settings: BusSettings) -> int:
    """Return the number of records that a trainer has written."""
    return len(list(read_whole_topics(settings, [CHUNKS, MANIFESTS, OUTCOMES])))


def test_samples_of_an_unapplied_minibatch_are_settled_as_failed(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(settings, policy_folder, tmp_path / "run", minibatches=GROUPS_PER_STEP)
    overflow_on(trainer, ["g04"])
    trainer.run()
    result = result_of(settings)
    failed = {name for name, outcome, _ in result.outcomes if outcome is Outcome.INFRA_FAILED}
    assert failed == {f"g04:{index}" for index in range(GROUP_SIZE)} | {f"{group_name(FAILED_GROUP)}:0"}
    assert result.counts[Outcome.TRAINED] == (GROUPS - 2) * GROUP_SIZE - 1
    records = [envelope.record for envelope in read_whole_topics(settings, [OUTCOMES])]
    reasons = {one.reason for one in records if isinstance(one, SampleOutcome) and one.group_id == "g04"}
    assert reasons == {"the gradient of its minibatch is not finite, and was not applied"}
    lines = read_step_log(tmp_path / "run")
    assert [sum(line["skipped_minibatches"] for line in lines), len(lines)] == [1, STEPS]
    assert all(line[name] is not None for line in lines for name in ("loss", "importance_mean", "kl_behaviour"))
    assert sum(line["outcomes"].get("trained", 0) for line in lines) == result.counts[Outcome.TRAINED]
    assert audit_log(settings).clean


def test_consecutive_non_finite_gradients_end_the_trainer_untrained(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(settings, policy_folder, tmp_path / "run")
    overflow_on(trainer, [group_name(number) for number in range(GROUPS)])
    with pytest.raises(NoProgress, match="in 2 steps on end no gradient was finite"):
        trainer.run()
    result = result_of(settings)
    assert result.counts.keys() <= {Outcome.INFRA_FAILED, Outcome.FILTERED}
    assert len(result.outcomes) == GROUPS_PER_STEP * GROUP_SIZE, "the first step alone is settled"
    assert result.digests[0] == result.digests[1] and not (tmp_path / "run" / "model").exists()
    again = trainer_of(settings, policy_folder, tmp_path / "run")
    overflow_on(again, [group_name(number) for number in range(GROUPS)])
    with pytest.raises(NoProgress, match="in 2 steps on end no gradient was finite"):
        again.run()
    assert len(result_of(settings).outcomes) == len(result.outcomes), "starting again settles no more of them"
    run_trainer(settings, config_of(policy_folder, tmp_path / "run"), Event())
    assert result_of(settings).counts[Outcome.TRAINED] >= (GROUPS - 2 - GROUPS_PER_STEP) * GROUP_SIZE
    assert audit_log(settings).clean


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_step_that_yields_a_non_finite_policy_is_undone(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, value: float
) -> None:
    trainer = trainer_of(settings, policy_folder, tmp_path / "run")
    spoil = trainer.learner.model.model.norm.weight.data

    def spoils(*_: object) -> None:
        spoil[3] = value

    trainer.learner.optimizer.register_step_post_hook(spoils)
    with pytest.raises(PolicyRefused, match=r"^version 1 is neither kept nor published: model\.norm\.weight holds a"):
        trainer.run()
    assert result_of(settings).outcomes == [] and list(result_of(settings).digests) == [0]
    kept = sorted(file.name for file in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000000.msgpack", "step-00000000.safetensors"]
    assert not (tmp_path / "run" / STEP_LOG).exists() and not (tmp_path / "run" / "model").exists()
    run_trainer(settings, config_of(policy_folder, tmp_path / "run"), Event())
    assert result_of(settings).counts == {
        Outcome.TRAINED: (GROUPS - 1) * GROUP_SIZE - 1,
        Outcome.FILTERED: GROUP_SIZE,
        Outcome.INFRA_FAILED: 1,
    }
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "run/model/model.safetensors").values())


def test_step_that_yields_non_finite_logprobs_is_undone(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(settings, policy_folder, tmp_path / "run")
    trainer.learner.optimizer.register_step_post_hook(
        lambda *_: trainer.learner.model.model.norm.weight.data.fill_(3e38)
    )
    with pytest.raises(
        PolicyRefused, match=r"^version 1 is neither kept nor published: its logprobs .* lower trainer\.learning_rate"
    ):
        trainer.run()
    assert result_of(settings).outcomes == [] and list(result_of(settings).digests) == [0]
    assert not (tmp_path / "run" / STEP_LOG).exists() and not (tmp_path / "run" / "model").exists()
    run_trainer(settings, config_of(policy_folder, tmp_path / "run"), Event())
    assert result_of(settings).counts[Outcome.TRAINED] == (GROUPS - 1) * GROUP_SIZE - 1


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_non_finite_initial_policy_is_refused(settings: BusSettings, tmp_path: Path, value: float) -> None:
    folder, before = spoiled_folder(tmp_path / "model", value), on_log(settings)
    with pytest.raises(UsageError, match=r"model: model\.norm\.weight holds a value that is not finite: begin with"):
        run_trainer(settings, config_of(folder, tmp_path / "run"), Event())
    assert on_log(settings) == before
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "model").exists()


def test_weight_too_large_for_the_published_type_is_refused_with_the_setting(
    settings: BusSettings, tmp_path: Path
) -> None:
    folder, before = spoiled_folder(tmp_path / "model", 70_000.0), on_log(settings)
    config = config_of(folder, tmp_path / "run")
    with pytest.raises(UsageError, match=r"holds 70000, which float16 does not: set weights\.dtype"):
        run_trainer(settings, config, Event(), weights=WeightsConfig(dtype="float16"))
    assert on_log(settings) == before and not config.checkpoints.exists()
    run_trainer(settings, config, Event(), weights=WeightsConfig(dtype="bfloat16"))
    assert result_of(settings).counts[Outcome.FILTERED] == GROUP_SIZE
