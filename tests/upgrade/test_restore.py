"""A run with a lost broker continues in a new namespace from checkpoint and prompt file."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from rose.pipeline.local.submit import settled_groups
from tests.support.brokers import KAFKA
from tests.support.rose_command import Rose
from tests.support.waiting import until

GROUPS, GROUP_SIZE, GROUPS_PER_STEP = 24, 4, 4
STEP_SECONDS = 300.0

CONFIG = f"""
[run]
executors = 1

[environment]
window_groups = 8

[trainer]
groups_per_step = {GROUPS_PER_STEP}
total_groups = {GROUPS}

[weights]
store = "store"
store_above_bytes = 0

[topics]
home_partitions = 2
inbox_slots = 2
"""


def steps(folder: Path) -> list[int]:
    """Return the versions that the steps of a run have published."""
    metrics = folder / "metrics.jsonl"
    return [json.loads(line)["version"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_run_with_a_lost_broker_continues_in_a_new_namespace(tmp_path: Path) -> None:
    rose, runs = Rose(KAFKA, tmp_path), tmp_path / "runs"
    (tmp_path / "rose.toml").write_text(CONFIG)
    prompts = [
        {"group_id": f"g{number}", "group_size": GROUP_SIZE, "environment": "calculator", "seed": number}
        for number in range(GROUPS)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    command_line = ("up", "--config", "rose.toml", "--prompts", "prompts.jsonl")
    with rose.start(*command_line, "--name", "lost") as process:
        until(lambda: process.poll() is not None or bool(steps(runs / "lost")), STEP_SECONDS)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    shutil.rmtree(runs / "lost" / "broker")

    settled = settled_groups(runs / "lost" / "metrics.jsonl")
    left = GROUPS - len(settled)
    assert 0 < left < GROUPS
    again = ("--name", "again", "--namespace", "again.", "--set", "trainer.begin_from=runs/lost/checkpoints")
    rest = ("--without", "runs/lost/metrics.jsonl", "--set", f"trainer.total_groups={left}")
    rose(*command_line, *again, *rest)
    audited = rose("audit", "--run", "again")
    assert f"{left * GROUP_SIZE} requested" in audited and "0 lost" in audited, audited
    assert not settled & settled_groups(runs / "again" / "metrics.jsonl")
    first = max(steps(runs / "lost")) + 2  # the number between is the last policy of the lost run, published again
    assert steps(runs / "again") == list(range(first, first + left // GROUPS_PER_STEP))
    of_runs = {file.name.split(".")[1] for file in (tmp_path / "store").iterdir()}
    assert len(of_runs) == 2, "anchors of both runs lie in the store"
