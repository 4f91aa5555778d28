"""Waiting for what nothing can be awaited of: another process's file, log or health."""

import time
from collections.abc import Callable

LOOK_SECONDS = 0.005
WAIT_SECONDS = 120.0
"""What has not come by then has been lost."""


def until(holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Look until it holds; the test fails when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s"
        time.sleep(LOOK_SECONDS)
