"""The status page: one page of memory that the watchdog and the engine core of a lending server share.

Keeps true
- Both sides map the page, read and write integers of 8 bytes, and never wait: an access takes less than a microsecond.
- If a watchdog has polled and is then silent for `WATCHDOG_SILENT_SECONDS`, the guest must stop: no other process would
  end a guest that hangs.
- Processes are identified by id and start time, because the kernel reuses ids.
- Every vLLM process of a lending server imports this module, which therefore loads the standard library only.
"""

import faulthandler
import mmap
import os
import signal
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rose.schemas.errors import UsageError

PID_BITS = 22
"""Bits of the largest process id that Linux assigns."""


class ProcessId(NamedTuple):
    """Identity of one process of this machine."""

    pid: int
    started: int
    """Start time in clock ticks since the boot of the machine."""

    @property
    def packed(self) -> int:
        """Both fields in one integer of 8 bytes, which is above 0."""
        return self.started << PID_BITS | self.pid

    @classmethod
    def unpack(cls, packed: int) -> "ProcessId":
        """Return the process id of a number that `packed` returned."""
        return cls(packed & ((1 << PID_BITS) - 1), packed >> PID_BITS)


def process_id_of(pid: int) -> ProcessId | None:
    """Return the identity of the process that has this id now; None if no process has it."""
    return (found := _read_stat(pid)) and found[0]


def current_process_id() -> ProcessId:
    """Return the identity of the calling process."""
    found = process_id_of(os.getpid())
    assert found is not None
    return found


def process_state(process: ProcessId) -> str | None:
    """Return the kernel's letter for the process's state, such as "R", "T" or "Z"; None if the process is gone."""
    found = _read_stat(process.pid)
    return found[1] if found is not None and found[0] == process else None


def open_pidfd(process: ProcessId) -> int | None:
    """Return a new pidfd of the process; None if the process is gone."""
    if process_id_of(process.pid) != process:
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process_id_of(process.pid) != process:  # the id may have been reused before the pidfd was opened
        os.close(descriptor)
        return None
    return descriptor


def _read_stat(pid: int) -> tuple[ProcessId, str] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold any character
    return ProcessId(pid, int(rest[18])), state


PAGE_BYTES = 4096

STACK_SIGNAL = signal.SIGRTMIN + 6
"""Makes the engine core, or a rank, write the stacks of its threads into the server's log. No other use of this signal
is known."""

WATCHDOG_SILENT_SECONDS = 5.0
"""A watchdog that has not polled for so long is silent; a watchdog polls several times a second."""

CORE, SINCE, STOP, POLLED, RANKS = 0, 8, 16, 24, 32
"""Indices of 8-byte integers on the page, 64 bytes apart. Times are nanoseconds of this machine's monotonic clock.

CORE: identity of the engine core's process. SINCE: when its guest got the thread, 0 while it does not have the thread.
STOP: whether the guest must stop. POLLED: the latest poll of the watchdog, 0 without a watchdog. RANKS: from here on,
the processes of serving's ranks other than the engine core, ended by 0."""


class StatusPage:
    """The status page, as either side uses it."""

    def __init__(self, path: Path | None) -> None:
        """Map the existing file `path`; None makes a private page, for a server without a watchdog. Raises OSError."""
        if path is None:
            memory = mmap.mmap(-1, PAGE_BYTES)
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._words = memoryview(memory).cast("Q")
        self._own = 0
        """The value that this engine core has written to CORE."""

    @classmethod
    def create(cls, path: Path) -> "StatusPage":
        """Make an empty page at `path`, with access for this user only."""
        path.touch(0o600)
        os.truncate(path, PAGE_BYTES)
        return cls(path)

    @classmethod
    def for_core(cls, path: str) -> "StatusPage":
        """Open the page in the engine core's process and write this process as CORE. Raises UsageError.

        An empty `path` makes a private page.
        """
        try:
            page = cls(Path(path) if path else None)
        except OSError as error:
            raise UsageError(f"the watchdog's page {path} cannot be mapped: {error}") from None
        if path:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        page._words[SINCE] = 0
        page._words[CORE] = page._own = current_process_id().packed
        return page

    def clear_core(self) -> None:
        """Remove the engine core from the page, because it ends as requested. The file may be gone by then."""
        if self._words[CORE] == self._own:  # another engine core may have started since
            self._words[CORE] = 0

    def set_ranks(self, processes: Sequence[ProcessId]) -> None:
        """Write the processes of serving's ranks besides the engine core. Raises UsageError if they do not fit."""
        if len(processes) > len(self._words) - RANKS - 1:
            raise UsageError(f"no guest was tried on {len(processes)} ranks")
        for index, process in enumerate(processes):
            self._words[RANKS + index] = process.packed

    def guest_entered(self) -> None:
        """Record that the guest has the thread from now on."""
        self._words[SINCE] = time.monotonic_ns()

    def guest_left(self) -> None:
        """Record that the guest no longer has the thread."""
        self._words[SINCE] = 0

    @property
    def core(self) -> ProcessId | None:
        """The engine core's process; None before an engine core has started, and after it has ended as requested."""
        word = self._words[CORE]
        return ProcessId.unpack(word) if word else None

    @property
    def ranks(self) -> list[ProcessId]:
        """The processes of serving's ranks besides the engine core."""
        return [ProcessId.unpack(word) for word in takewhile(bool, self._words[RANKS:])]

    @property
    def guest_since(self) -> int:
        """When the guest got the thread, nanoseconds; 0 while the guest does not have the thread."""
        return self._words[SINCE]

    def on_poll(self, *, stop: bool) -> None:
        """Record a poll of the watchdog, and whether the guest must stop."""
        self._words[STOP] = stop
        self._words[POLLED] = time.monotonic_ns()

    @property
    def stop_reason(self) -> str | None:
        """Why the guest must stop; None if it may go on."""
        if self._words[STOP]:
            return "a file here says stop"
        polled = self._words[POLLED]
        if polled and time.monotonic_ns() - polled > WATCHDOG_SILENT_SECONDS * 1e9:
            return "its watchdog is silent"
        return None
