"""An environment of a few storm prompts. It blocks its thread, and the block cannot be cancelled."""

import time
from collections.abc import Mapping

from rose.workers.environments.protocol import JsonValue, Step

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
