"""Each role as a program: configuration, logs, metrics and signals around its loop."""

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from pipeline.command.config import Config, load
from pipeline.command.options import Common
from pipeline.command.processes import serve_metrics, stop_on_signals
from topics.access import ENVIRONMENT, EXECUTOR, ROUTER, TRAINER, Role
from topics.permission import reach_as
from topics.settings import BusSettings
from workers.weights.signing import refuse_unsigned


def run_environment(common: Common, number: int) -> None:
    """Environment worker `number`, until it is asked to stop."""
    from workers.environments.main import run_environment_worker

    config = load(common)
    settings, stop = _begin(config, ENVIRONMENT, config.settings.metrics.environment, number)
    run_environment_worker(settings, config.settings.environment, f"environment-{number}", stop)


def run_executor_role(common: Common) -> None:
    """The executor of inbox `executor.slot`, until it is asked to stop."""
    from workers.executor.engine_process import EngineProcess
    from workers.executor.main import run_executor

    config = load(common)
    _take_signed_alone(config)
    slot = config.settings.executor.slot
    with EngineProcess(config.settings.executor) as engine:
        settings, stop = _begin(config, EXECUTOR, config.settings.metrics.executor, slot)
        wanted, name = config.settings.executor, f"executor-{slot}"
        run_executor(settings, wanted, name, engine.link, engine.shapes, stop, weights=config.weights)


def run_lender_role(common: Common, serving: Path, flags: Sequence[str], *, observe: bool) -> None:
    """A vLLM server that lends to inbox `executor.slot`, or is observed; it takes the place of this process."""
    from workers.lender.beside import Plan, lend

    config = load(common)
    if not observe:
        _take_signed_alone(config)
    settings, metrics, slot = config.settings, config.settings.metrics, config.settings.executor.slot
    os.environ.update(settings.serving.environment)
    plan = Plan(
        settings=None if observe else config.bus(),
        executor=settings.executor,
        lender=settings.lender,
        weights=config.weights,
        stop_file=(settings.lender.stop_file or config.run_folder / f"executor-{slot}.stop").absolute(),
        serve_metrics=lambda: serve_metrics(metrics.host, metrics.executor + slot if metrics.executor else 0),
    )
    lend(plan, serving, flags)


def run_endpoint_role(common: Common) -> None:
    """An executor of inbox `executor.slot` whose engine is the endpoint `endpoint.url`, until it is asked to stop."""
    from workers.lender.endpoint.main import lend_endpoint

    config = load(common)
    _take_signed_alone(config)
    settings, stop = _begin(config, EXECUTOR, config.settings.metrics.executor, config.settings.executor.slot)
    lend_endpoint(settings, config.settings.executor, config.settings.endpoint, config.weights, stop)


def run_users_role(common: Common, url: str) -> None:
    """The users of the server at `url`, until they are asked to stop. They need no broker."""
    from workers.users.main import run_users

    run_users(load(common).settings.users, url, stop_on_signals())


def run_router_role(common: Common, number: int) -> None:
    """Router `number`, until it is asked to stop."""
    from pipeline.routing.main import run_router

    config = load(common)
    settings, stop = _begin(config, ROUTER, config.settings.metrics.router, number)
    run_router(settings, config.settings.router, stop, f"router-{number}")


def run_trainer_role(common: Common) -> None:
    """The trainer, until all groups are settled or it is asked to stop."""
    from workers.trainer.main import run_trainer

    config = load(common)
    refuse_unsigned(config.bus(), config.weights.signing_key, "signing_key")  # before it fences another
    settings, stop = _begin(config, TRAINER, config.settings.metrics.trainer)
    run_trainer(settings, config.settings.trainer, stop, weights=config.weights)


def _begin(config: Config, role: Role, metrics_port: int, number: int = 0) -> tuple[BusSettings, Event]:
    """What every role does first.

    Raises BrokerUnreachable, RightsMissing, or UsageError for metrics that cannot be served.
    """
    settings = config.bus()
    stop = stop_on_signals()
    reach_as(settings, role)
    serve_metrics(config.settings.metrics.host, metrics_port + number if metrics_port else 0)
    return settings, stop


def _take_signed_alone(config: Config) -> None:
    """Before there is an engine: it would be of no use. Raises UsageError."""
    refuse_unsigned(config.bus(), config.weights.trusted_key, "trusted_key")
