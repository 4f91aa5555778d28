"""The demo as users run it, with smaller settings: every role on a real broker, a trained policy, a report."""

import json
from pathlib import Path

import pytest

from rose.pipeline.config.settings import WARM_START
from tests.support.brokers import EMBEDDED, KAFKA
from tests.support.rose_command import TRAJECTORIES, Rose, small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("broker_kind", [EMBEDDED, pytest.param(KAFKA, marks=pytest.mark.long)], indirect=True)
def test_demo_trains_settles_every_trajectory_and_writes_a_report(rose: Rose) -> None:
    output = rose("demo", *small())
    run = rose.folder / "runs" / "demo"
    summary = json.loads((run / "summary.json").read_text())
    terms = summary["trajectories"]
    assert terms["requested"] == TRAJECTORIES, output
    assert sum(count for name, count in terms.items() if name != "requested") == TRAJECTORIES
    assert (terms["in_flight"], summary["lost"], summary["doubled"]) == (0, 0, 0)
    assert summary["success"]["n"] == 16
    assert 0 <= summary["success"]["before"] <= 1
    assert summary["turns"] >= 2 * TRAJECTORIES
    assert summary["weights"]["versions"] == 3
    cost = summary["cost"]
    assert cost["trainer_known"] and (cost["unknown_attempts"], cost["unjudged"], cost["assumed_devices"]) == (0, 0, 0)
    assert sum(line["attempts"] for line in cost["lines"]) >= summary["turns"]
    assert sum(step["device_seconds"] for step in cost["steps"]) == pytest.approx(cost["device_seconds"])
    assert {"idle", "training"} <= {line["fate"] for line in cost["lines"]}
    assert "held-out success" in output
    assert (run / "model" / "config.json").exists()
    assert (run / "report.html").stat().st_size > 1_000_000
    assert f"{TRAJECTORIES} requested" in rose("audit", "--run", "demo")
    life = rose("replay", "--run", "demo", "demo.00000:0")
    assert "reads" in life
    assert "outcome" in life
    rose("export", "--run", "demo", "--to", "newest")
    name = "model.safetensors"
    assert (rose.folder / "newest" / name).read_bytes() == (run / "model" / name).read_bytes()
    for taken, reason in (
        ("newest", "is there already"),
        ("runs", "is there already"),
        (str(WARM_START / "x"), "lies in"),
    ):
        with rose.start("export", "--run", "demo", "--to", taken) as refused:
            assert reason in refused.communicate(timeout=60)[0]
        assert refused.returncode == 2
    assert (run / "checkpoints").is_dir()
    with rose.start("demo", "--name", "demo") as again:
        assert "is there already" in again.communicate(timeout=60)[0]
    assert again.returncode == 2


@pytest.mark.parametrize("broker_kind", [EMBEDDED], indirect=True)
def test_demo_that_reaches_its_time_limit_measures_and_reports_the_newest_policy(rose: Rose) -> None:
    output = rose("demo", *small(run__time_limit_seconds=1, tasks__steps=1000))
    run = rose.folder / "runs" / "demo"
    assert "stopped early, after 1 s" in output and "held-out success after training" in output
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["lost"], summary["doubled"]) == (0, 0)
    assert summary["trajectories"]["in_flight"] > 0
    assert (run / "report.html").exists()


@pytest.mark.long
@pytest.mark.parametrize("broker_kind", [EMBEDDED], indirect=True)
def test_demo_trains_on_a_server_under_user_load(rose: Rose) -> None:
    output = rose("demo", *small(run__executors=0, run__lenders=1, users__trace=steady_users(rose.folder)))
    run = rose.folder / "runs" / "demo"
    lending = json.loads((run / "summary.json").read_text())["lending"]
    rows = [json.loads(line) for line in (run / "moments.jsonl").read_text().splitlines()]
    requests = (run / "serving.jsonl").read_text().splitlines()
    assert (lending["requests"], lending["failed"]) == (len(requests), 0), output
    assert lending["share"] == 1
    assert sum(row["lent_tokens"] for row in rows) == pytest.approx(lending["tokens"])
    assert sum(row["requests"] for row in rows) == len(requests)
    assert any(row["requests"] and row["turns"] for row in rows)
    assert 'id="lending"' in (run / "report.html").read_text()
    assert "requests of users" in output


def steady_users(folder: Path) -> Path:
    """Write a trace with one request per second. ROSE's own trace has half a minute of silence, in which a small demo
    may fall."""
    ask = {"input_length": 512, "output_length": 16}
    trace = folder / "users.jsonl"
    rows = [json.dumps({"timestamp": 1000 * second, "hash_ids": [second], **ask}) for second in range(60)]
    trace.write_text("\n".join(rows))
    return trace
