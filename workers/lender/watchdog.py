"""The watchdog of a lending server: one small process that has the sidecar for a child and looks at the guest.

Keeps true
- The sidecar that is killed, or cannot be started, is started again, later each time (`backoff`); one that ends
  by itself is not.
- A file that says stop is seen within `POLL_SECONDS`, whatever a broker, the sidecar or serving is doing.
- An engine core whose guest hangs is ended, and its ranks with it, so that whoever runs the server starts it anew; the
  file then says stop: the next life does not lend until somebody has looked at it and removed it. Serving that is slow
  is left alone.
- It is the server's child and ends with it, after the sidecar has said goodbye. An engine core that outlives its
  server, as when that one is killed, ends then too, with its ranks: it serves nobody, and holds its memory. One that
  was still loading ends itself (`vllm/attach.py`).
- It ends no stranger: not one who has got the id of a process that is gone.

It looks at one page of memory (`watchdog_page`) and at one file, and imports nothing that could hang itself.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event

import structlog

from rose.workers.lender.backoff import Backoff
from rose.workers.lender.process_id import ProcessId, open_pidfd, process_state
from rose.workers.lender.watchdog_page import STACK_SIGNAL, StatusPage

MAX_GAP_SECONDS = 1.0


class HangDetector:
    """How long the present hold of the thread has lasted, as far as it was seen."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The bound."""
        self._since = 0
        self._at = 0.0
        self._held = 0.0
        """Seconds of this hold that were seen."""

    def on_poll(self, since: int, *, halted: bool, now: float) -> bool:
        """The guest has had the thread since `since`, 0 for not at all; whether it hangs."""
        if since != self._since:
            self._since, self._held = since, 0.0
        elif since and not halted:
            self._held += min(now - self._at, MAX_GAP_SECONDS)
        self._at = now
        return bool(since) and self._held >= self.seconds


POLL_SECONDS = 0.2
"""Between two looks."""

STACK_SECONDS = 1.0
"""That this may take."""

SIDECAR_EXIT_SECONDS = 10.0
"""How long the sidecar may take to hand its turns back once the server is gone."""

ORPHAN_SECONDS = 5.0
"""How long an engine core whose server is gone may take to leave."""


class Watchdog:
    """`start_sidecar` forks the sidecar and returns its id; it may raise OSError."""

    def __init__(
        self, page: StatusPage, stop_file: Path, start_sidecar: Callable[[], int], *, hang_seconds: float
    ) -> None:
        self._page = page
        self._stop_file = stop_file
        self._start_sidecar = start_sidecar
        self._hang = HangDetector(hang_seconds)
        self._server = os.getppid()
        self._core: tuple[ProcessId, int] | None = None
        """Which process the engine core is, and a descriptor of it."""
        self._ended = False
        """The engine core was."""
        self._sidecar: int | None = None
        self._backoff = Backoff()
        self._done = False
        """The sidecar has ended by itself."""
        self._log = structlog.get_logger("watchdog")

    def run(self, stop: Event) -> None:
        """Until `stop` is set; then the sidecar has said goodbye."""
        while not stop.is_set():
            self._page.on_poll(stop=stop_file_exists(self._stop_file))
            self._check_guest()
            self._supervise_sidecar()
            time.sleep(POLL_SECONDS)
        self._stop_sidecar()
        if os.getppid() != self._server:
            self._kill_orphan()

    def _supervise_sidecar(self) -> None:
        """Start the sidecar, if it is to be there and is not."""
        now = time.monotonic()
        if self._sidecar is not None:
            code = _exit_status(self._sidecar)
            if code is None:
                return
            self._sidecar = None
            self._done = code == 0
            if not self._done:
                self._log.error("the sidecar has ended", status=code, again_in=self._backoff.failed(now))
        if not self._done and now >= self._backoff.until:
            try:
                self._sidecar = self._start_sidecar()
            except OSError as error:  # as where no process is left
                wait = self._backoff.failed(now)
                self._log.error("the sidecar cannot be started", reason=str(error), again_in=wait)

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
        """What an operator would do: have it not happen again, keep the evidence, and let the server be restarted."""
        reason = f"a guest has had the thread of engine core {pid} for {self._hang.seconds:.0f} s; it is ended"
        self._log.error(reason, stacks="in the server's log", stop_file=str(self._stop_file))
        try:
            self._stop_file.parent.mkdir(parents=True, exist_ok=True)
            self._stop_file.write_text(f"{reason}\n", encoding="utf-8")
        except OSError as error:
            self._log.error("the next life may lend: the stop file cannot be written", reason=str(error))
        self._ended = True
        processes = [descriptor, *self._open_ranks()]
        _send_signal(processes, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        _send_signal(processes, signal.SIGKILL)

    def _open_ranks(self) -> list[int]:
        """Descriptors of those that are there: one that hangs does not see that the core is gone."""
        return [descriptor for rank in self._page.ranks if (descriptor := open_pidfd(rank)) is not None]

    def _stop_sidecar(self) -> None:
        if self._sidecar is None:
            return
        deadline = time.monotonic() + SIDECAR_EXIT_SECONDS
        terminated = False
        with suppress(ProcessLookupError):
            while (
                _exit_status(self._sidecar) is None
            ):  # looked at before each signal: until it was waited for, the id is its
                if not terminated:
                    os.kill(self._sidecar, signal.SIGTERM)
                    terminated = True
                elif time.monotonic() > deadline:
                    os.kill(self._sidecar, signal.SIGKILL)
                time.sleep(POLL_SECONDS)

    def _kill_orphan(self) -> None:
        self._find_core()  # it may have begun after the last look
        if self._core is None:
            return
        core, descriptor = self._core
        if _have_exited([descriptor], 0.0):
            return
        self._log.warning("the server is gone: its engine core is ended", core=core.pid)
        processes = [descriptor, *self._open_ranks()]
        _send_signal([descriptor], signal.SIGTERM)  # which ends its ranks
        if not _have_exited(processes, ORPHAN_SECONDS):
            _send_signal(processes, signal.SIGKILL)


def _have_exited(processes: Sequence[int], seconds: float) -> bool:
    """Whether all of them have ended, by their descriptors, within so long."""
    deadline = time.monotonic() + seconds
    for process in processes:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        if not ended.poll(1000 * max(0.0, deadline - time.monotonic())):
            return False
    return True


def _send_signal(processes: Sequence[int], number: int) -> None:
    """To those that are there, by their descriptors."""
    for process in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)


def _exit_status(child: int) -> int | None:
    """How it has ended, as an exit status; None while it runs."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:  # who started the server ignores its children: what is forked from there hears of none
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if pid else None


def stop_file_exists(file: Path) -> bool:
    """Whether the file is there, or nobody can tell."""
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def is_halted(process: ProcessId) -> bool:
    """Whether somebody has stopped the process, or it is gone."""
    return process_state(process) in ("", "Z", "X") or is_stopped(process)


def is_stopped(process: ProcessId) -> bool:
    """Whether somebody has stopped the process, as a debugger does."""
    return process_state(process) in ("T", "t")
