"""A rolling restart of the broker's nodes under load, as for an upgrade of Kafka.

No stall is excused: two of three nodes are always healthy.

ROSE_CHAOS_SEED repeats a seed.
"""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.brokers import start_nodes
from tests.support.storm.plan import Role, Worker
from tests.support.storm.run import blow
from tests.support.storm.shape import Shape
from tests.upgrade.rolling import FLEET, rolling

SEED = int(os.environ.get("ROSE_CHAOS_SEED", random.randrange(2**20)))
NODES = [Worker(Role.NODE, number) for number in range(3)]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed: it produces the prompts")
def test_run_does_not_stall_while_every_node_is_restarted_twice(tmp_path: Path) -> None:
    print(f"ROSE_CHAOS_SEED={SEED}")
    workers = [worker for worker in FLEET if worker.role is not Role.LENDER]
    shape = Shape(nodes=len(NODES), round_seconds=120.0, groups_per_second=0.7, blocking_groups=0)
    with start_nodes(tmp_path / "broker") as broker:
        report = blow(tmp_path / "roles", rolling(SEED, shape, workers, [*NODES, *NODES]), broker)
    print(report)
    assert not report.breaches and not report.letters, str(report)
    assert report.crashes.keys() <= {"trainer"}, "it may be amid a commit, and is started again"
    assert report.faults == {"leave node": 2 * len(NODES)}
