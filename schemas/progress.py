"""Records of an environment worker's open work: groups, trajectories and the states of environments.

Keeps true: the progress of a trajectory has offsets and lengths. The tokens are stored once, in requests and results.
"""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import (
    MAX_DEFERRALS,
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
    """State of a group."""

    OPEN = "open"
    """At least one trajectory has no outcome yet."""
    SETTLED = "settled"
    REFUSED = "refused"
    """The prompt was dead-lettered; a mended prompt of the same id may still open the group."""


class Group(Record, frozen=True, kw_only=True):
    """A group id that is taken: a second prompt of an open or settled group is refused. The newest record counts."""

    SCHEMA: ClassVar[str] = "group/1"

    group_id: GroupId
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    """Number of trajectories that were opened."""
    state: GroupState
    offset: Count
    """Offset of the prompt in its home."""
    prompt: Prompt | None = None
    """The prompt, while the group is open."""
    outcomes_from: Count = 0
    """Lower bound of the offsets of its trajectories' outcomes."""
    decided_to: Count | None = None
    """The prompts of its home before this offset have been decided; None: those up to its own prompt."""
    needed: Annotated[int, Meta(ge=0, le=MAX_GROUP_SIZE)] = 0
    """Size that its prompt asks for, if the group was opened with more trajectories; 0 if it was not. Once so many have
    ended with a reward, the others are surplus."""
    deferrals: Annotated[int, Meta(ge=0, le=MAX_DEFERRALS)] = 0
    """How often the group was deferred."""
    deferred: bool = False
    """Whether its turns are on hold until a later round."""
    rewarded: Annotated[int, Meta(ge=0, le=MAX_GROUP_SIZE)] = 0
    """Number of trajectories that have ended with a reward; counted only in open groups with surplus trajectories."""
    changed_at: Moment
    """Unix seconds at which the state changed."""


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
    """How a turn was applied: facts that no other record has, so that a restart continues exactly."""

    offset: Count
    """Offset of the turn's result in the home's results."""
    observed: Annotated[int, Meta(ge=0, le=2**32)]
    """Tokens of the observation that followed."""
    applied_at: Moment
    """Unix seconds at which the environment worker applied the result."""
    environment_seconds: Seconds
    """Time that the environment's own step took."""
    reward: Reward
    """Sum of the rewards of all steps so far."""
    committed_at: Moment = 0.0
    """Unix seconds at which the turn's request was committed; 0 if a worker took the trajectory over in between."""


class TrajectoryProgress(Record, frozen=True, kw_only=True):
    """The offsets of the parts of a live trajectory in its home.

    The newest record counts; a tombstone says that the trajectory has ended.
    """

    SCHEMA: ClassVar[str] = "trajectory-progress/2"

    trajectory_id: TrajectoryId
    group_id: GroupId
    index: Annotated[int, Meta(ge=0, lt=MAX_GROUP_SIZE)]
    """Index of the trajectory in its group."""
    turn: Turn
    """Number of the requested turn."""
    requested_from: Count
    """Lower bound of the offset of the request of `turn`, a few records before it at most."""
    prompted: Annotated[int, Meta(ge=0, le=2**32)]
    """Tokens of the first observation."""
    applied: Annotated[tuple[Applied, ...], Meta(max_length=MAX_TURNS)] = ()
    """Results of the turns before `turn`, in order."""


class SettleRequest(Record, frozen=True, kw_only=True):
    """A request to end a trajectory as a failure of the infrastructure.

    The environment worker ends it before it applies another result. A trajectory that has ended stays as it is.
    """

    SCHEMA: ClassVar[str] = "settle-request/1"

    trajectory_id: TrajectoryId
    group_id: GroupId
    offset: Count
    """Offset of the group's prompt in its home: a later group of the same id is another group."""
    reason: Text = ""
    """Reason, for people."""
    asked_at: Moment
    """Unix seconds of the request."""
