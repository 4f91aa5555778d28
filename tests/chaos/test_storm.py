"""A storm over real roles and a real broker: afterwards the law holds, and no stall occurred.

A long storm has a lending server among its executors, and a control app, which moves executors between two cells.

ROSE_CHAOS_SEED repeats a seed.
"""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.brokers import EMBEDDED, IF_KAFKA, KAFKA, start, start_nodes
from tests.support.sandbox_fixtures import needs_sandboxes, own_leases
from tests.support.storm.plan import draw
from tests.support.storm.run import LEAST_ASKED, blow
from tests.support.storm.shape import Shape, leaving
from tests.support.storm.stalls import SESSION_SECONDS

# Any number that is the same in all processes of pytest-xdist, which must collect the same tests.
FRESH_SEED = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(2**20)
FIRST_SEED = int(os.environ.get("ROSE_CHAOS_SEED", FRESH_SEED))

LEFT = "has left group through explicit `LeaveGroup` request"
EXPIRED = "has failed, removing it from the group"
"""Log text of a coordinator about a member that left, and about a member whose session expired."""

__all__ = ["own_leases"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed: it produces the storm's prompts"),
]


def storm(
    seed: int, kind: str, folder: Path, *, rounds: int = 1, cells: int = 1, ranks: int = 1, sandboxes: bool = False
) -> None:
    print(f"ROSE_CHAOS_SEED={seed}")
    lends = rounds > 1
    shape = Shape(
        nodes=3 if kind == KAFKA else 0,
        lenders=lends,
        control=lends,
        cells=cells,
        rounds=rounds,
        ranks=ranks,
        sandboxes=sandboxes,
    )
    data = folder / "broker"
    with start_nodes(data) if kind == KAFKA else start(kind, data) as broker:
        report = blow(folder / "roles", draw(seed, shape), broker)
    print(report)
    assert not report.breaches, str(report)


# One short storm per suite: on Apache Kafka if installed, because it supports more faults.
@pytest.mark.parametrize("kind", [KAFKA, pytest.param(EMBEDDED, marks=IF_KAFKA)])
def test_law_holds_without_stalls_after_a_short_storm(kind: str, tmp_path: Path) -> None:
    storm(FIRST_SEED, kind, tmp_path)


@needs_sandboxes
def test_storm_over_sandboxes_loses_no_file_and_leaves_nothing(own_leases: None, tmp_path: Path) -> None:
    storm(FIRST_SEED + 4, EMBEDDED, tmp_path, sandboxes=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST_SEED + 1, FIRST_SEED + 4))
def test_law_holds_without_stalls_after_a_long_storm(seed: int, tmp_path: Path) -> None:
    storm(seed, KAFKA, tmp_path, rounds=2, cells=1 + seed % 2)


@pytest.mark.long
def test_law_holds_without_stalls_after_a_storm_over_executors_of_two_ranks(tmp_path: Path) -> None:
    storm(FIRST_SEED + 5, KAFKA, tmp_path, ranks=2)


@pytest.mark.long
def test_thirty_stopped_processes_end_in_time_and_no_turn_waits_for_a_session(tmp_path: Path) -> None:
    """Routers, environment workers, executors, a trainer and a lender are stopped at random times while others join."""
    print(f"ROSE_CHAOS_SEED={FIRST_SEED}")
    with start_nodes(tmp_path / "broker") as broker:
        report = blow(tmp_path / "roles", draw(FIRST_SEED, leaving(30)), broker)
        log_lines = [line for node in broker.nodes for line in node.log.read_text(errors="replace").splitlines()]
    print(report)
    assert not report.breaches and not report.crashes, str(report)
    assert report.asked_to_leave >= LEAST_ASKED * 30 and report.left.keys() == {0}, (report.faults, report.left)
    assert report.attempts_at_fault == 0, "an executor that left was waited for"
    members = report.faults["leave environment"] + report.faults["leave router"]
    assert sum(LEFT in line for line in log_lines) >= members > 0
    assert not [line for line in log_lines if EXPIRED in line], "a member that left was waited for"
    for role, seconds in report.waits.items():
        assert seconds < SESSION_SECONDS[role], (role, seconds)


@pytest.mark.long
def test_law_holds_without_stalls_after_a_long_storm_on_the_embedded_broker(tmp_path: Path) -> None:
    storm(FIRST_SEED + 4, EMBEDDED, tmp_path, rounds=2)
