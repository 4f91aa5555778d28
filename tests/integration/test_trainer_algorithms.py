"""The trainer with another algorithm: built-in, user-defined, and unknown names."""

from pathlib import Path
from threading import Event

import pytest

from rose.pipeline.audit import audit_log
from rose.topics.settings import BusSettings
from rose.workers.trainer.main import run_trainer
from tests.support.brokers import AnyBroker, flags
from tests.support.roles import rose
from tests.support.trainer_fixtures import GROUP_SIZE, GROUPS, STEPS, config_of, log_with_samples, result_of

pytestmark = pytest.mark.slow

OWN = """
from rose.workers.trainer.algorithms import TokenLoss

class Own:
    def __init__(self, config): ...
    def advantages(self, group): return [sample.reward - 0.5 for sample in group]
    def loss(self, batch): return TokenLoss(-(batch.advantages * batch.logprobs)[batch.loss_mask].sum())
"""


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return log_with_samples(broker, namespace)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module. Additions of the trainer to the import path are removed at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "my_algorithm.py").write_text(OWN)
    return folder


@pytest.mark.parametrize("name", ["rloo", "decoupled_ppo", "reinforce_plus_plus", "my_algorithm:Own"])
def test_run_with_another_algorithm_trains_and_settles_everything(
    settings: BusSettings, policy_folder: Path, own_folder: Path, tmp_path: Path, name: str
) -> None:
    config = config_of(policy_folder, tmp_path / "run", algorithm=name, import_paths=(own_folder,))
    run_trainer(settings, config, Event())
    result = result_of(settings)
    assert len(set(result.digests.values())) == STEPS + 1
    assert len(result.outcomes) == GROUPS * GROUP_SIZE
    assert audit_log(settings).clean


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("algorithm=gpro", "rose: unknown algorithm 'gpro': use grpo, rloo, dr_grpo, maxrl, "),
        ("algorithm=json:JSONDecoder", "rose: algorithm 'json:JSONDecoder': JSONDecoder lacks advantages, loss; use "),
        ('import_paths=["nowhere"]', "rose: trainer.import_paths: nowhere is not there"),
    ],
)
def test_trainer_with_an_unknown_algorithm_exits_with_2_and_one_sentence(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, setting: str, says: str
) -> None:
    common = ("--set", f"run.folder={tmp_path}", "--set", f"model.folder={policy_folder}", *flags(settings))
    done = rose("trainer", "--set", f"trainer.{setting}", *common)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert result_of(settings).digests == {}
