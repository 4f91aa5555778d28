"""Whether a process is still fit for environments, after one of them had it, and what can be put right at once.

Keeps true
- What could make another trajectory come out differently without a word (a working folder, streams, functions, limits
  that are not what they were) is told in words after any environment's code has run in the event loop: before an answer
  that it may have spoiled is given.
- The event loop is as it was whenever an environment's code begins: running, with its pool and no task factory.
"""

import asyncio
import builtins
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from os import close, dup, fstat  # as they are now: an environment may take them away
from types import ModuleType

SPARE_FILES = 64
"""A process that can open fewer further files than this, or than an eighth of its limit, is unfit."""

MODULES: tuple[ModuleType, ...] = (builtins, os, shutil, subprocess, time, json, socket)
"""Those whose functions guards of generated code take away."""

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

HERE = "."

_stat, _getrlimit, _getitimer, _getsignal = os.stat, resource.getrlimit, signal.getitimer, signal.getsignal


class ProcessIntegrity:
    """What environments of a process share, as it was when this was made."""

    def __init__(self, give_up: Callable[[str], None]) -> None:
        """`give_up` is called with the change that was found, and returns if the process may go on."""
        self._give_up = give_up
        self._files = _files()
        self._streams = sys.stdout, sys.stderr
        self._on_child = _getsignal(signal.SIGCHLD)
        self._limits = _limits()
        self._depth = sys.getrecursionlimit()
        self._variables = len(os.environ)
        self._functions = [_Functions(module) for module in MODULES]
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

        What this has put right by then nobody else has met.
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
                return "changed the working directory of its process (give children `cwd`)"
            return "put something else in place of descriptors 0 to 2"
        if any(getattr(stream, "closed", stream is None) for stream in (sys.stdout, sys.stderr)):
            return "closed sys.stdout or sys.stderr"
        if sys.stdout is not self._streams[0] or sys.stderr is not self._streams[1]:
            return "left sys.stdout or sys.stderr redirected, to where others' output would go as well"
        if any(_getitimer(timer)[0] for timer in TIMERS):
            return "left a timer running, whose signal would come amid the code of others"
        if _getsignal(signal.SIGCHLD) is not self._on_child:
            return "ignored or handled SIGCHLD, which takes the exit statuses of others' children away"
        limits = _limits()
        most = _height(limits["open files"])
        if lowest >= most - min(SPARE_FILES, most / 8):
            return "left no room for further open files"
        return self._lowered(limits) or self._taken_away()

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
    """What a module has that can be called."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module.__name__
        self._names = vars(module)
        self._take = itemgetter(*(name for name, value in self._names.items() if callable(value)))
        self._known = self._take(self._names)

    def gone(self) -> bool:
        """Whether any of it can be called no more. Others in their place are taken as they are."""
        try:
            present = self._take(self._names)
        except KeyError:
            return True
        if present == self._known:  # told by identity: this is quick
            return False
        self._known = present
        return not all(map(callable, present))


class LoopRepair:
    """The event loop that environments share."""

    def __init__(self, loop: AbstractEventLoop, pool: ThreadPoolExecutor) -> None:
        self._loop = loop
        self._pool = pool
        loop.shutdown_default_executor = _nothing  # type: ignore[method-assign]
        self.repair()
        asyncio._set_running_loop(None)  # it has yet to run

    def repair(self) -> None:
        """Undo what an environment's code has done to it. Called in the loop's thread."""
        self._loop.set_default_executor(self._pool)
        if self._loop.get_task_factory() is not None:
            self._loop.set_task_factory(None)
        asyncio._set_running_loop(self._loop)


def restore_child_handling() -> None:
    """Have the exit status of children kept, whatever a module that was imported has set. Called in the main thread."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


async def _nothing(timeout: float | None = None) -> None:
    """Instead of the end of a pool that others use."""


def _files() -> list[tuple[int, int]]:
    """Which directory and which files the working directory and descriptors 0 to 2 are. Raises OSError."""
    found = [_stat(HERE), fstat(0), fstat(1), fstat(2)]
    return [(file.st_dev, file.st_ino) for file in found]


def _limits() -> dict[str, tuple[int, int]]:
    return dict(zip(LIMITS, map(_getrlimit, LIMITS.values()), strict=True))


def _height(limit: tuple[int, int]) -> float:
    return float("inf") if limit[0] == resource.RLIM_INFINITY else limit[0]
