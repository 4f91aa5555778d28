"""`rose track` on a handwritten log: every step is one point, over stops, kills and late samples."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from rose.pipeline.cli.track_run import track_run, write_steps
from rose.pipeline.tracking.log import StepLog
from rose.pipeline.tracking.steps import StepPoint
from rose.schemas.errors import UsageError
from rose.schemas.samples import Outcome, SampleOutcome
from rose.topics.catalog import OUTCOMES, SAMPLES, TRACKER_PREFIX
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from tests.integration.test_command_log import common
from tests.support.brokers import AnyBroker, flags
from tests.support.log_fixtures import PARTITIONS, Log
from tests.support.rose_command import Rose
from tests.support.sample_fixtures import sample
from tests.support.waiting import until


class Recorder:
    """A tracker that keeps the points, and may be killed before they are committed."""

    def __init__(self, *, dies: bool = False) -> None:
        self.points: list[StepPoint] = []
        self._dies = dies

    def write(self, point: StepPoint) -> None:
        self.points.append(point)

    def flush(self) -> None:
        if self._dies:
            raise KilledError

    def close(self) -> None:
        pass


class KilledError(Exception):
    """Stands for a kill after the write and before the commit."""


@pytest.fixture
def log(broker: AnyBroker, namespace: str) -> Log:
    return Log(broker.settings(namespace))


def finish(log: Log, group: str, rewards: Sequence[float], model: str = "policy") -> None:
    for index, reward in enumerate(rewards):
        found = sample(group, index, size=len(rewards), reward=reward, model_id=model)
        log.put(SAMPLES, found, key=group)


def settle(log: Log, group: str, count: int, step: int) -> None:
    for index in range(count):
        record = SampleOutcome(
            trajectory_id=f"{group}:{index}",
            group_id=group,
            outcome=Outcome.TRAINED,
            step=step,
            policy_version=step - 1,
            recorded_at=100.0 + step,
        )
        log.put(OUTCOMES, record, key=record.trajectory_id)


def tracked(log: Log, tracker: Recorder | None = None, *, from_start: bool = False) -> list[tuple[int, float]]:
    """Run the loop to the end of the log; return step and mean reward of each point that was written."""
    tracker = tracker or Recorder()
    with StepLog(log.settings, "policy", "test", from_start=from_start) as steps:
        write_steps(steps, tracker, follow=False, stop=Event())
    return [(each.step, each.values["reward_mean"]) for each in tracker.points]


def test_steps_are_written_in_order_with_the_figures_of_their_samples(log: Log) -> None:
    finish(log, "late", [1.0, 1.0])
    finish(log, "a", [1.0, 0.0])
    finish(log, "b", [0.0, 0.0])
    settle(log, "a", 2, 1)
    settle(log, "b", 2, 2)
    settle(log, "late", 2, 3)
    assert tracked(log) == [(1, 0.5), (2, 0.0), (3, 1.0)]


def test_new_start_goes_on_and_repeats_only_the_last_step(log: Log) -> None:
    finish(log, "late", [1.0, 1.0])
    for step, name in enumerate(("a", "b", "c"), 1):
        finish(log, name, [1.0, 0.0])
        settle(log, name, 2, step)
    assert [step for step, _ in tracked(log)] == [1, 2, 3]
    assert tracked(log) == [(3, 0.5)]
    settle(log, "late", 2, 4)
    finish(log, "d", [0.0, 0.0])
    settle(log, "d", 2, 5)
    assert tracked(log) == [(3, 0.5), (4, 1.0), (5, 0.0)]
    assert tracked(log) == [(5, 0.0)]
    assert [step for step, _ in tracked(log, from_start=True)] == [1, 2, 3, 4, 5]


def test_tracker_that_began_before_the_first_sample_has_its_figures(log: Log) -> None:
    with StepLog(log.settings, "policy", "test") as steps:
        finish(log, "a", [1.0, 0.0])
        settle(log, "a", 1, 1)
        found = steps.steps(follow=True, should_stop=lambda: False)
        assert next(each.values["reward_mean"] for each in found if each is not None) == 1.0


def test_killed_tracker_writes_the_same_points_again(log: Log) -> None:
    for step, name in enumerate(("a", "b"), 1):
        finish(log, name, [float(step), 0.0])
        settle(log, name, 2, step)
    killed, again = Recorder(dies=True), Recorder()
    with pytest.raises(KilledError):
        tracked(log, killed)
    tracked(log, again)
    assert killed.points == again.points
    assert [each.step for each in again.points] == [1, 2]


def test_step_that_is_settled_in_parts_is_written_whole_in_the_end(log: Log) -> None:
    finish(log, "a", [1.0, 1.0])
    finish(log, "b", [0.0, 0.0])
    settle(log, "a", 2, 1)
    assert tracked(log) == [(1, 1.0)]
    settle(log, "b", 2, 1)
    assert tracked(log) == [(1, 0.5)]


def test_samples_of_other_models_and_dead_letters_are_in_no_step(log: Log) -> None:
    finish(log, "a", [1.0, 0.0])
    finish(log, "other", [5.0, 5.0], model="another")
    finish(log, "dead", [9.0])
    [dead] = [each for each in read_whole_topics(log.settings, [SAMPLES]) if each.key == "dead"]
    log.writer.dead_letter(dead, "no trajectory of its group")
    settle(log, "other", 2, 7)
    settle(log, "a", 2, 1)
    assert tracked(log) == [(1, 0.5)]


def test_outcome_without_a_sample_is_counted(log: Log) -> None:
    settle(log, "gone", 2, 1)
    finish(log, "a", [1.0, 0.0])
    settle(log, "a", 2, 2)
    recorder = Recorder()
    with StepLog(log.settings, "policy", "test") as steps:
        write_steps(steps, recorder, follow=False, stop=Event())
    first, second = recorder.points
    assert (first.values["without_sample"], first.values["outcomes/trained"]) == (2, 2)
    assert (second.values["without_sample"], second.values["reward_mean"]) == (0, 0.5)


def test_tensorboard_has_each_step_once_after_a_second_start(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"folder": tmp_path, "project": "rose", "name": None, "once": True, "from_start": False}
    for step, name in enumerate(("a", "b", "c"), 1):
        finish(log, name, [1.0, 0.0])
        settle(log, name, 2, step)
        if step > 1:
            track_run(common(log.settings), "tensorboard", **options)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "2 steps written to tensorboard\n2 steps written to tensorboard\n"
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(each.step, each.wall_time, each.value) for each in read.Scalars("reward_mean")] == [
        (step, 100.0 + step, 0.5) for step in (1, 2, 3)
    ]


@pytest.mark.slow
def test_killed_processes_leave_each_step_once(log: Log, broker_kind: str, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rose, folder, step = Rose(broker_kind, tmp_path), tmp_path / "events", 0
    command = ("track", "--to", "tensorboard", "--folder", str(folder), *flags(log.settings))

    def scalars() -> list[tuple[int, float]]:
        read = events.EventAccumulator(str(folder))
        read.Reload()
        found = read.Scalars("reward_mean") if read.Tags()["scalars"] else []
        return [(each.step, each.value) for each in found]

    def is_written(last: int) -> bool:
        return folder.exists() and any(number == last for number, _ in scalars())

    for _ in range(3):
        with rose.start(*command) as process:
            for _ in range(3):
                step += 1
                finish(log, f"g{step}", [float(step), 0.0])
                settle(log, f"g{step}", 2, step)
            until(partial(is_written, step))
            process.kill()  # about when it commits
    rose(*command, "--once")
    assert scalars() == [(number, number / 2) for number in range(1, step + 1)]


def test_folder_for_another_tracker_and_bad_names_are_refused(log: Log, tmp_path: Path) -> None:
    given = {"project": "rose", "once": True, "from_start": False}
    with pytest.raises(UsageError, match="goes with --to tensorboard"):
        track_run(common(log.settings), "mlflow", folder=tmp_path, name=None, **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--name a/b is no name"):
        track_run(common(log.settings), "mlflow", folder=None, name="a/b", **given)  # type: ignore[arg-type]


def test_facts_of_settled_trajectories_do_not_hold_the_offsets_back(log: Log) -> None:
    for step in range(1, 6):
        finish(log, f"g{step}", [1.0, 0.0])
        settle(log, f"g{step}", 2, step)
        tracked(log)
    places = [(SAMPLES, number) for number in range(PARTITIONS.samples)]
    with closing(Reader(log.settings, "test", group=f"{TRACKER_PREFIX}test")) as reader:
        committed, ends = reader.committed(places), reader.watermarks
        first = min(each.offset for each in read_whole_topics(log.settings, [SAMPLES]) if each.key == "g5")
        [last] = {each.partition for each in read_whole_topics(log.settings, [SAMPLES]) if each.key == "g5"}
        assert committed == {place: first if place[1] == last else ends(place)[1] for place in places}
