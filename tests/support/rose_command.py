"""The `rose` command in its own folder, and a small demo."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.brokers import home_of

SMALL = {
    "tasks.steps": 2,
    "tasks.group_size": 4,
    "tasks.held_out": 16,
    "trainer.groups_per_step": 4,
    "environment.window_groups": 8,
    "run.executors": 2,
    "run.lenders": 0,
}
TRAJECTORIES = 2 * 4 * 4


class Rose:
    """The `rose` command in its own folder, with the broker of the test."""

    def __init__(self, kind: str, folder: Path) -> None:
        home = home_of(kind)
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
        self._environment |= {"COLUMNS": "200", "KAFKA_HOME": str(home or "")}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "rose.pipeline.cli.main", *arguments]
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
            output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
        return output


def small(**more: int | Path) -> list[str]:
    changes = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    return [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
