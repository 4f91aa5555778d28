"""The trainer beside evaluations: it holds versions back, exports the best one, and ends early."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from rose.schemas.evaluations import EvaluationResult, Metric
from rose.schemas.prompts import trajectory_id
from rose.schemas.samples import Sample
from rose.topics.catalog import EVALUATION_RESULTS, SAMPLES
from rose.topics.health import HEALTH
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.trainer.loop import Trainer
from rose.workers.trainer.ranks import ALONE
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.trust import run_id
from tests.support.brokers import AnyBroker, any_broker, kafka_first
from tests.support.sample_fixtures import sample
from tests.support.trainer_fixtures import GROUP_SIZE, GROUPS_PER_STEP, config_of, log_with_samples, on_log, result_of
from tests.support.waiting import until

pytestmark = pytest.mark.slow

EVERY = 2


class Training:
    """A trainer on a thread, and the results that its evaluator writes."""

    def __init__(self, settings: BusSettings, policy_folder: Path, folder: Path, **changes: object) -> None:
        self.settings = settings
        self.config = config_of(policy_folder, folder / "run")
        self.stop = Event()
        evaluation = EvaluationConfig(every_versions=EVERY, stop_after=1, **changes)  # type: ignore[arg-type]
        self._trainer = Trainer(settings, self.config, WeightsConfig(), self.stop, ALONE, evaluation)
        self._thread = Thread(target=self._trainer.run, daemon=True)
        self._thread.start()

    def write_result(self, version: int, *, best: int, stops: bool = False, complete: bool = True) -> None:
        result = EvaluationResult(
            model_id="policy",
            run=run_id(self.settings.namespace, WeightsConfig().run),
            evaluation="held-out",
            set_digest="0123abcd",
            version=version,
            epoch=0,
            prompts=1,
            samples=4,
            counted=4,
            mismatched=0,
            failed=0,
            complete=complete,
            metric=Metric.SUCCESS,
            score=0.5 if complete else None,
            best_version=best,
            best_score=0.5,
            without_improvement=int(stops),
            stops_run=stops,
            started_at=1.0,
            completed_at=2.0,
        )
        writer = Writer(self.settings, "test")
        writer.write(EVALUATION_RESULTS, result, key=f"run/held-out/{version}", partition=0)
        writer.flush()

    def until_held(self, version: int) -> None:
        until(lambda: HEALTH.status.sentence == f"holds the next version until version {version} is evaluated")

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return log_with_samples(broker, namespace)


@pytest.fixture
def training(settings: BusSettings, policy_folder: Path, tmp_path: Path) -> Iterator[Training]:
    made = Training(settings, policy_folder, tmp_path)
    yield made
    made.stop.set()
    made.join()


@kafka_first
def test_version_waits_for_the_evaluation_of_the_version_before_and_the_best_is_exported(training: Training) -> None:
    training.until_held(0)
    assert list(result_of(training.settings).digests) == [0]
    training.write_result(0, best=0)
    training.until_held(2)
    assert sorted(result_of(training.settings).digests) == [0, 1, 2]
    first = load_file(training.config.best / "model.safetensors")
    training.write_result(2, best=2)
    training.until_held(4)
    training.write_result(4, best=2)
    training.join()
    best, last = (
        load_file(folder / "model.safetensors") for folder in (training.config.best, training.config.exported)
    )
    assert not all(torch.equal(first[name], best[name]) for name in best), "version 2 replaces version 0"
    assert not all(torch.equal(last[name], best[name]) for name in best), "training went on after version 2"


@any_broker
def test_run_that_an_evaluation_stops_ends_after_its_step_and_again_after_a_restart(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        training = Training(settings, policy_folder, tmp_path)
        training.until_held(0)
        training.write_result(0, best=0)
        training.until_held(2)
        training.write_result(2, best=0, stops=True)
        training.join()
    assert sorted(result_of(settings).digests) == [0, 1, 2, 3]
    assert len(on_log(settings)) == 3 * GROUPS_PER_STEP * GROUP_SIZE
    [end] = [line for line in logs if line["event"] == "run_completed"]
    assert end["reason"] == "early stop: 1 evaluations were no improvement on version 0 (success 0.5)"
    assert training.config.exported.is_dir()
    before = result_of(settings)
    Training(settings, policy_folder, tmp_path).join()
    assert result_of(settings).outcomes == before.outcomes


@any_broker
def test_trainer_goes_on_without_a_result_after_hold_seconds_and_says_so(
    settings: BusSettings, policy_folder: Path, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        Training(settings, policy_folder, tmp_path, hold_seconds=1.0).join()
    assert sorted(result_of(settings).digests) == [0, 1, 2, 3, 4]
    given_up = [line["version"] for line in logs if line["event"] == "evaluation_not_awaited"]
    assert given_up == [0, 2, 4]


@any_broker
def test_trainer_that_is_stopped_while_it_holds_a_version_repeats_the_step(
    training: Training, policy_folder: Path, tmp_path: Path
) -> None:
    training.until_held(0)
    training.stop.set()
    training.join()
    assert (list(result_of(training.settings).digests), on_log(training.settings)) == ([0], [])
    again = Training(training.settings, policy_folder, tmp_path)
    again.write_result(0, best=0)
    again.until_held(2)
    assert len(on_log(training.settings)) == 2 * GROUPS_PER_STEP * GROUP_SIZE
    again.stop.set()
    again.join()


@any_broker
def test_samples_of_evaluations_are_in_no_step(
    broker: AnyBroker, namespace: str, policy_folder: Path, tmp_path: Path
) -> None:
    settings = log_with_samples(broker, namespace)
    group = "evaluation:held-out:0123abcd:0:0:0"
    writer = Writer(settings, "test")
    for index in range(4):
        found: Sample = sample(group, index, reward=float(index))
        writer.write(SAMPLES, found, key=group)
    writer.flush()
    Training(settings, policy_folder, tmp_path, hold_seconds=1.0).join()
    assert trajectory_id(group, 0) not in on_log(settings)
