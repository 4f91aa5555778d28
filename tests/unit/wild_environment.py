"""An environment that does to its process what an action says, as native code and careless authors do."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from workers.environments.protocol import JsonValue, Step

NAME = "tests.unit.wild_environment:Wild"

FOLDER = "WILD_FOLDER"
"""The variable that names where environments leave files, and wait for them."""


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


def start_children() -> None:
    """One in its group, one in a session of its own, one whose parent is gone."""
    for command, apart in (("sleep 3600", False), ("sleep 3600", True), ("sleep 3600 & sleep 3600 & echo", False)):
        subprocess.Popen(["sh", "-c", command], start_new_session=apart, stdout=subprocess.DEVNULL)


DEEDS: dict[str, Callable[[], None]] = {
    "end": end_at_once,
    "crash": crash,
    "kill": kill_itself,
    "end in a thread": end_in_a_thread,
    "close all files": close_all_files,
    "sleep": sleep_for_ever,
    "hold": hold_the_interpreter,
    "children": start_children,
}


class Wild:
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        if deed := arguments.get("deed"):
            DEEDS[str(deed)]()
        return "begin"

    async def step(self, action: str) -> Step:
        if action in DEEDS:
            DEEDS[action]()
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
        self.steps += 1
        return Step(observation=str(self.steps), reward=1.0, done=action == "done")

    async def snapshot(self) -> bytes:
        return str(self.steps).encode()

    async def restore(self, state: bytes) -> None:
        self.steps = int(state)

    async def close(self) -> None:
        pass


class EndsAtLast(Wild):
    async def close(self) -> None:
        sys.stdout.flush()
        end_at_once()
