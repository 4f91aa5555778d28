"""Which prompts a worker opens, and with what.

Keeps true: a prompt is opened only if everything that must be written of it can be: the record of its group holds it,
its sampling can be trained on, and its environment is one that this worker runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import UsageError
from schemas.progress import GroupState
from schemas.prompts import Prompt, trajectory_id, untrainable_reason
from workers.environments.home import Decision, Home
from workers.environments.jobs import Reset
from workers.environments.outbox import group_of
from workers.environments.steps import unwritable
from workers.environments.trajectory import Rules, settled_sampling

FURTHEST = 2**53
"""The offset whose encoding is longest."""


@dataclass(frozen=True, slots=True)
class Resetting:
    """A trajectory of a group that is being opened."""

    home: Home
    decision: Decision
    index: int


def refusal_of(prompt: Prompt, rules: Rules, check_environment: Callable[[str], object]) -> str:
    """Why this prompt cannot be opened; empty when it can. `check_environment` raises UsageError."""
    whole = settled_sampling(prompt, rules.sampling)
    if reason := untrainable_reason(whole.sampling):
        return reason
    try:
        check_environment(prompt.environment)
    except UsageError as error:
        return str(error)
    furthest = group_of(whole, GroupState.OPEN, offset=FURTHEST, decided_to=FURTHEST, outcomes_from=FURTHEST, now=0.0)
    return unwritable(furthest)


def resets(home: Home, decision: Decision, *, life: int) -> list[Reset]:
    """What the environments of the group are asked to begin with. What is to be settled by hand begins nothing."""
    prompt = decision.opens
    decision.begun |= home.asked_of(decision)
    decision.awaited -= len(decision.begun)
    return [
        Reset(
            life=life,
            trajectory_id=trajectory_id(prompt.group_id, index),
            environment=prompt.environment,
            ticket=Resetting(home, decision, index),
            seed=prompt.task_seed,
            arguments=prompt.arguments,
        )
        for index in range(prompt.group_size)
        if index not in decision.begun
    ]
