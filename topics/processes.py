"""Child processes that do not outlive whoever started them, how one is asked to stop, and what it is called."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h

REAP_SECONDS = 10.0
"""A process that has not gone so long after SIGKILL waits for a device or is not ours: nobody waits for it."""

POLL_SECONDS = 0.005
"""Between two looks at processes that end."""


def die_with_parent(parent: int, signal_number: signal.Signals) -> Callable[[], None]:
    """What a child runs first (`preexec_fn`): the kernel sends it the signal `signal_number` the moment its parent is
    gone.

    Safe between fork and exec: the library is loaded before the fork, so the child makes two system calls and no more.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os._exit(1)  # the parent went before the kernel was asked

    return ask_kernel


def signal_safe_setter(event: Event) -> Callable[[], None]:
    """Sets the event, soon, and may be called by a handler of signals.

    `event.set` may not: it waits for a lock, and the thread that the handler broke in on may be the one that has it, as
    at the beginning and end of every `event.wait`.
    """
    requested: SimpleQueue[None] = SimpleQueue()  # whose `put` may be called amid itself

    def pass_on() -> None:
        requested.get()
        event.set()

    Thread(target=pass_on, name="asked", daemon=True).start()
    return lambda: requested.put(None)


def set_process_name(name: str) -> None:
    """What `top` and `ps -o comm` call this process; they show fifteen bytes of it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """From now on a descendant that loses its parent becomes a child of this process, whatever session it is in."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(*, grace_seconds: float = 0.0, keep: Collection[int] = ()) -> None:
    """End all children `keep` these, and after `adopt_orphans` every descendant of theirs, and reap them.

    They get SIGTERM first where there is a grace, and SIGKILL when it is over.
    """
    kill_at = time.monotonic() + grace_seconds
    has_asked: set[int] = set()
    while remaining := [pid for pid in _children() if pid not in keep]:
        now = time.monotonic()
        if now > kill_at + REAP_SECONDS:
            return
        for pid in remaining:
            with suppress(ProcessLookupError, PermissionError):
                if now >= kill_at:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in has_asked:
                    os.kill(pid, signal.SIGTERM)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        has_asked.update(remaining)
        time.sleep(POLL_SECONDS)


def _children() -> list[int]:
    """Of this process, those among them that have ended and are not reaped."""
    own, found = str(os.getpid()), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            if stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1] == own:
                found.append(int(stat.parent.name))
    return found
