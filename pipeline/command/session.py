"""A run on this machine: broker, topics, roles and prompts, watched until the trainer is done, then reported.

Keeps true
- All that a run writes lies in its folder: `config.toml` (the whole configuration), `logs/`, `broker/`, the trainer's
  checkpoints.
- Whatever ends the run, its processes and its own broker are stopped before the command ends.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from pipeline.command.broker import RunBroker, kafka_home
from pipeline.command.config import RESOLVED, Config, load, without_settings
from pipeline.command.nursery import Nursery
from pipeline.command.options import Common
from pipeline.command.processes import stop_on_signals
from pipeline.command.resolved import resolved_toml
from pipeline.command.screen import Screen
from pipeline.command.submit import send_prompts, work_of
from pipeline.command.supervisor import Role, Supervisor
from pipeline.command.watching import watch_of
from schemas.prompts import Prompt
from topics.admin import create_topics
from topics.local_broker.process import free_ports
from workers.weights.signing import refuse_unsigned

OWNERS_ALONE = 0o600

LOGS = "logs"
"""Folder of the roles' logs in a run's folder."""

LOOPBACK = "127.0.0.1"


class Interrupted(Exception):
    """The user asked the run to end before it was done."""


def prepare(config: Config, broker: RunBroker) -> Path:
    """Create the topics, and write the configuration that the roles read.

    Raises BusError, RightsMissing, or UsageError where versions would not be signed and have to be.
    """
    refuse_unsigned(broker.settings, config.weights.signing_key, "signing_key")
    refuse_unsigned(broker.settings, config.weights.trusted_key, "trusted_key")
    create_topics(broker.settings, config.partitions, replication_factor=config.settings.topics.replication_factor)
    return write_configuration(config, broker)


def write_configuration(config: Config, broker: RunBroker) -> Path:
    """Write the whole configuration, broker included, into the run's folder; the roles read it from there.

    They read it alone (`roles_nursery`): a variable over which a flag has won would win over the file.
    """
    bus = broker.settings
    said: list[tuple[str, str, object]] = [
        ("broker", "broker.bootstrap_server", bus.bootstrap),
        ("broker", "broker.properties", dict(bus.properties)),
        ("broker", "broker.embedded", bus.embedded),
    ]
    home = kafka_home(config)
    if broker.own is not None and home is not None:
        said.append(("broker", "broker.kafka_home", str(home)))
    path = config.run_folder / RESOLVED
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(OWNERS_ALONE)  # a password may be in it
    path.write_text(resolved_toml(config, explained=False), encoding="utf-8")
    resolved = load(Common(config=path, said=tuple(said)), resolved=True)
    path.write_text(resolved_toml(resolved, explained=True), encoding="utf-8")
    return path


def roles_nursery() -> Nursery:
    """For roles that read what `write_configuration` has written."""
    return Nursery(environment=without_settings(os.environ))


def roles_of(config: Config, configuration: Path) -> list[Role]:
    """The processes of a run, those first that import least: they work while a nursery imports for the others."""
    common = ("--config", str(configuration))
    run = config.settings.run
    executors = [Role(f"executor-{n}", ("executor", "--name", f"executor-{n}", *common)) for n in range(run.executors)]
    workers = [
        Role(f"environment-{n}", ("environment", "--number", str(n), *common)) for n in range(run.environment_workers)
    ]
    return [
        Role("router", ("router", *common)),
        *workers,
        Role("trainer", ("trainer", *common), ends_run_with=config.settings.trainer.exported),
        *executors,
    ]


def serving_roles(config: Config, configuration: Path) -> list[Role]:
    """The servers that lend, each with its users. As executors they are numbered on from the dedicated ones."""
    common = ("--config", str(configuration))
    run, serving = config.settings.run, config.settings.serving
    roles = []
    for number, port in enumerate(free_ports(run.lenders), run.executors):
        model = ("--model", str(serving.folder), "--name", f"executor-{number}")
        where = ("--host", LOOPBACK, "--port", str(port))
        roles += [
            Role(f"lender-{number}", ("lend", *model, *common, "--", *serving.flags, *where)),
            Role(f"users-{number}", ("users", f"http://{LOOPBACK}:{port}", *common), leaves_first=True),
        ]
    return roles


@contextmanager
def serving_beside(config: Config, configuration: Path, nursery: Nursery) -> Iterator[Supervisor]:
    """The servers that lend, and their users, until the end of the block. Tick what it gives."""
    supervisor = Supervisor(serving_roles(config, configuration), config.run_folder / LOGS, nursery)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


def run_roles(
    config: Config,
    broker: RunBroker,
    nursery: Nursery,
    console: Console,
    *,
    configuration: Path,
    serving: Supervisor,
    prompts: Sequence[Prompt],
    title: str,
) -> None:
    """Run everything until the trainer is done. Of the prompts those are sent that the log does not know.

    Raises Interrupted, RoleFailed, BrokerFailed, BusError, or UsageError for a prompt that is known as another.
    """
    work = work_of(broker.settings, prompts, config.run_folder)
    if work.known:
        console.print(f"{work.known} of {len(prompts)} prompts are on the log already, and are not sent again")
    supervisor = Supervisor(roles_of(config, configuration), config.run_folder / LOGS, nursery)
    stop = stop_on_signals()
    watch = watch_of(config, broker.settings, whole=work.trajectories > 0)
    screen = Screen(watch, console, title=title, total=work.trajectories)

    def look_after() -> list[str]:
        broker.check()
        return supervisor.tick() + serving.tick()

    try:
        supervisor.start()
        send_prompts(broker.settings, work.prompts)
        screen.run(lambda: not (supervisor.finished or stop.is_set()), events=look_after)
    finally:
        supervisor.stop()
        watch.close()
    if not supervisor.finished:
        raise Interrupted
