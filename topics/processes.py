"""Threads, child processes and their output streams: starts, names, priorities, stop requests, the end of children."""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from rose.schemas.errors import ThreadRefused

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h

REAP_SECONDS = 10.0
"""How long to wait for a process after SIGKILL. A process that takes longer waits for a device or belongs to another
user."""

POLL_SECONDS = 0.005
"""Time between two checks of ending processes."""

AUTOGROUP_SECONDS, AUTOGROUP_TRIES = 0.1, 50
"""Time between two tries to set the nice value of a session, and the number of tries."""


def start_thread(target: Callable[..., object], *given: object, name: str) -> Thread:
    """Start a daemon thread that calls `target(*given)`. Raises ThreadRefused where the system starts none."""
    thread = Thread(target=target, args=given, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadRefused from error
    return thread


def die_with_parent(parent: int, signal_number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` for a child to which the kernel shall send `signal_number` when the parent ends.

    `parent`: process id of the caller. Safe between fork and exec: the library is loaded before the fork, so the child
    makes only two system calls.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before the prctl call

    return ask_kernel


def signal_safe_setter(event: Event) -> Callable[[], None]:
    """A function that sets the event soon afterwards and may be called in a signal handler.

    `event.set` may not be called there: it acquires a lock that the interrupted thread may hold, as at the beginning
    and end of every `event.wait`.
    """
    requested: SimpleQueue[None] = SimpleQueue()  # its `put` is reentrant

    def pass_on() -> None:
        requested.get()
        event.set()

    start_thread(pass_on, name="signal-relay")
    return lambda: requested.put(None)


def set_process_name(name: str) -> None:
    """Set the name of this process in `top` and `ps -o comm`, which show its first fifteen bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def lower_priority(niceness: int) -> None:
    """Make this process, its threads and its future children nicer by `niceness` (0 to 19). Call it in a new session.

    With 0, the new session becomes as nice as the process is already. Where Linux groups processes by session
    (autogroup), the nice value of a process counts only within the session; the group of the session has a nice value
    of its own, which is set too.
    """
    niceness = os.nice(niceness)
    for _ in range(AUTOGROUP_TRIES if niceness > 0 else 0):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness), encoding="utf-8")
            return
        except BlockingIOError:  # Linux takes one such write in 0.1 s from all unprivileged processes
            time.sleep(AUTOGROUP_SECONDS)
        except OSError:  # a kernel without autogroups
            return


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose their parent, in whatever session (child subreaper)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(*, grace_seconds: float = 0.0, keep: Collection[int] = ()) -> None:
    """End and reap all children except `keep`; after `adopt_orphans` also all their descendants.

    The children receive SIGTERM if `grace_seconds` is positive, and SIGKILL after that time. Returns at the latest
    REAP_SECONDS after SIGKILL.
    """
    kill_at = time.monotonic() + grace_seconds
    has_asked: set[int] = set()
    while remaining := [pid for pid in children_of(os.getpid()) if pid not in keep]:
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


def children_of(parent: int) -> list[int]:
    """Process ids of the children of a process, including children that have ended and are not reaped."""
    own, found = str(parent), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            if stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1] == own:
                found.append(int(stat.parent.name))
    return found


def have_exited(processes: Sequence[int], seconds: float) -> bool:
    """Wait until all processes (pidfds) have ended, up to `seconds` in total. Return whether they have."""
    deadline = time.monotonic() + seconds
    for process in processes:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        if not ended.poll(1000 * max(0.0, deadline - time.monotonic())):
            return False
    return True


def send_signal(processes: Sequence[int], number: int) -> None:
    """Send signal `number` to the processes (pidfds) that exist."""
    for process in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)


class _UnreadFile(FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def unread_stream(number: int, like: TextIOWrapper) -> TextIOWrapper:
    """A stream `like` this one on the descriptor `number`; output without a reader is lost without an error."""
    return stream_like(like, _UnreadFile(number, "w", closefd=False))


def stream_like(like: TextIOWrapper, file: FileIO, *, errors: str | None = None) -> TextIOWrapper:
    """A stream `like` this one on another file. `errors`: the handler of characters that the encoding does not have."""
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=like.encoding,
        errors=errors or like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )
