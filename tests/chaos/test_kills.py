"""Roles of a `rose up` are killed during the run: its supervisor restarts them, and the run ends by itself."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.pipeline.audit import audit_log
from tests.support.brokers import EMBEDDED, start
from tests.support.killed_run import WAIT_SECONDS, KilledRun

ROLES = ("trainer", "router", "executor-0", "executor-1", "environment-0")
GROUPS, GROUP_SIZE, GROUPS_PER_STEP = 12, 8, 3
KILLS = 2
SETTLED_BETWEEN_KILLS = GROUPS_PER_STEP * GROUP_SIZE
"""Number of outcomes between two kills, which shows that the run works again."""

CONFIG = f"""
[trainer]
groups_per_step = {GROUPS_PER_STEP}
total_groups = {GROUPS}

[environment]
window_groups = 8

[topics]
home_partitions = 2
inbox_slots = 2
sample_partitions = 2
chunk_partitions = 2
"""


@pytest.fixture
def run(tmp_path: Path, namespace: str) -> Iterator[KilledRun]:
    with start(EMBEDDED, tmp_path / "broker") as broker:
        running = KilledRun(tmp_path, broker.settings(namespace), config=CONFIG, groups=GROUPS, group_size=GROUP_SIZE)
        try:
            yield running
        finally:
            running.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_run_ends_and_the_law_holds_under_kills_of_any_role(run: KilledRun) -> None:
    seed = int(os.environ.get("ROSE_CHAOS_SEED", random.SystemRandom().randrange(2**32)))
    print(f"ROSE_CHAOS_SEED={seed}")
    dice = random.Random(seed)
    for role in dice.sample(ROLES, KILLS):
        run.until_settled(run.settled + dice.randint(1, SETTLED_BETWEEN_KILLS))
        print(f"after {run.settled} outcomes: kill -9 {role}")
        run.kill(role)
    run.until_settled(GROUPS * GROUP_SIZE)
    assert run.process.wait(WAIT_SECONDS) == 0, run.output()

    audit = audit_log(run.settings)
    assert (audit.lost, audit.doubled, audit.unasked) == ((), (), ())
    assert audit.requested == audit.settled == GROUPS * GROUP_SIZE
    assert audit.infra_failed == 0, "a killed process is no failure of a trajectory"
    assert audit.clean
