"""Rolling changes as plans: one after another is asked to leave and started again, while prompts come. Pure.

Keeps true: nobody is asked to leave before all are well again, as where a StatefulSet rolls.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.chaos.storm_lines import Line, Lines, Sort
from tests.chaos.storm_plan import Act, Deed, Plan, Role, Worker
from tests.chaos.storm_shape import Shape
from tests.upgrade.next_version import FIELD

FLEET = (
    *(Worker(Role.EXECUTOR, number) for number in range(2)),
    *(Worker(Role.ENVIRONMENT, number) for number in range(2)),
    *(Worker(Role.ROUTER, number) for number in range(2)),
    Worker(Role.TRAINER, 0),
    Worker(Role.LENDER, 0),
)
"""Who runs, in the order in which they are replaced: new environment workers have old routers for a while."""

OF_A_PRODUCER = "set by a producer"
"""The value that a producer gives a field of the prompt which nobody here knows."""


def rolling(seed: int, shape: Shape, first: Sequence[Worker], order: Sequence[Worker]) -> Plan:
    """The workers of `first` run; those of `order` are replaced one by one."""
    deeds = [Deed(0.0, act, worker) for worker in order for act in (Act.LEAVE, Act.START)]
    dice = random.Random(f"rolling {seed}")
    lines = sorted(_good(Lines(dice, shape)), key=lambda line: line.at)
    return Plan(seed, shape, tuple(first), tuple(deeds), tuple(lines), in_turn=True)


def _good(lines: Lines) -> Iterator[Line]:
    """Prompts without a fault, with a field more."""
    for line in lines.drawn():
        if line.sort is Sort.GOOD:
            yield replace(line, value=json.dumps(json.loads(line.value) | {FIELD: OF_A_PRODUCER}).encode())
