"""One sandbox as the worker holds it: its process, and the requests to it. Calls block; use them in a thread.

Keeps true
- The sandbox ends with this object, with the process that made it, and when its lease is no longer renewed.
- What the sandbox answers is checked before other code reads it: it may be broken by a fault of the kernel.
"""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rose.schemas.errors import UsageError
from rose.workers.environments.sandbox import namespace_init
from rose.workers.environments.sandbox.leases import LEASE_SECONDS, Lease, lease_folder
from rose.workers.environments.sandbox.tree import Entry, Tree, checked_tree

START_SECONDS = 30.0
"""Longest time until a sandbox has started."""

ANSWER_SECONDS = 30.0
"""Longest time for an answer, in addition to the time limit of a command."""

INODES = 16_384
"""Most files and folders of a sandbox."""

READ_BLOCKS = 16
"""Blocks that are read at once: a command waits for one such read at most."""

ROOT = Path(namespace_init.__file__).parents[4]
"""Folder with the package `rose`."""

PROGRAM = (
    "import sys; sys.path.append({folder!r}); "
    "from rose.workers.environments.sandbox.namespace_init import main; main{handed}"
)
PYTHON_FOLDER = sys.base_prefix
VARIABLES = {
    "PATH": f"{PYTHON_FOLDER}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
"""Variables of every command: the same on every machine, so that a repeated command does the same."""


class NoSandbox(UsageError):
    """The kernel or the container allows no sandbox."""


class SandboxLost(Exception):
    """The sandbox has ended."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one sandbox."""

    disk_bytes: int
    processes: int
    memory_bytes: int
    """Most address space of each process."""
    output_bytes: int
    command_seconds: float


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command."""

    status: int
    """Exit status; negative: the signal that ended it."""
    ending: str
    """`time` or `processes` if a limit ended it."""
    processes: list[str]
    """Command lines of the processes that it, or an earlier command, has left."""
    output_size: int
    output: bytes = b""
    """Its output; a longer output has a zero byte in place of its middle."""


class SandboxProcess:
    """A running sandbox. Requests may come from several threads."""

    def __init__(self, limits: SandboxLimits) -> None:
        """Start it. Raises NoSandbox, or SandboxLost if it does not start in time."""
        self._limits = limits
        self._lock = threading.Lock()
        self.lease = Lease.take()
        ours, theirs = socket.socketpair()
        self._line = ours
        try:
            with lease_folder() as folder:
                handed = theirs.fileno(), self.lease.descriptor, folder
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", PROGRAM.format(folder=str(ROOT), handed=handed)],
                    pass_fds=handed,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the worker
                    env={},
                )
        except BaseException:
            self.lease.give_back()
            ours.close()
            raise
        finally:
            theirs.close()
        self.lease.name_process(self._process.pid)
        try:
            self._ask(
                START_SECONDS,
                lease_name=self.lease.path.name,
                lease_seconds=LEASE_SECONDS,
                python_folder=PYTHON_FOLDER,
                disk_bytes=limits.disk_bytes,
                inodes=INODES,
                processes=limits.processes,
            )
        except SandboxLost:
            self.close()
            raise
        except ValueError as error:
            self.close()
            raise NoSandbox(
                f"no sandbox can be made here ({error}): allow unprivileged user namespaces for this user or container "
                "(Linux 5.12 or later; see docs/guides/sandboxes.md), or run its workers on hosts that allow them"
            ) from None

    @property
    def is_running(self) -> bool:
        """Whether the sandbox has not ended yet."""
        return self._process.poll() is None

    def run(self, argv: Sequence[str], variables: Mapping[str, str] | None = None) -> CommandResult:
        """Run a command. Raises SandboxLost."""
        limits = self._limits
        most = {"RLIMIT_AS": limits.memory_bytes, "RLIMIT_FSIZE": limits.disk_bytes, "RLIMIT_CORE": 0}
        answer, output = self._ask(
            limits.command_seconds + ANSWER_SECONDS,
            what="run",
            argv=list(argv),
            variables={**VARIABLES, **(variables or {})},
            limits={**most, "RLIMIT_NOFILE": 256},
            seconds=limits.command_seconds,
            output_bytes=limits.output_bytes,
        )
        try:
            return msgspec.convert({**answer, "output": output}, CommandResult)
        except msgspec.ValidationError as error:
            raise SandboxLost(f"malformed answer: {error}") from None

    def scan(self) -> Tree:
        """All files. Raises SandboxLost, or ValueError if some cannot be saved."""
        _, found = self._ask(ANSWER_SECONDS, what="scan")
        try:
            fields = msgspec.json.decode(found, type=list[tuple[str, str, int, int, int, str, str]])
            entries = [Entry(*each[:6], bytes.fromhex(each[6])) for each in fields]
        except (msgspec.DecodeError, ValueError) as error:
            raise SandboxLost(f"malformed answer: {error}") from None
        return checked_tree(entries)

    def read(self, blocks: Sequence[tuple[str, int]]) -> Iterator[bytes]:
        """Contents of blocks, given by path and number. Raises SandboxLost, or ValueError for a missing file."""
        for begin in range(0, len(blocks), READ_BLOCKS):
            answer, content = self._ask(ANSWER_SECONDS, what="read", blocks=blocks[begin : begin + READ_BLOCKS])
            at = 0
            for size in answer["sizes"]:
                yield content[at : at + size]
                at += size

    def load(self, tree: Tree, blocks: Mapping[bytes, bytes]) -> None:
        """Replace all files by those of the tree. Raises SandboxLost, or ValueError if they do not fit."""
        content = [blocks[digest] for entry in tree.values() for digest in entry.digests]
        fields = [[*each.fields[:6], ""] for each in tree.values()]
        self._ask(ANSWER_SECONDS, b"".join(content), what="load", entries=fields)

    def close(self) -> None:
        """End the sandbox with all its processes and files; may be called twice, and while a request is under way."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self.lease.give_back()
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # process 1 of the sandbox ends with it
            self._process.wait()
        with self._lock:
            self._line.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    def _ask(self, wait_seconds: float, payload: bytes = b"", **header: Any) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            try:
                self._line.settimeout(wait_seconds)
                namespace_init.send(self._line, header, payload)
                answer, content = namespace_init.receive(self._line)
            except (EOFError, OSError, json.JSONDecodeError) as error:
                self._line.close()
                raise SandboxLost(f"the sandbox has ended ({type(error).__name__})") from None
        if "error" in answer:
            raise ValueError(str(answer["error"]))
        return answer, content


SHELL = ("/bin/bash", "-c") if Path("/bin/bash").exists() else ("/bin/sh", "-c")
PYTHON = (str(Path(PYTHON_FOLDER) / "bin" / "python3"), "-c")
