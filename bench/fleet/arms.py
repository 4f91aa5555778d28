"""The arms of `bench.elastic`: the executors of each arm, the actions on them, and the prompts of all arms. Pure.

Keeps true: arms differ only in executors and actions.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.fleet.engine import Lengths, Rates
from bench.fleet.executor import ExecutorSpec
from bench.fleet.fleet import Action, PlannedAction, Serving
from bench.fleet.users import ServingRates, short_seconds, users_of, whole_workers
from rose.schemas.prompts import Prompt
from rose.workers.loadgen.traces import read_trace

RATES = Rates(prefill_tokens_per_second=500.0, decode_tokens_per_second=10.0, max_turns=2, kv_tokens=400)
"""Rates of an executor. They are low, so that 64 executors make fewer than a hundred turns a second, and the machine is
not the bottleneck."""

LENGTHS = Lengths(median_tokens=14.0, trajectory_sigma=0.25, turn_sigma=0.4, token=21)

SERVING_RATES = ServingRates(prefill_tokens_per_second=8000.0, tpot_seconds=0.03)
"""Rates of users' requests."""

SERVING_BYTES, GUEST_BYTES_PER_TOKEN = 36_000, 90
"""KV memory of a device, in units of one token of serving, and the memory of a rollout token in these units. The
largest peak of a worker's users in Azure's code trace is 29,262: this and the headroom fill the memory. Two turns fill
the rest, as dozens of turns fill a real device, so that memory is short and bursts have an effect."""

HEADROOM, QUIET_SECONDS = 0.2, 10.0
"""The defaults of `rose.workers.lender.config`."""

CONTROL = {"lease_seconds": 6.0, "dwell_seconds": 3.0, "idle_seconds": 2.0, "margin_seconds": 0.5}
"""The control app's settings, shortened about as much as the trace; a lease is six decisions long."""

OPERANDS = 4
"""Most operands of the sums. A wrong answer uses up its turn, so a trajectory has 5 to 8 turns for any sampled
tokens."""

MOST_WALL_SECONDS = 240.0
"""Time for which the moves of whole workers are planned."""

MOST_TURNS = 64
"""Most turns of a trajectory; no trajectory has this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The settings of a run."""

    dedicated: int
    lenders: int
    groups: int
    group_size: int
    trace: Path
    speed: float
    allocation_delay: float
    """Seconds of the trace; `wake` has the same unit."""
    wake: float


def specs_of(shape: Shape, arm: str) -> tuple[ExecutorSpec, ...]:
    """Return the executors of an arm, each with its own inbox."""
    fixed = [ExecutorSpec(name=dedicated_name(number), slot=number, rates=RATES) for number in range(shape.dedicated)]
    if arm == "fixed":
        return tuple(fixed)
    lends, given = arm == "rose", {planned.worker for planned in actions_of(shape, arm)}
    workers = [
        ExecutorSpec(
            name=worker_name(number),
            slot=shape.dedicated + number,
            rates=RATES,
            lends=lends,
            kv_bytes_per_token=GUEST_BYTES_PER_TOKEN,
            wake_seconds=shape.wake / shape.speed,
        )
        for number in range(shape.lenders)
        if lends or worker_name(number) in given
    ]
    return (*fixed, *workers)


def dedicated_name(number: int) -> str:
    """Return the name of a dedicated executor."""
    return f"dedicated-{number}"


def worker_name(number: int) -> str:
    """Return the name of a serving worker."""
    return f"serving-{number}"


def whole_plan(shape: Shape) -> tuple[tuple[PlannedAction, ...], float]:
    """Return the moves of whole workers, and for how many seconds users then needed more workers than were left."""
    users = users_of(read_trace(str(shape.trace)), SERVING_RATES, workers=shape.lenders, speed=shape.speed)
    moves = whole_workers(users, delay=shape.allocation_delay, wall_seconds=MOST_WALL_SECONDS)
    actions = [
        PlannedAction(at=move.at, worker=worker_name(move.worker), action=Action.START if move.given else Action.STOP)
        for move in moves
    ]
    return tuple(actions), short_seconds(users, moves, wall_seconds=MOST_WALL_SECONDS)


def actions_of(shape: Shape, arm: str) -> tuple[PlannedAction, ...]:
    """Return the actions on executors in an arm."""
    if arm == "whole":
        return whole_plan(shape)[0]
    if arm == "rose":  # the warm-up is for lenders only: it wakes all of them once
        return tuple(
            PlannedAction(at=0.0, worker=dedicated_name(number), action=Action.START)
            for number in range(shape.dedicated)
        )
    return ()


def serving_of(shape: Shape) -> Serving:
    """Return the users and settings of the lenders."""
    return Serving(
        trace=str(shape.trace),
        rates=SERVING_RATES,
        speed=shape.speed,
        kv_bytes=SERVING_BYTES,
        headroom=HEADROOM,
        quiet_seconds=QUIET_SECONDS,
    )


def prompts_of(name: str, groups: int, group_size: int, *, most_turns: int = MOST_TURNS) -> list[Prompt]:
    """Return the prompts, the same at each call; group ids are `name` and a number."""
    return [
        Prompt(
            group_id=f"{name}{number:04d}",
            group_size=group_size,
            environment="calculator",
            seed=number,
            arguments={"min_operands": 1, "max_operands": OPERANDS},
            max_turns=most_turns,
        )
        for number in range(groups)
    ]
