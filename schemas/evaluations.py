"""The result of an evaluation: how well one policy version does on a set of prompts that are never trained on.

Keeps true: a result without scores says why it has none. The scores of a complete evaluation are of as many samples of
each prompt as were asked for, each of which was sampled under the evaluated version alone.
"""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rose.schemas.limits import MAX_GROUP_SIZE, Count, Id, Moment, Reward, Text, Version
from rose.schemas.prompts import EvaluationSet
from rose.schemas.record import Record

Share = Annotated[float, Meta(ge=0, le=1)]

MAX_PASS_AT = 16
"""Most values of k in one result."""


class PassAt(msgspec.Struct, frozen=True, array_like=True):
    """The probability that at least one of k samples of a prompt solves it, as a mean over the prompts."""

    k: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    value: Share
    """Unbiased estimate from all samples of each prompt (Chen et al. 2021, arXiv 2107.03374)."""


class Metric(Enum):
    """The figure by which evaluations are compared."""

    SUCCESS = "success"
    """avg@k."""
    PASS = "pass"
    """pass@k of the largest k of the result."""
    REWARD = "reward"


class EvaluationResult(Record, frozen=True, kw_only=True):
    """The result of one evaluation of one policy version, written once, with the outcomes of its trajectories."""

    SCHEMA: ClassVar[str] = "evaluation-result/1"

    model_id: Id
    run: Id
    """Name of the run, as manifests have it."""
    evaluation: EvaluationSet
    set_digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
    """Digest of the prompts and of `samples`: results with another digest are not compared with this one."""
    version: Count
    """Version that was evaluated."""
    epoch: Count
    """Epoch of the version."""
    prompts: Count
    """Number of prompts of the set."""
    samples: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
    """Number of samples that were asked for of each prompt: the k of avg@k."""
    counted: Count
    """Number of samples that are in the scores, or would be if the evaluation were complete."""
    mismatched: Count
    """Number of samples that do not count because another version sampled tokens of them."""
    failed: Count
    """Number of samples that do not count because the infrastructure failed."""
    complete: bool
    """Whether each prompt has all of its samples. Without that there are no scores."""
    reason: Text = ""
    """Why the evaluation is not complete or cannot be compared; empty if it is and can."""
    reward: Reward | None = None
    """Mean over the prompts of the mean reward of a prompt's samples."""
    success: Share | None = None
    """avg@k: mean over the prompts of the share of a prompt's samples that solved it. None if the environment does not
    say."""
    pass_at: Annotated[tuple[PassAt, ...], Meta(max_length=MAX_PASS_AT)] = ()
    """pass@k for some k; empty if the environment does not say what is solved."""
    metric: Metric
    """The figure by which the evaluations of the run are compared."""
    score: Reward | None = None
    """The value of `metric`; None if the evaluation has none."""
    best_version: Version = -1
    """Version of the best score so far; -1 if there is none. Of equal scores the first counts."""
    best_score: Reward | None = None
    without_improvement: Count = 0
    """Number of complete evaluations since the best one."""
    stops_run: bool = False
    """Whether the run ends now, because so many evaluations were no improvement (early stop)."""
    started_at: Moment
    completed_at: Moment
