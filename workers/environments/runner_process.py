"""The process in which environments of one kind run, and its guard, a parent process that cleans up after it.

Keeps true
- Nothing that an environment starts outlives its process, and neither outlives the worker, however each of them ends:
  the guard becomes the parent of whatever is left behind, and ends it.
- The guard ends with the signal or status of the environments' process, which the worker reads.
- If memory runs out, the kernel kills an environments' process first, except in a container with `memory.oom.group`.

    worker --(pipe, jobs and answers)--> environments' process
       └──(standard input, never written to)──> guard, the parent of the environments' process
"""

import os
import select
import signal
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rose.topics.processes import (
    POLL_SECONDS,
    adopt_orphans,
    die_with_parent,
    lower_priority,
    set_process_name,
)

GRACE_SECONDS = 0.5
"""Time between SIGTERM and SIGKILL for processes that an environment leaves behind."""

TRACKER_SECONDS = 2.0
"""Time that a resource tracker may take to release its resources once all others have ended."""


def main(line: int, signs: int) -> NoReturn:
    """Fork the environments' process, with its line to the worker and memory for signs of life; be its guard."""
    guard = os.getpid()
    adopt_orphans()
    before_it_ends = die_with_parent(guard, signal.SIGKILL)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if pid == 0:
        before_it_ends()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # no session: its leader would get SIGHUP when a terminal that it has opened closes
        lower_priority(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            _reopen(number)
        os.close(wake)
        os.close(woken)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
        from rose.workers.environments.runner_server import serve

        serve(line, signs)
    os.close(line)
    os.close(signs)
    set_process_name("env-guard")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_as(_wait_for_end(pid, wake))


def _reopen(number: int) -> None:
    """Open the pipe or terminal of this descriptor again.

    The new descriptor does not share O_NONBLOCK, which ssh and node set, with the worker's descriptor.
    """
    kind = os.fstat(number).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        with suppress(OSError):  # it may be another user's: the worker and the environments share it then
            # Without O_NONBLOCK, opening a named pipe without a reader would block.
            reopened = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            os.set_blocking(reopened, True)
            os.dup2(reopened, number)
            os.close(reopened)


def _wait_for_end(pid: int, wake: int) -> int:
    """Wait for the end of the process or of the worker, and end everything it has started; returns its exit status."""
    watched = select.poll()
    watched.register(0, select.POLLIN)
    watched.register(wake, select.POLLIN)
    status: int | None = None
    while status is None:
        ended = {descriptor for descriptor, _ in watched.poll()}
        if wake in ended:
            os.read(wake, 512)
            status = _reaped(pid)
        if status is None and 0 in ended:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
    _end_rest(pid)
    return status


def _reaped(pid: int) -> int | None:
    """Reap processes that have ended, including orphans."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                found = ended[1]
    return found


def _end_rest(group: int) -> None:
    """End what the process has started: its group, and every orphan that the guard inherits.

    These processes get SIGTERM, and SIGKILL a little later. Resource trackers of Python are ended last: a tracker
    releases the shared memory and semaphores of ended processes, and then ends by itself.
    """
    began, has_asked = time.monotonic(), set[int]()
    with suppress(ChildProcessError, OSError):
        while children := _children():
            seconds = time.monotonic() - began
            if seconds > GRACE_SECONDS + TRACKER_SECONDS:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            for child in children:
                if seconds <= GRACE_SECONDS + TRACKER_SECONDS and _is_tracker(child):
                    continue
                if seconds > GRACE_SECONDS:
                    os.kill(child, signal.SIGKILL)
                elif child not in has_asked:
                    has_asked.add(child)
                    os.kill(child, signal.SIGTERM)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(POLL_SECONDS)


def _children() -> list[int]:
    """Return the process ids of this process's children, including children that have ended and are not reaped."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()]


def _is_tracker(pid: int) -> bool:
    """Whether the process is a resource tracker of multiprocessing, or of a library with a tracker of that name."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _end_as(status: int) -> NoReturn:
    """End this process with the same wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it is the environment that crashed, not the guard
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.stdout.flush()
    os._exit(max(code, 1 if code < 0 else 0))
