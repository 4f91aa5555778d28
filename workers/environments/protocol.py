"""The interface of an environment: text out, text in, one action a turn.

Keeps true
- The same seed and arguments give the same task, for ever: a group's trajectories all start from it.
- Whatever a policy writes is an ordinary `Step`, malformed or not: a policy cannot crash an environment.
- `restore(snapshot())` on a fresh instance goes on exactly as the original would have: same observations, same rewards.
- Exceptions are for what is not the policy's doing: bad arguments, a snapshot that does not decode, infrastructure.

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
    """Text that the policy reads next; of the last step, a closing remark that no policy reads."""
    reward: float
    """Reward of this step; a trajectory's reward is the sum over its steps."""
    done: bool
    success: bool | None = None
    """Whether the task is solved; only ever true together with `done`. None: there is no such thing here."""
    info: dict[str, str | float | int | bool] = {}
    """The environment's remarks so far; those of the last step travel with the sample."""


@runtime_checkable
class Environment(Protocol):
    """One task at a time. An instance is used by one trajectory and never by two tasks at once."""

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        """Begin the task of this seed; return the first observation. Raises EnvironmentArgumentError."""
        ...

    async def step(self, action: str) -> Step:
        """Take one action of the policy, as it wrote it."""
        ...

    async def snapshot(self) -> bytes:
        """The whole state between two steps, in a plain format of the environment's own (JSON, MessagePack)."""
        ...

    async def restore(self, state: bytes) -> None:
        """Become what `snapshot` saw. Raises SnapshotError."""
        ...

    async def close(self) -> None:
        """Let go of whatever the environment holds; safe to call twice."""
        ...
