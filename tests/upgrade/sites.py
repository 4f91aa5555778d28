"""Roles as processes of installations that lie beside each other: each start of a name is of the next one, in turn.

What an installation does not have, it takes from the environment of whoever runs this.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from topics.processes import end_with


class Started:
    """A role in a process of its own, which leads a session."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """The exit status, once it has ended."""
        return self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """To the role, if it still runs; it is killed with its session."""
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                self._process.send_signal(number)


class Sites:
    """Starts roles. Use it from one thread that lives as long as they should."""

    def __init__(self, folder: Path, environment: Mapping[str, str], sites: Sequence[Path]) -> None:
        """`folder` is where roles run. Each of the `sites` is a folder that a wheel was installed into."""
        self._folder = folder
        self._environment = environment
        self._sites = sites
        self._starts: Counter[str] = Counter()

    def start(self, arguments: Sequence[str], *, name: str, log: Path) -> Started:
        """Start a role with these arguments of `rose`; what it prints is appended to the log."""
        site = self._sites[self._starts[name] % len(self._sites)]
        self._starts[name] += 1
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipeline.command.main", *arguments],
                cwd=self._folder,
                env={**self._environment, "PYTHONPATH": str(site)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=end_with(os.getpid(), signal.SIGKILL),
            )
        return Started(process)

    def close(self) -> None:
        """Nothing is left that is not a role."""


def install(wheel: Path, site: Path) -> None:
    """Install a wheel, without what it needs, into a folder of its own; its loops are compiled there, once."""
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(uv, check=True)
    warm = "from workers.weights import codec; codec.warm_up(); print(codec.__file__)"
    told = subprocess.run(
        [sys.executable, "-P", "-c", warm],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=site,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert Path(told.strip()).is_relative_to(site), f"{told.strip()} is not of {site}"


def build(source: Path, folder: Path) -> Path:
    """The wheel of these sources, in this folder."""
    subprocess.run(
        [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(source)], check=True
    )
    [wheel] = folder.glob("*.whl")
    return wheel
