"""The watchdog of a lending server: a small process that starts the sidecar and detects a guest that hangs.

Keeps true
- A sidecar that is killed or fails, or cannot be started, is started again with increasing waits (`backoff`). A sidecar
  that exits with 0 is not started again.
- The stop file is seen within `POLL_SECONDS`, whatever the broker, the sidecar or serving is doing.
- An engine core whose guest hangs is killed with its ranks, so that the server ends and its supervisor restarts it. The
  watchdog then writes the stop file: the restarted server does not lend until an operator removes the file. Slow
  serving is not killed.
- The watchdog is a child of the server, and ends with the server after the sidecar has ended. An engine core that
  outlives its server, as after a kill of the server, is ended with its ranks: it serves no request and holds its
  memory. An engine core that was still loading ends itself (`vllm/attach.py`).
- The watchdog signals no other process: a process that has reused the id of an ended one is left alone.

The watchdog reads one page of memory (`status_page`) and one file, and imports nothing that could itself hang.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event

import structlog

from rose.topics.backoff import Backoff
from rose.topics.processes import have_exited, send_signal
from rose.workers.lender.status_page import STACK_SIGNAL, ProcessId, StatusPage, open_pidfd, process_state

MAX_GAP_SECONDS = 1.0


class HangDetector:
    """Measures how long the guest has had the serving thread without a break.

    The time between two polls counts for at most MAX_GAP_SECONDS, because the watchdog may have been paused.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """A guest that has the thread for so long hangs."""
        self._since = 0
        self._at = 0.0
        self._held = 0.0
        """Observed seconds for which the guest has had the thread."""

    def on_poll(self, since: int, *, halted: bool, now: float) -> bool:
        """Record the state of the guest, and return whether the guest hangs.

        `since`: when the guest got the thread (any unit), 0 if it does not have the thread. `halted`: whether a process
        of the engine core is stopped; this time does not count. `now`: monotonic seconds.
        """
        if since != self._since:
            self._since, self._held = since, 0.0
        elif since and not halted:
            self._held += min(now - self._at, MAX_GAP_SECONDS)
        self._at = now
        return bool(since) and self._held >= self.seconds


POLL_SECONDS = 0.2
"""Seconds between two polls of page, stop file and sidecar."""

STACK_SECONDS = 1.0
"""Time for the engine core and its ranks to log their stacks before they are killed."""

SIDECAR_EXIT_SECONDS = 10.0
"""How long the sidecar may take to return its turns when it is asked to stop."""

ORPHAN_SECONDS = 5.0
"""How long an engine core whose server is gone may take to exit after SIGTERM."""


class Watchdog:
    """Supervises the sidecar and the guest of one server. `start_sidecar` forks the sidecar and returns its process id.

    `start_sidecar` may raise OSError.
    """

    def __init__(
        self, page: StatusPage, stop_file: Path, start_sidecar: Callable[[], int], *, hang_seconds: float
    ) -> None:
        self._page = page
        self._stop_file = stop_file
        self._start_sidecar = start_sidecar
        self._hang = HangDetector(hang_seconds)
        self._server = os.getppid()
        self._core: tuple[ProcessId, int] | None = None
        """Identity and pidfd of the engine core."""
        self._ended = False
        """Whether the engine core was killed."""
        self._sidecar: int | None = None
        self._backoff = Backoff()
        self._done = False
        """Whether the sidecar has exited with 0."""
        self._log = structlog.get_logger("watchdog")

    def run(self, stop: Event) -> None:
        """Supervise until `stop` is set, then stop the sidecar, and the engine core if its server is gone."""
        while not stop.is_set():
            self._page.on_poll(stop=stop_file_exists(self._stop_file))
            self._check_guest()
            self._supervise_sidecar()
            time.sleep(POLL_SECONDS)
        self._stop_sidecar()
        if os.getppid() != self._server:
            self._kill_orphan()

    def _supervise_sidecar(self) -> None:
        """Start the sidecar if it should run and does not."""
        now = time.monotonic()
        if self._sidecar is not None:
            code = _exit_status(self._sidecar)
            if code is None:
                return
            self._sidecar = None
            self._done = code == 0
            if not self._done:
                self._log.error("sidecar_exited", status=code, retry_seconds=self._backoff.failed(now))
        if not self._done and now >= self._backoff.until:
            try:
                self._sidecar = self._start_sidecar()
            except OSError as error:  # such as at the limit of processes
                wait = self._backoff.failed(now)
                self._log.error("sidecar_not_started", reason=str(error), retry_seconds=wait)

    def _find_core(self) -> None:
        core = self._page.core
        if self._core is None and core is not None and (descriptor := open_pidfd(core)) is not None:
            self._core = core, descriptor

    def _check_guest(self) -> None:
        self._find_core()
        if self._core is None or self._ended:
            return
        core, descriptor = self._core
        since = self._page.guest_since
        halted = bool(since) and (is_halted(core) or any(map(is_stopped, self._page.ranks)))
        if self._hang.on_poll(since, halted=halted, now=time.monotonic()):
            self._kill_core(core.pid, descriptor)

    def _kill_core(self, pid: int, descriptor: int) -> None:
        """Write the stop file, have the processes log their stacks, then kill the engine core and its ranks."""
        reason = f"a guest has had the thread of engine core {pid} for {self._hang.seconds:.0f} s; it is ended"
        self._log.error("guest_hung", core=pid, stop_file=str(self._stop_file), reason=reason)
        try:
            self._stop_file.parent.mkdir(parents=True, exist_ok=True)
            self._stop_file.write_text(f"{reason}\n", encoding="utf-8")
        except OSError as error:
            self._log.error("stop_file_not_written", reason=str(error))
        self._ended = True
        processes = [descriptor, *self._open_ranks()]
        send_signal(processes, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        send_signal(processes, signal.SIGKILL)

    def _open_ranks(self) -> list[int]:
        """Return pidfds of the ranks that exist: a rank that hangs does not notice that the engine core is gone."""
        return [descriptor for rank in self._page.ranks if (descriptor := open_pidfd(rank)) is not None]

    def _stop_sidecar(self) -> None:
        if self._sidecar is None:
            return
        deadline = time.monotonic() + SIDECAR_EXIT_SECONDS
        terminated = False
        with suppress(ProcessLookupError):
            while (
                _exit_status(self._sidecar) is None
            ):  # checked before each signal: the id is not reused before the sidecar was waited for
                if not terminated:
                    os.kill(self._sidecar, signal.SIGTERM)
                    terminated = True
                elif time.monotonic() > deadline:
                    os.kill(self._sidecar, signal.SIGKILL)
                time.sleep(POLL_SECONDS)

    def _kill_orphan(self) -> None:
        self._find_core()  # the engine core may have started after the last poll
        if self._core is None:
            return
        core, descriptor = self._core
        if have_exited([descriptor], 0.0):
            return
        self._log.warning("engine_core_orphaned", core=core.pid)
        processes = [descriptor, *self._open_ranks()]
        send_signal([descriptor], signal.SIGTERM)  # ends its ranks too
        if not have_exited(processes, ORPHAN_SECONDS):
            send_signal(processes, signal.SIGKILL)


def _exit_status(child: int) -> int | None:
    """Return the child's exit status, negative for a signal; None while the child runs."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:  # an ignored SIGCHLD, inherited from the server's parent, leaves no status to read
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if pid else None


def stop_file_exists(file: Path) -> bool:
    """Whether the file exists, or its existence cannot be checked."""
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def is_halted(process: ProcessId) -> bool:
    """Whether the process is stopped or gone."""
    return process_state(process) in (None, "Z", "X") or is_stopped(process)


def is_stopped(process: ProcessId) -> bool:
    """Whether the process is stopped by a signal or a debugger."""
    return process_state(process) in ("T", "t")
