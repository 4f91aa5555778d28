"""The cost of a simulated run, by the accounting of live runs (`pipeline/accounting`).

Keeps true
- Every attempt and every held device of a simulation is a fact of the accounting. Attempts of an executor that was
  killed are counted as unknown.
- Engines that an allocator moved, and engines on the trainer's GPUs, are held as dedicated ones while they run
  rollouts. A lender's devices cost for the seconds of its turns only.
"""

import msgspec

from rose.pipeline.accounting.cost import Answer, Attempt, CostReport, HeldDevices, TrainerStep, Usage, cost_of
from rose.pipeline.accounting.prices import DeviceClass, Prices
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.lender import LendingServer


def simulated_cost(fleet: Fleet) -> CostReport:
    """Return the cost of a simulation that has ended."""
    prices = fleet.scenario.prices
    return cost_of(simulated_usage(fleet), Prices() if prices is None else Prices(**msgspec.structs.asdict(prices)))


def simulated_usage(fleet: Fleet) -> Usage:
    """Return the facts from which the cost of a simulation follows."""
    executors, figures, training = fleet.executors.values(), fleet.trainer.figures, fleet.scenario.training
    attempts = [
        Attempt(
            trajectory_id=each.key.trajectory_id,
            device_class=DeviceClass.BORROWED if isinstance(executor, LendingServer) else DeviceClass.DEDICATED,
            device=executor.cost.card,
            device_seconds=each.device_seconds,
            kept=each.sampled,
            ended_at=each.ended_at,
        )
        for executor in executors
        for each in executor.attempts
    ]
    now, ends = fleet.events.now, [step.ended_at for step in figures.steps]
    answers = {
        sample.trajectory_id: Answer(outcome, sample.success, step, ends[step] if step < len(ends) else now)
        for sample, outcome, step in figures.settled
    }
    held = [
        HeldDevices(executor.cost.card, executor.cost.tensor_parallel, begin, end)
        for executor in executors
        if not isinstance(executor, LendingServer)
        for begin, end in executor.held_times(now)
    ]
    steps = [
        TrainerStep(
            ended_at=step.ended_at,
            training_seconds=step.ended_at - step.collected_at,
            waiting_seconds=step.collected_at - step.began_at,
            devices=0 if training.colocated else training.gpus,
        )
        for step in figures.steps
    ]
    return Usage(attempts, answers, held, steps, unknown_attempts=sum(each.lost_attempts for each in executors))
