"""Child processes that do not outlive whoever started them, and what a process is called."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


def end_with(parent: int, how: signal.Signals) -> Callable[[], None]:
    """What a child runs first (`preexec_fn`): the kernel sends it the signal `how` the moment its parent is gone.

    Safe between fork and exec: the library is loaded before the fork, so the child makes two system calls and no more.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, how)
        if os.getppid() != parent:
            os._exit(1)  # the parent went before the kernel was asked

    return ask_kernel


def show_as(name: str) -> None:
    """What `top` and `ps -o comm` call this process; they show fifteen bytes of it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
