"""The device time of a simulation: the facts from which the cost of an answer follows.

Keeps true
- A device is one card: an engine on four cards uses four device seconds in a second.
- Time of attempts that were lost with their executor, and of turns that have not ended, is not counted.
- The device time of a turn counts for the card of the executor that ended the turn.
- An engine that an allocator has moved counts as borrowed, and only while it computes. This favours the allocator.

Pure.
"""

from collections.abc import Iterator

from rose.pipeline.accounting.cost import Answer, Attempt, HeldDevices, TrainerStep, Usage
from rose.pipeline.accounting.prices import DeviceClass
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.results import OWN, worker_kind
from rose.schemas.heartbeats import WorkerClass


def simulated_usage(fleet: Fleet) -> Usage:
    """Return the device time of a simulation that has ended."""
    steps, gpus = fleet.trainer.figures.steps, fleet.scenario.training.gpus
    ends = [step.ended_at for step in steps] + [fleet.events.now]
    own = [each for each in fleet.executors.values() if worker_kind(each.name) == OWN]
    return Usage(
        attempts=list(_attempts(fleet)),
        answers={
            sample.trajectory_id: Answer(outcome, sample.success, step + 1, ends[step])
            for sample, outcome, step in fleet.trainer.figures.settled
        },
        held=[HeldDevices(each.cost.card, each.cost.tensor_parallel, 0.0, fleet.events.now) for each in own],
        trainer=[
            TrainerStep(step.ended_at, step.ended_at - step.collected_at, step.collected_at - step.began_at, gpus)
            for step in steps
        ],
    )


def _attempts(fleet: Fleet) -> Iterator[Attempt]:
    for turn in fleet.rollout.turns:
        cost = fleet.executors[turn.worker].cost
        for worker_class, seconds in turn.device_seconds.items():
            borrowed = worker_class == WorkerClass.SERVING.value or worker_kind(turn.worker) != OWN
            yield Attempt(
                trajectory_id=turn.trajectory,
                device_class=DeviceClass.BORROWED if borrowed else DeviceClass.DEDICATED,
                device=cost.card,
                device_seconds=seconds * cost.tensor_parallel,
                kept=True,
                ended_at=turn.finished_at,
            )
