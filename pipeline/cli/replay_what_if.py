"""`rose replay --what-if`: simulates a recorded run as it was and with changes, and prices the difference."""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from rose.pipeline.accounting.usage import UsageLedger
from rose.pipeline.cli.replay_decisions import parse_time
from rose.pipeline.cli.simulate import TABLE_WIDTH, watch
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log
from rose.pipeline.simulation.recorded_run import RecordedRun
from rose.pipeline.simulation.scenario import Control
from rose.pipeline.simulation.what_if import (
    RECORDED,
    WHAT_IF,
    Replica,
    RunFigures,
    RunSettings,
    changed,
    replica_of,
    simulated_figures,
)
from rose.pipeline.terminal import print_line
from rose.schemas.errors import UsageError
from rose.topics.acl import VIEW, connect_as
from rose.topics.catalog import COMPLETED, HEARTBEATS, OUTCOMES, SAMPLES
from rose.topics.log_reader import read_whole_topics

READ = (HEARTBEATS, COMPLETED, SAMPLES, OUTCOMES)
"""Topics from which a run is simulated."""


def simulate_change(common: Common, changes: Sequence[str], since: str | None, until: str | None) -> None:
    """Print the run as it was, as it is simulated, and with the changes. Raises RoseError."""
    begin, end = parse_time(since, -math.inf), parse_time(until, math.inf)
    if begin > end:
        raise UsageError("--from is later than --to")
    config = load(common)
    run, ledger = RecordedRun(begin, end), UsageLedger()
    with readable_log(config) as settings:
        connect_as(settings, VIEW)
        for envelope in read_whole_topics(settings, READ, client_id="rose-replay"):
            if envelope.record is not None:
                run.add(envelope.record)
                ledger.add(envelope.record)
    with tempfile.TemporaryDirectory(prefix="rose-what-if-") as folder:
        replica = replica_of(run, run_settings(config), ledger.usage(None), Path(folder))
        arms = {RECORDED: replica.scenario, WHAT_IF: changed(replica.scenario, changes)}
        found = {"log": replica.log}
        for arm, scenario in arms.items():
            fleet = replica.simulate(scenario)
            with watch(f"{scenario.name}, {arm}", fleet, None):
                fleet.run()
            found[arm] = simulated_figures(fleet)
    for line in describe(replica):
        print_line(line)
    console = Console(width=max(Console().width, TABLE_WIDTH))
    console.print(table(found), highlight=False, markup=False)


def run_settings(config: Config) -> RunSettings:
    """Return the settings of a run that a simulation needs."""
    settings, control = config.settings, config.settings.control
    return RunSettings(
        name=settings.run.name,
        step_tokens=settings.executor.step_tokens,
        max_staleness=settings.trainer.max_staleness,
        max_lag_versions=settings.router.max_lag_versions,
        promise=settings.lender.promise,
        control=Control(
            most_lenders=control.most_lenders,
            lease_seconds=control.lease_seconds,
            margin_seconds=control.margin_seconds,
            min_gain=control.min_gain,
            dwell_seconds=control.dwell_seconds,
            idle_seconds=control.idle_seconds,
        ),
        cells=settings.topics.cells,
        heartbeat_seconds=settings.executor.heartbeat_seconds,
        prices=settings.prices,
    )


def describe(replica: Replica) -> list[str]:
    """Return what is simulated, and what is left out."""
    scenario = replica.scenario
    dedicated = sum(pool.count for pool in scenario.dedicated)
    lenders = 0 if scenario.lending is None else scenario.lending.count
    turns = sum(replica.log.turns)
    lines = [
        f"{scenario.name}: {len(replica.plans)} groups, {turns:,} turns, {scenario.training.steps} training steps, "
        f"{dedicated} dedicated and {lenders} lending executors"
    ]
    if replica.left_out_groups:
        lines.append(
            f"left out: {replica.left_out_groups} groups of evaluations, or that failed, ended early or are not whole "
            "on the log"
        )
    if replica.left_out_executors > 0:
        lines.append(f"left out: {replica.left_out_executors} executors that were there for less than half of the time")
    for model, engine in replica.engines.items():
        lines.append(
            f"engines, {model.worker_class.value} {model.device}, fitted to {engine.rows:,} prefills and decodes: "
            f"error {engine.median_error:.1%} (median), {engine.p90_error:.1%} (p90)"
        )
    return lines


class Column(NamedTuple):
    """A column of the table."""

    name: str
    figure: Callable[[RunFigures], float]
    text: Callable[[RunFigures], str]


COLUMNS = (
    Column("whole s", lambda run: run.seconds, lambda run: f"{run.seconds:,.1f}"),
    Column("step s", lambda run: run.step_seconds, lambda run: f"{run.step_seconds:,.2f}"),
    Column("rollout s", lambda run: run.rollout_seconds, lambda run: f"{run.rollout_seconds:,.2f}"),
    Column("wait p50 s", lambda run: run.wait_p50, lambda run: f"{run.wait_p50:.3f}"),
    Column("wait p99 s", lambda run: run.wait_p99, lambda run: f"{run.wait_p99:.3f}"),
    Column("cached", lambda run: run.cached_share, lambda run: f"{run.cached_share:.1%}"),
    Column("lent", lambda run: run.lent_share, lambda run: f"{run.lent_share:.1%}"),
    Column("an answer", lambda run: _price(run), lambda run: _cost(run)),
)


def table(found: dict[str, RunFigures]) -> Table:
    """Return the runs side by side, and how many times the simulated ones differ."""
    shown = Table("", *(each.name for each in COLUMNS), box=None, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, run in found.items():
        shown.add_row(name, *(column.text(run) for column in COLUMNS))
    for ours, theirs in ((RECORDED, "log"), (WHAT_IF, RECORDED)):
        shown.add_row(f"{ours} / {theirs}", *(_ratio(each, found[ours], found[theirs]) for each in COLUMNS))
    return shown


def _ratio(column: Column, ours: RunFigures, theirs: RunFigures) -> str:
    one, other = column.figure(ours), column.figure(theirs)
    return f"x {one / other:.3f}" if one and other else "-"


def _price(figures: RunFigures) -> float:
    """Return the price of an answer in the currency, or in device seconds without prices; 0 if there is none."""
    cost = figures.device_seconds_per_answer if figures.cost_per_answer is None else figures.cost_per_answer
    return cost or 0.0


def _cost(figures: RunFigures) -> str:
    if figures.cost_per_answer is not None:
        return f"{figures.cost_per_answer:,.4f} {figures.currency}"
    seconds = figures.device_seconds_per_answer
    return "-" if seconds is None else f"{seconds:,.2f} device s"
