"""The processes of a run on this machine: started, logged, restarted after crashes, and ended together.

Keeps true
- A role that crashes is restarted, with longer pauses each time. A role that crashes `MOST_QUICK_CRASHES` times in a
  row soon after its start, or that refuses its input (exit status 2), ends the run with one sentence and the last lines
  of its log.
- When the supervisor ends, its processes end: the kernel kills them if the supervisor cannot.
"""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.schemas.errors import RoseError, UsageError
from rose.topics.backoff import Backoff

QUICK_SECONDS = 120.0
"""A crash is quick if the process ran for less. An engine takes ten seconds to start, a minute on a busy machine."""

MOST_QUICK_CRASHES = 5
"""Number of quick crashes in a row that ends the run."""

FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first restart after a crash; doubled with every quick crash in a row."""

STOP_SECONDS = 20.0
"""How long a process may take to end after SIGTERM."""

LAST_LINES = 6
"""Lines of a log that are shown when its role fails."""


class RoleFailed(RoseError):
    """A role cannot be kept running."""


def restart_backoff() -> Backoff:
    """The pauses before the restarts of a role: crashes after 3 s, 2 s, 130 s -> pauses of 0.5 s, 1 s, 0.5 s."""
    return Backoff(FIRST_PAUSE_SECONDS, math.inf, reset_seconds=QUICK_SECONDS)


@dataclass(frozen=True, slots=True)
class Role:
    """One process of a run."""

    name: str
    """Name of the role, its log and its process."""
    arguments: tuple[str, ...]
    """Arguments of the `rose` command."""
    ends_run_with: Path | None = None
    """File that the role writes when its work is done. An exit with status 0 after a new version of the file ends the
    run; without a new version the role was asked to stop, and is restarted as after a crash.
    """
    niceness: int = 0
    """Added to the nice value of the process, 0 to 19."""
    leaves_first: bool = False
    """The role uses the other roles until its end: they are asked to stop after it has ended."""


class _Supervised:
    """One role and its present process."""

    def __init__(self, role: Role, log: Path) -> None:
        self.role = role
        self.log = log
        self.process: ForkedProcess | None = None
        self.restarts = restart_backoff()
        self.started_at = 0.0
        self._log_size_before: tuple[int, int] | None = None

    def start(self, fork_server: ForkServer, now: float) -> None:
        self._log_size_before = self._log_size()
        role = self.role
        self.process = fork_server.start(role.arguments, name=role.name, log=self.log, niceness=role.niceness)
        self.started_at = now

    @property
    def finished_work(self) -> bool:
        """Whether a process that exited with status 0 has finished its work."""
        return self._log_size() not in (None, self._log_size_before)

    def _log_size(self) -> tuple[int, int] | None:
        try:
            found = self.role.ends_run_with and self.role.ends_run_with.stat()
        except FileNotFoundError:
            return None
        return (found.st_ino, found.st_mtime_ns) if found else None

    def last_lines(self) -> str:
        return "\n".join(f"    {line}" for line in self._lines()[-LAST_LINES:])

    def last_line(self) -> str:
        return (self._lines() or ["nothing"])[-1].strip()

    def _lines(self) -> list[str]:
        return [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


class Supervisor:
    """Keeps the roles of a run running. Call it from the thread that opened the fork server."""

    def __init__(self, roles: Sequence[Role], log_folder: Path, fork_server: ForkServer) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._supervised = [_Supervised(role, log_folder / f"{role.name}.log") for role in roles]
        self._fork_server = fork_server
        self.finished = False
        """Whether the role that ends the run has finished its work."""

    def start(self) -> None:
        """Start all processes."""
        for each in self._supervised:
            each.start(self._fork_server, monotonic())

    def tick(self) -> list[str]:
        """Check the processes, restart those that are due, and return a line for each event. Call it often.

        Raises RoleFailed if a role cannot be kept running.
        """
        happened = []
        for each in self._supervised:
            if each.process is None:
                if monotonic() >= each.restarts.until:
                    each.start(self._fork_server, monotonic())
                    happened.append(f"{each.role.name} starts again")
            elif (status := each.process.poll()) is not None:
                each.process = None
                if status == 0 and each.finished_work:
                    self.finished = True
                else:
                    happened.append(self._on_crash(each, status))
        return happened

    def stop(self) -> None:
        """Ask every process to stop, and kill those that do not stop within STOP_SECONDS.

        A role that was about to finish its work may finish the work now.
        """
        for first in (True, False):
            stopping = [each for each in self._supervised if each.process and each.role.leaves_first is first]
            self._end([each.process for each in stopping if each.process])
            self.finished = self.finished or any(each.finished_work for each in stopping)

    def _end(self, running: Sequence[ForkedProcess]) -> None:
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = monotonic() + STOP_SECONDS
        for process in running:
            if process.wait(max(0.0, deadline - monotonic())) is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    @property
    def process_ids(self) -> dict[str, int]:
        """The process ids of the running roles, by name. Waits until each process runs."""
        return {each.role.name: each.process.pid for each in self._supervised if each.process is not None}

    def _on_crash(self, each: _Supervised, status: int) -> str:
        ended = f"was killed by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        pause = each.restarts.failed(monotonic())
        if status == UsageError.exit_status or each.restarts.failures >= MOST_QUICK_CRASHES:
            often = "" if status == UsageError.exit_status else f", {each.restarts.failures} times in a row"
            raise RoleFailed(f"{each.role.name} {ended}{often}; the end of {each.log}:\n{each.last_lines()}")
        return (
            f"{each.role.name} {ended} and starts again in {pause:.1f} s; its last line of output: {each.last_line()}"
        )
