"""A trainer that rolls back: broken and missing checkpoints, numbers never used twice, and other weight transports."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from rose.pipeline.audit import audit_log
from rose.schemas.errors import UsageError
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Outcome, Sample
from rose.topics.settings import BusSettings
from rose.workers.trainer.loop import Trainer
from rose.workers.trainer.main import run_trainer
from rose.workers.trainer.metrics import read_step_log
from rose.workers.weights.config import WeightsConfig
from tests.support.brokers import AnyBroker, any_broker, kafka_first
from tests.support.trainer_fixtures import (
    GROUP_SIZE,
    GROUPS,
    GROUPS_PER_STEP,
    STEPS,
    config_of,
    log_with_samples,
    make_samples,
    newest_of,
    result_of,
    train_in_a_process_that_is_killed,
    write_samples,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return log_with_samples(broker, namespace)


def cut_short(checkpoints: Path) -> None:
    newest = max(checkpoints.glob("*.msgpack"))
    newest.write_bytes(newest.read_bytes()[:-7])


def rotten_tensors(checkpoints: Path) -> None:
    newest = max(checkpoints.glob("*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)


def without_tensors(checkpoints: Path) -> None:
    max(checkpoints.glob("*.safetensors")).unlink()


@any_broker
@pytest.mark.parametrize("harm", [cut_short, rotten_tensors, without_tensors])
def test_trainer_with_a_broken_checkpoint_rolls_back_under_a_new_version(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    before, lines = result_of(settings), read_step_log(config.run_folder)
    shutil.rmtree(config.run_folder / "model")
    harm(config.checkpoints)
    again = Trainer(settings, config, WeightsConfig(), Event())
    again.run()
    after = result_of(settings)
    assert after.outcomes == before.outcomes
    assert after.digests == before.digests | {STEPS + 1: before.digests[STEPS - 1]}
    assert newest_of(settings).order == (1, STEPS + 1)
    assert read_step_log(config.run_folder) == lines
    exported = load_file(config.run_folder / "model" / "model.safetensors")
    parameters = dict(again.learner.model.named_parameters())
    assert all(torch.equal(exported[name], parameter) for name, parameter in parameters.items())


def of_version(samples: Iterable[Sample], version: int) -> list[Sample]:
    return [
        msgspec.structs.replace(one, spans=tuple(VersionSpan(span.start, span.end, version) for span in one.spans))
        for one in samples
    ]


@kafka_first
def test_samples_of_versions_before_a_rollback_are_superseded(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    """This also holds after one more restart, and every number stands for one policy."""
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    cut_short(config.checkpoints)
    run_trainer(settings, config, Event())  # from version 3, which is version 5 now
    lost, kept = make_samples(7, groups=[20]), make_samples(7, groups=[21, 22])
    write_samples(settings, [*of_version(lost, STEPS), *of_version(kept, STEPS - 1)])
    run_trainer(settings, config_of(policy_folder, config.run_folder, total_groups=GROUPS + 3), Event())
    result = result_of(settings)
    assert {name for name, outcome, _ in result.outcomes if outcome is Outcome.SUPERSEDED} == {
        one.trajectory_id for one in lost
    }
    assert len(result.outcomes) == len({name for name, _, _ in result.outcomes}) == (GROUPS + 3) * GROUP_SIZE
    assert sorted(result.digests) == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_step_log(config.run_folder)] == [1, 2, 3, 4, 6]


@kafka_first
def test_trainer_killed_during_a_rollback_rolls_back_once(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    before = result_of(settings)
    cut_short(config.checkpoints)
    killed = train_in_a_process_that_is_killed(
        settings, policy_folder, config.run_folder, point="after_checkpoint", version=STEPS + 1
    )
    assert killed == -9
    run_trainer(settings, config, Event())
    assert result_of(settings).digests == before.digests | {STEPS + 1: before.digests[STEPS - 1]}
    assert newest_of(settings).order == (1, STEPS + 1)


@kafka_first
def test_endless_trainer_that_rolls_back_settles_nothing_twice(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    before = result_of(settings)
    cut_short(config.checkpoints)
    for _ in range(3):
        trainer = Trainer(
            settings, config_of(policy_folder, config.run_folder, total_groups=0), WeightsConfig(), Event()
        )
        trainer.recover()
        trainer.versions.publisher.close()
        trainer.stream.close()
    assert result_of(settings).outcomes == before.outcomes


def test_checkpoint_unknown_to_the_log_falls_back_to_the_previous_checkpoint(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    """A fenced trainer leaves such a checkpoint: it wrote the checkpoint of a version and could not settle it."""
    config = config_of(policy_folder, tmp_path / "run")
    trainer = Trainer(settings, config, WeightsConfig(), Event())
    trainer.run()
    before = result_of(settings)
    with torch.no_grad():
        next(trainer.learner.model.parameters()).add_(1.0)
    versions, learner = trainer.versions, trainer.learner
    assert versions.progress is not None
    strange = msgspec.structs.replace(versions.progress, weights_digest=versions.snapshot()[1])
    learner.save(versions.checkpoints, strange)
    again = Trainer(settings, config, WeightsConfig(), Event())
    again.run()
    assert result_of(settings).digests == before.digests | {STEPS + 1: before.digests[STEPS - 1]}
    assert result_of(settings).outcomes == before.outcomes


@any_broker
@pytest.mark.parametrize("other", [WeightsConfig(dtype="bfloat16"), WeightsConfig(column_parts=2)])
def test_run_continues_with_another_weight_transport(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, other: WeightsConfig
) -> None:
    run_trainer(settings, config_of(policy_folder, tmp_path / "run", total_groups=GROUPS_PER_STEP), Event())
    for _ in range(2):  # the second start finds the records of the first
        run_trainer(settings, config_of(policy_folder, tmp_path / "run"), Event(), weights=other)
    result = result_of(settings)
    assert result.counts[Outcome.TRAINED] == (GROUPS - 1) * GROUP_SIZE - 1
    assert sorted(result.digests) == list(range(STEPS + 2)), "the policy of version 1 is there twice, under two numbers"
    assert newest_of(settings).order == (1, STEPS + 1)
    assert audit_log(settings).clean


def test_checkpoint_missing_on_the_log_resumes_with_another_weight_transport(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    killed = train_in_a_process_that_is_killed(
        settings, policy_folder, tmp_path / "run", point="after_checkpoint", version=1
    )
    assert killed == -9
    for total in (GROUPS_PER_STEP, GROUPS):  # the second start finds the records of the first
        config = config_of(policy_folder, tmp_path / "run", total_groups=total)
        run_trainer(settings, config, Event(), weights=WeightsConfig(dtype="bfloat16"))
    result = result_of(settings)
    assert result.counts[Outcome.TRAINED] == (GROUPS - 1) * GROUP_SIZE - 1
    assert sorted(result.digests) == list(range(STEPS + 1))
    assert audit_log(settings).clean


def double_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def raise_the_rope_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


@any_broker
@pytest.mark.parametrize("change", [double_a_weight, raise_the_rope_base])
def test_run_is_not_resumed_with_another_model_folder(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A copy of the folder is no other folder."""
    run_trainer(settings, config_of(policy_folder, tmp_path / "run", total_groups=GROUPS_PER_STEP), Event())
    before, copied = result_of(settings), tmp_path / "copied"
    shutil.copytree(policy_folder, copied)
    run_trainer(settings, config_of(copied, tmp_path / "run", total_groups=GROUPS_PER_STEP), Event())
    change(copied)
    with pytest.raises(UsageError, match=r"copied has other weights or .* set model\.folder .* another run\.name"):
        run_trainer(settings, config_of(copied, tmp_path / "run"), Event())
    assert result_of(settings) == before


@any_broker
def test_checkpoint_that_does_not_name_its_model_folder_is_resumed_with_a_warning(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    """ROSE 0.2.0 writes such checkpoints. The next checkpoint has the digest."""
    trainer = Trainer(settings, config_of(policy_folder, tmp_path / "run", total_groups=3), WeightsConfig(), Event())
    trainer.run()
    versions, learner = trainer.versions, trainer.learner
    assert versions.progress is not None and versions.progress.folder_digest
    older = msgspec.structs.replace(versions.progress, folder_digest=b"")
    learner.save(versions.checkpoints, older)
    with capture_logs() as logged:
        run_trainer(settings, config_of(policy_folder, tmp_path / "run"), Event())
    (warning,) = [line for line in logged if line["event"] == "model_folder_not_checked"]
    assert warning["log_level"] == "warning" and warning["folder"] == str(policy_folder)
    assert next(versions.checkpoints.newest_first()).folder_digest == versions.progress.folder_digest
