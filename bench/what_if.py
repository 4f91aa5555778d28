"""Compares `rose replay --what-if` with really running what it asks.

    python -m bench.what_if                       32 executors on the embedded broker
    KAFKA_HOME=... python -m bench.what_if        on Apache Kafka
    python -m bench.what_if --executors 16 --groups 12

A rollout on emulated executors (`bench.fleet`) with a real bus, router and environment worker is recorded: its
heartbeats, samples and outcomes. From these records alone, as `rose replay --what-if` does, the run is simulated as it
was and with each change: half of the executors, one turn at a time for each executor, and other routing policies. Each
change is then really made, in a run with the same prompts and sampled tokens.
A second rollout with more groups has as many lenders beside the executors, users of a trace, and a real control app.
Its change is a run without lenders.

- `recorded`, `recorded_lending`: difference of the simulation as it was from the recorded run, in seconds.
- `what_if`: difference of each what-if from its real run, in seconds; the check is the largest.

`--json FILE` writes one object with `checks` and all rows. Exit status 1 if a bound is missed.
"""

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.broker import scratch_broker
from bench.check import Check, keep, options, say
from bench.fleet.arms import CONTROL, LENGTHS, RATES, Shape, actions_of, prompts_of, serving_of, specs_of
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
from rose.topics.local_broker import Broker
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.workers.lender.admission import Promise
from rose.workers.loadgen.config import TRACE_FILE

TOLERANCE = 0.15

LENDING_GROUPS = 2
"""Times the groups of the other run."""

SPEED, WAKE_SECONDS = 6.0, 5.0
"""Seconds of the users' trace in each second, and of the trace until a woken guest is ready, as in `bench.elastic`."""


class Change(NamedTuple):
    """A change of the recorded run, and how it is really made."""

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

NO_LENDERS = "elastic.how=none"

PROMISE = Promise(ttft_seconds=10.0, yield_seconds=5.0)
"""An emulated guest stops at once when a user comes, so that nothing bounds its steps, which are slow."""

SETTINGS = RunSettings(
    name="recorded",
    step_tokens=STEP_TOKENS,
    max_staleness=4,
    max_lag_versions=2,
    promise=PROMISE,
    control=msgspec.convert(CONTROL, Control),
    cells=1,
    heartbeat_seconds=0.2,
    prices=Prices(),
)


class Run(NamedTuple):
    """A run: its shape, the rates of the executors, and the routing policy."""

    shape: Shape
    rates: Rates
    policy: str = ROSE

    def specs(self) -> tuple[ExecutorSpec, ...]:
        """Return the executors; those that run rollouts only have the rates of this run."""
        arm = "rose" if self.shape.lenders else "fixed"
        return tuple(
            spec if spec.lends else msgspec.structs.replace(spec, rates=self.rates)
            for spec in specs_of(self.shape, arm)
        )


def record(settings: BusSettings, run: Run, folder: Path) -> Replica:
    """Run a rollout, and return what its log says. Raises Stalled."""
    shape, lends = run.shape, bool(run.shape.lenders)
    plan = Plan(
        bus=settings,
        job=job_of(settings),
        executors=run.specs(),
        lengths=LENGTHS,
        serving=serving_of(shape) if lends else None,
        actions=actions_of(shape, "rose") if lends else (),
        journal=str(folder / "journal.jsonl"),
    )
    prompts, control = prompts_of(GROUPS, shape.groups, shape.group_size), CONTROL if lends else None
    with rollout(settings, plan, folder, groups=shape.groups, control=control, policy=run.policy) as running:
        warm = prompts_of("warm.", WARM_GROUPS, WARM_GROUP_SIZE, most_turns=WARM_TURNS)
        running.submit(warm, go=False)
        running.until(lambda: running.ended(warm))
        running.submit(prompts)
        running.until(lambda: running.ended(prompts))
        running.fleet.stop()
    recorded, ledger = RecordedRun(running.began_at, float("inf")), UsageLedger()
    for envelope in read_whole_topics(settings, [HEARTBEATS, COMPLETED, SAMPLES, OUTCOMES]):
        if envelope.record is not None:
            recorded.add(envelope.record)
            ledger.add(envelope.record)
    return replica_of(recorded, SETTINGS, ledger.usage(None), folder)


def simulate(replica: Replica, changes: list[str]) -> RunFigures:
    """Simulate the recorded run with changes."""
    fleet = replica.simulate(changed(replica.scenario, changes))
    fleet.run()
    return simulated_figures(fleet)


def compare_changes(broker: Broker, run: Run, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the recorded run with its simulation, and each change with its real run."""
    recorded = record(broker.settings("recorded."), run, folder)
    yield _row("as it was", recorded.log, simulate(recorded, []))
    for number, change in enumerate(CHANGES):
        executors = round(change.executors_share * run.shape.dedicated)
        really = Run(
            dataclasses.replace(run.shape, dedicated=executors),
            msgspec.structs.replace(run.rates, **change.rates),
            change.policy,
        )
        real = record(broker.settings(f"change{number}."), really, folder)
        yield _row(change.name, real.log, simulate(recorded, [change.what_if.format(half=executors)]))


def compare_lending(broker: Broker, run: Run, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a recorded run with lenders, and the same run without them."""
    recorded = record(broker.settings("lending."), run, folder)
    yield _row("lending, as it was", recorded.log, simulate(recorded, []))
    really = Run(dataclasses.replace(run.shape, lenders=0), run.rates)
    real = record(broker.settings("alone."), really, folder)
    yield _row("lending, without lenders", real.log, simulate(recorded, [NO_LENDERS]))


def main() -> None:
    """Run the comparison; see the module."""
    parser = options(__doc__)
    parser.add_argument("--executors", type=int, default=32)
    parser.add_argument("--groups", type=int, default=16, help="groups of trajectories")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=4096, help="KV tokens of an executor")
    parser.add_argument("--only", choices=("changes", "lending"), help="one of the two recorded runs")
    arguments = parser.parse_args()
    shape = Shape(
        dedicated=arguments.executors,
        lenders=0,
        groups=arguments.groups,
        group_size=arguments.group_size,
        trace=TRACE_FILE,
        speed=SPEED,
        allocation_delay=0.0,
        wake=WAKE_SECONDS,
    )
    run = Run(shape, msgspec.structs.replace(RATES, kv_tokens=arguments.kv_tokens))
    lending = Run(
        dataclasses.replace(shape, lenders=arguments.executors, groups=LENDING_GROUPS * arguments.groups), RATES
    )
    folder = Path(tempfile.mkdtemp(prefix="rose-what-if-"))
    rows: list[dict[str, Any]] = []
    with scratch_broker() as broker:
        compared = {
            "changes": compare_changes(broker, run, folder),
            "lending": compare_lending(broker, lending, folder),
        }
        for name, found in compared.items():
            for row in found if arguments.only in (None, name) else ():
                say(str(row))
                rows.append(row)
    checks = checks_of(rows)
    if not keep({"broker": broker.name, "checks": checks, "runs": rows}, arguments.json):
        print(f"broker: {broker.name}; {shape.dedicated} emulated executors")
        print(*rows, *checks, sep="\n")
    shutil.rmtree(folder)
    sys.exit(not all(check.met for check in checks))


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Return the checks of the recorded runs, and of the worst change."""
    recorded = {"as it was": "recorded", "lending, as it was": "recorded_lending"}
    found = [
        Check(name, abs(row["difference"]), "of the run", TOLERANCE, "max", "the recorded run")
        for row in rows
        if (name := recorded.get(row["name"])) is not None
    ]
    worst = max((row for row in rows if row["name"] not in recorded), key=lambda row: abs(row["difference"]))
    against = f"a real run: {worst['name']}"
    return [*found, Check("what_if", abs(worst["difference"]), "of the run", TOLERANCE, "max", against)]


def _row(name: str, real: RunFigures, simulated: RunFigures) -> dict[str, Any]:
    return {
        "name": name,
        "difference": simulated.seconds / real.seconds - 1.0,
        "real_seconds": real.seconds,
        "simulated_seconds": simulated.seconds,
        "real_lent": real.lent_share,
        "simulated_lent": simulated.lent_share,
        "real_cached": real.cached_share,
        "simulated_cached": simulated.cached_share,
        "real_wait_p99": real.wait_p99,
        "simulated_wait_p99": simulated.wait_p99,
    }


if __name__ == "__main__":
    main()
