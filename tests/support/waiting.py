"""Polling of states without events: the file, log or health of another process."""

import time
from collections.abc import Callable
from pathlib import Path

LOOK_SECONDS = 0.005
WAIT_SECONDS = 120.0
"""A state that is not reached within this time counts as lost."""


def until(holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Poll until the condition holds. Fail the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s"
        time.sleep(LOOK_SECONDS)


def has_ended(pid: int | str) -> bool:
    """Whether the process runs no more: the process is a zombie, or has been reaped.

    A process that is reaped between the open and the read of its file makes the read fail with ESRCH.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
