"""The arms of `bench.elastic`: which executors each has, who comes and goes, and what all of them are asked. Pure.

Keeps true: arms differ in nothing but that.
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
"""So slow that 64 executors make fewer than a hundred turns a second, and the machine is not what is measured."""

LENGTHS = Lengths(median_tokens=14.0, trajectory_sigma=0.25, turn_sigma=0.4, token=21)

SERVING_RATES = ServingRates(prefill_tokens_per_second=8000.0, tpot_seconds=0.03)
"""Of users' requests."""

SERVING_BYTES, GUEST_BYTES_PER_TOKEN = 36_000, 90
"""KV memory of a device in that of one token of serving's, and what a token of a rollout takes of it. Users' peaks are
29,262 where a worker's share of Azure's code trace is largest: that and the headroom fill it. Two turns fill what they
leave, as the dozens do that a real device would hold: memory is short, and bursts are felt."""

HEADROOM, QUIET_SECONDS = 0.2, 10.0
"""The defaults of `rose.workers.lender.config`."""

CONTROL = {"lease_seconds": 6.0, "dwell_seconds": 3.0, "idle_seconds": 2.0, "margin_seconds": 0.5}
"""The control app's settings, shortened about as the trace is; a lease is six of its decisions."""

OPERANDS = 4
"""Of the sums, at most. An answer that is no sum spends its turn, so a trajectory has 5 to 8 whatever is sampled."""

MOST_WALL_SECONDS = 240.0
"""For which whole workers are planned ahead."""

MOST_TURNS = 64
"""Of a trajectory: more than it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is run."""

    dedicated: int
    lenders: int
    groups: int
    group_size: int
    trace: Path
    speed: float
    allocation_delay: float
    """Seconds of the trace; so is `wake`."""
    wake: float


def specs_of(shape: Shape, arm: str) -> tuple[ExecutorSpec, ...]:
    """The executors of an arm, each with an inbox of its own."""
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
    """Of an executor."""
    return f"dedicated-{number}"


def worker_name(number: int) -> str:
    """Of a serving worker."""
    return f"serving-{number}"


def whole_plan(shape: Shape) -> tuple[tuple[PlannedAction, ...], float]:
    """When whole workers come and go, and for how many seconds users then wanted more than was left to them."""
    users = users_of(read_trace(str(shape.trace)), SERVING_RATES, workers=shape.lenders, speed=shape.speed)
    moves = whole_workers(users, delay=shape.allocation_delay, wall_seconds=MOST_WALL_SECONDS)
    actions = [
        PlannedAction(at=move.at, worker=worker_name(move.worker), action=Action.START if move.given else Action.STOP)
        for move in moves
    ]
    return tuple(actions), short_seconds(users, moves, wall_seconds=MOST_WALL_SECONDS)


def actions_of(shape: Shape, arm: str) -> tuple[PlannedAction, ...]:
    """Who comes and goes in an arm."""
    if arm == "whole":
        return whole_plan(shape)[0]
    if arm == "rose":  # what is run before is for the lenders alone: so all are woken once
        return tuple(
            PlannedAction(at=0.0, worker=dedicated_name(number), action=Action.START)
            for number in range(shape.dedicated)
        )
    return ()


def serving_of(shape: Shape) -> Serving:
    """Whom lenders serve."""
    return Serving(
        trace=str(shape.trace),
        rates=SERVING_RATES,
        speed=shape.speed,
        kv_bytes=SERVING_BYTES,
        headroom=HEADROOM,
        quiet_seconds=QUIET_SECONDS,
    )


def prompts_of(name: str, groups: int, group_size: int, *, most_turns: int = MOST_TURNS) -> list[Prompt]:
    """The same whenever they are asked for; groups are called `name` and a number."""
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
