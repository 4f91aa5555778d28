"""What an environment worker keeps on the log of what is open: its groups, its trajectories and their environments.

Keeps true: a trajectory is written down by places. Its tokens lie in its requests and results, once.
"""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import (
    MAX_GROUP_SIZE,
    MAX_RECORD_BYTES,
    MAX_TURNS,
    Count,
    Digest,
    GroupId,
    Moment,
    Reward,
    Seconds,
    Text,
    TrajectoryId,
)
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.turns import Turn


class GroupState(Enum):
    """How far a group is."""

    OPEN = "open"
    """Not every trajectory has an outcome yet."""
    SETTLED = "settled"
    REFUSED = "refused"
    """Its prompt was dead-lettered; a mended one of the same id may still open it."""


class Group(Record, frozen=True, kw_only=True):
    """A group id that is taken: a second prompt of one that is open or settled is refused. The newest record counts."""

    SCHEMA: ClassVar[str] = "group/1"

    group_id: GroupId
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    state: GroupState
    offset: Count
    """Offset of the prompt in its home."""
    prompt: Prompt | None = None
    """While it is open."""
    outcomes_from: Count = 0
    """Every outcome of its trajectories lies at or after this offset."""
    decided_to: Count | None = None
    """The prompts of its home before this offset have been decided; None: those up to its own."""
    changed_at: Moment
    """Unix seconds."""


class EnvSnapshot(Record, frozen=True, kw_only=True):
    """The state of a trajectory's environment, saved where a turn left state (Crab, arXiv 2604.28138).

    The newest of a trajectory counts; a tombstone says that it has ended.
    """

    SCHEMA: ClassVar[str] = "env-snapshot/2"

    trajectory_id: TrajectoryId
    digest: Digest
    """Digest of `state`: no new snapshot is written while it stays the same."""
    state: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class Applied(msgspec.Struct, frozen=True, array_like=True):
    """How a turn was taken in: what no other record says, so that a restart goes on exactly."""

    offset: Count
    """Offset of the turn's result in the home's results."""
    observed: Annotated[int, Meta(ge=0, le=2**32)]
    """Tokens of the observation that followed."""
    applied_at: Moment
    """Unix seconds; the environment worker took the result in."""
    environment_seconds: Seconds
    """Spent in the environment's own step."""
    reward: Reward
    """Sum over the steps so far."""
    committed_at: Moment = 0.0
    """Unix seconds; the turn's request was committed. 0 where a worker took the trajectory over meanwhile."""


class TrajectoryProgress(Record, frozen=True, kw_only=True):
    """Where the parts of a live trajectory lie in its home. The newest counts; a tombstone says that it has ended."""

    SCHEMA: ClassVar[str] = "trajectory-progress/2"

    trajectory_id: TrajectoryId
    group_id: GroupId
    index: Annotated[int, Meta(ge=0, lt=MAX_GROUP_SIZE)]
    """Index of the trajectory in its group."""
    turn: Turn
    """The one that is asked for."""
    requested_from: Count
    """The request of `turn` lies at or after this offset of the home's requests, a few records on at most."""
    prompted: Annotated[int, Meta(ge=0, le=2**32)]
    """Tokens of the first observation."""
    applied: Annotated[tuple[Applied, ...], Meta(max_length=MAX_TURNS)] = ()
    """Results of the turns before `turn`, in order."""


class SettleRequest(Record, frozen=True, kw_only=True):
    """Somebody wants a trajectory to end as a failure of the infrastructure.

    Its environment worker sees to it, before it applies another of its results; one that has ended already stays as it
    is.
    """

    SCHEMA: ClassVar[str] = "settle-request/1"

    trajectory_id: TrajectoryId
    group_id: GroupId
    offset: Count
    """Offset of the group's prompt in its home: a later group of the same id is another group."""
    reason: Text = ""
    """Reason, for people."""
    asked_at: Moment
    """Unix seconds."""
