"""Output of benchmarks: `--json -` prints one object, whatever else is printed."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import heartbeats, learning, storm
from bench.check import Check, options, tell
from bench.learning import configured
from bench.reference import Curve, Point
from tests.support.storm.run import Report
from tests.support.storm.shape import Shape

CHECK = Check("latency", 3.0, "ms", 2.0, "max", "nothing", {"windows": 4})
POINT = Point(
    step=0,
    reward=0.5,
    held_out=None,
    turns=2.0,
    groups_with_signal=1,
    gradient_norm=0.1,
    kl_behaviour=0.01,
    clipped_share=0.0,
    sampling_seconds=1.0,
    training_seconds=1.0,
)
CURVE = Curve(seed=0, lag=1, held_out_tasks=4, before=0.25, after=0.5, points=[POINT])


def printed(program: Callable[[], None], *line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status of a program with this command line, and its standard output."""
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench", *line])
        try:
            program()
        except SystemExit as left:
            status = int(left.code or 0)
    return status, capsys.readouterr().out


def test_bench_output_is_one_json_object_or_text_and_is_kept_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell([CHECK], broker="embedded", file="-")
    whole = capsys.readouterr().out
    assert json.loads(whole)["checks"][0]["details"] == {"windows": 4}
    tell([CHECK], broker="embedded", file=str(tmp_path / "found"))
    assert "3.0000 ms (at most 2: MISSED)" in capsys.readouterr().out
    assert (tmp_path / "found").read_text() == whole


def test_bound_missed_by_a_little_is_shown_as_missed() -> None:
    assert "0.1032 of a core (at most 0.1: MISSED)" in str(Check("share", 0.1032, "of a core", 0.1, "max", ""))
    assert "7,560.00 turns/s (at least 5,000: met)" in str(Check("router", 7560.0, "turns/s", 5_000, "min", ""))


def test_unwritable_output_file_is_refused_before_any_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = options("about")
    for file in ("-", str(tmp_path / "found"), "found"):
        assert parser.parse_args(["--json", file]).json == file
    for file in (str(tmp_path / "none" / "found"), str(tmp_path)):
        with pytest.raises(SystemExit):
            parser.parse_args(["--json", file])
        assert f"{file} cannot be written: name a file" in capsys.readouterr().err


def test_router_cost_is_not_lowered_by_missing_heartbeats() -> None:
    whole = heartbeats.share(1.0, 10_000, 1_000, 4, {})
    assert whole.value == 0.125 and whole.details["microseconds a heartbeat"] == 100.0
    assert heartbeats.share(0.5, 5_000, 1_000, 4, {}).value == whole.value
    assert not heartbeats.share(0.01, 0, 1_000, 4, {}).met, "none was measured"


def test_storm_bench_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def blown(seed: int, _shape: Shape, *, leaves: int) -> Report:
        assert not leaves
        return Report(seed, "embedded", Path(), breaches=["lost"] * (seed == 8))

    monkeypatch.setattr(storm, "storm", blown)
    status, output = printed(storm.main, "--first", "7", "--seeds", "2", "--json", "-", capsys=capsys)
    found = json.loads(output)
    assert (status, [each["seed"] for each in found["storms"]], found["checks"][0]["value"]) == (1, [7, 8], 1)
    status, output = printed(storm.main, "--first", "7", "--seeds", "1", capsys=capsys)
    assert status == 0 and output.startswith("1 storms, 1 clean")


def test_storm_that_misses_a_bound_fails_by_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAFKA_HOME", "somewhere")
    faults = Counter({"leave router": 30})
    monkeypatch.setattr(storm, "storm", lambda seed, _shape, leaves: Report(seed, "kafka", Path(), faults=faults))
    assert printed(storm.main, "--leaves", "30", "--seeds", "1", capsys=capsys)[0] == 0
    left = Counter({1: 1})
    monkeypatch.setattr(
        storm, "storm", lambda seed, _shape, leaves: Report(seed, "kafka", Path(), faults=faults, left=left)
    )
    status, output = printed(storm.main, "--leaves", "30", "--seeds", "1", capsys=capsys)
    assert status == 1 and output.startswith("1 storms, 1 clean")


def test_departures_after_the_storm_do_not_count_as_requested_in_it() -> None:
    few = Report(7, "kafka", Path(), faults=Counter({"leave router": 20, "leave trainer": 3}), left=Counter({0: 33}))
    found = {check.name: check for check in storm.checks_of([few], leaves=30)}
    assert found["asked to leave while it blew"].value == 23 and not found["asked to leave while it blew"].met


def test_demo_bench_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = configured([], 0).run_folder.name

    def demo(_command: list[str], **options: Any) -> None:
        assert options["check"] and options["stdout"] is sys.stderr, "a demo's words are not the result"
        success = {"before": 0.3, "after": 0.8, "n": 4}
        run = tmp_path / "runs" / folder
        run.mkdir(parents=True, exist_ok=True)
        (run / "summary.json").write_text(json.dumps({"seed": 0, "seconds": 1.0, "success": success}))
        (run / "metrics.jsonl").write_text('{"reward_mean": 0.5}\n')

    def reference(_settings: object, *, lag: int, show: Callable[[Point], None]) -> Curve:
        show(POINT)
        return CURVE

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", demo)
    monkeypatch.setattr(learning, "run_reference", reference)
    _, output = printed(learning.main, "--seeds", "1", "--reference", "--json", "-", capsys=capsys)
    found = json.loads(output)
    assert [each["value"] for each in found["checks"]] == [0.3, 0.8]
    assert found["reference"][0]["points"] and found["runs"][0]["curve"] == [0.5]
    _, output = printed(learning.main, "--seeds", "1", capsys=capsys)
    assert "over the bus, seed 0: 0.300 -> 0.800" in output and "at least 0.7: met" in output
