"""The tasks of the demo and of evaluations. Keeps true: no training task is ever a held-out one."""

from pipeline.command.sections import TasksSection
from schemas.errors import UsageError
from schemas.prompts import Prompt

SEEDS_OF_A_RUN = 1_000_000
"""Every run seed draws its tasks from a range of its own."""


def training_prompts(tasks: TasksSection, *, run: str, seed: int, groups: int) -> list[Prompt]:
    """The prompts of a run, a task each. Raises UsageError when they would reach into the held-out tasks."""
    first = tasks.first_seed + seed * SEEDS_OF_A_RUN
    if first + groups > tasks.held_out_seed and first < tasks.held_out_seed + tasks.held_out:
        raise UsageError(
            f"run.seed {seed} would train on held-out tasks: take a smaller seed, or a larger tasks.held_out_seed"
        )
    return [
        Prompt(
            group_id=f"{run}.{number:05d}",
            group_size=tasks.group_size,
            environment=tasks.environment,
            seed=first + number,
            arguments=tasks.arguments,
            max_turns=tasks.max_turns,
        )
        for number in range(groups)
    ]
