"""A run on this machine: broker, topics, roles and prompts, watched until the trainer is done, then reported.

Keeps true
- All that a run writes lies in its folder: `config.toml` (the whole configuration), `logs/`, `broker/`, the trainer's
  checkpoints.
- Whatever ends the run, its processes and its own broker are stopped before the command ends.
- A run continues to its summary and report also after the reader of its output has gone.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time

from rich.console import Console

from rose.pipeline.config.load import RESOLVED, Config, load, resolved_toml, without_settings
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import RunBroker, kafka_home, run_broker
from rose.pipeline.local.fork_server import ForkServer
from rose.pipeline.local.submit import read_prompts, remaining_work, send_prompts
from rose.pipeline.local.supervisor import Role, Supervisor
from rose.pipeline.monitor.follower import follow_run
from rose.pipeline.monitor.screen import Screen
from rose.pipeline.process_setup import RUN_LOCK, run_folder_lock, stop_on_signals
from rose.pipeline.report.summary import RunMetadata, Success, Summary, describe_machine
from rose.pipeline.report.write import print_summary, write_report
from rose.schemas.errors import RoseError
from rose.schemas.prompts import Prompt
from rose.topics.admin import create_topics, remaining_drift
from rose.topics.local_broker import free_ports
from rose.workers.weights.trust import require_signing_key


class RunConsole(Console):
    """A console that is quiet once its reader has gone, such as a `tee` that Ctrl-C has ended. The run continues."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what is written and not flushed goes there
        os.close(nowhere)


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run on this machine whose broker answers, with its topics and the configuration that its roles read."""

    config: Config
    broker: RunBroker
    fork_server: ForkServer
    console: Console
    began: float
    """monotonic() seconds at the start of the command; the time limit counts from it."""
    started_at: float
    """The same time in Unix seconds."""

    def supervisor_of(self, roles: Sequence[Role]) -> Supervisor:
        """Return a supervisor of these roles, which log to the run's folder."""
        return Supervisor(roles, self.config.run_folder / LOG_FOLDER, self.fork_server)

    def report(self, success: Success) -> Summary:
        """Write the report of the run, which ends now. Raises TopicMissing or BusError."""
        facts = RunMetadata(
            broker=self.broker.name,
            started_at=self.started_at,
            seconds=monotonic() - self.began,
            success=success,
            machine=describe_machine(),
        )
        return write_report(self.config, self.broker.settings, facts)


@contextmanager
def open_run(config: Config) -> Iterator[LocalRun]:
    """Lock the run's folder, start or find its broker, and prepare the run. At the end, stop what was started.

    Raises UsageError, BrokerFailed, BusError or RightsMissing.
    """
    console, began, started_at = RunConsole(), monotonic(), time()
    with run_folder_lock(config.run_folder, RUN_LOCK), role_fork_server() as fork_server, run_broker(config) as broker:
        console.print(f"[bold]ROSE[/bold] on {broker.settings.bootstrap} ({broker.name}), in {config.run_folder}")
        for line in prepare_run(config, broker):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        yield LocalRun(config, broker, fork_server, console, began, started_at)


def run_up(common: Common, prompts_file: Path | None, without: Path | None) -> None:
    """Run all roles until the trainer is done or the user ends the run; the same name again continues the run."""
    config = load(common)
    prompts = read_prompts(prompts_file, config.environments, without=without) if prompts_file is not None else []
    with open_run(config) as run:
        try:
            with lending_servers(run) as serving:
                run_roles(run, serving, prompts)
        except TimeLimitReached:
            run.console.print(f"stopped after {monotonic() - run.began:.0f} s, as run.time_limit_seconds says; {GO_ON}")
        except RunInterrupted:
            run.console.print(f"ended before the trainer was done; {GO_ON}")
        print_summary(run.console, run.report(Success()), config.run_folder)


GO_ON = "the same command goes on from here"

OWNER_ONLY = 0o600

LOG_FOLDER = "logs"
"""Folder of the roles' logs in a run's folder."""

LOOPBACK = "127.0.0.1"

NICENESS_BESIDE_SERVERS = 5
"""Niceness of the other roles beside servers that lend. In a deployment the roles run on other machines, and do not
compete with the server for its processors."""


class RunInterrupted(Exception):
    """The user asked the run to end before it was done."""


class TimeLimitReached(RunInterrupted):
    """The run has taken `run.time_limit_seconds`."""


def prepare_run(config: Config, broker: RunBroker) -> list[str]:
    """Create the topics, and write the configuration that the roles read; return lines about topics that differ.

    Raises BusError, RightsMissing, or UsageError where versions would not be signed and have to be.
    """
    require_signing_key(broker.settings, config.weights.signing_key, "signing_key")
    require_signing_key(broker.settings, config.weights.trusted_key, "trusted_key")
    replication_factor = config.settings.topics.replication_factor
    created = create_topics(broker.settings, config.partitions, replication_factor=replication_factor)
    write_configuration(config, broker)
    try:
        return remaining_drift(broker.settings, config.partitions, created)
    except RoseError as error:  # a run needs neither the right nor the time to read the topics' settings
        return [f"the topics' settings are unknown: {error}"]


def write_configuration(config: Config, broker: RunBroker) -> Path:
    """Write the whole configuration, broker included, into the run's folder; the roles read it from there.

    They read it alone (`role_fork_server`): a variable over which a flag has won would win over the file.
    """
    bus = broker.settings
    overrides: list[tuple[str, str, object]] = [
        ("broker", "broker.bootstrap_server", bus.bootstrap),
        ("broker", "broker.properties", dict(bus.properties)),
        ("broker", "broker.embedded", bus.embedded),
    ]
    home = kafka_home(config)
    if broker.own is not None and home is not None:
        overrides.append(("broker", "broker.kafka_home", str(home)))
    path = config.run_folder / RESOLVED
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(OWNER_ONLY)  # a password may be in it
    path.write_text(resolved_toml(config, explained=False), encoding="utf-8")
    resolved = load(Common(config=path, overrides=tuple(overrides)), resolved=True)
    path.write_text(resolved_toml(resolved, explained=True), encoding="utf-8")
    return path


def role_fork_server() -> ForkServer:
    """Return a fork server for roles that read the file of `write_configuration`.

    The roles do not inherit variables that set the configuration.
    """
    return ForkServer(environment=without_settings(os.environ))


def config_flags(config: Config) -> tuple[str, str]:
    """Return the flags by which a role reads what `write_configuration` has written."""
    return ("--config", str(config.run_folder / RESOLVED))


def roles_of(config: Config) -> list[Role]:
    """Return the processes of a run.

    Processes that import little come first: they work while the fork server imports for the others.
    """
    common = config_flags(config)
    run = config.settings.run
    executors = [Role(f"executor-{n}", ("executor", "--name", f"executor-{n}", *common)) for n in range(run.executors)]
    workers = [
        Role(f"environment-{n}", ("environment", "--number", str(n), *common)) for n in range(run.environment_workers)
    ]
    roles = [
        Role("router", ("router", *common)),
        *workers,
        Role("trainer", ("trainer", *common), ends_run_with=config.settings.trainer.exported),
        *executors,
    ]
    if config.settings.evaluation.every_versions:
        roles.append(Role("evaluator", ("evaluator", *common)))
    return [replace(role, niceness=NICENESS_BESIDE_SERVERS) for role in roles] if run.lenders else roles


def lending_server_roles(config: Config) -> list[Role]:
    """Return the servers that lend, each with its load generator. Their executors are numbered after the dedicated."""
    common = config_flags(config)
    run, serving = config.settings.run, config.settings.serving
    roles = []
    for number, port in enumerate(free_ports(run.lenders), run.executors):
        model = ("--model", str(serving.folder), "--name", f"executor-{number}")
        where = ("--host", LOOPBACK, "--port", str(port))
        roles += [
            Role(f"lender-{number}", ("lend", *model, *common, "--", *serving.flags, *where)),
            Role(f"loadgen-{number}", ("loadgen", f"http://{LOOPBACK}:{port}", *common), leaves_first=True),
        ]
    return roles


@contextmanager
def lending_servers(run: LocalRun) -> Iterator[Supervisor]:
    """Run the servers that lend, and their load generators, until the end of the block. Tick the supervisor."""
    supervisor = run.supervisor_of(lending_server_roles(run.config))
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


def run_roles(run: LocalRun, serving: Supervisor, prompts: Sequence[Prompt]) -> None:
    """Run everything until the trainer is done. Only prompts that the log does not know are sent.

    Raises RunInterrupted, TimeLimitReached, RoleFailed, BrokerFailed, BusError, or UsageError for a prompt that is
    known as another.
    """
    config, broker, console = run.config, run.broker, run.console
    trainer, limit = config.settings.trainer, config.settings.run.time_limit_seconds
    deadline = run.began + limit if limit else math.inf
    ratio = config.settings.environment.members_ratio
    work = remaining_work(broker.settings, prompts, config.run_folder, members_ratio=ratio)
    if work.known:
        console.print(f"{work.known} of {len(prompts)} prompts are on the log already, and are not sent again")
    supervisor = run.supervisor_of(roles_of(config))
    stop = stop_on_signals()
    watch = follow_run(config, broker.settings, whole=work.trajectories > 0)
    executors = [f"executor-{n}" for n in range(config.settings.run.executors + config.settings.run.lenders)]
    name = config.settings.run.name
    screen = Screen(watch, console, title=name, total=work.trajectories, started_executors=executors)

    def out_of_time() -> bool:
        return monotonic() > deadline and trainer.has_checkpoint

    def look_after() -> list[str]:
        broker.check()
        return supervisor.tick() + serving.tick()

    try:
        supervisor.start()
        send_prompts(broker.settings, work.prompts)
        screen.run(lambda: not (supervisor.finished or stop.is_set() or out_of_time()), events=look_after)
    finally:
        supervisor.stop()
        watch.close()
    if not supervisor.finished:
        raise RunInterrupted if stop.is_set() else TimeLimitReached
