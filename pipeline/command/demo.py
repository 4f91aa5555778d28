"""`rose demo`: a policy that learns over the bus, measured on held-out tasks before and after, with a report."""

from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from time import monotonic, time

import msgspec
from rich.console import Console
from rich.text import Text

from pipeline.command.broker import run_broker
from pipeline.command.client import LawBroken
from pipeline.command.closing import facts_now, show_summary, write_report
from pipeline.command.config import Config, load
from pipeline.command.folder import RUN, held, made
from pipeline.command.nursery import Nursery
from pipeline.command.options import Common
from pipeline.command.processes import stop_on_signals
from pipeline.command.saying import harmless
from pipeline.command.session import LOGS, Interrupted, prepare, roles_nursery, run_roles, serving_beside
from pipeline.command.supervisor import Role, Supervisor
from pipeline.command.tasks import training_prompts
from pipeline.report.summary import Success, Summary
from schemas.errors import UsageError
from workers.evaluate import Evaluation
from workers.users.waits import read_waits

CONFIGURATION = "demo.toml"
"""The demo's own configuration, beside this module; `--config` takes its place."""

LOOK_SECONDS = 0.2
"""Between two looks at a process that measures."""


def run_demo(common: Common) -> None:
    """Everything on this machine. Raises UsageError, RoleFailed, BrokerFailed, or LawBroken for an unclean audit."""
    config = _configuration(common)
    settings, console = config.settings, Console()
    prompts = training_prompts(
        settings.tasks, run=settings.run.name, seed=settings.run.seed, groups=settings.trainer.total_groups
    )
    started_at, began = time(), monotonic()
    with held(config.run_folder, RUN), roles_nursery() as nursery, run_broker(config) as broker:
        console.print(f"[bold]ROSE[/bold] on {broker.settings.bootstrap} ({broker.name}), in {config.run_folder}")
        configuration = prepare(config, broker)
        try:
            with serving_beside(config, configuration, nursery) as serving:
                measure = partial(_measure, config, nursery, configuration, serving, console)
                before = measure(settings.model.folder, "before")
                _wait_for_users(config, serving, console)
                run_roles(
                    config,
                    broker,
                    nursery,
                    console,
                    configuration=configuration,
                    serving=serving,
                    prompts=prompts,
                    title=settings.run.name,
                )
                after = measure(settings.trainer.exported, "after")
        except Interrupted:
            console.print(f"ended before it was done; `rose up --run {settings.run.name}` goes on with the training")
            return
        success = Success(before=before.success, after=after.success, n=after.tasks)
        facts = facts_now(broker.name, started_at=started_at, seconds=monotonic() - began, success=success)
        summary = write_report(config, broker.settings, facts)
    show_summary(console, summary, config.run_folder)
    _check_law(summary)


def _configuration(common: Common) -> Config:
    """The demo's configuration, with a run name that is free. Raises UsageError when the name given is taken."""
    if common.run is not None:
        raise UsageError("a demo is a run of its own: give it --name, or go on with a run by `rose up --run NAME`")
    if common.config is None:
        common = replace(common, config=Path(str(files("pipeline.command") / CONFIGURATION)))
    config = load(common)
    name, folder = config.settings.run.name, config.settings.run.folder
    made(folder)
    if (folder / name).exists():
        if "run.name" in config.origins:
            raise UsageError(f"{folder / name} is there already: choose another --name, or remove it")
        name = next(free for number in range(2, 10**6) if not (folder / (free := f"{name}-{number}")).exists())
    groups = config.settings.tasks.steps * config.settings.trainer.groups_per_step
    common = common.saying(name=("run.name", name), groups=("trainer.total_groups", groups))
    broker = config.settings.broker
    if broker.bootstrap_server and not broker.namespace:  # a shared cluster: the demo keeps to topics of its own
        common = replace(common, namespace=f"{name}-{int(time())}.")
    return load(common)


def _wait_for_users(config: Config, serving: Supervisor, console: Console) -> None:
    """Until serving has answered its first user. Raises Interrupted or RoleFailed."""
    stop = stop_on_signals()
    with console.status("the serving engine comes up"):
        while config.settings.run.lenders and not read_waits(config.run_folder):
            if stop.wait(LOOK_SECONDS):
                raise Interrupted
            _tell(serving, console)


def _tell(serving: Supervisor, console: Console) -> None:
    """Say what happened to serving and its users."""
    for happened in serving.tick():
        console.print(Text(harmless(happened)))


def _measure(
    config: Config,
    nursery: Nursery,
    configuration: Path,
    serving: Supervisor,
    console: Console,
    model: Path,
    when: str,
) -> Evaluation:
    """Held-out success, in a process of its own. Raises Interrupted or RoleFailed."""
    output = config.run_folder / f"success-{when}.json"
    arguments = ("evaluate", str(model), "--json", str(output), "--config", str(configuration))
    role = Role(f"evaluate-{when}", arguments, ends_run_with=output)
    supervisor = Supervisor([role], config.run_folder / LOGS, nursery)
    stop = stop_on_signals()
    try:
        supervisor.start()
        with console.status(f"measuring held-out success {when} training"):
            while not (supervisor.finished or stop.wait(LOOK_SECONDS)):
                supervisor.tick()
                _tell(serving, console)
    finally:
        supervisor.stop()
    if not supervisor.finished:
        raise Interrupted
    evaluation = msgspec.json.decode(output.read_bytes(), type=Evaluation)
    console.print(
        f"held-out success {when} training: [bold]{evaluation.success:.3f}[/bold] "
        f"({evaluation.tasks} tasks, temperature 1)",
        highlight=False,
    )
    return evaluation


def _check_law(summary: Summary) -> None:
    if summary.lost or summary.doubled:
        raise LawBroken(f"{summary.lost} trajectories were lost and {summary.doubled} doubled: see `rose audit`")
