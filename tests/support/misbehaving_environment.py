"""An environment that changes its process as an action requests, like native code or careless authors."""

import asyncio
import ctypes
import inspect
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import FrameType

from rose.workers.environments.protocol import JsonValue, Step

NAME = "tests.support.misbehaving_environment:Wild"

FOLDER = "WILD_FOLDER"
"""Environment variable with the folder in which environments write files and wait for files."""


def end_at_once() -> None:
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_in_a_thread() -> None:
    asyncio.get_running_loop().run_in_executor(None, end_at_once)
    time.sleep(0.05)


def close_all_files() -> None:
    os.closerange(3, 256)


def sleep_for_ever() -> None:
    time.sleep(3600.0)


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(3600)


def sleep_a_while() -> None:
    time.sleep(1.5)


def sleep_for_a_moment() -> None:
    time.sleep(0.7)


def start_children() -> None:
    """Start a child in the same process group, a child in its own session, and an orphan."""
    for command, apart in (("sleep 3600", False), ("sleep 3600", True), ("sleep 3600 & sleep 3600 & echo", False)):
        subprocess.Popen(["sh", "-c", command], start_new_session=apart, stdout=subprocess.DEVNULL)


def share_memory() -> None:
    """Create shared memory that is never released; write its name to a file."""
    memory = SharedMemory(create=True, size=4096)
    (Path(os.environ[FOLDER]) / "memory").write_text(memory.name)


def share_memory_and_end() -> None:
    share_memory()
    end_at_once()


def start_a_tidy_child() -> None:
    """Start a child that cleans up on SIGTERM."""
    folder = os.environ[FOLDER]
    tidies = f"trap 'touch {folder}/tidied; exit' TERM; touch {folder}/traps; while :; do sleep 0.05; done"
    subprocess.Popen(["sh", "-c", tidies], stdout=subprocess.DEVNULL)
    while not (Path(folder) / "traps").exists():
        time.sleep(0.01)


def change_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


def guard() -> None:
    """Disable functions, as graders of generated code do."""
    for module, names in ((os, ("kill", "unlink", "_exit", "stat")), (shutil, ("rmtree",)), (subprocess, ("Popen",))):
        for name in names:
            setattr(module, name, None)


def close_streams() -> None:
    os.closerange(0, 3)
    LEFT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(3))


def leak_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    LEFT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(200))


def change_folder_in_a_thread() -> None:
    asyncio.get_running_loop().run_in_executor(None, change_folder)
    time.sleep(0.1)


def nest_a_loop() -> None:
    asyncio._set_running_loop(None)
    asyncio.run(asyncio.sleep(0))


def take_the_pool() -> None:
    loop = asyncio.get_running_loop()
    with suppress(StopIteration):
        loop.shutdown_default_executor().send(None)
    loop.set_task_factory(lambda *_: None)  # type: ignore[arg-type]


class WithoutWatcher(asyncio.DefaultEventLoopPolicy):
    """Like uvloop's policy, the policy watches no children of other event loops."""

    def get_child_watcher(self) -> asyncio.AbstractChildWatcher:
        raise NotImplementedError


def set_policy() -> None:
    asyncio.set_event_loop_policy(WithoutWatcher())


class TookTooLong(Exception):
    """Raised for code that took too long."""


def too_late(*_: object) -> None:
    raise TookTooLong("it took too long")


def too_late_in_a_callback(_: int, frame: FrameType | None) -> None:
    """Raise if a callback of an event loop runs."""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise TookTooLong("it took too long")
        frame = frame.f_back


def bound_by_a_signal() -> None:
    """Bound the time of a call by an alarm signal, as graders of answers do."""
    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with suppress(TookTooLong):
            while True:
                sum(range(9))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def leave_a_timer(timer: int, its_signal: signal.Signals) -> None:
    signal.signal(its_signal, too_late)
    signal.setitimer(timer, 0.2)


def redirect_output() -> None:
    sys.stdout = io.StringIO()


def ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def reap_children() -> None:
    """Reap children in a signal handler, like a server that forks."""

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, reap)


def not_wait_for_readers() -> None:
    """Make inherited descriptors non-blocking, as ssh and node do."""
    for number in (1, 2):
        os.set_blocking(number, False)


def fork(end: Callable[[], None]) -> None:
    """Fork. The child ends as `end` does, and the parent does not wait."""
    if os.fork() == 0:
        end()


def fail() -> None:
    raise RuntimeError("in the child")


def come_back() -> None:
    pass


FORKS: dict[str, Callable[[], None]] = {
    "fork and exit": lambda: fork(sys.exit),
    "fork and raise": lambda: fork(fail),
    "fork and return": lambda: fork(come_back),
}


async def do_in_a_task(deed: str) -> None:
    DEEDS[deed]()


async def coroutine_state() -> str:
    """Return the state of the current task's coroutine, which anyio asks for when a scope is cancelled."""
    task = asyncio.current_task()
    assert task is not None
    return inspect.getcoroutinestate(task.get_coro())  # type: ignore[arg-type]


async def block_in_a_moment() -> None:
    await asyncio.sleep(0.2)
    time.sleep(1.6)


def use_a_terminal() -> None:
    ours, theirs = os.openpty()
    os.close(os.open(os.ttyname(theirs), os.O_RDWR))
    os.close(theirs)
    os.close(ours)


def print_much() -> None:
    sys.stderr.write("x" * 9000)
    sys.stderr.flush()


def find_no_thread_at_first() -> None:
    """Raise the error of a process that can start no thread, in the first call."""
    mark = Path(os.environ[FOLDER]) / "refused"
    if not mark.exists():
        mark.touch()
        raise RuntimeError("can't start new thread")


LEFT: list[int] = []

MEMORY: list[object] = []


def take_all_memory() -> None:
    """Keep large objects, then small ones, so that nothing is left for other code of the process either."""
    with suppress(MemoryError):
        while True:
            MEMORY.append([None] * (1 << 16))
    while True:
        MEMORY.append([None] * 64)


CHANGES: dict[str, Callable[[], None]] = {
    "folder": change_folder,
    "folder in a thread": change_folder_in_a_thread,
    "guard": guard,
    "streams": close_streams,
    "files": leak_files,
    "memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 28, resource.getrlimit(resource.RLIMIT_AS)[1])),
    "depth": lambda: sys.setrecursionlimit(sys.getrecursionlimit() // 4),
    "stderr": lambda: sys.stderr.close(),
    "stdout": redirect_output,
    "variables": os.environ.clear,
    "timer": lambda: leave_a_timer(signal.ITIMER_REAL, signal.SIGALRM),
    "timer of its own time": lambda: leave_a_timer(signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    "timer of all its time": lambda: leave_a_timer(signal.ITIMER_PROF, signal.SIGPROF),
    "ignored children": ignore_children,
    "reaped children": reap_children,
    "nest": nest_a_loop,
    "pool": take_the_pool,
    "policy": set_policy,
}
"""Process-wide effects, which other environments of the process share."""

DEEDS: dict[str, Callable[[], None]] = {
    "end": end_at_once,
    "crash": crash,
    "kill": kill_itself,
    "end in a thread": end_in_a_thread,
    "close all files": close_all_files,
    "sleep": sleep_for_ever,
    "hold": hold_the_interpreter,
    "doze": sleep_a_while,
    "nap": sleep_for_a_moment,
    "bound": bound_by_a_signal,
    "non-blocking": not_wait_for_readers,
    **CHANGES,
    **FORKS,
    "memory and end": share_memory_and_end,
    "tidy child": start_a_tidy_child,
    "print": print_much,
    "all memory": take_all_memory,
    "chroot": lambda: os.chroot(os.environ[FOLDER]),
    "terminal": use_a_terminal,
    "children": start_children,
    "no thread at first": find_no_thread_at_first,
}


class Wild:
    """An environment that counts its steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.large = False
        self.left: asyncio.Task[None] | None = None

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        if deed := arguments.get("deed"):
            DEEDS[str(deed)]()
        return "begin"

    async def step(self, action: str) -> Step:
        if action in DEEDS:
            DEEDS[action]()
        if action in FORKS:
            await asyncio.sleep(0.2)
        if action.startswith("thread: "):
            await asyncio.to_thread(DEEDS[action.removeprefix("thread: ")])
        if action.startswith("task: "):
            with suppress(SystemExit, RuntimeError):
                await asyncio.create_task(do_in_a_task(action.removeprefix("task: ")))
        if action.startswith("gather: "):
            await asyncio.gather(do_in_a_task(action.removeprefix("gather: ")), asyncio.sleep(0))
        if action == "inspect":
            states = await asyncio.gather(coroutine_state(), coroutine_state())
            assert states == ["CORO_RUNNING"] * 2
        if action == "leave a block":
            self.left = asyncio.create_task(block_in_a_moment())
        if action == "long":
            with (Path(os.environ[FOLDER]) / "long").open("a") as begun:
                begun.write("x")
            await asyncio.sleep(9.0)
        if action == "use":
            await self.use()
        if action == "capture":
            await self.capture()
        self.large = action == "large snapshot"
        if action == "late":
            leave_a_timer(signal.ITIMER_REAL, signal.SIGALRM)
            await asyncio.Event().wait()
        if action == "late in a callback":
            signal.signal(signal.SIGALRM, too_late_in_a_callback)
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.0001)
            await asyncio.Event().wait()
        if action == "pause":
            await asyncio.sleep(0.5)
        if action == "end meanwhile":
            asyncio.get_running_loop().run_in_executor(None, end_at_once)
            await asyncio.Event().wait()
        if action == "hang in a thread":
            await asyncio.to_thread(sleep_for_ever)
        if action == "wait":
            folder = Path(os.environ[FOLDER])
            (folder / f"{os.getpid()}.waits").touch()
            while not (folder / "gate").exists():
                await asyncio.sleep(0.005)
            with (folder / "passed").open("a") as passed:
                passed.write("x")
        self.steps += 1
        return Step(observation=str(self.steps), reward=1.0, done=action == "done")

    async def capture(self) -> None:
        """Capture printed output, as code interpreters do. Raise if the captured output is incomplete."""
        printed = io.StringIO()
        with redirect_stdout(printed):
            for _ in range(3):
                print(id(self))
                await asyncio.sleep(0.02)
        assert printed.getvalue() == f"{id(self)}\n" * 3, printed.getvalue()

    async def use(self) -> None:
        """Raise if the process state has changed."""

        def depth(left: int) -> int:
            return depth(left - 1) if left else 0

        with tempfile.TemporaryFile(dir=Path.cwd()), tempfile.TemporaryDirectory():
            print("used", file=sys.stderr, flush=True)
        assert not isinstance(sys.stdout, io.StringIO)
        assert not any(signal.getitimer(timer)[0] for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF))
        assert callable(os.unlink) and depth(500) == 0
        ended = await asyncio.to_thread(subprocess.run, ["false"], check=False)
        assert ended.returncode == 1
        assert await (await asyncio.create_subprocess_exec("false")).wait() == 1

    async def snapshot(self) -> bytes:
        return bytes(65 << 20) if self.large else str(self.steps).encode()

    async def restore(self, state: bytes) -> None:
        self.steps = int(state)

    async def close(self) -> None:
        pass


class EndsAtLast(Wild):
    async def close(self) -> None:
        sys.stdout.flush()
        end_at_once()
