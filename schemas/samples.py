"""A finished trajectory, and what became of it."""

from enum import Enum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import (
    MAX_GROUP_SIZE,
    MAX_SPANS,
    MAX_TURNS,
    Count,
    GroupId,
    Id,
    Logprobs,
    Mask,
    Moment,
    Reward,
    Seconds,
    Seed,
    Text,
    Tokens,
    TrajectoryId,
    Version,
)
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import Attempt, DeviceSeconds, Turn, TurnTimes


class SampleTurn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One applied turn, as the loss, the report and the cost accounting need it."""

    turn: Turn
    attempt: Attempt
    worker: Id
    sampling: Sampling
    """As the turn was asked for."""
    start: Count
    """Index of its first sampled token in the sample's tokens."""
    end: Count
    cached_tokens: Count
    """Of the context, by the attempt that ended the turn."""
    times: TurnTimes
    environment_seconds: Seconds
    """Spent in the environment's own step."""


class Ending(Enum):
    """Why a trajectory has no further turn."""

    DONE = "done"
    """Its environment said so."""
    MAX_TURNS = "max_turns"
    """It had as many turns as its prompt allows, and its environment was not done."""
    CONTEXT = "context"
    """Its context had no room for another token, and its environment was not done."""
    FAILED = "failed"
    """The infrastructure failed."""
    UNKNOWN = "unknown"
    """Whoever wrote the sample did not say."""


TRUNCATED = frozenset({Ending.MAX_TURNS, Ending.CONTEXT})
"""Endings of trajectories that would have gone on: the reward is that of a part of the task."""


class Sample(Record, frozen=True, kw_only=True):
    """One trajectory from its first observation to its end."""

    SCHEMA: ClassVar[str] = "sample/5"

    trajectory_id: TrajectoryId
    group_id: GroupId
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    model_id: Id
    """Whose policy versions sampled it."""
    environment: Annotated[str, Meta(max_length=256)]
    seed: Seed
    tokens: Tokens
    """Observations and sampled tokens in order."""
    loss_mask: Mask
    """1 where the policy sampled the token."""
    logprobs: Logprobs
    """One a token; 0.0 where the mask is 0."""
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=MAX_SPANS)]
    """Over `tokens`; they cover exactly the sampled ones."""
    turns: Annotated[tuple[SampleTurn, ...], Meta(max_length=MAX_TURNS)]
    reward: Reward | None
    """None when the infrastructure failed: that is no reward of 0."""
    success: bool | None = None
    """Whether the task was solved, where its environment says so."""
    failure: Text = ""
    """Why the infrastructure failed; empty when it did not."""
    info: dict[str, Any] = {}
    """The environment's own remarks at the end."""
    device_seconds: DeviceSeconds = {}
    completed_at: Moment
    ended: Ending = Ending.UNKNOWN
    """`max_turns` and `context`: it was cut off, with its reward as it stood."""

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled one of its tokens; -1 if none was sampled."""
        return min((span.version for span in self.spans), default=-1)


class Outcome(Enum):
    """How a trajectory ends, once. A failure of the infrastructure is one of them, and never a reward of 0."""

    TRAINED = "trained"
    STALE = "stale"
    """Sampled under a policy older than the bound allows."""
    FILTERED = "filtered"
    """There is nothing to learn from it: all rewards of its group were equal, it asks for what cannot be weighed, or it
    was cut off and the trainer leaves such out."""
    INFRA_FAILED = "infra_failed"
    SUPERSEDED = "superseded"
    """Sampled under a policy version that the run has gone back behind."""


class SampleOutcome(Record, frozen=True, kw_only=True):
    """The one end of a trajectory."""

    SCHEMA: ClassVar[str] = "sample-outcome/2"

    trajectory_id: TrajectoryId
    group_id: GroupId
    outcome: Outcome
    step: Count
    """The optimizer step that settled it."""
    policy_version: Version
    """The trainer's version at that moment."""
    reason: Text = ""
    recorded_at: Moment
