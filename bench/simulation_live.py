"""Compares a live run of emulated executors with its simulation.

    python -m bench.simulation_live                      64 executors on the embedded broker
    KAFKA_HOME=... python -m bench.simulation_live       on Apache Kafka
    python -m bench.simulation_live --executors 16 --groups 12

The live run is that of `bench.elastic`, arm `fixed`, with memory for prefixes (with `--kv-tokens 400`, as there, two
turns fill an executor): a real bus, router and environment worker, and executors whose compute is emulated
(`bench.fleet`). The simulation has the same engines, the same prompts and sampled tokens. It takes
from the live run what it does not model: the mean time of a record on the bus, the time of each environment's steps,
and when each trajectory requests its first turn (the worker opens all environments at once, in an order of its own).
Nothing else of the simulation depends on the live run.

- `rollout`: difference of the seconds from the first request to the last sample.
- `workers`: turns by executor, half of the sum of the differences, relative to all turns. Equal executors are
  compared in order of their turns: which of them is first is chance.
- `cached`: difference of the prompt tokens found in caches, relative to all prompt tokens of the live run's caches.

`--runs` repeats the live run; a check is of the run in the middle, and the rows show all. `--json FILE` writes one
object with `checks` and all rows. Exit status 1 if a bound is missed.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.broker import scratch_broker
from bench.check import Check, keep, options, say
from bench.fleet.arms import LENGTHS, RATES, dedicated_name, prompts_of
from bench.fleet.engine import STEP_TOKENS, Rates, profile_of
from bench.fleet.executor import ExecutorSpec
from bench.fleet.fleet import Plan
from bench.fleet.rollout import MOST_TOKENS, job_of, rollout
from rose.pipeline.simulation.cost_model import write_profile
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.recorded_run import RECORDS_OF_A_TURN, on_the_bus
from rose.pipeline.simulation.scenario import Elastic, Pool, Scenario, Tasks, Training
from rose.pipeline.simulation.trajectory_plans import PlannedTurn, TrajectoryPlan
from rose.schemas.samples import Sample
from rose.topics.settings import BusSettings

GROUPS = "live."
"""Prefix of the names of the counted groups."""

WARM_GROUPS, WARM_GROUP_SIZE, WARM_TURNS = 4, 16, 2
"""Number, size and turns of the groups that are not counted: processes are cold."""

ROLLOUT_TOLERANCE, COUNT_TOLERANCE = 0.10, 0.15


class Figures(NamedTuple):
    """A rollout, live or simulated."""

    seconds: float
    turns: list[int]
    """Turns by executor, in ascending order."""
    cached_tokens: int
    context_tokens: int


class Live(NamedTuple):
    """A live rollout, and what its simulation takes from it."""

    figures: Figures
    plans: list[list[TrajectoryPlan]]
    """The trajectories of each group."""
    hop_seconds: float
    """Mean time of a record on the bus."""


def run_live(settings: BusSettings, rates: Rates, executors: int, groups: int, group_size: int, folder: Path) -> Live:
    """Run a rollout on emulated executors. Raises Stalled."""
    specs = (ExecutorSpec(name=dedicated_name(number), slot=number, rates=rates) for number in range(executors))
    plan = Plan(
        bus=settings,
        job=job_of(settings),
        executors=tuple(specs),
        lengths=LENGTHS,
        journal=str(folder / "journal.jsonl"),
    )
    prompts = prompts_of(GROUPS, groups, group_size)
    with rollout(settings, plan, folder, groups=groups, control=None) as running:
        warm = prompts_of("warm.", WARM_GROUPS, WARM_GROUP_SIZE, most_turns=WARM_TURNS)
        running.submit(warm, go=False)
        running.until(lambda: running.ended(warm))
        running.submit(prompts)
        running.until(lambda: running.ended(prompts))
        running.fleet.stop()
    samples = [sample for sample in running.trainer.samples if sample.group_id.startswith(GROUPS)]
    return live_of(samples)


def live_of(samples: Sequence[Sample]) -> Live:
    """Return the figures of a live rollout."""
    turns = [turn for sample in samples for turn in sample.turns]
    began = min(turn.times.requested_at for turn in turns)
    figures = Figures(
        seconds=max(sample.completed_at for sample in samples) - began,
        turns=sorted(Counter(turn.worker for turn in turns).values()),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        context_tokens=sum(turn.start for turn in turns),
    )
    groups: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda each: (each.group_id, int(each.trajectory_id.rpartition(":")[2]))):
        groups[sample.group_id].append(sample)
    plans = [[plan_of(sample, began) for sample in members] for members in groups.values()]
    hop = statistics.fmean(on_the_bus(turn.times) for turn in turns) / RECORDS_OF_A_TURN
    return Live(figures, plans, hop)


def plan_of(sample: Sample, began: float) -> TrajectoryPlan:
    """Return what a trajectory did: its tokens, and the times of its environment, from `began` on."""
    turns, known = [], 0
    for turn in sample.turns:
        turns.append(PlannedTurn(turn.start - known, turn.end - turn.start, turn.environment_seconds))
        known = turn.end
    first = sample.turns[0].times.requested_at - began
    return TrajectoryPlan(tuple(turns), first, MOST_TOKENS, bool(sample.success))


def simulate(live: Live, rates: Rates, executors: int, folder: Path) -> Figures:
    """Simulate the rollout."""
    profile = folder / "emulated.toml"
    profile.write_text(write_profile(profile_of(rates)), encoding="utf-8")
    scenario = Scenario(
        name="live",
        dedicated=(Pool(profile=str(profile), count=executors, max_turns=rates.max_turns, step_tokens=STEP_TOKENS),),
        elastic=Elastic(how="none"),
        tasks=Tasks(groups=len(live.plans), group_size=len(live.plans[0]), max_turn_tokens=MOST_TOKENS),
        training=Training(steps=1),
        hop_seconds=live.hop_seconds,
    )
    fleet = Fleet(scenario, plans=live.plans)
    fleet.run()
    turns = fleet.rollout.turns
    began = min(turn.requested_at for turn in turns)
    return Figures(
        seconds=fleet.trainer.figures.steps[0].collected_at - began,
        turns=sorted(Counter(turn.worker for turn in turns).values()),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        context_tokens=sum(turn.context_tokens for turn in turns),
    )


def differences(live: Figures, simulated: Figures) -> dict[str, float]:
    """Return the relative differences of a simulation from its live run."""
    missing = [0] * (len(live.turns) - len(simulated.turns))
    moved = sum(abs(one - other) for one, other in zip(live.turns, [*missing, *simulated.turns], strict=True))
    return {
        "rollout": simulated.seconds / live.seconds - 1.0,
        "workers": moved / 2 / sum(live.turns),
        "cached": simulated.cached_tokens / live.cached_tokens - 1.0,
    }


def checks_of(rows: Iterable[dict[str, float]]) -> list[Check]:
    """Return the checks: the difference in the middle of all runs, whatever its sign."""
    rows = list(rows)
    bounds = {"rollout": ROLLOUT_TOLERANCE, "workers": COUNT_TOLERANCE, "cached": COUNT_TOLERANCE}
    return [
        Check(
            name,
            statistics.median(abs(row[name]) for row in rows),
            "of the live run",
            bound,
            "max",
            "the live run",
            {"runs": len(rows), "largest": round(max(abs(row[name]) for row in rows), 4)},
        )
        for name, bound in bounds.items()
    ]


def main() -> None:
    """Run the comparison; see the module."""
    parser = options(__doc__)
    parser.add_argument("--executors", type=_positive, default=64)
    parser.add_argument("--groups", type=_positive, default=24, help="groups of trajectories")
    parser.add_argument("--group-size", type=_positive, default=8)
    parser.add_argument("--kv-tokens", type=_positive, default=4096, help="KV tokens of an executor")
    parser.add_argument("--runs", type=_positive, default=1)
    arguments = parser.parse_args()
    rates = msgspec.structs.replace(RATES, kv_tokens=arguments.kv_tokens)
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="rose-simulation-live-"))
    for number in range(arguments.runs):
        with scratch_broker() as broker:
            shape = arguments.executors, arguments.groups, arguments.group_size
            live = run_live(broker.settings(f"run{number}."), rates, *shape, folder)
            name = broker.name
        began = time.perf_counter()
        simulated = simulate(live, rates, arguments.executors, folder)
        rows.append(
            {
                **differences(live.figures, simulated),
                "live_seconds": live.figures.seconds,
                "simulated_seconds": simulated.seconds,
                "live_reused": live.figures.cached_tokens / live.figures.context_tokens,
                "simulated_reused": simulated.cached_tokens / simulated.context_tokens,
                "turns": float(sum(live.figures.turns)),
                "hop_milliseconds": 1000 * live.hop_seconds,
                "simulation_took_seconds": time.perf_counter() - began,
            }
        )
        say(f"run {number}: {rows[-1]}")
    checks = checks_of(rows)
    if not keep({"broker": name, "checks": checks, "runs": rows}, arguments.json):
        print(f"broker: {name}; {arguments.executors} emulated executors")
        print(*rows, *checks, sep="\n")
    shutil.rmtree(folder)
    sys.exit(not all(check.met for check in checks))


def _positive(text: str) -> int:
    if not text.isdigit() or text == "0":
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    main()
