"""`rose` in processes that import next to nothing: forked from one nursery for all tests that a process runs.

Keeps true: what must die or freeze is a process, and it dies by SIGKILL: nothing is flushed, committed or said goodbye.
"""

import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any, cast

from pipeline.command.nursery import Forked, Nursery
from tests.brokers import flags
from tests.forked import Fork
from topics.settings import BusSettings

STOP_SECONDS = 60.0
"""A role that was asked to stop and is not gone by then hangs."""

COMMAND_SECONDS = 120.0

place_of_forks: str | None = None
"""Where forks can be asked for, that have imported everything; None: nowhere."""

NURSE = """
import os
line = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update({environment!r})
from pipeline.command.nursery import nurse
nurse(line)
"""


class ForkedNursery(Nursery):
    """A nursery that is such a fork."""

    def _open(self, output: int) -> None:
        assert place_of_forks is not None
        self._line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            fork = Fork(place_of_forks, NURSE.format(environment=self._environment), [its.fileno(), output, output])
        self._process = cast(Any, SimpleNamespace(kill=lambda: self._line.shutdown(socket.SHUT_RDWR), wait=fork.wait))


@cache
def nursery() -> Nursery:
    """It ends with this process. It has what every command imports."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
    kind = Nursery if place_of_forks is None else ForkedNursery
    opened = kind(environment=inherited | {"COLUMNS": "200"})
    opened.start(("router", "--help"), name="router", log=Path(os.devnull))
    return opened


def rose(*arguments: str) -> CompletedProcess[str]:
    """A command that ends by itself. All that it prints is its output; what begins as a refusal is its error too."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = nursery().start(arguments, name="rose", log=log)
        try:
            status = command.wait(COMMAND_SECONDS)
        finally:
            kill(command)
        said = log.read_text()
    assert status is not None, f"not done after {COMMAND_SECONDS:.0f} s: {said}"
    refusal = f"\n{said}".rfind("\nrose: ")
    return CompletedProcess(arguments, status, stdout=said, stderr=said[refusal:] if refusal >= 0 else "")


@contextmanager
def role_process(
    command: str, settings: BusSettings, number: int, config: Mapping[str, object], *, log: Path | None = None
) -> Iterator[Forked]:
    """A role on this broker with these settings, `section.field` and value; killed at the end if it still runs.

    What it prints is appended to `log`.
    """
    values = {key: json.dumps(value) if isinstance(value, list) else str(value) for key, value in config.items()}
    said = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        output = log or Path(folder) / "log"
        arguments = (command, f"--number={number}", *flags(settings), *said)
        role = nursery().start(arguments, name=f"{command}-{number}", log=output)
        try:
            yield role
        finally:
            kill(role)
            print(output.read_text(), end="")  # of a test that fails: why the role ended


def stop(role: Forked) -> None:
    """Ask it to stop, if it still runs, and wait until it has ended well."""
    if role.poll() is None:
        role.send_signal(signal.SIGTERM)
        assert role.wait(STOP_SECONDS) == 0


def kill(role: Forked) -> None:
    """kill -9, and wait until it is gone."""
    role.send_signal(signal.SIGKILL)
    role.wait()


def freeze(role: Forked) -> None:
    role.send_signal(signal.SIGSTOP)


def thaw(role: Forked) -> None:
    role.send_signal(signal.SIGCONT)
