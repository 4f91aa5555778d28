"""What a lending server and its watchdog know of each other: one page of memory, in a file that both map.

Keeps true
- Either side reads and writes words of eight bytes and never waits: a look costs less than a microsecond.
- A watchdog that was there and is silent for `WATCHDOG_SILENT_SECONDS` says stop: nobody else would end a guest that
  hangs.

All times are nanoseconds of this machine's monotonic clock.
"""

import faulthandler
import mmap
import os
import signal
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from rose.schemas.errors import UsageError
from rose.workers.lender.process_id import ProcessId, current_process_id

PAGE_BYTES = 4096

STACK_SIGNAL = signal.SIGRTMIN + 6
"""Has the engine core, or a rank, write the stacks of its threads into the server's log; nobody else is known to use
it."""

WATCHDOG_SILENT_SECONDS = 5.0
"""A watchdog looks several times a second."""

CORE, SINCE, STOP, POLLED, RANKS = 0, 8, 16, 24, 32
"""Words, 64 bytes apart: which process the engine core is; since when its guest has had the thread, 0 while it has not;
whether the guest must stop; when the watchdog looked last, 0 while there is none; from the last on, one behind another,
the processes of serving's ranks, where they are not the engine core's, and 0."""


class StatusPage:
    """Either side's view of the page."""

    def __init__(self, path: Path | None) -> None:
        """`path`: of the page, which must be there; None is a page of one's own: no watchdog. Raises OSError."""
        if path is None:
            memory = mmap.mmap(-1, PAGE_BYTES)
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._words = memoryview(memory).cast("Q")
        self._own = 0
        """What an engine core has written of itself."""

    @classmethod
    def create(cls, path: Path) -> "StatusPage":
        """Of an empty page, made at `path` for this user alone."""
        path.touch(0o600)
        os.truncate(path, PAGE_BYTES)
        return cls(path)

    @classmethod
    def for_core(cls, path: str) -> "StatusPage":
        """For the process of the engine core; an empty `path` is a page of its own. Raises UsageError."""
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
        """The engine core ends as it was asked to, whoever has left and taken the file along."""
        if self._words[CORE] == self._own:  # of several, another may have come since
            self._words[CORE] = 0

    def set_ranks(self, processes: Sequence[ProcessId]) -> None:
        """Besides the engine core, serving computes in these. Raises UsageError."""
        if len(processes) > len(self._words) - RANKS - 1:
            raise UsageError(f"no guest was tried on {len(processes)} ranks")
        for index, process in enumerate(processes):
            self._words[RANKS + index] = process.packed

    def guest_entered(self) -> None:
        """The guest has the thread from now on."""
        self._words[SINCE] = time.monotonic_ns()

    def guest_left(self) -> None:
        """The guest has the thread no more."""
        self._words[SINCE] = 0

    @property
    def core(self) -> ProcessId | None:
        """The engine core's process; None before there is one, and once it has ended as it was asked to."""
        word = self._words[CORE]
        return ProcessId.unpack(word) if word else None

    @property
    def ranks(self) -> list[ProcessId]:
        """Serving's processes besides it, as far as there are any."""
        return [ProcessId.unpack(word) for word in takewhile(bool, self._words[RANKS:])]

    @property
    def guest_since(self) -> int:
        """Since when the guest has had the thread; 0 while it has not."""
        return self._words[SINCE]

    def on_poll(self, *, stop: bool) -> None:
        """The watchdog was here, and says whether the guest must stop."""
        self._words[STOP] = stop
        self._words[POLLED] = time.monotonic_ns()

    @property
    def stop_reason(self) -> str:
        """Why the guest must stop; empty if it need not."""
        if self._words[STOP]:
            return "a file here says stop"
        polled = self._words[POLLED]
        if polled and time.monotonic_ns() - polled > WATCHDOG_SILENT_SECONDS * 1e9:
            return "its watchdog is silent"
        return ""
