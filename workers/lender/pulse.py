"""What a lending server and its keeper know of each other: one page of memory, in a file that both map.

Keeps true
- Either side reads and writes words of eight bytes and never waits: a look costs less than a microsecond.
- A keeper that was there and is silent for `KEEPER_SECONDS` says stop: nobody else would end a guest that hangs.

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

from schemas.errors import UsageError
from workers.lender.identity import Identity, this_process

BYTES = 4096

STACK_SIGNAL = signal.SIGRTMIN + 6
"""Has the engine core, or a rank, write the stacks of its threads into the server's log; nobody else is known to use
it."""

KEEPER_SECONDS = 5.0
"""A keeper looks several times a second."""

CORE, SINCE, STOP, LOOKED, RANKS = 0, 8, 16, 24, 32
"""Words, 64 bytes apart: which process the engine core is; since when its guest has had the thread, 0 while it has not;
whether the guest must stop; when the keeper looked last, 0 while there is none; from the last on, one behind another,
the processes of serving's ranks, where they are not the engine core's, and 0."""


class Pulse:
    """Either side's view of the page."""

    def __init__(self, path: Path | None) -> None:
        """`path`: of the page, which must be there; None is a page of one's own: no keeper. Raises OSError."""
        if path is None:
            memory = mmap.mmap(-1, BYTES)
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), BYTES)
        self._words = memoryview(memory).cast("Q")
        self._own = 0
        """What an engine core has written of itself."""

    @classmethod
    def made(cls, path: Path) -> "Pulse":
        """Of an empty page, made at `path` for this user alone."""
        path.touch(0o600)
        os.truncate(path, BYTES)
        return cls(path)

    @classmethod
    def of_core(cls, path: str) -> "Pulse":
        """For the process of the engine core; an empty `path` is a page of its own. Raises UsageError."""
        try:
            pulse = cls(Path(path) if path else None)
        except OSError as error:
            raise UsageError(f"the keeper's page {path} cannot be mapped: {error}") from None
        if path:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        pulse._words[SINCE] = 0
        pulse._words[CORE] = pulse._own = this_process().word
        return pulse

    def leave(self) -> None:
        """The engine core ends as it was asked to, whoever has left and taken the file along."""
        if self._words[CORE] == self._own:  # of several, another may have come since
            self._words[CORE] = 0

    def has_ranks(self, processes: Sequence[Identity]) -> None:
        """Besides the engine core, serving computes in these. Raises UsageError."""
        if len(processes) > len(self._words) - RANKS - 1:
            raise UsageError(f"no guest was tried on {len(processes)} ranks")
        for place, process in enumerate(processes):
            self._words[RANKS + place] = process.word

    def take(self) -> None:
        """The guest has the thread from now on."""
        self._words[SINCE] = time.monotonic_ns()

    def give(self) -> None:
        """The guest has the thread no more."""
        self._words[SINCE] = 0

    @property
    def core(self) -> Identity | None:
        """The engine core's process; None before there is one, and once it has ended as it was asked to."""
        word = self._words[CORE]
        return Identity.of_word(word) if word else None

    @property
    def ranks(self) -> list[Identity]:
        """Serving's processes besides it, as far as there are any."""
        return [Identity.of_word(word) for word in takewhile(bool, self._words[RANKS:])]

    @property
    def since(self) -> int:
        """Since when the guest has had the thread; 0 while it has not."""
        return self._words[SINCE]

    def look(self, *, stop: bool) -> None:
        """The keeper was here, and says whether the guest must stop."""
        self._words[STOP] = stop
        self._words[LOOKED] = time.monotonic_ns()

    @property
    def stop(self) -> str:
        """Why the guest must stop; empty if it need not."""
        if self._words[STOP]:
            return "a file here says stop"
        looked = self._words[LOOKED]
        if looked and time.monotonic_ns() - looked > KEEPER_SECONDS * 1e9:
            return "its keeper is silent"
        return ""
