"""Compares `rose replay --what-if` with really running what it asks.

    python -m bench.what_if                       32 executors on the embedded broker
    KAFKA_HOME=... python -m bench.what_if        on Apache Kafka
    python -m bench.what_if --executors 16 --groups 12

A rollout on emulated executors (`bench.fleet`) with a real bus, router and environment worker is recorded: its
heartbeats, samples and outcomes. From these records alone, as `rose replay --what-if` does, the run is simulated as it
was and with each change: half of the executors, one turn at a time for each executor, and other routing policies. Each
change is then really made, in a run with the same prompts and sampled tokens.

- `recorded`: difference of the simulation as it was from the recorded run, in seconds of the rollout.
- `what_if`: difference of each what-if from its real run, in seconds of the rollout; the check is the largest.

`--json FILE` writes one object with `checks` and all rows. Exit status 1 if a bound is missed.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.broker import scratch_broker
from bench.check import Check, keep, options, say
from bench.fleet.arms import LENGTHS, RATES, dedicated_name, prompts_of
from bench.fleet.engine import STEP_TOKENS, Rates
from bench.fleet.executor import ExecutorSpec
from bench.fleet.fleet import Plan
from bench.fleet.rollout import ROSE, job_of, rollout
from bench.simulation_live import GROUPS, WARM_GROUP_SIZE, WARM_GROUPS, WARM_TURNS
from rose.pipeline.accounting.prices import Prices
from rose.pipeline.accounting.usage import UsageLedger
from rose.pipeline.simulation.recorded_run import RecordedRun
from rose.pipeline.simulation.scenario import Control
from rose.pipeline.simulation.what_if import (
    Replica,
    RunFigures,
    RunSettings,
    changed,
    replica_of,
    simulated_figures,
)
from rose.topics.catalog import COMPLETED, HEARTBEATS, OUTCOMES, SAMPLES
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.workers.lender.admission import Promise

TOLERANCE = 0.15


class Change(NamedTuple):
    """A change of the recorded run."""

    name: str
    what_if: str
    executors_share: float = 1.0
    rates: Mapping[str, Any] = {}
    policy: str = ROSE


CHANGES = (
    Change("half of the executors", "dedicated.0.count={half}", executors_share=0.5),
    Change("one turn at a time", "dedicated.0.max_turns=1", rates={"max_turns": 1}),
    Change("round robin", "routing.policy=round_robin", policy="round_robin"),
    Change("least load", "routing.policy=least_load", policy="least_load"),
)

SETTINGS = RunSettings(
    name="recorded",
    step_tokens=STEP_TOKENS,
    max_staleness=4,
    max_lag_versions=2,
    promise=Promise(),
    control=Control(),
    cells=1,
    heartbeat_seconds=0.2,
    prices=Prices(),
)


class Shape(NamedTuple):
    """The size of a run."""

    executors: int
    groups: int
    group_size: int


def record(settings: BusSettings, rates: Rates, shape: Shape, folder: Path, policy: str = ROSE) -> Replica:
    """Run a rollout, and return what its log says. Raises Stalled."""
    specs = (ExecutorSpec(name=dedicated_name(number), slot=number, rates=rates) for number in range(shape.executors))
    plan = Plan(
        bus=settings,
        job=job_of(settings),
        executors=tuple(specs),
        lengths=LENGTHS,
        journal=str(folder / "journal.jsonl"),
    )
    prompts = prompts_of(GROUPS, shape.groups, shape.group_size)
    with rollout(settings, plan, folder, groups=shape.groups, control=None, policy=policy) as running:
        warm = prompts_of("warm.", WARM_GROUPS, WARM_GROUP_SIZE, most_turns=WARM_TURNS)
        running.submit(warm, go=False)
        running.until(lambda: running.ended(warm))
        running.submit(prompts)
        running.until(lambda: running.ended(prompts))
        running.fleet.stop()
    run, ledger = RecordedRun(running.began_at, float("inf")), UsageLedger()
    for envelope in read_whole_topics(settings, [HEARTBEATS, COMPLETED, SAMPLES, OUTCOMES]):
        if envelope.record is not None:
            run.add(envelope.record)
            ledger.add(envelope.record)
    return replica_of(run, SETTINGS, ledger.usage(None), folder)


def simulate(replica: Replica, changes: list[str]) -> RunFigures:
    """Simulate the recorded run with changes."""
    fleet = replica.simulate(changed(replica.scenario, changes))
    fleet.run()
    return simulated_figures(fleet)


def main() -> None:
    """Run the comparison; see the module."""
    parser = options(__doc__)
    parser.add_argument("--executors", type=int, default=32)
    parser.add_argument("--groups", type=int, default=16, help="groups of trajectories")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=4096, help="KV tokens of an executor")
    arguments = parser.parse_args()
    shape = Shape(arguments.executors, arguments.groups, arguments.group_size)
    rates = msgspec.structs.replace(RATES, kv_tokens=arguments.kv_tokens)
    folder = Path(tempfile.mkdtemp(prefix="rose-what-if-"))
    rows: list[dict[str, Any]] = []
    with scratch_broker() as broker:
        say(f"recording {shape.executors} executors on {broker.name}")
        recorded = record(broker.settings("recorded."), rates, shape, folder)
        rows.append(_row("as it was", recorded.log, simulate(recorded, [])))
        (engine,) = recorded.engines.values()
        say(f"{rows[-1]}; {engine}")
        for number, change in enumerate(CHANGES):
            asked = simulate(recorded, [change.what_if.format(half=shape.executors // 2)])
            real = record(
                broker.settings(f"change{number}."),
                msgspec.structs.replace(rates, **change.rates),
                shape._replace(executors=round(change.executors_share * shape.executors)),
                folder,
                change.policy,
            )
            rows.append(_row(change.name, real.log, asked))
            say(str(rows[-1]))
        name = broker.name
    first, *others = rows
    worst = max(others, key=lambda row: abs(row["difference"]))
    checks = [
        Check("recorded", abs(first["difference"]), "of the run", TOLERANCE, "max", "the recorded run"),
        Check("what_if", abs(worst["difference"]), "of the run", TOLERANCE, "max", f"a real run: {worst['name']}"),
    ]
    if not keep({"broker": name, "checks": checks, "runs": rows}, arguments.json):
        print(f"broker: {name}; {shape.executors} emulated executors")
        print(*rows, *checks, sep="\n")
    shutil.rmtree(folder)
    sys.exit(not all(check.met for check in checks))


def _row(name: str, real: RunFigures, simulated: RunFigures) -> dict[str, Any]:
    return {
        "name": name,
        "difference": simulated.seconds / real.seconds - 1.0,
        "real_seconds": real.seconds,
        "simulated_seconds": simulated.seconds,
        "real_cached": real.cached_share,
        "simulated_cached": simulated.cached_share,
        "real_wait_p99": real.wait_p99,
        "simulated_wait_p99": simulated.wait_p99,
    }


if __name__ == "__main__":
    main()
