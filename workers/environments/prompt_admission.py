"""Decides which prompts a worker opens, and starts their environments.

Keeps true: a prompt is opened only if its group record can be encoded, its sampling is trainable, the model has its
stop tokens and the worker has its environment.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rose.schemas.errors import RecordError, UsageError
from rose.schemas.limits import MAX_DEFERRALS, MAX_GROUP_SIZE
from rose.schemas.progress import GroupState
from rose.schemas.prompts import Prompt, sampling_error, stop_tokens_error, trajectory_id
from rose.schemas.wire import encode
from rose.workers.environments.home import Home
from rose.workers.environments.jobs import ResetJob
from rose.workers.environments.outbox import group_record
from rose.workers.environments.prompt_decisions import PromptDecision
from rose.workers.environments.trajectory import TrajectoryRules, with_full_sampling

FURTHEST = 2**53
"""The offset with the longest encoding."""


@dataclass(frozen=True, slots=True)
class PendingReset:
    """The ticket of a reset: a trajectory of a group that is being opened."""

    home: Home
    decision: PromptDecision
    index: int


def admission_error(prompt: Prompt, rules: TrajectoryRules, check_environment: Callable[[str], object]) -> str | None:
    """Why the prompt cannot be opened; None if it can.

    `check_environment` raises UsageError for an unknown environment.
    """
    whole = with_full_sampling(prompt, rules.sampling)
    if not prompt.evaluation and (reason := sampling_error(whole.sampling)):
        return reason
    if rules.vocabulary is not None and (reason := stop_tokens_error(whole.sampling, rules.vocabulary)):
        return reason
    furthest = group_record(
        whole,
        GroupState.OPEN,
        offset=FURTHEST,
        decided_to=FURTHEST,
        outcomes_from=FURTHEST,
        needed=MAX_GROUP_SIZE,
        rewarded=MAX_GROUP_SIZE,
        deferrals=MAX_DEFERRALS,
        now=0.0,
    )
    try:
        check_environment(prompt.environment)
        encode(furthest)
    except (UsageError, RecordError) as error:
        return str(error)
    return None


def reset_jobs(home: Home, decision: PromptDecision, *, generation: int) -> list[ResetJob]:
    """The reset jobs of a group that is to be opened. Trajectories with a settle request are not started."""
    prompt = decision.opens
    decision.reset_results |= home.settle_requests_of(decision)
    decision.awaited -= len(decision.reset_results)
    return [
        ResetJob(
            generation=generation,
            trajectory_id=trajectory_id(prompt.group_id, index),
            environment=prompt.environment,
            ticket=PendingReset(home, decision, index),
            seed=prompt.task_seed,
            arguments=prompt.arguments,
            evaluation=prompt.evaluation,
        )
        for index in range(prompt.group_size)
        if index not in decision.reset_results
    ]
