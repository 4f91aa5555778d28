"""The end of a child that an environment's code has forked and that comes back from that code.

Keeps true: of a process there is never a twin that goes on with its event loop, its jobs and its line to the worker.
"""

import sys
import traceback
from contextlib import suppress
from os import _exit, getpid  # as they are now: an environment may take them away


def end_if_forked(home: int, error: BaseException | None = None) -> None:
    """End this process if it is another than `home`, as a program ends by this error (0 without one)."""
    if getpid() == home:
        return
    status = 0
    with suppress(BaseException):
        if isinstance(error, SystemExit):
            if error.code is not None:
                status = error.code if isinstance(error.code, int) else 1
            if isinstance(error.code, str):
                sys.stderr.write(f"{error.code}\n")
        elif error is not None:
            status = 1
            traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    _exit(status & 0xFF)
