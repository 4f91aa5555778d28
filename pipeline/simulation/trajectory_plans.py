"""Plans of simulated trajectories: drawn from the tasks of a scenario, or taken from a recorded run.

Keeps true: the plans of a group depend on the tasks, the seed and the number of the group alone. So every arm samples
the same tokens in the same turns. Pure.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rose.pipeline.simulation.scenario import TaskKind, Tasks
from rose.schemas.prompts import trajectory_id
from rose.workers.environments.config import members_to_open


class PlannedTurn(NamedTuple):
    """One turn."""

    observed_tokens: int
    """Tokens of the observation before the turn. The group shares that of the first turn, the prompt."""
    new_tokens: int
    """Tokens that the turn samples."""
    environment_seconds: float
    """Time of the environment's step after the turn."""


class TrajectoryPlan(NamedTuple):
    """One trajectory."""

    turns: tuple[PlannedTurn, ...]
    """At least one."""
    reset_seconds: float
    """Time until the first turn is requested."""
    max_turn_tokens: int
    """Most tokens that a turn may sample, as the request says."""
    solved: bool


GroupPlans = Callable[[int], Sequence[TrajectoryPlan]]
"""Returns the plans of a group's trajectories, by the number of the group."""


def drawn_plans(tasks: Tasks, seed: int) -> GroupPlans:
    """Return the plans that are drawn from the distributions of `tasks`."""
    return partial(_draw_group, tasks, seed)


def _draw_group(tasks: Tasks, seed: int, number: int) -> list[TrajectoryPlan]:
    kinds = tasks.kinds or (tasks,)
    kind = kinds[number % len(kinds)]
    group = f"g{number}"
    chance = _chance(kind, random.Random(f"{seed}/{group}"))
    return [
        _draw_trajectory(kind, chance, random.Random(f"{seed}/{trajectory_id(group, index)}"))
        for index in range(members_to_open(tasks.group_size, tasks.members_ratio))
    ]


def _draw_trajectory(kind: TaskKind, chance: float, draw: random.Random) -> TrajectoryPlan:
    most = min(kind.max_turns, max(1, round(_around(draw, kind.turns, kind.turns_spread))))
    pace = math.exp(draw.gauss(0.0, kind.trajectory_spread))
    solved = draw.random() < chance
    return TrajectoryPlan(tuple(_draw_turns(kind, most, pace, draw)), kind.reset_seconds, kind.max_turn_tokens, solved)


def _draw_turns(kind: TaskKind, most: int, pace: float, draw: random.Random) -> Iterator[PlannedTurn]:
    """Draw turns until there are `most`, or the context has no room for another one."""
    context, observed = 0, kind.prompt_tokens
    for _ in range(most):
        new = min(kind.max_turn_tokens, max(1, round(_around(draw, kind.new_tokens * pace, kind.turn_spread))))
        context += observed + new
        yield PlannedTurn(observed, new, _around(draw, kind.environment_seconds, kind.environment_spread))
        observed = max(1, round(_around(draw, kind.observation_tokens, kind.observation_spread)))
        if kind.context_tokens - context - observed < kind.max_turn_tokens:
            return


def _chance(kind: TaskKind, draw: random.Random) -> float:
    """Draw a group's probability of success."""
    if not 0.0 < kind.solved < 1.0:
        return kind.solved
    return draw.betavariate(kind.solved * kind.hardness, (1.0 - kind.solved) * kind.hardness)


def _around(draw: random.Random, median: float, spread: float) -> float:
    """Draw from a log-normal distribution."""
    return median * math.exp(draw.gauss(0.0, spread))
