"""Figures of steps, and the trackers that take them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rose.pipeline.tracking.steps import SampleFacts, Settled, StepPoint, point_of
from rose.pipeline.tracking.trackers import TRACKERS, Target, open_tracker
from rose.schemas.errors import UsageError
from rose.schemas.samples import Ending, Sample
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.metrics import StepLine
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, outcomes_of, select_groups
from rose.workers.trainer.step import StepMetrics
from tests.support.sample_fixtures import sample

RULES = SelectionRules(max_staleness=1, vocabulary=100, context_tokens=100)
VERSION = 3


def selected() -> list[SelectedGroup]:
    """Return groups with every outcome but superseded, as a trainer at VERSION selects them."""
    mixed = [
        sample("a", 0, reward=1.0, version=3, ended=Ending.MAX_TURNS),
        sample("a", 1, reward=0.0, version=2),
        sample("a", 2, reward=0.0, version=0),
        sample("a", 3, reward=None, failure="the engine died"),
    ]
    equal = [sample("b", index, size=2, reward=1.0, version=3) for index in range(2)]
    made = [CompleteGroup("a", tuple(mixed)), CompleteGroup("b", tuple(equal))]
    return select_groups(made, VERSION, rules=RULES)


def settled(groups: Sequence[SelectedGroup], known: Sequence[Sample] | None = None) -> list[Settled]:
    """Return the outcomes with the facts of the `known` samples; None: of all."""
    samples = [one for group in groups for one in group.samples] if known is None else known
    facts = {one.trajectory_id: SampleFacts.of(one) for one in samples}
    outcomes = outcomes_of(groups, step=VERSION + 1, policy_version=VERSION, now=50.0)
    return [Settled(outcome, facts.get(outcome.trajectory_id)) for outcome in outcomes]


def test_figures_are_those_of_the_step_log_of_the_trainer() -> None:
    groups = selected()
    point = point_of(VERSION + 1, settled(groups))
    line = StepLine.of(
        groups, StepMetrics(reward=0.0, groups=0, groups_with_signal=0), before=VERSION, version=VERSION + 1
    )
    assert (point.step, point.at) == (line.step, 50.0)
    values = point.values
    assert [values[name] for name in ("reward_mean", "success_rate", "staleness_mean", "staleness_max")] == [
        line.reward_mean,
        line.success_rate,
        line.staleness_mean,
        line.staleness_max,
    ]
    assert (values["groups"], values["groups_filtered"]) == (line.groups, line.groups_filtered)
    counts = {name: values[f"outcomes/{name}"] for name in line.outcomes}
    assert counts == line.outcomes
    assert values["outcomes/superseded"] == 0
    assert values["truncated_share"] == pytest.approx(1 / 6)
    assert values["tokens"] == 4


def test_step_without_samples_has_counts_and_no_means() -> None:
    values = point_of(VERSION + 1, settled(selected(), known=[])).values
    assert values["without_sample"] == 6
    assert values["outcomes/trained"] == 2
    assert "reward_mean" not in values
    assert "staleness_max" not in values


def target(folder: Path) -> Target:
    return Target(run="team.demo", project="rose", folder=folder / "events")


def point(step: int, reward: float = 0.5) -> StepPoint:
    return StepPoint(step, 1_000.0 + step, {"reward_mean": reward, "outcomes/trained": 4.0})


def write(name: str, folder: Path, *points: StepPoint, closes: bool = True) -> None:
    """Write points as one start of the command does; without `closes` as one that is killed."""
    tracker = open_tracker(name, target(folder))
    for one in points:
        tracker.write(one)
    tracker.flush()
    if closes:
        tracker.close()


def scalars(folder: Path) -> list[tuple[int, float, float]]:
    """Return steps, times and values of the reward, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "events"), purge_orphaned_data=True)
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["outcomes/trained", "reward_mean"]
    return [(each.step, each.wall_time, each.value) for each in read.Scalars("reward_mean")]


def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write("tensorboard", tmp_path, point(1), point(2), closes=False)
    write("tensorboard", tmp_path, point(2), point(3))
    assert scalars(tmp_path) == [(1, 1001.0, 0.5), (2, 1002.0, 0.5), (3, 1003.0, 0.5)]


def test_tensorboard_replaces_a_step_that_grew(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write("tensorboard", tmp_path, point(1), point(2, 0.25), point(2, 0.75))
    assert scalars(tmp_path) == [(1, 1001.0, 0.5), (2, 1002.0, 0.75)]


def test_mlflow_has_a_repeated_step_once_and_goes_on_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    write("mlflow", tmp_path, point(1), point(2), closes=False)
    write("mlflow", tmp_path, point(2), point(3))
    client = tracking.MlflowClient()
    experiment = client.get_experiment_by_name("rose")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "team.demo"
    found = client.get_metric_history(run.info.run_id, "reward_mean")
    assert [(each.step, each.timestamp, each.value) for each in found] == [
        (1, 1_001_000, 0.5),
        (2, 1_002_000, 0.5),
        (3, 1_003_000, 0.5),
    ]


def test_trackio_has_a_repeated_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    program = """
from pathlib import Path
from tests.unit.test_tracking import point, write
write("trackio", Path("{folder}"), point(1), point(2), closes=False)
write("trackio", Path("{folder}"), point(2), point(3))
from trackio.sqlite_storage import SQLiteStorage
print([(row["step"], row["reward_mean"]) for row in SQLiteStorage.get_logs("rose", "team.demo")])
"""  # a process of its own: trackio reads TRACKIO_DIR as it is imported
    done = subprocess.run(
        [sys.executable, "-c", program.replace("{folder}", str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert "[(1, 0.5), (2, 0.5), (3, 0.5)]" in done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("name", TRACKERS)
def test_missing_package_is_one_sentence_with_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [each for each in sys.modules if each.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"^{name} is not installed: pip install 'rose-rollouts\[{name}\]'$"):
        open_tracker(name, target(tmp_path))


def test_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give one of tensorboard, mlflow, trackio"):
        open_tracker("excel", target(tmp_path))
