"""`rose` in processes that import almost nothing, forked from one fork server per test process.

Keeps true: a role is a process. A kill is SIGKILL: nothing is flushed or committed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any, cast

from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.topics.settings import BusSettings
from tests.support.brokers import flags
from tests.support.forked_processes import Fork

STOP_SECONDS = 60.0
"""A role that has not exited this long after SIGTERM hangs."""

COMMAND_SECONDS = 120
"""A command that takes longer hangs."""

place_of_forks: str | None = None
"""Address of a fork source that has imported all modules; None if there is none."""

NURSE = """
import os
line = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update({environment!r})
from rose.pipeline.local.fork_server import serve
serve(line)
"""


COMMAND = """
import os, signal, sys
if child := os.fork():
    with open({status!r}, "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os._exit(0)
signal.alarm({seconds})
os.environ.clear()
os.environ.update({environment!r})
sys.argv = {arguments!r}
from rose.pipeline.cli.main import main
main()
"""


class SharedForkServer(ForkServer):
    """A fork server that is itself such a fork."""

    def _open(self, output: int) -> None:
        assert place_of_forks is not None
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            fork = Fork(place_of_forks, NURSE.format(environment=self._environment), [its.fileno(), output, output])
        self._process = cast(Any, SimpleNamespace(kill=lambda: self._socket.shutdown(socket.SHUT_RDWR), wait=fork.wait))


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this process, with the imports of every command."""
    kind = ForkServer if place_of_forks is None else SharedForkServer
    opened = kind(environment=_inherited())
    opened.start(("router", "--help"), name="router", log=Path(os.devnull))
    return opened


def started(*arguments: str, folder: Path | None = None, **environment: str) -> CompletedProcess[str]:
    """Run a command in a new Python process and wait for its end."""
    return subprocess.run(
        [sys.executable, "-m", "rose.pipeline.cli.main", *arguments],
        cwd=folder,
        env=_inherited() | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_SECONDS,
    )


def rose(*arguments: str) -> CompletedProcess[str]:
    """Run a command in a forked process if a fork source exists."""
    if place_of_forks is None:
        return started(*arguments)
    with tempfile.TemporaryDirectory() as name:
        ended, out, error = (Path(name) / each for each in ("status", "out", "error"))
        code = COMMAND.format(
            status=str(ended), seconds=COMMAND_SECONDS, environment=_inherited(), arguments=["rose", *arguments]
        )
        with Path(os.devnull).open() as nothing, out.open("w") as output, error.open("w") as errors:
            Fork(place_of_forks, code, [nothing.fileno(), output.fileno(), errors.fileno()]).wait()
        return CompletedProcess(arguments, int(ended.read_text()), stdout=out.read_text(), stderr=error.read_text())


@contextmanager
def role_process(
    command: str, settings: BusSettings, number: int, config: Mapping[str, object], *, log: Path | None = None
) -> Iterator[ForkedProcess]:
    """Run a role on this broker with these settings (`section.field` and value). A role that still runs at the end is
    killed.

    Its output is appended to `log`.
    """
    values = {key: json.dumps(value) if isinstance(value, list) else str(value) for key, value in config.items()}
    options = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        output = log or Path(folder) / "log"
        arguments = (command, f"--number={number}", *flags(settings), *options)
        role = fork_server().start(arguments, name=f"{command}-{number}", log=output)
        try:
            yield role
        finally:
            kill(role)
            print(output.read_text(), end="")  # shows in a failed test why the role ended


def stop(role: ForkedProcess) -> None:
    """Send SIGTERM if the role still runs, and assert that it exits with status 0."""
    if role.poll() is None:
        role.send_signal(signal.SIGTERM)
        assert role.wait(STOP_SECONDS) == 0


def kill(role: ForkedProcess) -> None:
    """Send SIGKILL and wait for the end of the process."""
    role.send_signal(signal.SIGKILL)
    role.wait()


def freeze(role: ForkedProcess) -> None:
    role.send_signal(signal.SIGSTOP)


def thaw(role: ForkedProcess) -> None:
    role.send_signal(signal.SIGCONT)


def _inherited() -> dict[str, str]:
    """Return the environment of the caller without variables of `rose`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")} | {"COLUMNS": "200"}
