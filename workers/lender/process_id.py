"""Identity of a process: its id and its start time, because the kernel reuses ids.

Keeps true: a lookup by identity finds this process or no process; a later process with the same id is not mistaken for
it.
"""

import os
from pathlib import Path
from typing import NamedTuple

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
