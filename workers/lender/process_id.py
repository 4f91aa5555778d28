"""Which process is meant: by its id and by when it was started, since the kernel gives ids again.

Keeps true: what is opened or looked at by its identity is that process, or none; whoever has got its id since is not
taken for it.
"""

import os
from pathlib import Path
from typing import NamedTuple

PID_BITS = 22
"""The kernel gives no larger id."""


class ProcessId(NamedTuple):
    """Of one process of this machine."""

    pid: int
    started: int
    """Ticks of the kernel's clock after the machine's start."""

    @property
    def packed(self) -> int:
        """Both in eight bytes; above 0."""
        return self.started << PID_BITS | self.pid

    @classmethod
    def unpack(cls, packed: int) -> "ProcessId":
        return cls(packed & ((1 << PID_BITS) - 1), packed >> PID_BITS)


def process_id_of(pid: int) -> ProcessId | None:
    """Of whoever has this id now; None if nobody does."""
    return (found := _read_stat(pid)) and found[0]


def current_process_id() -> ProcessId:
    """That of the process that asks."""
    found = process_id_of(os.getpid())
    assert found is not None
    return found


def process_state(process: ProcessId) -> str:
    """As the kernel's letter; empty if it is there no more."""
    found = _read_stat(process.pid)
    return found[1] if found is not None and found[0] == process else ""


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor of it; None if it is there no more."""
    if process_id_of(process.pid) != process:
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process_id_of(process.pid) != process:  # until it was opened its id may have been given again
        os.close(descriptor)
        return None
    return descriptor


def _read_stat(pid: int) -> tuple[ProcessId, str] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # its name, which may hold anything, is before
    return ProcessId(pid, int(rest[18])), state
