"""Sandboxes for tests, and what is left of sandboxes on this host."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rose.workers.environments.protocol import Step
from rose.workers.environments.sandbox.environment import SandboxEnvironment
from rose.workers.environments.sandbox.host import SandboxSettings, configure_sandboxes
from rose.workers.environments.sandbox.leases import folder_of_leases, reap
from rose.workers.environments.sandbox.process import NoSandbox, SandboxLimits, SandboxProcess
from rose.workers.environments.sandbox.store import PackStore

T = TypeVar("T")

LEFT_SECONDS = 150.0
"""Time after which nothing of a sandbox may be left: `sandbox_store_seconds` of 60 s, and two passes."""

LIMITS = SandboxLimits(disk_bytes=8 << 20, processes=32, memory_bytes=1 << 30, output_bytes=1024, command_seconds=10.0)


def refusal() -> str:
    """Why this host allows no sandboxes; an empty text if it does."""
    try:
        SandboxProcess(LIMITS).close()
    except NoSandbox as error:
        return str(error)
    return ""


def refusal_elsewhere() -> str:
    """The same, asked in a process of its own: a sandbox starts threads, which no import of a test may do."""
    code = "from tests.support import sandbox_fixtures; print(sandbox_fixtures.refusal())"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, ASKED: "1"}, capture_output=True, text=True
    )
    return (result.stdout or result.stderr).strip()


ASKED = "ROSE_TESTS_ASK_FOR_SANDBOXES"
why = "" if ASKED in os.environ else refusal_elsewhere()
needs_sandboxes = pytest.mark.skipif(bool(why), reason=why)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store of packs, for all sandboxes of the test."""
    configure_sandboxes(SandboxSettings(store=str(tmp_path / "store")))
    yield tmp_path / "store"
    configure_sandboxes(SandboxSettings())


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def shell(command: str) -> str:
    """The action that runs a command."""
    return f"I run this:\n```bash\n{command}\n```"


def begun(**arguments: Any) -> SandboxEnvironment:
    """A sandbox after its reset, with its first snapshot taken."""
    environment = SandboxEnvironment()
    run(environment.reset(7, arguments))
    run(environment.snapshot())
    return environment


def act(environment: SandboxEnvironment, command: str) -> tuple[Step, bytes]:
    """The step of a command, and the snapshot after it."""

    async def both() -> tuple[Step, bytes]:
        return await environment.step(shell(command)), await environment.snapshot()

    return run(both())


def restored(state: bytes) -> SandboxEnvironment:
    environment = SandboxEnvironment()
    run(environment.restore(state))
    return environment


def seen(environment: SandboxEnvironment, command: str = "grep -r '' . | sort") -> str:
    """Return what a command prints: by default all files with their contents."""
    return act(environment, command)[0].observation


def sandbox_processes() -> list[int]:
    """Processes that run sandboxes whose leases are in this process's folder of leases."""
    leases, found = str(folder_of_leases()), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"namespace_init" in (folder / "cmdline").read_bytes():
                opened = [str(file.readlink()) for file in (folder / "fd").iterdir()]
                found += [int(folder.name)] if any(file.startswith(leases) for file in opened) else []
        except OSError:
            continue
    return found


@pytest.fixture
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a folder of leases for the test and the processes that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    monkeypatch.undo()


def sleepers(seconds: str) -> list[int]:
    """Processes that sleep for this time."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def sandboxes_left(store: Path, *, keep_seconds: float = 60.0) -> list[str]:
    """Return sentences on what sandboxes have left behind, once a later worker's passes had their time."""
    deadline = time.monotonic() + LEFT_SECONDS
    while True:
        reap(folder_of_leases())
        PackStore(store, keep_seconds).sweep()
        left = [f"the process {pid} of a sandbox is left" for pid in sandbox_processes()]
        left += [f"{path} is left" for path in (*folder_of_leases().glob("*.lease"), *store.glob("*/*"))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(1.0)
