"""A clock that never jumps, and the text of a time.

Keeps true: any number that is stamped on a message can be formatted.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime


def steady_clock() -> Callable[[], float]:
    """Return a clock in Unix seconds that never jumps: the present wall clock, continued by the monotonic clock."""
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


def format_utc(unix_seconds: float, pattern: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Format the time in UTC with `strftime`; a number outside the calendar is printed as seconds."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime(pattern)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:.0f} s after 1970"
