"""The keeper of a lending server: one small process that has the process beside for a child and looks at the guest.

Keeps true
- The process beside that is killed, or cannot be started, is started again, later each time (`backoff`); one that ends
  by itself is not.
- A file that says stop is seen within `LOOK_SECONDS`, whatever a broker, the process beside or serving is doing.
- An engine core whose guest hangs is ended, and its ranks with it, so that whoever runs the server starts it anew; the
  file then says stop: the next life does not lend until somebody has looked at it and removed it. Serving that is slow
  is left alone.
- It is the server's child and ends with it, after the process beside has said goodbye. An engine core that outlives its
  server, as when that one is killed, ends then too, with its ranks: it serves nobody, and holds its memory. One that
  was still loading ends itself (`vllm/attach.py`).
- It ends no stranger: not one who has got the id of a process that is gone.

It looks at one page of memory (`pulse`) and at one file, and imports nothing that could hang itself.
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

from workers.lender.backoff import Backoff
from workers.lender.hang import Hang
from workers.lender.identity import Identity, opened, state_of
from workers.lender.pulse import STACK_SIGNAL, Pulse

LOOK_SECONDS = 0.2
"""Between two looks."""

STACK_SECONDS = 1.0
"""That this may take."""

GOODBYE_SECONDS = 10.0
"""How long the process beside may take to hand its turns back once the server is gone."""

ORPHAN_SECONDS = 5.0
"""How long an engine core whose server is gone may take to leave."""


class Keeper:
    """`begin` forks the process beside and returns its id; it may raise OSError."""

    def __init__(self, pulse: Pulse, stop_file: Path, begin: Callable[[], int], *, hang_seconds: float) -> None:
        self._pulse = pulse
        self._stop_file = stop_file
        self._begin = begin
        self._hang = Hang(hang_seconds)
        self._server = os.getppid()
        self._core: tuple[Identity, int] | None = None
        """Which process the engine core is, and a descriptor of it."""
        self._ended = False
        """The engine core was."""
        self._beside: int | None = None
        self._again = Backoff()
        self._done = False
        """The process beside has ended by itself."""
        self._log = structlog.get_logger("keeper")

    def keep(self, stop: Event) -> None:
        """Until `stop` is set; then the process beside has said goodbye."""
        while not stop.is_set():
            self._pulse.look(stop=says_stop(self._stop_file))
            self._watch()
            self._tend()
            time.sleep(LOOK_SECONDS)
        self._part()
        if os.getppid() != self._server:
            self._end_orphan()

    def _tend(self) -> None:
        """Start the process beside, if it is to be there and is not."""
        now = time.monotonic()
        if self._beside is not None:
            code = _ended(self._beside)
            if code is None:
                return
            self._beside = None
            self._done = code == 0
            if not self._done:
                self._log.error("the process beside has ended", status=code, again_in=self._again.failed(now))
        if not self._done and now >= self._again.until:
            try:
                self._beside = self._begin()
            except OSError as error:  # as where no process is left
                wait = self._again.failed(now)
                self._log.error("the process beside cannot be started", reason=str(error), again_in=wait)

    def _find_core(self) -> None:
        core = self._pulse.core
        if self._core is None and core is not None and (descriptor := opened(core)) is not None:
            self._core = core, descriptor

    def _watch(self) -> None:
        self._find_core()
        if self._core is None or self._ended:
            return
        core, descriptor = self._core
        since = self._pulse.since
        halted = bool(since) and (is_halted(core) or any(map(is_stopped, self._pulse.ranks)))
        if self._hang.looked(since, halted=halted, now=time.monotonic()):
            self._end(core.pid, descriptor)

    def _end(self, pid: int, descriptor: int) -> None:
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
        _send(processes, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        _send(processes, signal.SIGKILL)

    def _open_ranks(self) -> list[int]:
        """Descriptors of those that are there: one that hangs does not see that the core is gone."""
        return [descriptor for rank in self._pulse.ranks if (descriptor := opened(rank)) is not None]

    def _part(self) -> None:
        if self._beside is None:
            return
        deadline = time.monotonic() + GOODBYE_SECONDS
        asked = False
        with suppress(ProcessLookupError):
            while _ended(self._beside) is None:  # looked at before each signal: until it was waited for, the id is its
                if not asked:
                    os.kill(self._beside, signal.SIGTERM)
                    asked = True
                elif time.monotonic() > deadline:
                    os.kill(self._beside, signal.SIGKILL)
                time.sleep(LOOK_SECONDS)

    def _end_orphan(self) -> None:
        self._find_core()  # it may have begun after the last look
        if self._core is None:
            return
        core, descriptor = self._core
        if _are_gone([descriptor], 0.0):
            return
        self._log.warning("the server is gone: its engine core is ended", core=core.pid)
        processes = [descriptor, *self._open_ranks()]
        _send([descriptor], signal.SIGTERM)  # which ends its ranks
        if not _are_gone(processes, ORPHAN_SECONDS):
            _send(processes, signal.SIGKILL)


def _are_gone(processes: Sequence[int], seconds: float) -> bool:
    """Whether all of them have ended, by their descriptors, within so long."""
    deadline = time.monotonic() + seconds
    for process in processes:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        if not ended.poll(1000 * max(0.0, deadline - time.monotonic())):
            return False
    return True


def _send(processes: Sequence[int], number: int) -> None:
    """To those that are there, by their descriptors."""
    for process in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)


def _ended(child: int) -> int | None:
    """How it has ended, as an exit status; None while it runs."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:  # who started the server ignores its children: what is forked from there hears of none
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if pid else None


def says_stop(file: Path) -> bool:
    """Whether the file is there, or nobody can tell."""
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def is_halted(process: Identity) -> bool:
    """Whether somebody has stopped the process, or it is gone."""
    return state_of(process) in ("", "Z", "X") or is_stopped(process)


def is_stopped(process: Identity) -> bool:
    """Whether somebody has stopped the process, as a debugger does."""
    return state_of(process) in ("T", "t")
