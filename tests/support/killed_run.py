"""A `rose up` in its own process, whose roles a test kills."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from rose.schemas.prompts import Prompt
from rose.schemas.samples import SampleOutcome
from rose.topics.catalog import OUTCOMES
from rose.topics.errors import TopicMissing
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from tests.support.brokers import flags

REPOSITORY = Path(__file__).parents[2]

WAIT_SECONDS = 240.0
"""A run without an outcome for so long does not recover by itself."""


class KilledRun:
    """A `rose up` in its own process, and its number of outcomes so far."""

    def __init__(self, folder: Path, settings: BusSettings, *, config: str, groups: int, group_size: int) -> None:
        """`config`: text of the configuration file."""
        self.settings = settings
        self.settled = 0
        self.folder = folder / "runs" / "chaos"
        (folder / "rose.toml").write_text(config)
        prompts = [
            Prompt(group_id=f"g{number}", group_size=group_size, environment="calculator", seed=number)
            for number in range(groups)
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
