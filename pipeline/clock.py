"""Moments: a clock that never jumps, and how one is told to people.

Keeps true: whatever number somebody stamped on a message, it can be told.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime


def steady_clock() -> Callable[[], float]:
    """Unix seconds that never jump: the wall clock of this moment, carried on by the monotonic one."""
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


def format_utc(unix_seconds: float, pattern: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """The moment in UTC as `strftime` writes it; the number itself where no calendar has it."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime(pattern)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:.0f} s after 1970"
