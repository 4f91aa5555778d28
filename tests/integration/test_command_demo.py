"""The demo as a user runs it, only smaller: every role on a real broker, a policy that is trained, a report."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from time import monotonic

import pytest

from tests.brokers import EXTERNAL, KAFKA

PATIENCE_SECONDS = 240.0
SMALL = {
    "tasks.steps": 2,
    "tasks.group_size": 4,
    "tasks.held_out": 16,
    "trainer.groups_per_step": 4,
    "environment.window_groups": 8,
}
TRAJECTORIES = 2 * 4 * 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Rose:
    """The command in a folder of its own, with the broker that the test asks for."""

    def __init__(self, kind: str, folder: Path) -> None:
        if kind == EXTERNAL:
            pytest.skip("ROSE_BOOTSTRAP names a broker; the demo starts one")
        home = os.environ.get("KAFKA_HOME", "")
        if kind == KAFKA and not home:
            pytest.skip("KAFKA_HOME is not set: name a folder with Apache Kafka's libs/")
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
        self._environment |= {"COLUMNS": "200", "KAFKA_HOME": home if kind == KAFKA else ""}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "pipeline.command.main", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *arguments: str) -> str:
        with self.start(*arguments) as process:
            told = process.communicate(timeout=600)[0]
        assert process.returncode == 0, told
        return told


@pytest.fixture
def rose(broker_kind: str, tmp_path: Path) -> Rose:
    return Rose(broker_kind, tmp_path)


def small(**more: int) -> list[str]:
    changes = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    return [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]


def test_the_demo_trains_settles_every_trajectory_and_reports(rose: Rose) -> None:
    told = rose("demo", *small())
    run = rose.folder / "runs" / "demo"
    summary = json.loads((run / "summary.json").read_text())
    terms = summary["trajectories"]
    assert terms["requested"] == TRAJECTORIES, told
    assert sum(count for name, count in terms.items() if name != "requested") == TRAJECTORIES
    assert (terms["in_flight"], summary["lost"], summary["doubled"]) == (0, 0, 0)
    assert summary["success"]["n"] == 16
    assert 0 <= summary["success"]["before"] <= 1
    assert summary["turns"] >= 2 * TRAJECTORIES
    assert summary["weights"]["versions"] == 3
    assert "held-out success" in told
    assert (run / "model" / "config.json").exists()
    assert (run / "report.html").stat().st_size > 1_000_000
    assert f"{TRAJECTORIES} requested" in rose("audit", "--run", "demo")
    life = rose("replay", "--run", "demo", "demo.00000:0")
    assert "reads" in life
    assert "outcome" in life
    with rose.start("demo", "--name", "demo") as again:
        assert "is there already" in again.communicate(timeout=60)[0]
    assert again.returncode == 2


def test_a_run_that_was_ended_goes_on_where_it_was(rose: Rose) -> None:
    run = rose.folder / "runs" / "demo"
    with rose.start("demo", *small(tasks__steps=6, run__executors=1)) as process:
        deadline, never = monotonic() + PATIENCE_SECONDS, Event()
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text().count("\n"):
            assert process.poll() is None, process.communicate()[0]
            assert monotonic() < deadline
            never.wait(0.1)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=120)[0]
    assert process.returncode == 0, told
    assert "rose up --run demo" in told
    rose("up", "--run", "demo")
    terms = json.loads((run / "summary.json").read_text())["trajectories"]
    assert terms["requested"] == 6 * 4 * 4
    assert terms["in_flight"] == 0
    assert "0 lost" in rose("audit", "--run", "demo")
