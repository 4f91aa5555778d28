"""Checks that a process is still fit for environments after an environment's code ran, and repairs its event loop.

Keeps true
- A change of the process that could silently change another trajectory (working folder, streams, functions, limits) is
  reported after each run of an environment's code in the event loop, before an answer, which may be wrong, is returned.
- The event loop is as it was whenever an environment's code begins: running, with its pool, its task factory and its
  policy.
- A call to `asyncio.to_thread` that hangs takes its own thread and no other's: each call has a thread, and an idle
  thread serves again. These threads are never joined, so a process ends whatever hangs. Calls that continue after they
  were abandoned are counted.
- A child that an environment's code has forked ends once it returns from that code: no second process continues with
  the event loop, the jobs and the connection to the worker.
"""

import asyncio
import builtins
import json
import os
import queue
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from _thread import start_new_thread
from asyncio import AbstractEventLoop, get_event_loop_policy, set_event_loop_policy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import itemgetter
from os import _exit, close, dup, fstat, getpid  # as they are now: an environment may take them away
from threading import Lock, Thread
from time import monotonic
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

SPARE_FILES = 64
"""A process that can open fewer further files than this, or than an eighth of its limit, is unfit."""

MOST_LEFT, MOST_LEFT_EACH = 256, 4
"""Most threads and child processes that a process may have in addition to those at its start, and the addition for each
environment that may be held. A process with more is unfit."""

FEW_LEFT = 32
"""A process with more additional threads and child processes than this is unfit once no further thread starts."""

COUNT_PARTS, COUNT_SECONDS = 20, 1.0
"""The pause after a count of threads and children: the first number times the time of the count, at most the second."""

TASKS = "/proc/self/task"

MODULES: tuple[ModuleType, ...] = (builtins, os, shutil, subprocess, time, json, socket)
"""Modules whose functions are taken away by guards against generated code."""

LIMITS = {
    "address space": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
    "stack": resource.RLIMIT_STACK,
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "file size": resource.RLIMIT_FSIZE,
    "CPU time": resource.RLIMIT_CPU,
}

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

ROOT, HERE = "/", "."

POLICY = get_event_loop_policy()
"""The policy chooses the child watcher of every event loop, so an environment must not replace the policy."""

_stat, _getrlimit, _getitimer, _getsignal = os.stat, resource.getrlimit, signal.getitimer, signal.getsignal
_listdir, _open = os.listdir, open


class ProcessIntegrity:
    """Process state that environments share, as it was at the start."""

    def __init__(self, give_up: Callable[[str], None], *, most: int) -> None:
        """`give_up` is called with the change that was found; it ends the process.

        `most`: threads and child processes that the process may have above those of now.
        """
        self._give_up = give_up
        self._files = _files()
        self._streams = sys.stdout, sys.stderr
        self._on_child = _getsignal(signal.SIGCHLD)
        self._limits = _limits()
        self._depth = sys.getrecursionlimit()
        self._variables = len(os.environ)
        self._functions = [_Functions(module) for module in MODULES]
        self._most = most
        self._held = _threads_and_children()
        self._count_at = 0.0
        self._change = ""
        self._only: str | None = None
        self._several = False

    def on_use(self, trajectory_id: str) -> None:
        """Note that code of this trajectory will run."""
        self._several = self._several or self._only not in (None, trajectory_id)
        self._only = trajectory_id

    def check(self) -> None:
        """Give the process up if it was changed and any other trajectory was in it."""
        self._change = self._change or self._changed()
        if self._change and self._several:
            self._give_up(self._change)

    def on_answered(self) -> None:
        """Give a changed process up once the trajectory that it was left to has been answered.

        A change that the trajectory has undone by then did not affect another trajectory.
        """
        self._change = self._change and self._changed()
        if self._change:
            self._give_up(self._change)

    def _changed(self) -> str:
        try:
            files = _files()
            close(lowest := dup(0))
        except OSError as error:
            return f"closed files of its process ({error.strerror})"
        if files != self._files:
            if files[0] != self._files[0]:
                return "changed the root folder of its process"
            if files[1] != self._files[1]:
                return "changed the working directory of its process (give children `cwd`)"
            return "put something else in place of descriptors 0 to 2"
        if any(getattr(stream, "closed", stream is None) for stream in (sys.stdout, sys.stderr)):
            return "closed sys.stdout or sys.stderr"
        if sys.stdout is not self._streams[0] or sys.stderr is not self._streams[1]:
            return "left sys.stdout or sys.stderr redirected, also for others: print with `file=`, or use a child"
        if any(_getitimer(timer)[0] for timer in TIMERS):
            return "left a timer running, whose signal would interrupt the code of others"
        if _getsignal(signal.SIGCHLD) is not self._on_child:
            return "ignored or handled SIGCHLD, which takes the exit statuses of others' children away"
        limits = _limits()
        most = _height(limits["open files"])
        if lowest >= most - min(SPARE_FILES, most / 8):
            return "left no room for further open files"
        return self._lowered(limits) or self._taken_away() or self._crowded()

    def _crowded(self) -> str:
        began = monotonic()
        if began < self._count_at and not self._change:
            return ""
        try:
            left = _threads_and_children() - self._held
        except OSError as error:  # in a sandbox that the environment has entered
            return f"made /proc unreadable for its process ({error.strerror})"
        roomless = left > FEW_LEFT and not _starts_threads()
        ended = monotonic()
        self._count_at = ended + min(COUNT_PARTS * (ended - began), COUNT_SECONDS)
        if roomless:
            return f"left no room for further threads ({left} threads and child processes; pids.max, ulimit -u)"
        return f"left {left} threads and child processes ({self._most} are allowed)" if left > self._most else ""

    def on_start_refused(self) -> None:
        """Give the process up because an environment's code could start no thread or child.

        Another process may hold them, so all jobs are repeated.
        """
        self._give_up(
            "could start no further thread or process (pids.max of the container, ulimit -u, "
            "or environment.process_memory_bytes)"
        )

    def on_memory_refused(self) -> None:
        """Give the process up because an environment's code got no memory. Another environment may hold the memory."""
        self._give_up("got no further memory (environment.process_memory_bytes)")

    def _lowered(self, limits: dict[str, tuple[int, int]]) -> str:
        if limits != self._limits:
            for name, limit in limits.items():
                if _height(limit) < _height(self._limits[name]):
                    return f"lowered its process's limit of {name}"
        if sys.getrecursionlimit() < self._depth:
            return "lowered the recursion limit"
        return ""

    def _taken_away(self) -> str:
        for functions in self._functions:
            if functions.gone():
                return f"took functions of {functions.module} away"
        if len(os.environ) * 2 < self._variables:
            return "took most environment variables away"
        return ""


class _Functions:
    """The callable attributes of a module."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module.__name__
        self._names = vars(module)
        self._take = itemgetter(*(name for name, value in self._names.items() if callable(value)))
        self._known = self._take(self._names)

    def gone(self) -> bool:
        """Whether a function was removed or replaced by a value that is not callable. Another function is accepted."""
        try:
            present = self._take(self._names)
        except KeyError:
            return True
        if present == self._known:  # compared by identity, which is fast
            return False
        self._known = present
        return not all(map(callable, present))


TaskFactory = Callable[..., "asyncio.Task[Any]"]
"""Called with the loop, a coroutine and asyncio's own keyword arguments."""


class LoopRepair:
    """The event loop that environments share."""

    def __init__(self, loop: AbstractEventLoop, pool: ThreadPoolExecutor, make_task: TaskFactory) -> None:
        self._loop = loop
        self._pool = pool
        self._make_task = make_task
        loop.shutdown_default_executor = _nothing  # type: ignore[method-assign]
        self.repair()
        asyncio._set_running_loop(None)  # the loop does not run yet

    def repair(self) -> None:
        """Undo changes that an environment's code has made to the loop. Called in the loop's thread."""
        self._loop.set_default_executor(self._pool)
        if self._loop.get_task_factory() is not self._make_task:
            self._loop.set_task_factory(self._make_task)
        if get_event_loop_policy() is not POLICY:
            set_event_loop_policy(POLICY)
        asyncio._set_running_loop(self._loop)


def restore_child_handling() -> None:
    """Undo an ignored SIGCHLD, which an imported module may have set. Called in the main thread."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


async def _nothing(timeout: float | None = None) -> None:
    """Do nothing, in place of a shutdown of the pool, which all environments use."""


def _files() -> list[tuple[int, int]]:
    """Return device and inode of the root, the working directory and descriptors 0 to 2. Raises OSError."""
    found = [_stat(ROOT), _stat(HERE), fstat(0), fstat(1), fstat(2)]
    return [(file.st_dev, file.st_ino) for file in found]


def _threads_and_children() -> int:
    tasks = _listdir(TASKS)
    count = len(tasks)
    for task in tasks:
        with suppress(OSError), _open(f"{TASKS}/{task}/children", "rb") as children:  # the thread may have ended
            count += len(children.read().split())
    return count


def _starts_threads() -> bool:
    try:
        start_new_thread(getpid, ())
    except RuntimeError:
        return False
    return True


def _limits() -> dict[str, tuple[int, int]]:
    return dict(zip(LIMITS, map(_getrlimit, LIMITS.values()), strict=True))


def _height(limit: tuple[int, int]) -> float:
    return float("inf") if limit[0] == resource.RLIM_INFINITY else limit[0]


def end_if_forked(home: int, error: BaseException | None = None) -> None:
    """End this process if its id is not `home`, with the status of a program that ends by this error (0 for None)."""
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


P = ParamSpec("P")
T = TypeVar("T")

IDLE_KEPT = 8
"""Most threads that wait for a next call."""

_getpid = os.getpid

Call = Callable[[], None]


class _Outcome(Future[T]):
    """Future of one call."""

    def __init__(self, stuck: "set[_Outcome[Any]]") -> None:
        super().__init__()
        self._stuck = stuck
        self._pid = _getpid()

    def cancel(self) -> bool:
        """Cancel the future; a call that continues to run is counted as stuck until it ends."""
        cancelled = super().cancel()
        if self.running():
            self._stuck.add(self)
            if not self.running():  # it has ended meanwhile
                self._stuck.discard(self)
        return cancelled

    def run(self, call: Callable[[], T]) -> None:
        """Make the call in the current thread."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            outcome = call()
        except BaseException as error:  # noqa: BLE001 - user code: the awaiting caller gets the exception
            end_if_forked(self._pid, error)
            self.set_exception(error)
        else:
            end_if_forked(self._pid)
            self.set_result(outcome)
        self._stuck.discard(self)


class EnvironmentThreadPool(ThreadPoolExecutor):
    """A default executor of an event loop; asyncio requires a subclass of ThreadPoolExecutor."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = Lock()
        self._calls: queue.Queue[Call | None] = queue.Queue()
        self._waiting = 0
        self._stuck: set[_Outcome[Any]] = set()

    @property
    def stuck(self) -> int:
        """Number of calls that continue although they were abandoned."""
        return len(self._stuck)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the function in a thread that makes no other call at the same time."""
        outcome = _Outcome[T](self._stuck)
        call = partial(outcome.run, partial(function, *args, **kwargs))
        with self._guard:
            served = self._waiting > 0
            self._waiting -= served
        if served:
            self._calls.put(call)
        else:
            Thread(target=self._serve, args=(call,), name="environment-call", daemon=True).start()
        return outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that wait; a call that hangs is left behind."""
        with self._guard:
            idle, self._waiting = self._waiting, -(1 << 60)
        for _ in range(max(0, idle)):
            self._calls.put(None)

    def _serve(self, call: Call | None) -> None:
        while call is not None:
            call()
            del call  # and the objects that it holds
            with self._guard:
                if not 0 <= self._waiting < IDLE_KEPT:
                    return
                self._waiting += 1
            call = self._calls.get()
