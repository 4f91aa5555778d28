"""Roles of several installations: each start of a name uses the next installation in turn.

Packages that an installation lacks come from the environment of the caller.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rose.pipeline.local.fork_server import ForkedProcess, ForkServer


class InstalledVersions:
    """A fork server for each installation. Use it from one thread that lives as long as the roles."""

    def __init__(self, folder: Path, environment: Mapping[str, str], sites: Sequence[Path]) -> None:
        """Roles run in `folder`. Each of the `sites` is a folder with an installed wheel."""
        self._fork_servers = [ForkServer(folder, {**environment, "PYTHONPATH": str(site)}) for site in sites]
        self._starts: Counter[str] = Counter()

    def start(self, arguments: Sequence[str], *, name: str, log: Path) -> ForkedProcess:
        """Start a role with these arguments of `rose`. Its output is appended to the log."""
        fork_server = self._fork_servers[self._starts[name] % len(self._fork_servers)]
        self._starts[name] += 1
        return fork_server.start(arguments, name=name, log=log)

    def close(self) -> None:
        """End every role that still runs."""
        for fork_server in self._fork_servers:
            fork_server.close()


def build(source: Path, folder: Path) -> Path:
    """Build the wheel of these sources in this folder."""
    uv = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(source)]
    subprocess.run(uv, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def install(wheel: Path, site: Path) -> None:
    """Install a wheel without its dependencies into its own folder, and compile its loops there once."""
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(uv, check=True)
    warm = [
        sys.executable,
        "-P",
        "-c",
        "from rose.workers.weights import codec; codec.warm_up(); print(codec.__file__)",
    ]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    output = subprocess.run(warm, env=environment, cwd=site, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert Path(output.strip()).is_relative_to(site), f"{output.strip()} is not of {site}"
