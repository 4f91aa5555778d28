"""The interface of an environment: text out, text in, one action a turn.

Keeps true
- The same seed and arguments always give the same task: all trajectories of a group start from it.
- Whatever a policy writes is an ordinary `Step`, malformed or not: a policy cannot crash an environment.
- `restore(snapshot())` on a fresh instance goes on exactly as the original would have: same observations, same rewards.
- Exceptions are for causes other than the policy: bad arguments, a snapshot that does not decode, infrastructure.

A life: `reset`, then `step` until `done`, then `close`. A restored life starts with `restore` instead of `reset`.
"""

from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from rose.schemas.errors import UsageError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


class EnvironmentArgumentError(UsageError):
    """A prompt's `arguments` that its environment does not take."""


class SnapshotError(Exception):
    """Bytes that are no snapshot of this environment."""


class LifeCycleError(RuntimeError):
    """A call out of order: `step` before `reset`, or after the last step. A bug of the caller."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one action."""

    observation: str
    """Text that the policy reads next. No policy reads the observation of the last step."""
    reward: float
    """Reward of this step; a trajectory's reward is the sum over its steps."""
    done: bool
    success: bool | None = None
    """Whether the task is solved; true only together with `done`. None: the environment has no notion of success."""
    info: dict[str, str | float | int | bool] = {}
    """Further values for people. The values of the last step are stored in the sample."""


@runtime_checkable
class Environment(Protocol):
    """Runs one task at a time. An instance is used by one trajectory, and is never called concurrently."""

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        """Begin the task of this seed; return the first observation. Raises EnvironmentArgumentError."""
        ...

    async def step(self, action: str) -> Step:
        """Take one action of the policy. `action` is the unchanged text that the policy wrote."""
        ...

    async def snapshot(self) -> bytes:
        """Return the whole state between two steps, in a plain format (JSON, MessagePack)."""
        ...

    async def restore(self, state: bytes) -> None:
        """Set the state to that of a snapshot. Raises SnapshotError."""
        ...

    async def close(self) -> None:
        """Release all resources of the environment; may be called twice."""
        ...
