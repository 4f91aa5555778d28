"""Rolling changes as plans: workers are stopped and restarted one after another under load. Pure.

Keeps true: a worker is stopped only while all others are healthy, like in a StatefulSet.
"""

import random
from collections.abc import Sequence

from tests.support.storm.lines import LineKind, Lines
from tests.support.storm.plan import Act, Plan, PlannedFault, Role, Worker
from tests.support.storm.shape import Shape

FLEET = (
    *(Worker(Role.EXECUTOR, number) for number in range(2)),
    *(Worker(Role.ENVIRONMENT, number) for number in range(2)),
    *(Worker(Role.ROUTER, number) for number in range(2)),
    Worker(Role.TRAINER, 0),
    Worker(Role.LENDER, 0),
)
"""Workers in the order of their replacement: new environment workers work with old routers for a while."""


def rolling(seed: int, shape: Shape, first: Sequence[Worker], order: Sequence[Worker]) -> Plan:
    """Return the plan: the workers of `first` run, and those of `order` are replaced one by one."""
    planned_faults = [PlannedFault(0.0, act, worker) for worker in order for act in (Act.LEAVE, Act.START)]
    dice = random.Random(f"rolling {seed}")
    good = (line for line in Lines(dice, shape).drawn() if line.sort is LineKind.GOOD)
    lines = sorted(good, key=lambda line: line.at)
    return Plan(seed, shape, tuple(first), tuple(planned_faults), tuple(lines), in_turn=True)
