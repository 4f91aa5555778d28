"""Child processes that do not outlive whoever started them, how one is asked to stop, and what it is called."""

import ctypes
import os
import signal
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

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


def setter(event: Event) -> Callable[[], None]:
    """Sets the event, soon, and may be called by a handler of signals.

    `event.set` may not: it waits for a lock, and the thread that the handler broke in on may be the one that has it, as
    at the beginning and end of every `event.wait`.
    """
    asked: SimpleQueue[None] = SimpleQueue()  # whose `put` may be called amid itself

    def pass_on() -> None:
        asked.get()
        event.set()

    Thread(target=pass_on, name="asked", daemon=True).start()
    return lambda: asked.put(None)


def show_as(name: str) -> None:
    """What `top` and `ps -o comm` call this process; they show fifteen bytes of it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
