"""A run with a lost log continues from its checkpoint: on a new broker, or in another namespace."""

from pathlib import Path
from threading import Event

import pytest

from rose.pipeline.audit import audit_log
from rose.pipeline.local.submit import settled_groups
from rose.schemas.errors import UsageError
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.settings import BusSettings
from rose.workers.trainer.main import run_trainer
from rose.workers.trainer.metrics import STEP_LOG
from tests.support.brokers import EMBEDDED, KAFKA, AnyBroker, start
from tests.support.trainer_fixtures import (
    GROUP_SIZE,
    GROUPS,
    GROUPS_PER_STEP,
    STEPS,
    Result,
    config_of,
    group_name,
    log_with_samples,
    make_samples,
    newest_of,
    result_of,
    write_prompts,
    write_samples,
)

KINDS = [EMBEDDED, pytest.param(KAFKA, marks=pytest.mark.long)]

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("broker_kind", KINDS, indirect=True)]

DONE = 2
"""Steps of the run before the loss of its log."""


@pytest.fixture
def lost(broker: AnyBroker, namespace: str, policy_folder: Path, tmp_path: Path) -> Path:
    """The folder of a run that has made two of its steps."""
    settings = log_with_samples(broker, namespace)
    config = config_of(policy_folder, tmp_path / "run", total_groups=DONE * GROUPS_PER_STEP)
    run_trainer(settings, config, Event())
    return config.run_folder


@pytest.fixture(scope="module")
def undisturbed(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The same run without a loss."""
    folder = tmp_path_factory.mktemp("whole")
    with start(EMBEDDED, folder / "broker") as broker:
        settings = log_with_samples(broker, "whole.")
        run_trainer(settings, config_of(policy_folder, folder / "run"), Event())
        return result_of(settings)


def ask_again(settings: BusSettings, lost: Path) -> int:
    """Request and sample on a new log what the lost log had not settled; return the number of groups."""
    settled = settled_groups(lost / STEP_LOG)
    assert len(settled) == DONE * GROUPS_PER_STEP
    left = [number for number in range(GROUPS) if group_name(number) not in settled]
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    write_prompts(settings, left)
    write_samples(settings, (each for each in make_samples() if each.group_id not in settled))
    return len(left)


def goes_on_as_if_nothing_was_lost(settings: BusSettings, left: int, undisturbed: Result) -> None:
    """Assert that the policies equal those of the undisturbed run bit for bit, each under a higher number."""
    result = result_of(settings)
    assert result.digests == {version + 1: digest for version, digest in undisturbed.digests.items() if version >= DONE}
    assert newest_of(settings).order == (1, STEPS + 1)
    assert len(result.outcomes) == len({name for name, _, _ in result.outcomes}) == left * GROUP_SIZE
    audit = audit_log(settings)
    assert audit.clean and audit.requested == audit.settled == left * GROUP_SIZE


def test_run_on_a_new_broker_resumes_from_its_own_checkpoint(
    lost: Path, namespace: str, policy_folder: Path, undisturbed: Result, tmp_path: Path
) -> None:
    with start(EMBEDDED, tmp_path / "broker") as another:
        settings = another.settings(namespace)
        left = ask_again(settings, lost)
        run_trainer(settings, config_of(policy_folder, lost, total_groups=left), Event())
        goes_on_as_if_nothing_was_lost(settings, left, undisturbed)


def test_run_in_another_namespace_starts_from_the_given_checkpoint(
    broker: AnyBroker, lost: Path, namespace: str, policy_folder: Path, undisturbed: Result, tmp_path: Path
) -> None:
    settings = broker.settings(f"{namespace}again.")
    left = ask_again(settings, lost)
    config = config_of(policy_folder, tmp_path / "again", total_groups=left, begin_from=lost / "checkpoints")
    run_trainer(settings, config, Event())
    goes_on_as_if_nothing_was_lost(settings, left, undisturbed)
    run_trainer(settings, config, Event())  # which now has its own checkpoints
    assert newest_of(settings).order == (1, STEPS + 1)


def test_missing_checkpoint_folder_is_refused(
    broker: AnyBroker, namespace: str, policy_folder: Path, tmp_path: Path
) -> None:
    settings = log_with_samples(broker, namespace)
    config = config_of(policy_folder, tmp_path / "run", begin_from=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="nowhere, where no whole checkpoint is"):
        run_trainer(settings, config, Event())
