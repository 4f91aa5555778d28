"""`rose samples` on a handwritten log."""

import json
import time
from pathlib import Path

import msgspec
import pytest

from rose.pipeline.cli.read_samples import export_to, filter_of, print_list, show_attempts
from rose.pipeline.config.options import Common
from rose.pipeline.samples.log import SampleFilter
from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import Tenant, WorkerClass
from rose.schemas.samples import Outcome, Sample
from rose.schemas.turns import TurnTimes
from rose.topics.catalog import SAMPLES
from rose.topics.log_reader import read_whole_topics
from tests.integration.test_command_log import common
from tests.support.brokers import AnyBroker
from tests.support.log_fixtures import Log
from tests.support.sample_fixtures import sample
from tests.support.tokenizer_fixtures import CHATML, byte_level, folder

ALL = SampleFilter()


@pytest.fixture
def log(broker: AnyBroker, namespace: str) -> Log:
    """A log with two whole groups, `a` and `b`, and one of two trajectories of `c`."""
    log = Log(broker.settings(namespace))
    now = time.time()  # the broker stamps heartbeats
    times = TurnTimes(requested_at=now - 3, scheduled_at=now - 2, finished_at=now)
    for name, rewards in (("a", (1.0, 0.0)), ("b", (0.0, 0.0)), ("c", (1.0,))):
        for index, reward in enumerate(rewards):
            found = sample(name, index, size=2, reward=reward, version=index + 3)
            turn = msgspec.structs.replace(found.turns[0], worker="lender-0", times=times)
            put(log, msgspec.structs.replace(found, turns=(turn,), completed_at=1_000.0 + index))
    for name in ("a:0", "a:1"):
        log.outcome(name)
    for name in ("b:0", "b:1"):
        log.outcome(name, Outcome.FILTERED, reason="all rewards of its group are equal")
    log.heartbeat(
        worker="lender-0", worker_class=WorkerClass.SERVING, sent_at=now - 1, serving=Tenant(running=7, waiting=2)
    )
    return log


def put(log: Log, record: Sample) -> None:
    log.put(SAMPLES, record, key=record.group_id)


def with_model(log: Log, model: Path) -> Common:
    """Return the options of a command with another model folder."""
    return common(log.settings, overrides=(("--model", "model.folder", str(model)),))


def listed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def test_list_has_a_line_for_each_finished_trajectory(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    print_list(common(log.settings), ALL, groups=False, limit=None)
    lines = {line[0]: line[1:7] for line in listed(capsys)}
    assert lines == {
        "a:0": ["trained", "1", "1", "yes", "3", "1"],
        "a:1": ["trained", "1", "0", "no", "4", "1"],
        "b:0": ["filtered", "1", "0", "no", "3", "1"],
        "b:1": ["filtered", "1", "0", "no", "4", "1"],
        "c:0": ["waiting", "-", "1", "yes", "3", "1"],
    }


def test_list_of_groups_has_means_and_ends_with_incomplete_groups(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    print_list(common(log.settings), ALL, groups=True, limit=None)
    lines = listed(capsys)
    assert sorted(line[0] for line in lines[:2]) == ["a", "b"]
    assert lines[2][:6] == ["c", "1", "of", "2", "-", "1.000"]
    [group_a] = [line for line in lines if line[0] == "a"]
    assert group_a[1:] == ["2", "of", "2", "1", "0.500", "50%", "3-4", "1.0", "3", "2", "trained"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"group": "b"}, {"b:0", "b:1"}),
        ({"outcomes": ["waiting"]}, {"c:0"}),
        ({"step": 1}, {"a:0", "a:1", "b:0", "b:1"}),
        ({"since": "1000.5"}, {"a:1", "b:1"}),
        ({"until": "1970-01-01T00:16:40"}, {"a:0", "b:0", "c:0"}),
    ],
)
def test_list_has_what_the_filters_want(
    log: Log, capsys: pytest.CaptureFixture[str], options: dict[str, object], names: set[str]
) -> None:
    given = {"group": None, "outcomes": None, "step": None, "since": None, "until": None, **options}
    print_list(common(log.settings), filter_of(**given), groups=False, limit=None)  # type: ignore[arg-type]
    assert {line[0] for line in listed(capsys)} == names


def test_list_ends_at_its_limit(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    print_list(common(log.settings), ALL, groups=False, limit=2)
    assert len(listed(capsys)) == 2


def test_unknown_outcome_and_wrong_times_are_refused() -> None:
    with pytest.raises(UsageError, match="give one of trained, stale"):
        filter_of(None, ["traind"], None, None, None)
    with pytest.raises(UsageError, match="--since is later"):
        filter_of(None, None, None, "2", "1")
    with pytest.raises(UsageError, match="nan is no time"):
        filter_of(None, None, None, "nan", None)


def test_sample_that_is_a_dead_letter_is_left_out(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    [found] = [each for each in read_whole_topics(log.settings, [SAMPLES]) if each.key == "c"]
    log.writer.dead_letter(found, "no trajectory of its group")
    log.writer.flush()
    print_list(common(log.settings), ALL, groups=False, limit=None)
    assert len(listed(capsys)) == 4


def test_group_is_shown_with_advantages_texts_and_what_serving_had(
    log: Log, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tokenizer = byte_level()
    model = folder(tmp_path / "model", tokenizer, CHATML)
    given = with_model(log, model)
    show_attempts(given, "a", None)
    shown = capsys.readouterr().out
    assert "+0.9998" in shown
    assert "-0.9998" in shown
    assert "users: 7 running, 2 waiting at most" in shown
    assert "lender-0, version 3, 0 of 1 tokens cached" in shown
    assert tokenizer.decode([2, 3], skip_special_tokens=False) in shown
    show_attempts(given, "a", tmp_path / "a.html")
    assert "users: 7 running, 2 waiting at most" in (tmp_path / "a.html").read_text()


def test_incomplete_group_is_shown_with_what_it_lacks(
    log: Log, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    show_attempts(with_model(log, tmp_path), "c", None)
    found = capsys.readouterr()
    assert "without a sample on the log: c:1" in found.out
    assert "not settled yet" in found.out
    assert "without text: " in found.err


def test_unknown_group_is_refused(log: Log) -> None:
    with pytest.raises(UsageError, match="no finished trajectory of group z"):
        show_attempts(common(log.settings), "z", None)


def test_export_holds_the_wanted_samples_with_advantages(
    log: Log, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wanted = filter_of(None, ["trained", "waiting"], None, None, None)
    export_to(common(log.settings), tmp_path / "rows.jsonl", "jsonl", wanted, limit=None)
    rows = {row["trajectory_id"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert set(rows) == {"a:0", "a:1", "c:0"}
    assert rows["a:0"]["advantage"] == -rows["a:1"]["advantage"]
    assert rows["c:0"]["advantage"] is None
    said = capsys.readouterr()
    assert said.out == f"3 trajectories are in {tmp_path / 'rows.jsonl'}\n"
    assert "1 without an advantage: not settled yet\n" in said.err


def test_export_has_samples_of_evaluations_only_if_they_are_asked_for(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = "evaluation:held-out:0123abcd:0:0:0"
    put(log, sample(group, 0, size=1))
    log.outcome(f"{group}:0", Outcome.EVALUATED)
    target = tmp_path / "rollouts.jsonl"
    export_to(common(log.settings), target, "jsonl", ALL, limit=None)
    assert group not in target.read_text()
    assert "left out: 1 of evaluations (--outcome evaluated exports them)" in capsys.readouterr().out
    asked = filter_of(None, ["evaluated"], None, None, None)
    export_to(common(log.settings), target, "jsonl", asked, limit=None)
    assert [json.loads(line)["group_id"] for line in target.read_text().splitlines()] == [group]


@pytest.mark.parametrize("file_format", ["trl", "verl"])
def test_export_of_texts_without_a_tokenizer_is_refused(log: Log, tmp_path: Path, file_format: str) -> None:
    with pytest.raises(UsageError, match="need the tokenizer"):
        export_to(with_model(log, tmp_path), tmp_path / "rows", file_format, ALL, limit=None)
    assert list(tmp_path.iterdir()) == []


def test_export_into_a_missing_folder_or_an_unknown_format_is_refused(log: Log, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        export_to(common(log.settings), tmp_path / "no" / "rows", "jsonl", ALL, limit=None)
    with pytest.raises(UsageError, match="give one of jsonl, parquet, trl, verl"):
        export_to(common(log.settings), tmp_path / "rows", "csv", ALL, limit=None)
