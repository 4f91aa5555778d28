"""A finished trajectory, and what became of it."""

from enum import Enum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import (
    MAX_CONTEXT_TOKENS,
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
    """One applied turn, with what the loss, the report and the cost accounting need."""

    turn: Turn
    attempt: Attempt
    worker: Id
    sampling: Sampling
    """Sampling settings with which the turn was requested."""
    start: Count
    """Index of its first sampled token in the sample's tokens."""
    end: Count
    cached_tokens: Count
    """Context tokens that the attempt that ended the turn found in the prefix cache."""
    times: TurnTimes
    environment_seconds: Seconds
    """Time that the environment's own step took."""


class Ending(Enum):
    """Why a trajectory has no further turn."""

    DONE = "done"
    """The environment was done."""
    MAX_TURNS = "max_turns"
    """The trajectory had as many turns as its prompt allows, and its environment was not done."""
    CONTEXT = "context"
    """The context had no room for another token, and the environment was not done."""
    FAILED = "failed"
    """The infrastructure failed."""
    SURPLUS = "surplus"
    """Enough other trajectories of its group had ended: the group was opened with more than it needs."""
    STALE = "stale"
    """One of its tokens is older than the trainer's staleness bound allows, so the sample could not be trained on."""
    UNKNOWN = "unknown"
    """The writer of the sample did not say."""


TRUNCATED = frozenset({Ending.MAX_TURNS, Ending.CONTEXT})
"""Endings of truncated trajectories: the reward is that of a part of the task."""


class Sample(Record, frozen=True, kw_only=True):
    """One trajectory from its first observation to its end."""

    SCHEMA: ClassVar[str] = "sample/5"

    MAX_BYTES: ClassVar[int] = 9 * MAX_CONTEXT_TOKENS + 400 * 1024
    """Most bytes of a sample: tokens, mask and logprobs of the longest context, its spans, turns and remarks."""

    trajectory_id: TrajectoryId
    group_id: GroupId
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    model_id: Id
    """Name of the policy whose versions sampled it."""
    environment: Annotated[str, Meta(max_length=256)]
    seed: Seed
    tokens: Tokens
    """Observations and sampled tokens in order."""
    loss_mask: Mask
    """1 where the policy sampled the token."""
    logprobs: Logprobs
    """Logprob of each token; 0.0 where the mask is 0."""
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=MAX_SPANS)]
    """Policy versions over `tokens`; the spans cover exactly the sampled tokens."""
    turns: Annotated[tuple[SampleTurn, ...], Meta(max_length=MAX_TURNS)]
    reward: Reward | None
    """Reward; None if the infrastructure failed or the trajectory was ended early, which is no reward of 0."""
    success: bool | None = None
    """Whether the task was solved; None if the environment does not say."""
    failure: Text = ""
    """Why the infrastructure failed; empty if it did not."""
    info: dict[str, Any] = {}
    """Remarks of the environment at the end."""
    device_seconds: DeviceSeconds = {}
    completed_at: Moment
    ended: Ending = Ending.UNKNOWN
    """Why the trajectory ended; `max_turns` and `context` mean that it was truncated, with its reward up to then."""

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that sampled one of its tokens; -1 if none was sampled."""
        return min((span.version for span in self.spans), default=-1)


class Outcome(Enum):
    """Outcome of a trajectory, written once. A failure of the infrastructure is an outcome, never a reward of 0."""

    TRAINED = "trained"
    STALE = "stale"
    """Sampled by a policy older than the bound allows."""
    FILTERED = "filtered"
    """Nothing can be learned: all rewards of its group were equal, its sampling cannot be weighed, or it was truncated
    and the trainer leaves such samples out."""
    INFRA_FAILED = "infra_failed"
    SURPLUS = "surplus"
    """Ended early, because its group was opened with more trajectories than it needs and enough had ended."""
    SUPERSEDED = "superseded"
    """Sampled by a policy version that the run has gone back behind."""
    EVALUATED = "evaluated"
    """Sampled for an evaluation. The reason says why the sample is not in the evaluation's result; empty if it is."""


class SampleOutcome(Record, frozen=True, kw_only=True):
    """The outcome of one trajectory, written by the trainer, or by the evaluator if its group is of an evaluation."""

    SCHEMA: ClassVar[str] = "sample-outcome/2"

    trajectory_id: TrajectoryId
    group_id: GroupId
    outcome: Outcome
    step: Count
    """Optimizer step that settled it; of an evaluation, the version that it is pinned to."""
    policy_version: Version
    """Version of the trainer's policy at that time; of an evaluation, the version that it is pinned to."""
    reason: Text = ""
    oldest_fresh: Version = 0
    """The oldest policy version that the trainer's staleness bound still allowed; 0 if it says nothing."""
    recorded_at: Moment
