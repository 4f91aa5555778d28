"""`rose demo`: trains a policy over the bus, measures held-out success before and after, and writes a report."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from time import time

import msgspec
from rich.text import Text

from rose.pipeline.audit import AuditFailed
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common
from rose.pipeline.config.settings import TasksSection
from rose.pipeline.local.run import (
    LocalRun,
    RunInterrupted,
    TimeLimitReached,
    config_flags,
    lending_servers,
    open_run,
    run_roles,
)
from rose.pipeline.local.supervisor import Role, Supervisor
from rose.pipeline.process_setup import ensure_folder, stop_on_signals
from rose.pipeline.report.summary import Success
from rose.pipeline.report.write import print_summary
from rose.pipeline.terminal import escape_control_chars
from rose.schemas.errors import UsageError
from rose.schemas.prompts import Prompt
from rose.workers.evaluate import Evaluation
from rose.workers.loadgen.requests import read_request_log

SEEDS_OF_A_RUN = 1_000_000
"""The task seeds of a run begin at run seed times this number, so that runs do not share tasks."""


def training_prompts(tasks: TasksSection, *, run: str, seed: int, groups: int) -> list[Prompt]:
    """Return the prompts of a run, one task each.

    Raises UsageError if a task would be a held-out task, or groups are of one trajectory.
    """
    if tasks.group_size < 2:
        raise UsageError(
            "tasks.group_size is 1, and a trainer learns from the differences between the rewards of a group: set at "
            "least 2"
        )
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


CONFIGURATION = "demo.toml"
"""The demo's default configuration, in the folder of this module; `--config` replaces it."""

LOOK_SECONDS = 0.2
"""Time between two checks of a process that measures, in seconds."""


def run_demo(common: Common) -> None:
    """Run the demo on this machine.

    Raises UsageError, RoleFailed, BrokerFailed, or AuditFailed if the audit finds lost or doubled trajectories.
    """
    config = _configuration(common)
    settings = config.settings
    prompts = training_prompts(
        settings.tasks, run=settings.run.name, seed=settings.run.seed, groups=settings.trainer.total_groups
    )
    with open_run(config) as run:
        try:
            with lending_servers(run) as serving:
                before = _measure(run, serving, settings.model.folder, "before")
                _wait_for_users(run, serving)
                try:
                    run_roles(run, serving, prompts)
                except TimeLimitReached:
                    _export_newest(run, serving)
                after = _measure(run, serving, settings.trainer.exported, "after")
        except RunInterrupted:
            name = settings.run.name
            run.console.print(f"ended before it was done; `rose up --run {name}` goes on with the training")
            return
        summary = run.report(Success(before=before.success, after=after.success, n=after.tasks))
    print_summary(run.console, summary, config.run_folder)
    if summary.lost or summary.doubled:
        raise AuditFailed(f"{summary.lost} trajectories were lost and {summary.doubled} doubled: see `rose audit`")


def _configuration(common: Common) -> Config:
    """Return the demo's configuration with an unused run name. Raises UsageError if the given name is in use."""
    if common.run is not None:
        raise UsageError("a demo is a run of its own: give it --name, or go on with a run by `rose up --run NAME`")
    if common.config is None:
        common = replace(common, config=Path(str(files("rose.pipeline.local") / CONFIGURATION)))
    config = load(common)
    name, folder = config.settings.run.name, config.settings.run.folder
    ensure_folder(folder)
    if (folder / name).exists():
        if "run.name" in config.origins:
            raise UsageError(f"{folder / name} is there already: choose another --name, or remove it")
        name = next(free for number in range(2, 10**6) if not (folder / (free := f"{name}-{number}")).exists())
    groups = config.settings.tasks.steps * config.settings.trainer.groups_per_step
    common = common.with_overrides(name=("run.name", name), groups=("trainer.total_groups", groups))
    broker = config.settings.broker
    if broker.bootstrap_server and not broker.namespace:  # the demo uses its own topics on a shared cluster
        common = replace(common, namespace=f"{name}-{int(time())}.")
    return load(common)


def _export_newest(run: LocalRun, serving: Supervisor) -> None:
    """Export the newest policy of a run that has reached its time limit. Raises RunInterrupted or RoleFailed."""
    settings = run.config.settings
    run.console.print(
        f"stopped early, after {settings.run.time_limit_seconds:.0f} s as run.time_limit_seconds says, before all "
        f"{settings.tasks.steps} steps were done: the newest policy is measured"
    )
    arguments = ("export", "--to", str(settings.trainer.exported), *config_flags(run.config))
    role = Role("export", arguments, ends_run_with=settings.trainer.exported)
    _run_alone(run, serving, role, "exporting the newest policy")


def _wait_for_users(run: LocalRun, serving: Supervisor) -> None:
    """Wait until serving has answered its first request. Raises RunInterrupted or RoleFailed."""
    stop = stop_on_signals()
    with run.console.status("the serving engine comes up"):
        while run.config.settings.run.lenders and not read_request_log(run.config.run_folder):
            if stop.wait(LOOK_SECONDS):
                raise RunInterrupted
            _print_events(run, serving)


def _print_events(run: LocalRun, serving: Supervisor) -> None:
    """Print the events of serving and of its load generator."""
    for happened in serving.tick():
        run.console.print(Text(escape_control_chars(happened)))


def _run_alone(run: LocalRun, serving: Supervisor, role: Role, doing: str) -> None:
    """Run a role beside the servers until it is done. Raises RunInterrupted or RoleFailed."""
    supervisor = run.supervisor_of([role])
    stop = stop_on_signals()
    try:
        supervisor.start()
        with run.console.status(doing):
            while not (supervisor.finished or stop.wait(LOOK_SECONDS)):
                supervisor.tick()
                _print_events(run, serving)
    finally:
        supervisor.stop()
    if not supervisor.finished:
        raise RunInterrupted


def _measure(run: LocalRun, serving: Supervisor, model: Path, moment: str) -> Evaluation:
    """Measure held-out success in a process of its own. Raises RunInterrupted or RoleFailed."""
    output = run.config.run_folder / f"success-{moment}.json"
    arguments = ("evaluate", str(model), "--json", str(output), *config_flags(run.config))
    role = Role(f"evaluate-{moment}", arguments, ends_run_with=output)
    _run_alone(run, serving, role, f"measuring held-out success {moment} training")
    evaluation = msgspec.json.decode(output.read_bytes(), type=Evaluation)
    run.console.print(
        f"held-out success {moment} training: [bold]{evaluation.success:.3f}[/bold] "
        f"({evaluation.tasks} tasks, temperature 1)",
        highlight=False,
    )
    return evaluation
