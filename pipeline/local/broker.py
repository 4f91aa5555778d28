"""The broker of a run: a broker that the configuration names, or the run's own broker on this machine.

Keeps true: a broker that was started here is stopped here; a named broker is never started or stopped.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rose.pipeline.config.load import RESOLVED, Config
from rose.schemas.errors import UsageError
from rose.topics.errors import BrokerUnreachable
from rose.topics.settings import BusSettings

if TYPE_CHECKING:
    from rose.topics.local_broker import Broker

DATA_FOLDER = "broker"
"""Folder of the run's own broker in the run's folder."""

CONNECT_SECONDS = 1.0
"""How long a broker on this machine may take to accept a connection."""


@dataclass(frozen=True, slots=True)
class RunBroker:
    """How a run reaches its broker."""

    settings: BusSettings
    name: str
    own: "Broker | None"
    """None if the broker is named in the configuration."""

    def check(self) -> None:
        """Raise BrokerFailed if the run's own broker has died or its disk is full."""
        if self.own is not None:
            self.own.check()


@contextmanager
def run_broker(config: Config) -> Iterator[RunBroker]:
    """Yield the named broker, or start the run's own and stop it at the end. Raises BrokerFailed or UsageError."""
    named = config.settings.broker.bootstrap_server
    if named and not _is_own(config):
        _refuse_moved(config)
        yield RunBroker(config.bus(), f"Kafka at {named}", None)
        return
    if named and _accepts(named):
        raise UsageError(f"the run in {config.run_folder} is going on: look at it with `rose watch --run`")
    from rose.topics.local_broker import start_broker  # a named broker does not need this import

    port = _port(named) if named else None
    with start_broker(config.run_folder / DATA_FOLDER, kafka_home=kafka_home(config), port=port) as broker:
        yield RunBroker(_settings(config, broker), broker.name, broker)


@contextmanager
def readable_log(config: Config) -> Iterator[BusSettings]:
    """Yield the settings to read a run's log. The run's own broker is started for the block, unless it runs already.

    Raises UsageError if the run's folder was moved, BrokerUnreachable if a named broker does not answer.
    """
    named = config.settings.broker.bootstrap_server
    if starts_own_broker(config):
        from rose.topics.local_broker import start_broker

        home = config.settings.broker.kafka_home
        with start_broker(config.run_folder / DATA_FOLDER, kafka_home=home, port=_port(named)) as broker:
            yield _settings(config, broker)
    else:
        with live_bus(config) as settings:
            yield settings


def starts_own_broker(config: Config) -> bool:
    """Whether `readable_log` starts the run's own broker, because the run has ended."""
    named = config.settings.broker.bootstrap_server
    return bool(named) and _is_own(config) and not _accepts(named)


@contextmanager
def live_bus(config: Config) -> Iterator[BusSettings]:
    """Yield the settings of a running broker.

    Raises UsageError if the run's folder was moved. Raises BrokerUnreachable if no broker answers; the message then
    names the file with the address and how to go on.
    """
    _refuse_moved(config)
    try:
        yield config.bus()
    except BrokerUnreachable as error:
        file = Path(config.origins.get("broker.bootstrap_server", ""))
        if not file.is_file():  # the address comes from a flag or a variable
            raise
        raise BrokerUnreachable(config.settings.broker.bootstrap_server, advice=_advice(config, file)) from error


def _advice(config: Config, file: Path) -> str:
    """Return advice about a broker that does not answer and whose address is in `file`."""
    data = config.run_folder / DATA_FOLDER
    if _is_own(config):
        return "the run has ended: `rose status` starts its broker to look at it, and `rose up` to go on with it"
    lost = f"; one that `rose up` started had its log in {data}, which is not there" if file.name == RESOLVED else ""
    return f"{file} has it there: start it, or say where it is now by --bootstrap-server{'' if data.is_dir() else lost}"


def kafka_home(config: Config) -> Path | None:
    """Return the Apache Kafka folder to start; None means the embedded broker."""
    home_variable = os.environ.get("KAFKA_HOME")
    return config.settings.broker.kafka_home or (Path(home_variable) if home_variable else None)


def _settings(config: Config, broker: "Broker") -> BusSettings:
    settings = broker.settings(config.settings.broker.namespace, config.settings.broker.properties)
    return replace(settings, retention=config.retention)


def _is_own(config: Config) -> bool:
    """Return whether the address is that of the run's own broker, as the run has written it to its folder."""
    origin = config.origins.get("broker.bootstrap_server", "")
    return Path(origin) == config.run_folder / RESOLVED and (config.run_folder / DATA_FOLDER).is_dir()


def _refuse_moved(config: Config) -> None:
    """Raise UsageError if the configuration comes from a moved run folder whose own broker does not run."""
    file = Path(config.origins.get("broker.bootstrap_server", ""))
    kept = file.name == RESOLVED and (file.parent / DATA_FOLDER).is_dir()
    if kept and not _is_own(config) and not _accepts(config.settings.broker.bootstrap_server):
        raise UsageError(
            f"the run in {file.parent} was in {config.run_folder}, as its {RESOLVED} has it, where its broker would be "
            f"started: move the folder back, or begin this where {config.run_folder} leads to it"
        )


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_SECONDS):
            return True
    except OSError:
        return False
