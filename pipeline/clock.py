"""A clock that never jumps, a log of a wall clock that does, and the text of a time.

Keeps true: any number that is stamped on a message can be formatted.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Event

import structlog

CLOCK_CHECK_SECONDS = 1.0
"""Time between two comparisons of the clocks."""

SET_BACK_SECONDS = 1.0
"""Steps of the wall clock by more are logged. Slewing changes both clocks alike."""


def steady_clock() -> Callable[[], float]:
    """Return a clock in Unix seconds that never jumps: the present wall clock, continued by the monotonic clock."""
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


def log_clock_set_back(stop: Event) -> None:
    """Log each step back of the wall clock until `stop` is set: Kafka clients stand still for as long as the step."""
    ahead = time.time() - time.monotonic()
    while not stop.wait(CLOCK_CHECK_SECONDS):
        before, ahead = ahead, time.time() - time.monotonic()
        if before - ahead > SET_BACK_SECONDS:
            structlog.get_logger("bus").warning("clock_set_back", seconds=round(before - ahead, 1))


def format_utc(unix_seconds: float, pattern: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Format the time in UTC with `strftime`; a number outside the calendar is printed as seconds."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime(pattern)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:.0f} s after 1970"
