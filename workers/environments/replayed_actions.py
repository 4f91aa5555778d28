"""Snapshots of tasks that run elsewhere and cannot be saved: the actions so far, with a digest of what was observed.

Keeps true
- A task is restored by playing the same actions again. If any observation, reward or end differs from the first time,
  the snapshot is refused: a trajectory never goes on in another task than its context shows.
- A snapshot is bounded: it holds at most MOST_TURNS actions.

The cost of a restore is one pass through the actions.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rose.workers.environments.protocol import (
    EnvironmentArgumentError,
    FirstObservation,
    JsonValue,
    LifeCycleError,
    SnapshotError,
    Step,
)

MOST_TURNS = 4096
"""Bounds the actions that a snapshot may ask to play again."""


class ReplayedActions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of a snapshot."""

    seed: int
    arguments: dict[str, Any]
    actions: Annotated[list[str], msgspec.Meta(max_length=MOST_TURNS)] = []
    digest: str = ""
    """Digest of everything that was observed, in order."""

    @classmethod
    def begun(cls, seed: int, arguments: Mapping[str, JsonValue], first: str | FirstObservation) -> "ReplayedActions":
        """Return the content after a reset."""
        begun = cls(seed=seed, arguments=dict(arguments))
        begun._observe(first)
        return begun

    def stepped(self, action: str, step: Step) -> None:
        """Note an action and what followed."""
        self.actions.append(action)
        self._observe([step.observation, step.reward, step.done])

    def encode(self) -> bytes:
        """Return the snapshot."""
        return msgspec.json.encode(self)

    def _observe(self, seen: Any) -> None:
        self.digest = hashlib.blake2b(self.digest.encode() + msgspec.json.encode(seen), digest_size=16).hexdigest()


def decode_actions(state: bytes, what: str) -> ReplayedActions:
    """Return the content of a snapshot of `what`. Raises SnapshotError."""
    try:
        return msgspec.json.decode(state, type=ReplayedActions)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"not a snapshot of {what}: {error}") from None


class ReplayedTask(ABC):
    """An environment whose task runs elsewhere. A subclass begins the task, steps it and ends it."""

    def __init__(self) -> None:
        self._played: ReplayedActions | None = None
        """The actions of the running task; None if no task runs."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """Name of what runs the task, for errors."""

    @abstractmethod
    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str | FirstObservation:
        """Begin a task."""

    @abstractmethod
    async def step(self, action: str) -> Step:
        """Take an action."""

    @abstractmethod
    async def close(self) -> None:
        """End the task."""

    async def snapshot(self) -> bytes:
        """Seed, arguments and actions, with a digest of what was observed."""
        if self._played is None:
            raise LifeCycleError("snapshot() needs a running task: call reset() or restore() first")
        return self._played.encode()

    async def restore(self, state: bytes) -> None:
        """Begin the same task again, and play the same actions."""
        before = decode_actions(state, type(self).__name__)
        try:
            await self.reset(before.seed, before.arguments)
            for action in before.actions:
                await self.step(action)
        except (EnvironmentArgumentError, LifeCycleError) as error:
            raise SnapshotError(f"not a snapshot of {type(self).__name__}: {error}") from None
        if self._played is None or self._played.digest != before.digest:
            await self.close()
            raise SnapshotError(f"{self.origin} does not repeat a task: the same seed and actions gave something else")
