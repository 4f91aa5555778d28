"""The trainer on a real broker: every sample trained once, one outcome each, and an exact resume."""

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from rose.pipeline.audit import audit_log
from rose.schemas.arrays import pack_tokens
from rose.schemas.errors import UsageError
from rose.schemas.samples import Ending, Outcome
from rose.schemas.weights import WeightManifest
from rose.topics.admin import create_topics
from rose.topics.catalog import MANIFESTS, Partitions
from rose.topics.health import HEALTH, status_of
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.workers.trainer.checkpoint import CheckpointRefused
from rose.workers.trainer.loop import Trainer, TrainerFenced
from rose.workers.trainer.main import run_trainer
from rose.workers.trainer.metrics import STEP_LOG, read_step_log
from rose.workers.weights.checks import check_manifest
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.model_folder import folder_shapes
from tests.support.brokers import AnyBroker, any_broker, kafka_first
from tests.support.model_families import tiny_policy
from tests.support.trainer_fixtures import (
    GROUP_SIZE,
    GROUPS,
    POINTS,
    STEPS,
    VOCABULARY,
    Result,
    config_of,
    log_with_samples,
    make_samples,
    newest_of,
    result_of,
    train_in_a_process_that_is_killed,
    trainer_of,
    write_prompts,
    write_samples,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return log_with_samples(broker, namespace)


@pytest.fixture(scope="module")
def unkilled(broker: AnyBroker, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run over the samples without faults."""
    settings = log_with_samples(broker, f"unkilled-{tmp_path_factory.getbasetemp().name}-{id(broker)}.")
    run_folder = tmp_path_factory.mktemp("unkilled") / "run"
    run_trainer(settings, config_of(policy_folder, run_folder), Event())
    return result_of(settings), run_folder


def assert_like(result: Result, run_folder: Path, unkilled: tuple[Result, Path]) -> None:
    """Assert the same policies bit for bit, the same outcomes in the same order, the same lines and the same exported
    weights."""
    expected, folder = unkilled
    assert result == expected
    assert [line["step"] for line in read_step_log(run_folder)] == list(range(1, STEPS + 1))
    for mine, theirs in zip(read_step_log(run_folder), read_step_log(folder), strict=True):
        assert {name: mine[name] for name in mine if "seconds" not in name and name != "ended_at"} == {
            name: theirs[name] for name in theirs if "seconds" not in name and name != "ended_at"
        }
    weights, theirs = (load_file(one / "model" / "model.safetensors") for one in (run_folder, folder))
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)


def test_every_sample_has_one_outcome_and_the_policy_learns(unkilled: tuple[Result, Path], policy_folder: Path) -> None:
    result, run_folder = unkilled
    assert sorted(name for name, _, _ in result.outcomes) == sorted(one.trajectory_id for one in make_samples())
    assert result.counts == {
        Outcome.TRAINED: (GROUPS - 1) * GROUP_SIZE - 1,
        Outcome.FILTERED: GROUP_SIZE,
        Outcome.INFRA_FAILED: 1,
    }
    assert sorted(result.digests) == list(range(STEPS + 1))
    assert len(set(result.digests.values())) == STEPS + 1
    assert Counter(step for _, _, step in result.outcomes) == {1: 12, 2: 12, 3: 12, 4: 4}
    lines = read_step_log(run_folder)
    assert [line["groups"] for line in lines] == [3, 3, 3, 1]
    assert sum(line["outcomes"].get("trained", 0) for line in lines) == result.counts[Outcome.TRAINED]
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run_folder / "model")
    assert exported.config.vocab_size == VOCABULARY
    assert (run_folder / "model" / "turn_format.json").is_file()


@any_broker
@pytest.mark.parametrize("truncated", ["train", "leave_out"])
def test_truncated_samples_are_trained_or_settled_as_filtered(
    broker: AnyBroker, namespace: str, policy_folder: Path, tmp_path: Path, truncated: str
) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    groups = [0, 1]
    write_prompts(settings, groups)
    for sample in make_samples(groups=groups):
        cut = sample.trajectory_id in ("g00:1", "g01:0", "g01:2")
        write_samples(settings, [msgspec.structs.replace(sample, ended=Ending.CONTEXT if cut else Ending.DONE)])
    config = config_of(policy_folder, tmp_path / "run", total_groups=2, groups_per_step=2, truncated=truncated)
    run_trainer(settings, config, Event())
    left_out = {name for name, outcome, _ in result_of(settings).outcomes if outcome is Outcome.FILTERED}
    alike = {"g01:1", "g01:3"}  # without the other samples, which have other rewards
    assert left_out == ({"g00:1", "g01:0", "g01:2"} | alike if truncated == "leave_out" else set())
    assert [line["endings"] for line in read_step_log(tmp_path / "run")] == [{"done": 5, "context": 3}]
    assert audit_log(settings).clean


def test_policy_renamed_by_transformers_is_published_with_folder_names(settings: BusSettings, tmp_path: Path) -> None:
    """The folder also has generation settings that transformers reads and does not write."""
    folder = tmp_path / "pythia"
    tiny_policy("gpt_neox", folder, vocab_size=VOCABULARY)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    run_trainer(settings, config_of(folder, tmp_path / "run"), Event())
    versions = [envelope.record for envelope in read_whole_topics(settings, [MANIFESTS])]
    assert len(versions) == STEPS + 1
    for version in versions:
        assert isinstance(version, WeightManifest)
        check_manifest(version, folder_shapes(folder))
    exported = tmp_path / "run" / "model"
    assert (exported / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    assert folder_shapes(exported) == folder_shapes(folder)
    assert trainer_of(settings, exported, tmp_path / "next")


def test_unpublishable_policy_is_refused_at_the_start(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy_folder, folder)
    tensors = load_file(folder / "model.safetensors") | {"value_head.weight": torch.zeros(1, 16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"holds value_head\.weight, for which transformers' Qwen3ForCausalLM has no"):
        run_trainer(settings, config_of(folder, tmp_path / "run"), Event())
    assert not result_of(settings).digests


@kafka_first
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trainer_killed_at_any_point_ends_with_the_same_policy(
    settings: BusSettings, policy_folder: Path, unkilled: tuple[Result, Path], tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    for version, point in enumerate(["after_checkpoint", *POINTS]):
        killed = train_in_a_process_that_is_killed(
            settings, policy_folder, run_folder, point=point, version=min(version, STEPS)
        )
        assert killed == -9, f"the trainer did not come to {point} of version {version}"
    run_trainer(settings, config_of(policy_folder, run_folder), Event())
    assert_like(result_of(settings), run_folder, unkilled)
    assert audit_log(settings).clean


def raise_on(trainer: Trainer, tokens: Iterable[bytes], error: Exception) -> None:
    """Make the policy raise for a batch with one of these token sequences."""

    def look(_module: torch.nn.Module, _arguments: object, given: dict[str, torch.Tensor]) -> None:
        rows = [pack_tokens(row.tolist()) for row in given["input_ids"]]
        if any(row.startswith(one[:-4]) for row in rows for one in tokens):
            raise error

    trainer.learner.model.register_forward_pre_hook(look, with_kwargs=True)


@any_broker
def test_group_that_no_step_can_compute_is_settled_and_training_continues(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(settings, policy_folder, tmp_path / "run")
    raise_on(trainer, [one.tokens for one in make_samples() if one.group_id == "g04"], ValueError("no such row"))
    trainer.run()
    result = result_of(settings)
    failed = {name for name, outcome, _ in result.outcomes if outcome is Outcome.INFRA_FAILED}
    assert failed == {f"g04:{index}" for index in range(GROUP_SIZE)} | {"g05:0"}
    assert sorted(result.digests) == list(range(STEPS + 1)) and len(set(result.digests.values())) == STEPS + 1
    assert audit_log(settings).clean


@any_broker
@pytest.mark.parametrize("error", [ValueError("the device is gone"), MemoryError()])
def test_error_of_every_group_or_lack_of_memory_blames_no_group(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, error: Exception
) -> None:
    config = config_of(policy_folder, tmp_path / "run")
    trainer = Trainer(settings, config, WeightsConfig(), Event())
    raise_on(trainer, [one.tokens for one in make_samples()], error)
    with pytest.raises(type(error)):
        trainer.run()
    assert result_of(settings).outcomes == []
    run_trainer(settings, config, Event())
    assert result_of(settings).counts[Outcome.TRAINED] == (GROUPS - 1) * GROUP_SIZE - 1


def test_every_start_publishes_the_current_version_as_an_anchor(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    """A log that was quiet for long has an anchor again: a new executor need not read back."""
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    before = newest_of(settings)
    run_trainer(settings, config, Event())
    records = [envelope.record for envelope in read_whole_topics(settings, [MANIFESTS])]
    again = [one for one in records if isinstance(one, WeightManifest)][-1]
    assert (again.order, again.digest, again.base_version) == (before.order, before.digest, None)


def test_run_that_is_complete_is_not_trained_again(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> None:
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    before = result_of(settings)
    write_samples(settings, make_samples(6, groups=range(50, 60)))
    run_trainer(settings, config, Event())
    assert result_of(settings) == before
    last = HEALTH._report  # the export of a large policy takes minutes, in which the trainer must not be restarted
    assert status_of(last, last.at + config.hung_seconds - 1).alive and "exported" in last.activity


def test_duplicate_samples_are_trained_once(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> None:
    write_samples(settings, make_samples())
    write_samples(settings, make_samples(6, groups=[50, 51]))
    run_trainer(settings, config_of(policy_folder, tmp_path / "run", total_groups=GROUPS + 2), Event())
    outcomes = result_of(settings).outcomes
    assert len(outcomes) == len({name for name, _, _ in outcomes}) == (GROUPS + 2) * GROUP_SIZE


@any_broker
def test_stale_samples_are_settled_and_not_trained(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> None:
    run_trainer(settings, config_of(policy_folder, tmp_path / "run", max_staleness=1), Event())
    stale = {step for _, outcome, step in result_of(settings).outcomes if outcome is Outcome.STALE}
    trained = {step for _, outcome, step in result_of(settings).outcomes if outcome is Outcome.TRAINED}
    assert (trained, stale) == ({1, 2}, {3, 4})
    digests = result_of(settings).digests
    assert digests[2] == digests[3] == digests[4]


@any_broker
@pytest.mark.parametrize(("versions", "levels"), [(0, ["warning"]), (1, [])])
def test_staleness_of_no_version_is_warned_of(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, versions: int, levels: list[str]
) -> None:
    with capture_logs() as logged:
        trainer_of(settings, policy_folder, tmp_path / "run", max_staleness=versions).stream.close()
    assert [line["log_level"] for line in logged if line["event"] == "most_samples_may_be_stale"] == levels


def test_new_trainer_fences_the_old_one(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> None:
    old = trainer_of(settings, policy_folder, tmp_path / "old" / "run")
    new = trainer_of(settings, policy_folder, tmp_path / "new" / "run")
    with pytest.raises(TrainerFenced, match="another trainer"):
        old.run()
    new.run()
    assert len(result_of(settings).outcomes) == GROUPS * GROUP_SIZE


@any_broker
def test_checkpoints_of_another_run_are_refused(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> None:
    first = config_of(policy_folder, tmp_path / "first")
    run_trainer(settings, first, Event())
    borrowed = config_of(policy_folder, tmp_path / "second", checkpoint_folder=first.checkpoints)
    with pytest.raises(CheckpointRefused, match="checkpoints of run first"):
        run_trainer(settings, borrowed, Event())
    with pytest.raises(CheckpointRefused, match="no checkpoint of it"):
        run_trainer(settings, config_of(policy_folder, tmp_path / "third"), Event())


@any_broker
def test_checkpoint_of_another_model_is_refused(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> None:
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    from transformers import Qwen3Config, Qwen3ForCausalLM

    other = tmp_path / "other"
    shape = Qwen3Config.from_pretrained(policy_folder)
    shape.intermediate_size = 48
    Qwen3ForCausalLM(shape).save_pretrained(other)
    with pytest.raises(CheckpointRefused, match="other weights or another"):
        run_trainer(settings, config_of(other, config.run_folder), Event())
    begun = config_of(other, tmp_path / "begun", begin_from=config.checkpoints, model_id="another")
    with pytest.raises(CheckpointRefused, match="other tensors"):
        run_trainer(settings, begun, Event())


def test_stopped_trainer_resumes_later(
    settings: BusSettings, policy_folder: Path, unkilled: tuple[Result, Path], tmp_path: Path
) -> None:
    config = config_of(policy_folder, tmp_path / "run")

    class StopAtVersion2(Event):
        def is_set(self) -> bool:
            return (config.checkpoints / "step-00000002.msgpack").exists()

    run_trainer(settings, config, StopAtVersion2())
    assert max(result_of(settings).digests) == 2
    assert not (config.run_folder / "model").exists()
    run_trainer(settings, config, Event())
    assert_like(result_of(settings), config.run_folder, unkilled)


@any_broker
def test_truncated_step_line_is_written_again(
    settings: BusSettings, policy_folder: Path, unkilled: tuple[Result, Path], tmp_path: Path
) -> None:
    config = config_of(policy_folder, tmp_path / "run")
    run_trainer(settings, config, Event())
    file = config.run_folder / STEP_LOG
    file.write_bytes(file.read_bytes()[:-20])
    run_trainer(settings, config, Event())
    assert_like(result_of(settings), config.run_folder, unkilled)


@any_broker
def test_broken_model_folder_is_reported_in_one_sentence(settings: BusSettings, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no readable config\.json"):
        run_trainer(settings, config_of(tmp_path, tmp_path / "run"), Event())


def test_audit_names_the_trajectories_in_flight(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> None:
    write_prompts(settings, [90])
    write_samples(settings, make_samples(7, groups=[91])[:1])
    run_trainer(settings, config_of(policy_folder, tmp_path / "run"), Event())
    audit = audit_log(settings)
    assert audit.in_flight.not_opened == GROUP_SIZE
    assert audit.requested == (GROUPS + 1) * GROUP_SIZE
    assert [name.partition(":")[0] for name in audit.unasked] == ["g91"]
    assert not audit.clean
    assert msgspec.json.encode(audit.trajectories())
