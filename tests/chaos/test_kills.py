"""Roles of a `rose up` are killed during the run: its supervisor restarts them, and the run ends by itself."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rose.pipeline.audit import audit_log
from rose.schemas.prompts import Prompt
from rose.schemas.samples import SampleOutcome
from rose.topics.catalog import OUTCOMES
from rose.topics.errors import TopicMissing
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from tests.support.brokers import EMBEDDED, flags, start

REPOSITORY = Path(__file__).parents[2]
ROLES = ("trainer", "router", "executor-0", "executor-1", "environment-0")
GROUPS, GROUP_SIZE, GROUPS_PER_STEP = 12, 8, 3
KILLS = 2
SETTLED_BETWEEN_KILLS = GROUPS_PER_STEP * GROUP_SIZE
"""Number of outcomes between two kills, which shows that the run works again."""
WAIT_SECONDS = 240.0
"""A run without an outcome for so long does not recover by itself."""

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


class Run:
    """A `rose up` in its own process, and its number of outcomes so far."""

    def __init__(self, folder: Path, settings: BusSettings) -> None:
        self.settings = settings
        self.settled = 0
        (folder / "rose.toml").write_text(CONFIG)
        prompts = [
            Prompt(group_id=f"g{number}", group_size=GROUP_SIZE, environment="calculator", seed=number)
            for number in range(GROUPS)
        ]
        (folder / "prompts.jsonl").write_bytes(b"\n".join(msgspec.json.encode(prompt) for prompt in prompts))
        self._output = folder / "output.txt"
        arguments = ("up", "--config", "rose.toml", "--prompts", "prompts.jsonl", "--set", "run.name=chaos")
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rose.pipeline.cli.main", *arguments, *flags(settings)],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._reader: Reader | None = None

    def until_settled(self, trajectories: int) -> None:
        """Read outcomes until their number is reached."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.settled < trajectories:
            assert time.monotonic() < deadline, f"{self.settled} settled, then nothing:\n{self.output()}"
            assert self.process.poll() is None, self.output()
            for item in self._read():
                if isinstance(item, Envelope) and isinstance(item.record, SampleOutcome):
                    self.settled += 1
                    deadline = time.monotonic() + WAIT_SECONDS

    def _read(self) -> list[object]:
        try:
            if self._reader is None:
                self._reader = Reader(self.settings, "chaos", group="chaos")
                self._reader.assign({(OUTCOMES, 0): 0})
            return list(self._reader.read(100, 0.5))
        except TopicMissing:  # the run has not created it yet
            return []

    def kill(self, role: str) -> None:
        """Send SIGKILL to the process of this role, which has the name of the role. A guard of a fork server has forked
        it."""
        for fork_server in children(self.process.pid):
            for child in (each for guard in children(fork_server) for each in children(guard)):
                if Path(f"/proc/{child}/comm").read_text().strip() == role:
                    os.kill(child, signal.SIGKILL)
                    return
        raise AssertionError(f"{role} is not running:\n{self.output()}")

    def output(self) -> str:
        return self._output.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def children(parent: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{parent}/task").iterdir():
        found += map(int, (thread / "children").read_text().split())
    return found


@pytest.fixture
def run(tmp_path: Path, namespace: str) -> Iterator[Run]:
    with start(EMBEDDED, tmp_path / "broker") as broker:
        running = Run(tmp_path, broker.settings(namespace))
        try:
            yield running
        finally:
            running.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_run_ends_and_the_law_holds_under_kills_of_any_role(run: Run) -> None:
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
