"""The cost of a simulated run, by the accounting of live runs (`pipeline/accounting`).

Keeps true
- Every attempt and every held device of a simulation is a fact of the accounting, attempts that are under way at the
  end included. Attempts of an executor that was killed are counted as unknown.
- An attempt is kept if the applied answer of its turn is its own or went on from it, as in the ledger of live runs.
- Engines that an allocator moved, and engines on the trainer's GPUs, are held as dedicated ones while they run
  rollouts. The trainer's GPUs do not cost as waiting ones meanwhile: no second of a device costs twice. A lender's
  devices cost for the seconds of its turns only.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from rose.pipeline.accounting.cost import Answer, Attempt, CostReport, HeldDevices, TrainerStep, Usage, cost_of
from rose.pipeline.accounting.prices import DeviceClass, Prices
from rose.pipeline.simulation.executors import AttemptFigures
from rose.pipeline.simulation.fleet import TRAINER, Fleet
from rose.pipeline.simulation.lender import LendingServer
from rose.pipeline.simulation.trainer import StepFigures
from rose.schemas.turns import TurnOutcome


def simulated_cost(fleet: Fleet) -> CostReport:
    """Return the cost of a simulation that has ended."""
    prices = fleet.scenario.prices
    return cost_of(simulated_usage(fleet), Prices() if prices is None else Prices(**msgspec.structs.asdict(prices)))


def simulated_usage(fleet: Fleet) -> Usage:
    """Return the facts from which the cost of a simulation follows."""
    executors, figures, training = fleet.executors.values(), fleet.trainer.figures, fleet.scenario.training
    now, ends = fleet.events.now, [step.ended_at for step in figures.steps]
    kept = _kept(fleet)
    attempts = []
    for executor in executors:
        device_class = DeviceClass.BORROWED if isinstance(executor, LendingServer) else DeviceClass.DEDICATED
        ended = [
            (each.key, each.device_seconds, (executor.name, each) in kept, each.ended_at) for each in executor.attempts
        ]
        under_way = [(key, seconds, True, now) for key, seconds in executor.open_attempts()]
        attempts += [
            Attempt(key.trajectory_id, device_class, executor.cost.card, seconds, is_kept, at)
            for key, seconds, is_kept, at in (*ended, *under_way)
        ]
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
            waiting_seconds=step.collected_at - step.began_at - _lent(fleet, step) / training.gpus,
            devices=0 if training.colocated else training.gpus,
        )
        for step in figures.steps
    ]
    return Usage(attempts, answers, held, steps, unknown_attempts=sum(each.lost_attempts for each in executors))


def _lent(fleet: Fleet, step: StepFigures) -> float:
    """Return the device seconds of a step in which GPUs of the trainer ran rollouts."""
    return sum(
        executor.cost.tensor_parallel * max(0.0, min(end, step.ended_at) - max(begin, step.began_at))
        for executor in fleet.executors.values()
        if executor.name.startswith(f"{TRAINER}-")
        for begin, end in executor.held_times(fleet.events.now)
    )


_Answered = tuple[str, AttemptFigures]
"""An answered attempt with the name of its executor."""


def _kept(fleet: Fleet) -> set[_Answered]:
    """Return the answered attempts whose tokens are part of a trajectory."""
    by_turn: defaultdict[tuple[str, int], list[_Answered]] = defaultdict(list)
    for executor in fleet.executors.values():
        for each in executor.attempts:
            by_turn[each.key.trajectory_id, each.key.turn].append((executor.name, each))
    applied = {(turn.trajectory, turn.turn): (turn.attempts - 1, turn.worker) for turn in fleet.rollout.turns}
    kept: set[_Answered] = set()
    for name, answered in by_turn.items():
        tip = _tip(answered, applied.get(name))
        while tip is not None and tip not in kept:
            if tip[1].tokens:
                kept.add(tip)
            tip = _before(tip[1], answered)
    return kept


def _tip(answered: Sequence[_Answered], applied: tuple[int, str] | None) -> _Answered | None:
    """Return the attempt whose answer counts: the applied one (attempt, executor), or else the longest so far."""
    if applied is None:
        return max(answered, key=lambda each: each[1].tokens)
    return next((each for each in answered if (each[1].key.attempt, each[0]) == applied), None)


def _before(attempt: AttemptFigures, answered: Sequence[_Answered]) -> _Answered | None:
    """Return the attempt that an attempt went on from; None if the attempt began the turn anew."""
    if not attempt.tokens_before:
        return None
    earlier = (each for each in answered if each[1].key.attempt < attempt.key.attempt)
    preempted = (each for each in earlier if each[1].outcome is TurnOutcome.PREEMPTED)
    return next((each for each in preempted if each[1].tokens == attempt.tokens_before), None)
