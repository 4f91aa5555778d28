"""Environments of a few storm prompts: one blocks its thread, and one runs commands in sandboxes."""

import time
import zlib
from collections.abc import Mapping

import msgspec

from rose.workers.environments.protocol import JsonValue, Step
from rose.workers.environments.sandbox.environment import LOST, SandboxEnvironment

BLOCKED_SECONDS = 3600.0
"""Longer than any storm."""


class Blocking:
    """An environment whose first step never ends."""

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        return "1+1"

    async def step(self, action: str) -> Step:
        time.sleep(BLOCKED_SECONDS)  # this is the fault
        raise AssertionError("nobody waits for so long")

    async def snapshot(self) -> bytes:
        return b"{}"

    async def restore(self, state: bytes) -> None:
        return

    async def close(self) -> None:
        return


COMMANDS = (
    "cat log",
    "ls -la",
    "echo x >> log",
    "yes $(wc -l < log) | head -c 300000 > large; echo x >> log",
    "sleep 300 & echo x >> log",
    "pkill sleep; true",
)
"""A policy of a storm writes no commands, so each of its texts stands for one of these."""

SUBMIT_EVERY = 5


class Sandboxed(SandboxEnvironment):
    """A sandbox whose `log` must have as many lines as commands have added, whatever was killed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = 0

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        await super().reset(seed, {"setup": ["seq 2000 > base; touch log"], "command_seconds": 5})
        return "1+1"

    async def step(self, action: str) -> Step:
        number = zlib.crc32(action.encode())
        command = COMMANDS[number % len(COMMANDS)]
        taken = await super().step(f"```bash\n{command}\n```")
        self._lines += "x >> log" in command and taken.observation != LOST
        if number % SUBMIT_EVERY:
            return msgspec.structs.replace(taken, observation="1")
        counted = await super().step("```bash\ncat base log | wc -l\n```")
        if counted.observation.split("\n")[0] != str(2000 + self._lines):
            raise AssertionError(f"{self._lines} lines were written, and there are {counted.observation}")
        return Step(observation="", reward=1.0, done=True, success=True)

    async def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self._lines, await super().snapshot()))

    async def restore(self, state: bytes) -> None:
        self._lines, inner = msgspec.msgpack.decode(state, type=tuple[int, bytes])
        await super().restore(inner)
