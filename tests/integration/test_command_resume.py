"""A run that its user stops can be resumed."""

import json
import signal
from threading import Event
from time import monotonic

import pytest

from tests.support.brokers import best_broker
from tests.support.rose_command import Rose, small

PATIENCE_SECONDS = 240.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@best_broker
def test_stopped_run_resumes_where_it_was(rose: Rose) -> None:
    run = rose.folder / "runs" / "demo"
    with rose.start("demo", *small(tasks__steps=3, run__executors=1)) as process:
        deadline, never = monotonic() + PATIENCE_SECONDS, Event()
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text().count("\n"):
            assert process.poll() is None, process.communicate()[0]
            assert monotonic() < deadline
            never.wait(0.1)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "rose up --run demo" in output
    rose("up", "--run", "demo")
    terms = json.loads((run / "summary.json").read_text())["trajectories"]
    assert terms["requested"] == 3 * 4 * 4
    assert terms["in_flight"] == 0
    assert "0 lost" in rose("audit", "--run", "demo")
